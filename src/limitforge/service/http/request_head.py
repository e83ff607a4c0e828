"""Rules of HTTP for the head of a request that the parser does not enforce."""

import re
from collections.abc import Iterable

from limitforge.service.http.framing import CHUNKED, HEAD_END, MAX_FIELDS, MAX_HEAD_BYTES
from limitforge.service.problems import HttpError

_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n(?![ \t]))", re.IGNORECASE)
_HOST = re.compile(rb"[-A-Za-z0-9._~!$&'()*+,;=:%\[\]]*")
_VERSIONS = (b" HTTP/1.1", b" HTTP/1.0")


def validate_head(version: str, request_line: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the length of the body (`CHUNKED` if it has chunks). Raises HttpError if the head is invalid or too large.

    `request_line` is empty if it is not known: then only the parsed version is checked.
    """
    if version not in ("1.1", "1.0") or (request_line and not request_line.endswith(_VERSIONS)):
        raise HttpError(400, "malformed_request", "the request line: the version must be HTTP/1.1")
    size, hosts, body_length = len(url), 0, 0
    for name, value in headers:
        size += len(name) + len(value)
        if name == b"host":
            hosts += 1 if _HOST.fullmatch(value) else 2
        elif name == b"content-length":
            body_length = int(value) if value.isdigit() else 0
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise HttpError(400, "malformed_request", "transfer-encoding: must be chunked")
            body_length = CHUNKED
    if size > MAX_HEAD_BYTES:
        raise head_too_large()
    if hosts > 1 or (not hosts and version == "1.1"):
        raise HttpError(400, "malformed_request", "host: must be present once, and be a name or an address")
    return body_length


def head_too_large() -> HttpError:
    return HttpError(431, "head_too_large", f"header fields: at most {MAX_FIELDS}, and {MAX_HEAD_BYTES} bytes")


def remove_upgrade(data: bytes) -> bytes:
    """Return the start of a request without an Upgrade field.

    The service supports no other protocol, so it ignores the field, as HTTP allows. The parser would treat everything
    after the head as that protocol.
    """
    if (b"pgrade" not in data and b"PGRADE" not in data) or HEAD_END not in data:
        return data
    head, end, rest = data.partition(HEAD_END)
    return _UPGRADE.sub(b"", head + end[:2]) + end[2:] + rest
