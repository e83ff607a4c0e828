"""What all connections of one listening socket share: the paths of the fast protocol, and cached response heads."""

import re
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

import httptools

from limitforge.core.headers import encode_block
from limitforge.service.checks.authentication import Authenticator
from limitforge.service.checks.request_credentials import Credentials
from limitforge.service.checks.responses import Response
from limitforge.service.counters.process_counters import ProcessCounters
from limitforge.service.http.connections import ConnectionRegistry
from limitforge.service.http.trusted_proxies import TrustedProxies

_PLAIN_PATH = re.compile(rb"/[-A-Za-z0-9._~/]*")
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

Submit = Callable[..., None]
FastRoute = tuple[dict[int, int], Submit, int]
"""The response counters of a path (by status), the function that answers it, and the largest body in bytes."""


class Listener:
    """The state of a listening socket in one process."""

    def __init__(
        self,
        authenticator: Authenticator,
        counters: ProcessCounters,
        routes: dict[bytes, FastRoute],
        proxies: TrustedProxies,
        connections: ConnectionRegistry,
    ) -> None:
        """`routes` are the paths that the fast protocol answers itself."""
        self.response_counter = counters.response_counter
        self.is_known, self.early_rejection = authenticator.is_known, authenticator.early_rejection
        self.routes = routes
        self.proxies = proxies
        self.connections = connections
        self.is_shutting_down = False
        """True once the socket is closed. A connection that was accepted before may still be made."""
        self.default_headers: list[tuple[bytes, bytes]] | None = None
        """The header fields that uvicorn adds to each response. It makes a new list every second, with a new date."""
        self.response_heads: dict[tuple[int, bytes], bytes] = {}
        """Encoded heads with these default headers, by status and content type."""

    def find_route(self, url: bytes) -> FastRoute | None:
        """Return the route of a URL, or None if ASGI must answer it or it can't be parsed.

        It accepts every form that ASGI would map to the same path: with a host, a query, a fragment or percent-encoded
        characters.
        """
        route = self.routes.get(url)
        if route is not None or _PLAIN_PATH.fullmatch(url):
            return route
        try:
            path = httptools.parse_url(url).path or b""
        except httptools.HttpParserInvalidURLError:
            return None
        if b"%2f" in path.lower():  # an encoded slash does not separate segments
            return None
        return self.routes.get(unquote_to_bytes(path))

    def build_response_head(self, response: Response, default_headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the status line, the default header fields and the content type, and cache them."""
        if default_headers is not self.default_headers:
            self.response_heads.clear()
            self.default_headers = default_headers
        content_type = b"content-type: %b\r\n" % response.content_type
        head = _STATUS_LINES[response.status] + encode_block(default_headers) + content_type
        self.response_heads[response.status, response.content_type] = head
        return head


class PipelinedRequest:
    """A check on a connection, until its response is written. Responses are written in the order of the requests."""

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

    def __init__(self, status_counts: dict[int, int], submit: Submit, max_body: int, credentials: Credentials) -> None:
        self.status_counts = status_counts
        """Where its response is counted, by status."""
        self.submit = submit
        self.max_body = max_body
        self.credentials = credentials
        self.body: bytes | bytearray = b""
        self.size = 0
        """Bytes of the body, until it is answered."""
        self.awaits_lookup = False
        """True while its key is looked up."""
        self.close = False
        """True if the connection closes after the response."""
        self.is_rejected = False
        """True if it was answered before it was received completely."""
        self.response: Response | None = None
        """The response, while it waits for those of earlier requests."""
