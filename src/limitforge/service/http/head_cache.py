"""Heads of requests that were parsed once, and need not be parsed again.

Clients that keep their connection send the same head with each check, but for the length of the body and, if they ask
for many callers, the key. What differs in anything else is left to the parser.
"""

import re

import msgspec

from limitforge.service.checks.request_credentials import Credentials

MAX_CACHED_HEAD = 2_048  # a longer one is parsed each time

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)(?=\r\n)", re.IGNORECASE)
_KEY = re.compile(rb"\r\nx-api-key:[ \t]*([0-9a-z_-]+)(?=\r\n)", re.IGNORECASE)
_CREDENTIAL_FIELD = re.compile(rb"\r\n(?:x-api-key|authorization):", re.IGNORECASE)
_PLAIN_KEY = re.compile(rb"[0-9A-Za-z_-]{1,128}")
_MAX_DIGITS = 7


class CachedHead(msgspec.Struct):
    """The head of a check as a connection sent it last, and whose it was."""

    pieces: tuple[bytes, ...]
    """What stands before, between and behind the values that may differ."""
    length_index: int
    """Which of these values is the length; another one is the key."""
    max_body: int
    last_head: bytes
    last_size: int
    """Of a request with the whole head of the last one: bodies of one length follow each other."""
    credentials: Credentials

    @classmethod
    def from_request(cls, request: bytes, body: bytes, limit: int, who: Credentials) -> "CachedHead | None":
        """Of a whole request, if its body is told by its length, and by nothing else."""
        end = request.find(_HEAD_END) + len(_HEAD_END)
        if end > MAX_CACHED_HEAD or len(request) - end != len(body):
            return None  # a body in chunks is longer than what it says
        length, key = _LENGTH.search(request, 0, end), _KEY.search(request, 0, end)
        if length is None or length[1] != b"%d" % len(body):
            return None
        values = [length.span(1)]
        if key is not None and len(_CREDENTIAL_FIELD.findall(request, 0, end)) == 1:  # two might come to differ
            values = sorted([*values, key.span(1)])
        edges = [0, *(edge for value in values for edge in value), end]
        pieces = tuple(request[edges[at] : edges[at + 1]] for at in range(0, len(edges), 2))
        return cls(pieces, values.index(length.span(1)), limit, request[:end], len(request), who)

    def match_body(self, request: bytes) -> bytes | None:
        """The body of a request that starts with this head; None if it does not, or does not end where it should. Then
        `who` tells whose it is.
        """
        start, *pieces = self.pieces
        if not request.startswith(start):
            return None
        at, values = len(start), []
        for piece in pieces:
            end = request.find(b"\r", at)
            if not request.startswith(piece, end):
                return None
            values.append(request[at:end])
            at = end + len(piece)
        digits = values.pop(self.length_index)
        if not 0 < len(digits) <= _MAX_DIGITS or not digits.isdigit() or digits.startswith(b"0"):
            return None
        if not len(request) - at == int(digits) <= self.max_body:
            return None
        if values and not self._match_key(values[0]):
            return None
        self.last_head, self.last_size = request[:at], len(request)
        return request[at:]

    def _match_key(self, key: bytes) -> bool:
        if not _PLAIN_KEY.fullmatch(key):
            return False
        text = key.decode()
        if text != self.credentials.key:
            self.credentials = Credentials.from_key(text, self.credentials.source)
        return True
