"""What all connections of one listening socket share: the paths of the fast protocol, and cached response heads."""

import re
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

import httptools

from limitforge.core.headers import encode_block
from limitforge.service.checks.authentication import Authenticator
from limitforge.service.checks.responses import Response
from limitforge.service.counters.process_counters import ProcessCounters
from limitforge.service.http.connections import ConnectionRegistry
from limitforge.service.http.pipelined_request import RequestHandler
from limitforge.service.http.trusted_proxies import TrustedProxies

_PLAIN_PATH = re.compile(rb"/[-A-Za-z0-9._~/]*")
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

FastRoute = tuple[dict[int, int], RequestHandler, int]
"""The arguments of `PipelinedRequest` for a path: response counters by status, handler, largest body in bytes."""


class ConnectionContext:
    """What the connections of one listening socket share in one process."""

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
        self.authenticator = authenticator
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
