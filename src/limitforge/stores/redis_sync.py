"""Decisions on Redis, for threads and forked workers: `redis.py` without `await`, on the same parts."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence

from limitforge.core.check import Check
from limitforge.core.clock import Clock
from limitforge.core.decision import Decision
from limitforge.core.keys import Keys
from limitforge.errors import LimitforgeError, StoreUnavailable
from limitforge.stores.codec import Call, Flow, T
from limitforge.stores.denials import Denials, Drop
from limitforge.stores.listener import SyncListener
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import Answer, Command, StoreStatus
from limitforge.stores.redis_parts import COMMAND_SECONDS, Parts, dropped_by
from limitforge.stores.resp import address_of
from limitforge.stores.wire_sync import SyncWire, WirePool

MAX_CONNECTIONS = 64

_log = logging.getLogger(__name__)


class SyncRedisStore:
    """Decides in Redis, by Redis's time. A `clock` replaces that time: for tests and replays only.

    Any number of threads may use it. A forked process starts afresh: it shares no socket, lock or cache with its
    parent.
    """

    def __init__(
        self, url: str, *, keys: Keys | None = None, clock: Clock | None = None, options: StoreOptions | None = None
    ) -> None:
        self.keys = keys or Keys()
        self._url = url
        self._clock = clock
        self._address = address_of(url)
        self._options = options or StoreOptions()
        self._start()
        _stores.add(self)

    def start_afresh(self) -> None:
        """In a forked child: sockets, locks and threads of the parent are not ours."""
        self._pool.abandon()
        self._start()

    def _start(self) -> None:
        self._parts = Parts(self.keys, self._clock, self._options)
        self._pool = WirePool(self._address, MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._listener: SyncListener | None = None

    def check(self, check: Check) -> Decision:
        (answer,) = self.check_many((check,))
        if isinstance(answer, LimitforgeError):
            raise answer
        return answer

    def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        answers = [self._denied(check) for check in checks]
        asked = [check for check, known in zip(checks, answers, strict=True) if known is None]
        judged: list[Decision | LimitforgeError]
        try:
            judged = self._carry(self._parts.judge(asked), self._options.deadline_ms / 1_000) if asked else []
        except StoreUnavailable as error:
            judged = [self._parts.resilience.decide(check, error) for check in asked]
        remaining = iter(judged)
        return [next(remaining) if known is None else known for known in answers]

    def run(self, command: Command[Answer]) -> Answer:
        if self._parts.is_local(command):
            return self._parts.resilience.local.run(command)
        try:
            return self._carry(self._parts.command(command), COMMAND_SECONDS)
        finally:  # also when it failed: it may have been carried out
            drop = dropped_by(command)
            if drop is not None and self._parts.denials is not None:
                self._parts.denials.drop(drop)
                self._tell_others(drop)

    def status(self) -> StoreStatus:
        return self._parts.status()

    def close(self) -> None:
        """Let go of every connection. It may be used again."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        self._pool.close()

    # -- talking

    def _carry(self, flow: Flow[T], seconds: float) -> T:
        """Run a flow on one connection, or raise StoreUnavailable when it takes longer than that."""
        resilience = self._parts.resilience
        due = time.monotonic() + seconds
        try:
            call = next(flow)
        except StopIteration as done:
            nothing_asked: T = done.value
            return nothing_asked
        resilience.admit()
        try:
            answer: T = self._pool.use(due, lambda wire: _walk(flow, call, wire, due))
        except StoreUnavailable as error:
            resilience.failed(error)
            raise
        if not resilience.is_quiet:
            self._charge(resilience.succeeded())
        return answer

    def _tell_others(self, drop: Drop) -> None:
        due = time.monotonic() + COMMAND_SECONDS
        try:
            self._parts.resilience.refuse_if_open()
            self._pool.use(due, lambda wire: wire.publish(self._parts.channel, drop.message(), due))
        except LimitforgeError as error:
            age_ms = self._options.denial_cache_ms
            _log.warning("other nodes were not told, and may deny for %g ms more: %s", age_ms, error)

    # -- denials

    def _denied(self, check: Check) -> Decision | None:
        """A denial that needs no asking."""
        denials = self._parts.denials
        if denials is None or not denials.is_active:
            return None
        if self._listener is None:
            self._listen(denials)
        return denials.look(check)

    def _listen(self, denials: Denials) -> None:
        with self._lock:
            if self._listener is None:
                self._listener = SyncListener(self._url, self._parts.channel, denials)
                self._listener.start()

    # -- after an outage

    def _charge(self, charges: Sequence[Check]) -> None:
        """What was admitted without the store, on a thread of its own: no caller waits for it."""
        if charges:
            threading.Thread(target=self._charge_now, args=[charges], name="limitforge-charges", daemon=True).start()

    def _charge_now(self, charges: Sequence[Check]) -> None:
        for charge in charges:
            try:
                self._carry(self._parts.judge([charge]), COMMAND_SECONDS)
            except LimitforgeError as error:  # never sent again: it may have been counted
                _log.error("what was admitted without the store could not be charged, or not surely: %s", error)


def _walk(flow: Flow[T], call: Call, wire: SyncWire, due: float) -> T:
    try:
        while True:
            call = flow.send(wire.call(call, due))
    except StopIteration as done:
        answer: T = done.value
        return answer


_stores: "weakref.WeakSet[SyncRedisStore]" = weakref.WeakSet()


def _start_afresh() -> None:
    for store in list(_stores):
        store.start_afresh()


os.register_at_fork(after_in_child=_start_afresh)
