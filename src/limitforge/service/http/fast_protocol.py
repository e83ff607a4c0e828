"""The fast HTTP protocol: it answers checks itself, and passes every other request to ASGI as uvicorn does.

Checks bypass ASGI: no task, scope or event is created for them. Pipelined requests are answered in their order. A
connection remembers the last head that was parsed, and does not parse an equal one again (`head_cache.py`).
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from limitforge.errors import LimitforgeError, UnknownKey
from limitforge.service.checks.body_sizes import MAX_BODY_BYTES, SMALL_BODY_BYTES
from limitforge.service.checks.request_credentials import Credentials, read_api_key
from limitforge.service.checks.responses import Response, problem_response
from limitforge.service.http.bounded_connection import BoundedConnection, ParsingStopped, overloaded
from limitforge.service.http.connection_context import ConnectionContext
from limitforge.service.http.framing import MAX_CHUNKS, MAX_FIELDS
from limitforge.service.http.head_cache import CachedHead
from limitforge.service.http.pipelined_request import PipelinedRequest
from limitforge.service.http.request_head import head_too_large, remove_upgrade, validate_head
from limitforge.service.problems import HttpError

MAX_IGNORED_BYTES = 65_536  # bytes of a body that may arrive although nothing reads it

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CONNECTION_CLOSE = b"connection: close\r\n"
CONTENT_LENGTH_LINES = [b"content-length: %d\r\n\r\n" % length for length in range(1_024)]
"""The last lines of the heads of small responses."""
_WITHOUT_BODY = (b"GET", b"HEAD")

ANONYMOUS = Credentials(None, b"", "")


class _BusyCycle:
    """Stands in for an ASGI cycle while checks are unanswered, so that uvicorn queues the request behind them."""

    response_complete = False


class FastHttpProtocol(BoundedConnection):
    """Handles the requests of one connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        context: ConnectionContext,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop, context=context)
        self._cached_head: CachedHead | None = None
        self._reusable_request: tuple[PipelinedRequest, Callable[[Response], None]] | None = None
        """One object that serves all requests with the cached head, and its callback."""
        self._idle_packet: bytes | None = None
        """A packet that arrived while the connection was idle, and may be a complete request."""
        self._ignored_bytes = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._cached_head = self._reusable_request = self._idle_packet = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._is_active = True
        is_idle = (
            not self._requests
            and self._receiving_since is None
            and (self.cycle is None or self.cycle.response_complete)  # `_is_asgi_busy`, inlined
        )
        head = self._cached_head
        if head is not None and is_idle and not self.transport.is_closing():
            # The most frequent case, inline because a call costs time: the same head and the same length as last time.
            if len(data) == head.last_size and data.startswith(head.last_head):
                body: bytes | None = data[len(head.last_head) :]
            else:
                body = head.match_body(data)
            if body is not None and self._reusable_request is not None:
                request, on_response = self._reusable_request
                request.response = None
                self._requests.append(request)
                request.handle(head.credentials, body, on_response)
                return
        is_idle = is_idle and not self._input.packet
        self._idle_packet = data if is_idle else None
        self._input.append(remove_upgrade(data) if is_idle else data)
        self._parse()
        self._idle_packet = None  # frees a packet that was not a complete request

    def _on_backlog(self) -> None:
        self._cached_head = self._reusable_request = None  # a request with this head would overtake the waiting input

    def _reject(self, error: LimitforgeError) -> None:
        if self._has_failed or self.transport.is_closing():
            return
        self._receiving_since = None
        self._is_last_request = self._has_failed = True
        if self._is_asgi_busy and not self._requests:
            cycle = self.cycle
            if not cycle.more_body or cycle.response_started:  # the error is in the input after this request
                cycle.keep_alive = False
                self.flow.pause_reading()
                return
            cycle.disconnected = True  # the app receives this instead of the rest of the body
            cycle.message_event.set()
        request = self._receiving
        if request is None:
            request = PipelinedRequest(self._context.response_counter("unreadable"), _ignore, 0, ANONYMOUS)
            self._requests.append(request)
        self._receiving = request
        request.is_rejected = request.close = True
        request.body, request.size = b"", 0
        self._on_response(request, problem_response(error))
        if not self.transport.is_closing():
            self.flow.pause_reading()

    # --- Callbacks of the parser -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._receiving_since is None:  # it begins in the packet of the previous request
            self._receiving_since = self.loop.time()
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._input.fields = 0
        self._receiving = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self._input.fields += 1
        if self._input.fields > MAX_FIELDS:
            self._reject(head_too_large())
            raise ParsingStopped
        if not self._input.is_in_body:  # fields of trailers are ignored
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._input.is_in_body = True
        if self._is_last_request:
            self._receiving = PipelinedRequest({}, _ignore, 0, ANONYMOUS)
            self._receiving.is_rejected = True
            return
        request_line = b"" if self._idle_packet is None else self._idle_packet.partition(b"\r\n")[0]
        try:
            body_length = validate_head(self.parser.get_http_version(), request_line, self.url, self.headers)
        except HttpError as error:
            self._reject(error)
            return
        self._input.body_left = body_length
        if self.parser.should_upgrade():  # the parser would parse its body as further requests
            self._reject(HttpError(400, "malformed_request", "upgrade: other protocols are not supported"))
            return
        self._is_last_request = self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive()
        route = self._context.find_route(self.url)
        if route is None or self.parser.get_method() != b"POST" or self._is_asgi_busy:
            self._begin_asgi_request()
            return
        request = self._receiving = PipelinedRequest(*route, ANONYMOUS)
        request.close = self._is_last_request
        self._requests.append(request)
        try:
            api_key = read_api_key(self.headers, request.max_body_bytes)
            request.credentials = Credentials.from_key(api_key, self._client_ip())
            caller = self._context.authenticator.find_cached(request.credentials.fingerprint)
            self.owner = b"" if caller is None else request.credentials.fingerprint
            if caller is None and not 0 <= body_length <= SMALL_BODY_BYTES:
                self._context.authenticator.reject_unknown_key(request.credentials)  # before its body is received
        except (HttpError, UnknownKey) as error:
            self._reject(error)
            return
        if self.expect_100_continue and len(self._requests) == 1:
            self.transport.write(CONTINUE)

    def _client_ip(self) -> str:
        peer = "" if self.client is None else self.client[0]
        return self._context.proxies.client_address(peer, self.headers)

    def on_chunk_header(self) -> None:
        self._input.chunks += 1
        if self._input.chunks > MAX_CHUNKS:
            detail = f"transfer-encoding: at most {MAX_CHUNKS} chunks; send larger ones"
            self._reject(HttpError(400, "malformed_request", detail))
            raise ParsingStopped

    def on_body(self, body: bytes) -> None:
        size = len(body)
        self._input.count_body(size)
        request = self._receiving
        if request is None:
            self._forward_body(body)
        elif not request.is_rejected:
            request.size += size
            if request.size > request.max_body_bytes:
                self._reject(HttpError(413, "body_too_large", f"at most {request.max_body_bytes} bytes"))
            elif request.body:
                if not isinstance(request.body, bytearray):
                    request.body = bytearray(request.body)
                request.body += body
            else:
                request.body = body

    def on_message_complete(self) -> None:
        self._receiving_since = None
        self._input.end_message()
        self._ignored_bytes = 0
        self.url, self.headers = b"", []
        request = self._receiving
        if request is None:
            super().on_message_complete()
            self._drop_finished_cycle()
            if not self._is_queued:
                self._asgi_bytes = 0
            return
        self._receiving = None
        if request.is_rejected:
            return
        if not self.owner and not self._context.connections.admit_lookup(request):
            self._receiving = request
            self._reject(overloaded())
            return
        self._queued_bytes += request.size
        body = bytes(request.body)
        request.body = b""
        on_response = partial(self._on_response, request)
        if (
            self._idle_packet is not None
            and request.max_body_bytes == MAX_BODY_BYTES  # a check, not a batch
            and not request.close
            and not self.expect_100_continue
        ):
            self._cached_head = CachedHead.from_request(
                self._idle_packet, body, request.max_body_bytes, request.credentials
            )
            self._reusable_request = None if self._cached_head is None else (request, on_response)
        self._idle_packet = None
        request.handle(request.credentials, body, on_response, self._is_connected)

    def _is_connected(self) -> bool:
        return not self.transport.is_closing()

    # --- Requests for ASGI -------------------------------------------------------------------------------------------

    def _begin_asgi_request(self) -> None:
        """Pass the request to ASGI: now, or once all checks before it are answered."""
        self._idle_packet = None
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers[:] = headers  # in place, because the scope refers to this list
        self.scope["client"] = (self._client_ip(), 0)
        cycle_before = self.cycle
        if self._requests:
            self.cycle = _BusyCycle()  # type: ignore[assignment]
        try:
            super().on_headers_complete()
        except Exception:  # the URL can't be parsed
            self.cycle = cycle_before
            raise
        self._is_queued = bool(self.pipeline) or self._is_queued
        self._asgi_bytes += self._input.overhead
        if self._is_shutting_down:
            self.cycle.keep_alive = False

    def _forward_body(self, body: bytes) -> None:
        """Pass a piece of a body to ASGI. Ignore the body of a GET, or one that arrives after the response."""
        if not self.cycle.response_complete and self.parser.get_method() not in _WITHOUT_BODY:
            self._asgi_bytes += len(body)
            super().on_body(body)
            return
        self._ignored_bytes += len(body)
        if self._ignored_bytes > MAX_IGNORED_BYTES:
            if self.cycle.response_complete:
                self.transport.close()
            else:
                self._reject(HttpError(413, "body_too_large", f"at most {MAX_IGNORED_BYTES} bytes"))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._is_queued = True
        self._context.connections.starts.add(partial(self._start_now, cycle, app))

    def _start_now(self, cycle: Any, app: Any) -> None:
        if self.transport.is_closing() or cycle.disconnected:
            return
        self._is_queued = False
        if not self._input.is_in_body:
            self._asgi_bytes = 0
            self._report_buffered()
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._is_active = True
        self._asgi_bytes = 0
        if self.cycle is not None:
            self.cycle.body = bytearray()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # `_check_timeouts` closes idle connections instead
        self._drop_finished_cycle()
        self._resume_input()

    def _drop_finished_cycle(self) -> None:
        """Free a request for ASGI that is complete and answered, because the connection may now be idle for long."""
        if self.cycle is not None and self.cycle.response_complete and not self._input.is_in_body:
            self.cycle = self.scope = None  # type: ignore[assignment]

    # --- Responses to checks -----------------------------------------------------------------------------------------

    def _on_response(self, request: PipelinedRequest, response: Response) -> None:
        """Write this response and later ones that are ready, unless an earlier request is still unanswered."""
        requests = self._requests
        if request.size:
            self._queued_bytes -= request.size
            self._context.connections.release_lookup(request)
            request.size = 0
            self._report_buffered()
        # The most frequent case: the only request of a connection that stays open.
        if len(requests) == 1 and requests[0] is request and not request.close and not self._is_shutting_down:
            requests.clear()
            if not self.transport.is_closing():
                self._write_response(response, close=False)
                status = response.status
                request.status_counts[status] = request.status_counts.get(status, 0) + 1
                self._is_active = True
                if self.buffered_bytes or self.pipeline or self.flow.read_paused:
                    self._on_all_answered()
            return
        request.response = response
        while requests and (ready := requests[0].response) is not None:
            first = requests.popleft()
            if self.transport.is_closing():
                requests.clear()
                return
            has_more = requests or self.pipeline or self._input.packet or self._receiving not in (None, first)
            close = first.close or (self._is_shutting_down and not has_more)
            self._write_response(ready, close=close)
            first.status_counts[ready.status] = first.status_counts.get(ready.status, 0) + 1
            if close:
                self.transport.close()
                requests.clear()
                return
        if not requests:
            self._on_all_answered()

    def _on_all_answered(self) -> None:
        """Continue with the ASGI request that follows the checks, if any, and with the waiting input."""
        self._is_active = True
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        self._resume_input()

    def _write_response(self, response: Response, *, close: bool) -> None:
        body, context = response.body, self._context
        default_headers = self.server_state.default_headers
        head = None
        if default_headers is context.default_headers:
            head = context.response_heads.get((response.status, response.content_type))
        if head is None:
            head = context.build_response_head(response, default_headers)
        if close or len(body) >= len(CONTENT_LENGTH_LINES):
            length = b"content-length: %d\r\n%b\r\n" % (len(body), CONNECTION_CLOSE if close else b"")
        else:
            length = CONTENT_LENGTH_LINES[len(body)]
        self.transport.write(b"".join((head, response.headers, length, body)))


def _ignore(*_: object) -> None:
    """Do nothing. This is the `handle` of a request that is rejected or ignored."""
