"""What all connections of a listening socket share, and the requests of one of them that wait for an answer."""

import re
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

import httptools

from limitforge.core.headers import block
from limitforge.service.answers import Answer
from limitforge.service.check import MAX_BATCH_BODY, MAX_BODY, Checks
from limitforge.service.connections import Connections
from limitforge.service.credentials import Who
from limitforge.service.proxies import Proxies

_PLAIN_PATH = re.compile(rb"/[-A-Za-z0-9._~/]*")
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

Submit = Callable[..., None]
Call = tuple[dict[int, int], Submit, int]
"""Where the answers of a path are counted, what decides it, and how large its body may be."""


class Doors:
    """What all connections of a listening socket share: the paths that door one answers, and common bounds."""

    def __init__(self, checks: Checks, calls: dict[bytes, Call], proxies: Proxies, connections: Connections) -> None:
        self.answers = checks.answers
        self.is_known, self.objection = checks.is_known, checks.objection
        self.calls = calls
        self.proxies = proxies
        self.connections = connections
        self.is_shutting_down = False
        """True when the listening socket is closed. A connection that was accepted before may still begin."""
        self.default_headers: list[tuple[bytes, bytes]] | None = None
        self.openings: dict[tuple[int, bytes], bytes] = {}
        """By status and content type, for as long as the default headers are these."""

    @classmethod
    def of_checks(cls, checks: Checks, root_path: str, proxies: Proxies, connections: Connections) -> "Doors":
        calls: dict[bytes, Call] = {
            f"{root_path}/v1/check".encode(): (checks.answers("check"), checks.submit, MAX_BODY),
            f"{root_path}/v1/check/batch".encode(): (checks.answers("batch"), checks.submit_batch, MAX_BATCH_BODY),
        }
        return cls(checks, calls, proxies, connections)

    def call_of(self, url: bytes) -> Call | None:
        """Return what answers a URL in any form that ASGI would read as one of these paths: with a host, a query, a
        fragment or encoded characters. None also if it can't be parsed.
        """
        call = self.calls.get(url)
        if call is not None or _PLAIN_PATH.fullmatch(url):
            return call
        try:
            path = httptools.parse_url(url).path or b""
        except httptools.HttpParserInvalidURLError:
            return None
        return None if b"%2f" in path.lower() else self.calls.get(unquote_to_bytes(path))  # that is not a slash

    def opening(self, answer: Answer, headers: list[tuple[bytes, bytes]]) -> bytes:
        """How an answer begins, with the fields of uvicorn's own, which are made anew each second."""
        if headers is not self.default_headers:
            self.openings.clear()
            self.default_headers = headers
        opening = STATUS_LINES[answer.status] + block(headers) + b"content-type: %b\r\n" % answer.content_type
        self.openings[answer.status, answer.content_type] = opening
        return opening


class Turn:
    """One check of a connection, until it is answered and everything before it is."""

    __slots__ = ("answer", "answers", "body", "close", "is_refused", "is_unknown", "limit", "size", "submit", "who")

    def __init__(self, answers: dict[int, int], submit: Submit, limit: int, who: Who) -> None:
        self.answers = answers
        """Where it is counted, by its status."""
        self.submit = submit
        self.limit = limit
        self.who = who
        self.body: bytes | bytearray = b""
        self.size = 0
        """Of the body, until it is answered."""
        self.is_unknown = False
        """Whether it waits until its key is looked up."""
        self.close = False
        self.is_refused = False
        """Whether it was answered before it was read to its end."""
        self.answer: Answer | None = None
