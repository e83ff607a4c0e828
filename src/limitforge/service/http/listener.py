"""What all connections of a listening socket share, and the requests of one of them that wait for an answer."""

import re
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

import httptools

from limitforge.core.headers import encode_block
from limitforge.service.checks.handler import MAX_BATCH_BODY, MAX_BODY, CheckHandler
from limitforge.service.checks.request_credentials import Credentials
from limitforge.service.checks.responses import Response
from limitforge.service.http.connections import ConnectionRegistry
from limitforge.service.http.trusted_proxies import TrustedProxies

_PLAIN_PATH = re.compile(rb"/[-A-Za-z0-9._~/]*")
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

Submit = Callable[..., None]
FastRoute = tuple[dict[int, int], Submit, int]
"""Where the answers of a path are counted, what decides it, and how large its body may be."""


class Listener:
    """What all connections of a listening socket share: the paths that door one answers, and common bounds."""

    def __init__(
        self,
        checks: CheckHandler,
        calls: dict[bytes, FastRoute],
        proxies: TrustedProxies,
        connections: ConnectionRegistry,
    ) -> None:
        self.status_counts = checks.status_counts
        self.is_known, self.early_rejection = checks.is_known, checks.early_rejection
        self.routes = calls
        self.proxies = proxies
        self.connections = connections
        self.is_shutting_down = False
        """True when the listening socket is closed. A connection that was accepted before may still begin."""
        self.default_headers: list[tuple[bytes, bytes]] | None = None
        self.response_heads: dict[tuple[int, bytes], bytes] = {}
        """By status and content type, for as long as the default headers are these."""

    @classmethod
    def for_checks(
        cls, checks: CheckHandler, root_path: str, proxies: TrustedProxies, connections: ConnectionRegistry
    ) -> "Listener":
        calls: dict[bytes, FastRoute] = {
            f"{root_path}/v1/check".encode(): (checks.status_counts("check"), checks.submit, MAX_BODY),
            f"{root_path}/v1/check/batch".encode(): (
                checks.status_counts("batch"),
                checks.submit_batch,
                MAX_BATCH_BODY,
            ),
        }
        return cls(checks, calls, proxies, connections)

    def find_route(self, url: bytes) -> FastRoute | None:
        """Return what answers a URL in any form that ASGI would read as one of these paths: with a host, a query, a
        fragment or encoded characters. None also if it can't be parsed.
        """
        call = self.routes.get(url)
        if call is not None or _PLAIN_PATH.fullmatch(url):
            return call
        try:
            path = httptools.parse_url(url).path or b""
        except httptools.HttpParserInvalidURLError:
            return None
        return None if b"%2f" in path.lower() else self.routes.get(unquote_to_bytes(path))  # that is not a slash

    def build_response_head(self, answer: Response, headers: list[tuple[bytes, bytes]]) -> bytes:
        """How an answer begins, with the fields of uvicorn's own, which are made anew each second."""
        if headers is not self.default_headers:
            self.response_heads.clear()
            self.default_headers = headers
        opening = STATUS_LINES[answer.status] + encode_block(headers) + b"content-type: %b\r\n" % answer.content_type
        self.response_heads[answer.status, answer.content_type] = opening
        return opening


class PipelinedRequest:
    """One check of a connection, until it is answered and everything before it is."""

    __slots__ = (
        "awaits_lookup",
        "body",
        "close",
        "credentials",
        "is_rejected",
        "max_body",
        "response",
        "size",
        "status_counts",
        "submit",
    )

    def __init__(self, answers: dict[int, int], submit: Submit, limit: int, who: Credentials) -> None:
        self.status_counts = answers
        """Where it is counted, by its status."""
        self.submit = submit
        self.max_body = limit
        self.credentials = who
        self.body: bytes | bytearray = b""
        self.size = 0
        """Of the body, until it is answered."""
        self.awaits_lookup = False
        """Whether it waits until its key is looked up."""
        self.close = False
        self.is_rejected = False
        """Whether it was answered before it was read to its end."""
        self.response: Response | None = None
