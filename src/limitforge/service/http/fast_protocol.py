"""Door one: uvicorn's HTTP protocol, which answers checks itself and hands every other request to ASGI as before.

A check needs no task, no ASGI scope and no event. What HTTP brings is handled here: pipelined requests are answered in
their order, slow clients are sent away, and a shutdown waits for what is in flight.

Everything that a connection can make this process hold is bounded. The parser gets one message at a time, and none
while too much waits: the rest of the packet stays as it came, and the connection is not read meanwhile. A message may
have only so many bytes that are not its body. What all connections hold together is bounded too (`connections.py`).

A connection remembers the last head that was parsed, and does not parse it again (`heads.py`).
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from limitforge.errors import LimitforgeError
from limitforge.service.checks.handler import MAX_BODY
from limitforge.service.checks.invalid_bodies import SMALL_BODY
from limitforge.service.checks.request_credentials import Credentials, read_api_key
from limitforge.service.checks.responses import Response, problem_response
from limitforge.service.http.framing import CHUNKED, HEAD_END, MAX_CHUNKS, MAX_FIELDS, MAX_HEAD, InputBuffer
from limitforge.service.http.head_cache import CachedHead
from limitforge.service.http.listener import Listener, PipelinedRequest
from limitforge.service.problems import HttpError

REQUEST_SECONDS = 10.0  # for the head and the body of a request, from its first byte to its last
TIMER_SECONDS = 2.5  # how often that is looked at
LINGER_SECONDS = 1.0  # how long a shutdown waits for clients that are silent
MAX_PIPELINED = 64  # checks that wait on one connection
MAX_QUEUED_BYTES = 262_144  # bytes of bodies that wait on one connection: what comes behind them is not parsed yet
MAX_IGNORED_BYTES = 65_536  # bytes of a body that still arrive after the answer
MAX_UNSENT_BYTES = 4_096  # bytes of answers that wait in this process before a connection is not read any more

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CONNECTION_CLOSE = b"connection: close\r\n"
CONTENT_LENGTHS = [b"content-length: %d\r\n\r\n" % length for length in range(1_024)]
"""How most heads end."""
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n(?![ \t]))", re.IGNORECASE)
_HOST = re.compile(rb"[-A-Za-z0-9._~!$&'()*+,;=:%\[\]]*")
_VERSIONS = (b" HTTP/1.1", b" HTTP/1.0")
_WITHOUT_BODY = (b"GET", b"HEAD")

ANONYMOUS = Credentials(None, b"", "")

_log = logging.getLogger(__name__)


class _BusyCycle:
    """Stands in the place of an ASGI cycle while checks are in flight: what comes after them waits its turn."""

    response_complete = False


class FastHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        doors: Listener,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.owner = b""
        self.buffered = 0
        self._listener = doors
        self._input = InputBuffer()
        self._is_parsing = False
        self._asgi_size = 0
        """Of a request for ASGI, until it is whole and was started."""
        self._is_queued = False
        """Whether that request has not been started yet."""
        self._ignored_bytes = 0
        self._requests: deque[PipelinedRequest] = deque()
        self._receiving: PipelinedRequest | None = None
        self._cached_head: CachedHead | None = None
        self._repeated: tuple[PipelinedRequest, Callable[[Response], None]] | None = None
        """The turn of requests with that head, over and over, and who hears its answer."""
        self._packet: bytes | None = None
        """What arrived at an idle connection: perhaps a whole request."""
        self._is_shutting_down = False
        self._is_last_request = False
        """Whether a request was the last one of this connection: what comes behind it is not for us."""
        self._is_rejected = self._is_evicted = False
        """Whether what arrives is no longer parsed at all; and whether the connection had to make room."""
        self._receiving_since: float | None = None
        self._queued_bytes = 0
        self._blocked_since: float | None = None
        self._is_active = True
        """Whether anything happened since the time was last looked at."""
        self._idle_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # --- The connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._idle_since = self.loop.time()
        self._timer = self.loop.call_later(TIMER_SECONDS, self._check_timeouts)
        self._listener.connections.add(self)
        if self._listener.is_shutting_down:  # uvicorn asked the other connections to shut down before this one began
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._listener.connections.remove(self)
        self._requests.clear()
        self.pipeline.clear()
        self._receiving = self._cached_head = self._repeated = None
        self._discard_input()
        try:
            super().connection_lost(exc)
        finally:
            self._packet = self.cycle = self.scope = None  # type: ignore[assignment]  # which refer to each other
            self._report_buffered()

    def data_received(self, data: bytes) -> None:
        self._is_active = True
        is_idle = (
            not self._requests
            and self._receiving_since is None
            and (self.cycle is None or self.cycle.response_complete)
        )
        head = self._cached_head
        if head is not None and is_idle and not self.transport.is_closing():
            if len(data) == head.last_size and data.startswith(
                head.last_head
            ):  # as the last one: here, since a call costs time
                body: bytes | None = data[len(head.last_head) :]
            else:
                body = head.match_body(data)
            if body is not None and self._repeated is not None:
                turn, tell = self._repeated
                turn.response = None
                self._requests.append(turn)
                turn.submit(head.credentials, body, tell)
                return
        is_idle = is_idle and not self._input.packet
        self._packet = data if is_idle else None
        self._input.append(_without_upgrade(data) if is_idle else data)
        self._parse()
        self._packet = None  # if it was not a whole request, the packet need not be kept

    def _parse(self) -> None:
        """Feed the parser, message by message, while there is room for another; the rest of the packet waits."""
        if self._is_parsing:  # an answer came at once
            return
        self._is_parsing = True
        while self._input.packet:
            if (
                self.transport.is_closing()
                or self._is_rejected
                or (self._is_last_request and not self._input.is_in_body)
            ):
                self._discard_input()
            elif self._is_full() and not self._input.is_in_body:
                self._cached_head = self._repeated = None  # nothing goes before what waits here
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
            pass  # it was refused when its head was read
        except httptools.HttpParserError as error:
            cause = error.__context__
            if cause is not None and not isinstance(cause, httptools.HttpParserError | UnicodeError | _ParsingStopped):
                _log.error("a request could not be read", exc_info=cause)
            self._reject(HttpError(400, "malformed_request", "this is not valid HTTP/1.1"))
        if self._input.is_too_large:
            self._reject(_head_too_large())

    def _report_buffered(self) -> None:
        """Tell how many bytes this connection holds."""
        if self._is_evicted:
            self._listener.connections.set_buffered(self, 0)
            return
        unsent = self.transport.get_write_buffer_size() if self.flow.write_paused else 0
        body = self._asgi_size if self._receiving is None else self._asgi_size + self._receiving.size
        self._listener.connections.set_buffered(self, unsent + self._input.size + body)

    def _discard_input(self) -> None:
        self._input.clear()
        self.url, self.headers = b"", []
        self._asgi_size = 0
        if self._receiving is not None:
            self._receiving.body, self._receiving.size = b"", 0

    @property
    def is_answering(self) -> bool:
        is_handled = bool(self._requests) or (self.cycle is not None and not self.cycle.response_complete)
        return is_handled and not self._input.is_in_body

    @property
    def quiet_since(self) -> float:
        return self._idle_since if self._receiving_since is None else self._receiving_since

    def evict(self) -> None:
        """One that is idle is closed. One that holds much is answered if it still reads, and lets go at once."""
        is_idle = not self.buffered and not self.is_answering
        self._is_evicted = True  # nothing of it counts from now on, also if the transport needs a moment to let go
        if is_idle:
            self.transport.close()
        elif self.flow.write_paused or self.transport.is_closing():
            self.transport.abort()
        else:
            if self._is_queued:
                self._cancel_queued()
            self._reject(_overloaded())
        self._discard_input()
        self._report_buffered()

    def _cancel_queued(self) -> None:
        """Drop a request for ASGI that was not started yet."""
        self.pipeline.clear()
        cycle, self.cycle = self.cycle, None  # type: ignore[assignment]
        if cycle is not None:
            cycle.disconnected = True  # so that it is never started
            cycle.body = bytearray()

    def _reject(self, error: LimitforgeError) -> None:
        """Answer what can't be parsed, behind whatever is still to be answered, and hear nothing more."""
        if self._is_rejected or self.transport.is_closing():
            return
        self._receiving_since = None
        self._is_last_request = self._is_rejected = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not self._requests:
            if not cycle.more_body or cycle.response_started:  # it is whole, and what can't be parsed came behind it
                cycle.keep_alive = False
                self.flow.pause_reading()
                return
            cycle.disconnected = True  # whoever waits for the rest of its body waits in vain
            cycle.message_event.set()
        turn = self._receiving
        if turn is None:
            turn = PipelinedRequest(self._listener.status_counts("unreadable"), _ignore, 0, ANONYMOUS)
            self._requests.append(turn)
        self._receiving = turn
        turn.is_rejected = turn.close = True
        turn.body, turn.size = b"", 0
        self._on_response(turn, problem_response(error))
        if not self.transport.is_closing():
            self.flow.pause_reading()

    def shutdown(self) -> None:
        """Answer what is in flight, then close. A client that is silent may be about to ask: it is given a moment."""
        self._is_shutting_down = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        elif not self._requests and self._receiving_since is None:
            self.loop.call_later(LINGER_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        is_answering = self._requests or (self.cycle is not None and not self.cycle.response_complete)
        if not is_answering and self._receiving_since is None:
            self.transport.close()

    def pause_writing(self) -> None:
        """A client that does not read its answers is not read from either."""
        super().pause_writing()
        self.flow.pause_reading()
        self._report_buffered()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resume_input()

    def _resume_input(self) -> None:
        """There may be room again: first for what was not parsed yet."""
        if self._input.packet:
            if self._receiving_since is not None:  # the client had no part in this pause
                self._receiving_since = self.loop.time()
            self._parse()
        is_wanted = self._input.is_in_body or not self._is_full()
        if is_wanted and not self._input.packet and not self._is_rejected and not self.flow.write_paused:
            self.flow.resume_reading()
        self._report_buffered()

    def _is_full(self) -> bool:
        """Whether so much waits to be answered that the next request has to wait. ASGI gets one request at a time, and
        so does a key that has to be looked up.
        """
        return (
            len(self._requests) >= (MAX_PIPELINED if self.owner else 1)
            or self._queued_bytes > MAX_QUEUED_BYTES
            or self.flow.write_paused
            or bool(self.pipeline)
            or (self.cycle is not None and not self.cycle.response_complete)
        )

    def _check_timeouts(self) -> None:
        """One timer for a connection's whole life is cheaper than one for each request."""
        now = self.loop.time()
        self._timer = self.loop.call_later(TIMER_SECONDS, self._check_timeouts)
        is_closing = self.transport.is_closing()
        if not is_closing and not self.flow.write_paused:
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = now
        elif (
            now - self._blocked_since > REQUEST_SECONDS
        ):  # whoever does not read its answers for that long goes without
            self.transport.abort()
            return
        if is_closing:
            return
        if self._is_active:
            self._is_active, self._idle_since = False, now
        if (
            self._receiving_since is not None
            and now - self._receiving_since > REQUEST_SECONDS
            and not self.flow.read_paused
        ):
            self._time_out()
        elif (
            self._receiving_since is None
            and not self._requests
            and (self.cycle is None or self.cycle.response_complete)
            and now - self._idle_since > self.timeout_keep_alive
        ):
            self.transport.close()

    def _time_out(self) -> None:
        """On a client that takes too long to say what it wants."""
        self._reject(HttpError(408, "too_slow", f"a request must arrive within {REQUEST_SECONDS:.0f} s"))
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()

    # --- One request -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._receiving_since is None:  # it came behind another, in one packet
            self._receiving_since = self.loop.time()
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._input.fields = 0
        self._receiving = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self._input.fields += 1
        if self._input.fields > MAX_FIELDS:
            self._reject(_head_too_large())
            raise _ParsingStopped
        if not self._input.is_in_body:  # what comes behind the body may not say what matters before
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._input.is_in_body = True
        if self._is_last_request:
            self._receiving = PipelinedRequest({}, _ignore, 0, ANONYMOUS)
            self._receiving.is_rejected = True
            return
        objection = self._validate_head()
        if objection is not None:
            self._reject(objection)
            return
        if self.parser.should_upgrade():  # its body would be taken for requests
            self._reject(HttpError(400, "malformed_request", "upgrade: no other protocol is spoken here"))
            return
        self._is_last_request = self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive()
        call = self._listener.find_route(self.url)
        if (
            call is None
            or self.parser.get_method() != b"POST"
            or (self.cycle is not None and not self.cycle.response_complete)
        ):
            self._begin_asgi_request()
            return
        turn = self._receiving = PipelinedRequest(*call, ANONYMOUS)
        turn.close = self._is_last_request
        self._requests.append(turn)
        try:
            turn.credentials = Credentials.from_key(read_api_key(self.headers, turn.max_body), self._source_address())
        except HttpError as error:
            self._reject(error)
            return
        is_known = self._listener.is_known(turn.credentials)
        self.owner = turn.credentials.fingerprint if is_known else b""
        if not is_known and not 0 <= self._input.body_left <= SMALL_BODY:  # it may not be worth reading
            unknown = self._listener.early_rejection(turn.credentials)
            if unknown is not None:
                self._reject(unknown)
                return
        if self.expect_100_continue and len(self._requests) == 1:
            self.transport.write(CONTINUE)

    def _validate_head(self) -> HttpError | None:
        """To a head that HTTP does not allow, or that is too large."""
        version = self.parser.get_http_version()
        line = b"" if self._packet is None else self._packet.partition(b"\r\n")[0]
        if version not in ("1.1", "1.0") or (line and not line.endswith(_VERSIONS)):
            return HttpError(400, "malformed_request", "the request line: HTTP/1.1 is spoken here")
        size, hosts = len(self.url), 0
        self._input.body_left = 0
        for name, value in self.headers:
            size += len(name) + len(value)
            if name == b"host":
                hosts += 1 if _HOST.fullmatch(value) else 2
            elif name == b"content-length":
                self._input.body_left = int(value) if value.isdigit() else 0
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked":
                    return HttpError(400, "malformed_request", "transfer-encoding: must be chunked")
                self._input.body_left = CHUNKED
        if size > MAX_HEAD:
            return _head_too_large()
        if hosts > 1 or (not hosts and version == "1.1"):
            return HttpError(400, "malformed_request", "host: there must be one, and it must be a name or an address")
        return None

    def _source_address(self) -> str:
        return self._listener.proxies.client_address("" if self.client is None else self.client[0], self.headers)

    def _begin_asgi_request(self) -> None:
        """To ASGI: now, or once the checks before it are answered."""
        self._packet = None
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers[:] = headers  # the list that the scope has
        self.scope["client"] = (self._source_address(), 0)
        before = self.cycle
        if self._requests:
            self.cycle = _BusyCycle()  # type: ignore[assignment]
        try:
            super().on_headers_complete()
        except Exception:  # a URL that can't be parsed
            self.cycle = before
            raise
        self._is_queued = bool(self.pipeline) or self._is_queued
        self._asgi_size += self._input.overhead
        if self._is_shutting_down:
            self.cycle.keep_alive = False

    def on_chunk_header(self) -> None:
        self._input.chunks += 1
        if self._input.chunks > MAX_CHUNKS:
            detail = f"transfer-encoding: at most {MAX_CHUNKS} chunks: send larger ones"
            self._reject(HttpError(400, "malformed_request", detail))
            raise _ParsingStopped

    def on_body(self, body: bytes) -> None:
        size = len(body)
        self._input.count_body(size)
        turn = self._receiving
        if turn is None:
            self._forward_body(body)
        elif not turn.is_rejected:
            turn.size += size
            if turn.size > turn.max_body:
                self._reject(HttpError(413, "body_too_large", f"at most {turn.max_body} bytes"))
            elif turn.body:
                if not isinstance(turn.body, bytearray):
                    turn.body = bytearray(turn.body)
                turn.body += body
            else:
                turn.body = body

    def _forward_body(self, body: bytes) -> None:
        """To ASGI. What a GET brings, or comes after the answer, is not wanted, and only a little of it is read."""
        if not self.cycle.response_complete and self.parser.get_method() not in _WITHOUT_BODY:
            self._asgi_size += len(body)
            super().on_body(body)
            return
        self._ignored_bytes += len(body)
        if self._ignored_bytes > MAX_IGNORED_BYTES:
            if self.cycle.response_complete:
                self.transport.close()
            else:
                self._reject(HttpError(413, "body_too_large", f"at most {MAX_IGNORED_BYTES} bytes"))

    def on_message_complete(self) -> None:
        self._receiving_since = None
        self._input.end_message()
        self._ignored_bytes = 0
        self.url, self.headers = b"", []
        turn = self._receiving
        if turn is None:
            super().on_message_complete()
            self._drop_finished_cycle()
            if not self._is_queued:
                self._asgi_size = 0
            return
        self._receiving = None
        if turn.is_rejected:
            return
        if not self.owner and not self._listener.connections.admit_lookup(turn):
            self._receiving = turn
            self._reject(_overloaded())
            return
        self._queued_bytes += turn.size
        body = bytes(turn.body)
        turn.body = b""
        tell = partial(self._on_response, turn)
        if self._packet is not None and turn.max_body == MAX_BODY and not turn.close and not self.expect_100_continue:
            self._cached_head = CachedHead.from_request(self._packet, body, turn.max_body, turn.credentials)
            self._repeated = None if self._cached_head is None else (turn, tell)
        self._packet = None
        turn.submit(turn.credentials, body, tell, self._is_connected)

    def _is_connected(self) -> bool:
        """Whether the client still waits for answers."""
        return not self.transport.is_closing()

    def on_response_complete(self) -> None:
        self._is_active = True
        self._asgi_size = 0
        if self.cycle is not None:
            self.cycle.body = bytearray()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the connection's own timer looks after it
        self._drop_finished_cycle()
        self._resume_input()

    def _drop_finished_cycle(self) -> None:
        """Keep nothing of a request for ASGI that is answered and has ended: the connection may be idle for long."""
        if self.cycle is not None and self.cycle.response_complete and not self._input.is_in_body:
            self.cycle = self.scope = None  # type: ignore[assignment]

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._is_queued = True
        self._listener.connections.starts.add(partial(self._start_now, cycle, app))

    def _start_now(self, cycle: Any, app: Any) -> None:
        if self.transport.is_closing() or cycle.disconnected:
            return
        self._is_queued = False
        if not self._input.is_in_body:
            self._asgi_size = 0
            self._report_buffered()
        super()._start_asgi_task(cycle, app)

    # --- Answers -----------------------------------------------------------------------------------------------------

    def _on_response(self, turn: PipelinedRequest, answer: Response) -> None:
        """Write every answer whose turn it is."""
        turns = self._requests
        if turn.size:
            self._queued_bytes -= turn.size
            self._listener.connections.release_lookup(turn)
            turn.size = 0
            self._report_buffered()
        if len(turns) == 1 and turns[0] is turn and not turn.close and not self._is_shutting_down:
            turns.clear()
            if not self.transport.is_closing():
                self._write_response(answer, close=False)
                status = answer.status
                turn.status_counts[status] = turn.status_counts.get(status, 0) + 1
                self._is_active = True
                if self.buffered or self.pipeline or self.flow.read_paused:
                    self._on_all_answered()
            return
        turn.response = answer
        while turns and (ready := turns[0].response) is not None:
            first = turns.popleft()
            if self.transport.is_closing():
                turns.clear()
                return
            is_waiting = turns or self.pipeline or self._input.packet or self._receiving not in (None, first)
            is_last = self._is_shutting_down and not is_waiting
            self._write_response(ready, close=first.close or is_last)
            first.status_counts[ready.status] = first.status_counts.get(ready.status, 0) + 1
            if first.close or is_last:
                self.transport.close()
                turns.clear()
                return
        if not turns:
            self._on_all_answered()

    def _on_all_answered(self) -> None:
        """All checks so far are answered."""
        self._is_active = True
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        self._resume_input()

    def _write_response(self, answer: Response, *, close: bool) -> None:
        body, doors = answer.body, self._listener
        headers = self.server_state.default_headers
        opening = (
            doors.response_heads.get((answer.status, answer.content_type)) if headers is doors.default_headers else None
        )
        if opening is None:
            opening = doors.build_response_head(answer, headers)
        if close or len(body) >= len(CONTENT_LENGTHS):
            length = b"content-length: %d\r\n%b\r\n" % (len(body), CONNECTION_CLOSE if close else b"")
        else:
            length = CONTENT_LENGTHS[len(body)]
        self.transport.write(b"".join((opening, answer.headers, length, body)))


def _without_upgrade(data: bytes) -> bytes:
    """The start of a request, less a field that asks for another protocol: there is none, so it does not count. The
    parser would take what follows for that protocol's.
    """
    if (b"pgrade" not in data and b"PGRADE" not in data) or HEAD_END not in data:
        return data
    head, end, rest = data.partition(HEAD_END)
    return _UPGRADE.sub(b"", head + end[:2]) + end[2:] + rest


def _head_too_large() -> HttpError:
    return HttpError(431, "head_too_large", f"header fields: at most {MAX_FIELDS}, and {MAX_HEAD} bytes")


def _overloaded() -> HttpError:
    return HttpError(503, "overloaded", "too much is being received now", **{"retry-after": "1"})


class _ParsingStopped(Exception):
    """Stops the parser: the message was refused already."""


def _ignore(*_: object) -> None:
    """What can't be read is not submitted."""
