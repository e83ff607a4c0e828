"""Recognize a request whose head equals that of the previous request, so that it need not be parsed again.

Clients that keep their connection open send the same head with each check. Only the Content-Length differs, and the key
if the client checks for many tenants. A head that differs in anything else goes to the parser.
"""

import re

import msgspec

from limitforge.service.checks.request_credentials import Credentials
from limitforge.service.http.framing import HEAD_END

MAX_CACHED_HEAD_BYTES = 2_048  # bytes; a longer head is parsed each time

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)(?=\r\n)", re.IGNORECASE)
_KEY = re.compile(rb"\r\nx-api-key:[ \t]*([0-9a-z_-]+)(?=\r\n)", re.IGNORECASE)
_CREDENTIAL_FIELD = re.compile(rb"\r\n(?:x-api-key|authorization):", re.IGNORECASE)
_PLAIN_KEY = re.compile(rb"[0-9A-Za-z_-]{1,128}")
_MAX_DIGITS = 7


class CachedHead(msgspec.Struct):
    """The head of the last parsed check of a connection, and its credentials."""

    pieces: tuple[bytes, ...]
    """The constant bytes before, between and after the values that may differ."""
    length_index: int
    """The index of the Content-Length among these values. If there is another value, it is the key."""
    max_body_bytes: int
    last_head: bytes
    last_size: int
    """Bytes of the last request, head and body. Consecutive bodies often have the same length."""
    credentials: Credentials

    @classmethod
    def from_request(
        cls, request: bytes, body: bytes, max_body_bytes: int, credentials: Credentials
    ) -> "CachedHead | None":
        """Build from a complete request that is framed by Content-Length alone, else return None."""
        end = request.find(HEAD_END) + len(HEAD_END)
        if end > MAX_CACHED_HEAD_BYTES or len(request) - end != len(body):
            return None  # with chunks, a request is longer than its head and body
        length, key = _LENGTH.search(request, 0, end), _KEY.search(request, 0, end)
        if length is None or length[1] != b"%d" % len(body):
            return None
        values = [length.span(1)]
        if key is not None and len(_CREDENTIAL_FIELD.findall(request, 0, end)) == 1:  # two fields might differ later
            values = sorted([*values, key.span(1)])
        edges = [0, *(edge for value in values for edge in value), end]
        pieces = tuple(request[edges[index] : edges[index + 1]] for index in range(0, len(edges), 2))
        return cls(pieces, values.index(length.span(1)), max_body_bytes, request[:end], len(request), credentials)

    def match_body(self, request: bytes) -> bytes | None:
        """Return the body of a complete request with this head, else None.

        A match updates `credentials`, `last_head` and `last_size` to those of this request.
        """
        start, *pieces = self.pieces
        if not request.startswith(start):
            return None
        offset, values = len(start), []
        for piece in pieces:
            end = request.find(b"\r", offset)
            if not request.startswith(piece, end):
                return None
            values.append(request[offset:end])
            offset = end + len(piece)
        digits = values.pop(self.length_index)
        if not 0 < len(digits) <= _MAX_DIGITS or not digits.isdigit() or digits.startswith(b"0"):
            return None
        if not len(request) - offset == int(digits) <= self.max_body_bytes:
            return None
        if values and not self._match_key(values[0]):
            return None
        self.last_head, self.last_size = request[:offset], len(request)
        return request[offset:]

    def _match_key(self, key: bytes) -> bool:
        if not _PLAIN_KEY.fullmatch(key):
            return False
        text = key.decode()
        if text != self.credentials.key:
            self.credentials = Credentials.from_key(text, self.credentials.client_ip)
        return True
