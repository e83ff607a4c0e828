"""A connection with bounded memory and time, on top of uvicorn's HTTP protocol.

Messages are parsed one at a time. While too many requests or bytes are unanswered, parsing and reading pause, and the
rest of the packet stays unparsed. The bytes of a message besides its body are bounded too. `connections.py` bounds what
all connections hold together.
"""

import asyncio
import logging
from collections import deque
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from limitforge.errors import LimitforgeError
from limitforge.observability.events import log_event
from limitforge.service.http.connection_context import ConnectionContext
from limitforge.service.http.framing import InputBuffer
from limitforge.service.http.pipelined_request import PipelinedRequest
from limitforge.service.http.request_head import head_too_large
from limitforge.service.problems import HttpError

REQUEST_SECONDS = 10.0  # for the head and the body of a request, from its first byte to its last
TIMEOUT_CHECK_SECONDS = 2.5  # how often timeouts are checked
LINGER_SECONDS = 1.0  # how long a shutdown waits for idle clients, which may be about to send a request
MAX_PIPELINED = 64  # unanswered checks of one connection
MAX_QUEUED_BYTES = 262_144  # bodies of the unanswered checks of one connection; beyond that, parsing stops
MAX_UNSENT_BYTES = 4_096  # response bytes in this process; beyond that, the connection is not read any more

_log = logging.getLogger(__name__)


class ParsingStopped(Exception):
    """Raised by a callback to stop the parser, after the message was rejected."""


