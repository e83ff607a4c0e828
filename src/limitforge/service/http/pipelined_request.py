"""A check or batch on a connection, from its head until its response is written."""

from typing import Protocol

from limitforge.service.checks.handler import IsConnected, OnResponse, always_connected
from limitforge.service.checks.request_credentials import Credentials
from limitforge.service.checks.responses import Response


class RequestHandler(Protocol):
    """`CheckHandler.handle` or `BatchHandler.handle`."""

    def __call__(
        self,
        credentials: Credentials,
        body: bytes,
        on_response: OnResponse,
        is_connected: IsConnected = always_connected,
        /,
    ) -> None: ...


class PipelinedRequest:
    """A request that the fast protocol answers. Responses are written in the order of the requests."""

    __slots__ = (
        "awaits_lookup",
        "body",
        "close",
        "credentials",
        "handle",
        "is_rejected",
        "max_body_bytes",
        "response",
        "size",
        "status_counts",
    )

    def __init__(
        self, status_counts: dict[int, int], handle: RequestHandler, max_body_bytes: int, credentials: Credentials
    ) -> None:
        self.status_counts = status_counts
        """Where its response is counted, by status."""
        self.handle = handle
        self.max_body_bytes = max_body_bytes
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
