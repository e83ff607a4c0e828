"""Read the API key from the header fields of a request, and check that its body may be read at all."""

from collections.abc import Iterable

import msgspec

from limitforge.catalog.credentials import fingerprint
from limitforge.service.problems import HttpError

_BEARER = b"bearer "


class Credentials(msgspec.Struct, frozen=True):
    """The API key of a request (None without one), its fingerprint, and the client's IP address."""

    key: str | None
    fingerprint: bytes
    client_ip: str

    @classmethod
    def from_key(cls, key: str | None, client_ip: str) -> "Credentials":
        return cls(key, b"" if key is None else fingerprint(key), client_ip)


def read_api_key(headers: Iterable[tuple[bytes, bytes]], max_body_bytes: int) -> str | None:
    """Return the key of a request with a JSON body of at most `max_body_bytes` bytes, or None if it has no key.

    Header names must be in lower case. Raises HttpError if the body is too large, compressed or not JSON.
    """
    key: bytes | None = None
    for name, value in headers:
        if name == b"x-api-key":
            key = _single_key(key, value)
        elif name == b"authorization" and value[:7].lower() == _BEARER:
            key = _single_key(key, value[7:].strip())
        elif name == b"content-length":
            if not value.isdigit() or len(value) > 16 or int(value) > max_body_bytes:
                raise HttpError(413, "body_too_large", f"at most {max_body_bytes} bytes")
        elif name == b"content-type" and not is_json(value):
            raise HttpError(415, "not_json", "content-type: must be application/json")
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise HttpError(415, "not_json", "content-encoding: the body must not be compressed")
    return None if key is None else key.decode("latin-1")


def read_api_key_without_body(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the key of a request whose body is ignored."""
    return read_api_key((header for header in headers if header[0] in (b"x-api-key", b"authorization")), 0)


def is_json(content_type: bytes) -> bool:
    media_type = content_type.partition(b";")[0].strip().lower()
    return media_type == b"application/json" or (
        media_type.startswith(b"application/") and media_type.endswith(b"+json")
    )


def _single_key(first: bytes | None, value: bytes) -> bytes:
    if first is not None and first != value:
        raise HttpError(400, "malformed_request", "x-api-key and authorization: two different keys")
    return value