class BoundedConnection(HttpToolsProtocol):
    """Reads, pauses and closes one connection. `FastHttpProtocol` handles its requests."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        context: ConnectionContext,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # The state of the requests. The subclass keeps it up to date. This class reads it, and resets some of it.
        self.owner = b""
        """The key fingerprint of the last parsed check if this process had the key in memory, else empty."""
        self._requests: deque[PipelinedRequest] = deque()
        """The unanswered checks, oldest first."""
        self._receiving: PipelinedRequest | None = None
        """The check whose body is being received."""
        self._queued_bytes = 0
        """Body bytes of the unanswered checks."""
        self._asgi_bytes = 0
        """Bytes of a request for ASGI, until it is complete and started."""
        self._is_queued = False
        """True while a request for ASGI waits to be started."""
        self._is_last_request = False
        """True if the connection closes after the current request. Later input is ignored."""
        self._has_failed = False
        """True once an error ends the connection. No more input is parsed."""

        # The state of the connection. Of it, the subclass sets only `_receiving_since` and `_is_active`.
        self.buffered_bytes = 0
        self._context = context
        self._input = InputBuffer()
        self._is_parsing = False
        self._is_shutting_down = False
        self._is_evicted = False
        self._receiving_since: float | None = None
        """When the first byte of an incomplete request arrived."""
        self._blocked_since: float | None = None
        """Since when the client has not read its responses."""
        self._is_active = True
        """True if anything has happened since timeouts were checked last."""
        self._idle_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def _reject(self, error: LimitforgeError) -> None:
        """Answer with an error after all earlier responses, then close. No more input is parsed."""
        raise NotImplementedError

    def _on_backlog(self) -> None:
        """Run when input must wait unparsed."""

    @property
    def _is_asgi_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # --- Life cycle --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._idle_since = self.loop.time()
        self._timer = self.loop.call_later(TIMEOUT_CHECK_SECONDS, self._check_timeouts)
        self._context.connections.add(self)
        if self._context.is_shutting_down:  # uvicorn has already asked all other connections to shut down
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._context.connections.remove(self)
        self._requests.clear()
        self.pipeline.clear()
        self._receiving = None
        self._discard_input()
        try:
            super().connection_lost(exc)
        finally:
            self.cycle = self.scope = None  # type: ignore[assignment]  # break the reference cycle
            self._report_buffered()

    def shutdown(self) -> None:
        """Answer what is in flight, then close. Give an idle client a moment to send its next request."""
        self._is_shutting_down = True
        if self._is_asgi_busy:
            self.cycle.keep_alive = False
        elif not self._requests and self._receiving_since is None:
            self.loop.call_later(LINGER_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self._requests and not self._is_asgi_busy and self._receiving_since is None:
            self.transport.close()

    # --- Input -------------------------------------------------------------------------------------------------------

    def _parse(self) -> None:
        """Feed the parser message by message while the connection may have another request."""
        if self._is_parsing:  # called from within the parser, by a check that was answered at once
            return
        self._is_parsing = True
        while self._input.packet:
            is_in_body = self._input.is_in_body
            if self.transport.is_closing() or self._has_failed or (self._is_last_request and not is_in_body):
                self._discard_input()
            elif self._must_wait() and not is_in_body:
                self._on_backlog()
                self._input.compact()
                self.flow.pause_reading()
                break
            else:
                self._feed(self._input.next_piece())
        self._is_parsing = False
        self._report_buffered()

    def _feed(self, piece: bytes) -> None:
        if self._receiving_since is None:
            self._receiving_since = self.loop.time()
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # the request was rejected when its head was complete
        except httptools.HttpParserError as error:
            cause = error.__context__
            if cause is not None and not isinstance(cause, httptools.HttpParserError | UnicodeError | ParsingStopped):
                log_event(_log, logging.ERROR, "service.parse_failed", "unexpected error in a request", exc_info=cause)
            self._reject(HttpError(400, "malformed_request", "this is not valid HTTP/1.1"))
        if self._input.is_too_large:
            self._reject(head_too_large())

    def _must_wait(self) -> bool:
        """Return whether the next request must wait until earlier ones are answered.

        A connection may have one request at a time in ASGI, and one whose key must be looked up.
        """
        return (
            len(self._requests) >= (MAX_PIPELINED if self.owner else 1)
            or self._queued_bytes > MAX_QUEUED_BYTES
            or self.flow.write_paused
            or bool(self.pipeline)
            or self._is_asgi_busy
        )

    def _discard_input(self) -> None:
        self._input.clear()
        self.url, self.headers = b"", []
        self._asgi_bytes = 0
        if self._receiving is not None:
            self._receiving.body, self._receiving.size = b"", 0

    def _resume_input(self) -> None:
        """Parse what waits, then read on, as far as the bounds allow."""
        if self._input.packet:
            if self._receiving_since is not None:  # the pause was not the client's fault, so its time starts again
                self._receiving_since = self.loop.time()
            self._parse()
        may_read = self._input.is_in_body or not self._must_wait()
        if may_read and not self._input.packet and not self._has_failed and not self.flow.write_paused:
            self.flow.resume_reading()
        self._report_buffered()

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read its responses."""
        super().pause_writing()
        self.flow.pause_reading()
        self._report_buffered()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resume_input()

    # --- Memory ------------------------------------------------------------------------------------------------------

    @property
    def is_answering(self) -> bool:
        return (bool(self._requests) or self._is_asgi_busy) and not self._input.is_in_body

    @property
    def quiet_since(self) -> float:
        return self._idle_since if self._receiving_since is None else self._receiving_since

    def _report_buffered(self) -> None:
        """Report to the registry how many bytes this connection holds."""
        if self._is_evicted:
            self._context.connections.set_buffered(self, 0)
            return
        unsent = self.transport.get_write_buffer_size() if self.flow.write_paused else 0
        body = self._asgi_bytes if self._receiving is None else self._asgi_bytes + self._receiving.size
        self._context.connections.set_buffered(self, unsent + self._input.size + body)

    def evict(self) -> None:
        """Free what the connection holds, and close it. A client that reads its responses receives a 503 first."""
        is_idle = not self.buffered_bytes and not self.is_answering
        self._is_evicted = True  # from now on it counts as empty, although the transport may take a moment to close
        if is_idle:
            self.transport.close()
        elif self.flow.write_paused or self.transport.is_closing():
            self.transport.abort()
        else:
            if self._is_queued:
                self._cancel_queued()
            self._reject(overloaded())
        self._discard_input()
        self._report_buffered()

    def _cancel_queued(self) -> None:
        """Drop a request for ASGI that was not started yet."""
        self.pipeline.clear()
        cycle, self.cycle = self.cycle, None  # type: ignore[assignment]
        if cycle is not None:
            cycle.disconnected = True  # so that it is never started
            cycle.body = bytearray()

    # --- Time --------------------------------------------------------------------------------------------------------

    def _check_timeouts(self) -> None:
        """Close a connection that is idle or blocked for too long. A periodic timer costs less than one per request."""
        now = self.loop.time()
        self._timer = self.loop.call_later(TIMEOUT_CHECK_SECONDS, self._check_timeouts)
        is_closing = self.transport.is_closing()
        if not is_closing and not self.flow.write_paused:
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = now
        elif now - self._blocked_since > REQUEST_SECONDS:  # the client has not read its responses for that long
            self.transport.abort()
            return
        if is_closing:
            return
        if self._is_active:
            self._is_active, self._idle_since = False, now
        if self._receiving_since is not None:
            if now - self._receiving_since > REQUEST_SECONDS and not self.flow.read_paused:
                self._time_out()
        elif not self._requests and not self._is_asgi_busy and now - self._idle_since > self.timeout_keep_alive:
            self.transport.close()

    def _time_out(self) -> None:
        """Reject a request that takes too long to arrive."""
        self._reject(HttpError(408, "too_slow", f"a request must arrive within {REQUEST_SECONDS:.0f} s"))
        if self._is_asgi_busy and self.cycle.response_started:
            self.transport.close()


def overloaded() -> HttpError:
    return HttpError(503, "overloaded", "the service is receiving too much data", **{"retry-after": "1"})
