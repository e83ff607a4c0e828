"""Door one: uvicorn's HTTP protocol, which answers checks itself and hands every other request to ASGI as before.

A check needs no task, no ASGI scope and no event. What HTTP brings is handled here: pipelined requests are answered in
their order, bodies are bounded, slow clients are sent away, and a shutdown waits for what is in flight.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from limitforge.service.answers import Answer, refused
from limitforge.service.check import MAX_BATCH_BODY, MAX_BODY, Checks
from limitforge.service.credentials import presented
from limitforge.service.problems import BadRequest

READ_SECONDS = 10.0  # for the head and the body of a request, from its first byte to its last
WATCH_SECONDS = 2.5  # how often that is looked at
LINGER_SECONDS = 1.0  # how long a shutdown waits for clients that are silent
MAX_PIPELINED = 64

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE = b"connection: close\r\n"


class Doors:
    """What every connection of a process shares: the paths that door one answers, and who answers them."""

    def __init__(self, checks: Checks, root_path: str) -> None:
        self.checks = checks
        self.calls: dict[bytes, tuple[str, Callable[..., None], int]] = {
            f"{root_path}/v1/check".encode(): ("check", checks.submit, MAX_BODY),
            f"{root_path}/v1/check/batch".encode(): ("batch", checks.submit_batch, MAX_BATCH_BODY),
        }
        self._default_headers: list[tuple[bytes, bytes]] | None = None
        self._default_block = b""

    def default_block(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The fields of uvicorn's own, which are made anew each second."""
        if headers is not self._default_headers:
            self._default_block = b"".join([b"%b: %b\r\n" % header for header in headers])
            self._default_headers = headers
        return self._default_block


class Turn:
    """One check of a connection, until it is answered and everything before it is."""

    __slots__ = ("answer", "body", "call", "close", "is_refused", "key", "limit", "submit")

    def __init__(self, call: str, submit: Callable[..., None], limit: int) -> None:
        self.call = call
        self.submit = submit
        self.limit = limit
        self.body: bytes | bytearray = b""
        self.key: str | None = None
        self.close = False
        self.is_refused = False
        """Whether it was answered before it was read to its end."""
        self.answer: Answer | None = None


class _Busy:
    """Stands in the place of an ASGI cycle while checks are in flight: what comes after them waits its turn."""

    response_complete = False


class CheckProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._doors: Doors = app_state["doors"]
        self._turns: deque[Turn] = deque()
        self._turn: Turn | None = None
        self._is_ending = False
        self._reads_since: float | None = None
        self._idle_since = 0.0
        self._watch: asyncio.TimerHandle | None = None

    # --- The connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._watch = self.loop.call_later(WATCH_SECONDS, self._watch_time)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._turns.clear()
        self._turn = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reads_since is None:
            self._reads_since = self.loop.time()
        super().data_received(data)

    def shutdown(self) -> None:
        """Answer what is in flight, then close. A client that is silent may be about to ask: it is given a moment."""
        self._is_ending = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        elif not self._turns and self._reads_since is None:
            self.loop.call_later(LINGER_SECONDS, self._end_silence)

    def _end_silence(self) -> None:
        is_answering = self._turns or (self.cycle is not None and not self.cycle.response_complete)
        if not is_answering and self._reads_since is None:
            self.transport.close()

    def pause_writing(self) -> None:
        """A client that does not read its answers is not read from either."""
        super().pause_writing()
        if self._turns:
            self.flow.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.flow.resume_reading()

    def _watch_time(self) -> None:
        """One timer for a connection's whole life is cheaper than one for each request."""
        now = self.loop.time()
        if self.transport.is_closing():
            return
        self._watch = self.loop.call_later(WATCH_SECONDS, self._watch_time)
        if self._reads_since is not None and now - self._reads_since > READ_SECONDS and not self.flow.read_paused:
            self._give_up()
        elif (
            self._reads_since is None
            and not self._turns
            and (self.cycle is None or self.cycle.response_complete)
            and now - self._idle_since > self.timeout_keep_alive
        ):
            self.transport.close()

    def _give_up(self) -> None:
        """On a client that takes too long to say what it wants."""
        late = refused(BadRequest(408, "too_slow", f"a request must arrive within {READ_SECONDS:.0f} s"))
        turn = self._turn
        if turn is not None:
            turn.is_refused = turn.close = True
            self._told(turn, late)
            return
        if not self._turns and (self.cycle is None or self.cycle.response_complete):
            self._write(late, close=True)
        self.transport.close()

    # --- One request -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._turn = None

    def on_headers_complete(self) -> None:
        call = self._doors.calls.get(self.url)
        if (
            call is None
            or self.parser.get_method() != b"POST"
            or (self.cycle is not None and not self.cycle.response_complete)
            or self.parser.should_upgrade()
        ):
            self._hand_over()
            return
        turn = self._turn = Turn(*call)
        turn.close = self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive()
        self._turns.append(turn)
        try:
            turn.key = presented(self.headers, turn.limit)
        except BadRequest as error:
            turn.is_refused = turn.close = True
            self._told(turn, refused(error))
            return
        if self.expect_100_continue and len(self._turns) == 1:
            self.transport.write(CONTINUE)

    def _hand_over(self) -> None:
        """To ASGI: now, or once the checks before it are answered."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers[:] = headers  # the list that the scope has
        if self._turns:
            self.cycle = _Busy()  # type: ignore[assignment]
        super().on_headers_complete()
        if self._is_ending:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        turn = self._turn
        if turn is None:
            super().on_body(body)
        elif not turn.is_refused:
            if len(turn.body) + len(body) > turn.limit:
                turn.is_refused = turn.close = True
                self._told(turn, refused(BadRequest(413, "body_too_large", f"at most {turn.limit} bytes")))
            elif turn.body:
                turn.body = turn.body + body
            else:
                turn.body = body

    def on_message_complete(self) -> None:
        self._reads_since = None
        turn = self._turn
        if turn is None:
            super().on_message_complete()
            return
        self._turn = None
        if turn.is_refused:
            return
        if len(self._turns) >= MAX_PIPELINED:
            self.flow.pause_reading()
        source = "" if self.client is None else self.client[0]
        turn.submit(turn.key, source, turn.body, lambda answer: self._told(turn, answer))

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the connection's own timer looks after it

    # --- Answers -----------------------------------------------------------------------------------------------------

    def _told(self, turn: Turn, answer: Answer) -> None:
        """Write every answer whose turn it is."""
        turn.answer = answer
        turns = self._turns
        while turns and (ready := turns[0].answer) is not None:
            first = turns.popleft()
            if self.transport.is_closing():
                turns.clear()
                return
            is_last = self._is_ending and not turns and (self._turn is None or self._turn is first)
            self._write(ready, close=first.close or is_last)
            self._doors.checks.answered(first.call, ready.status)
            self.server_state.total_requests += 1
            if first.close or is_last:
                self.transport.close()
                turns.clear()
                return
        if not turns:
            self._idle_since = self.loop.time()
            if self.flow.read_paused and not self.flow.write_paused:
                self.flow.resume_reading()
            if self.pipeline:
                cycle, app = self.pipeline.pop()
                self._start_asgi_task(cycle, app)

    def _write(self, answer: Answer, *, close: bool) -> None:
        parts = [STATUS_LINES[answer.status], self._doors.default_block(self.server_state.default_headers)]
        parts.append(b"content-type: %b\r\n" % answer.content_type)
        parts += [b"%b: %b\r\n" % header for header in answer.headers]
        parts.append(b"content-length: %d\r\n%b\r\n" % (len(answer.body), CLOSE if close else b""))
        parts.append(answer.body)
        self.transport.write(b"".join(parts))
