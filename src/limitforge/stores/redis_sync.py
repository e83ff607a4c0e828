"""Decisions on Redis, for threads and forked workers: `redis.py` without `await`, on the same parts."""

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import cast

from limitforge.core.check import Check
from limitforge.core.clock import Clock
from limitforge.core.decision import Decision
from limitforge.core.keys import Keys
from limitforge.errors import LimitforgeError, StoreUnavailable
from limitforge.stores.codec import Call, Flow, T, as_corrupt, parts
from limitforge.stores.denials import Denials, Drop
from limitforge.stores.listener import SyncListener
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import Answer, Command, StoreStatus
from limitforge.stores.redis_parts import COMMAND_SECONDS, Batch, Parts, is_local
from limitforge.stores.resp import address_of
from limitforge.stores.wire_sync import SyncWire, WirePool

MAX_CONNECTIONS = 64


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
        batch = Batch(checks, self._denied)
        due = time.monotonic() + self._options.deadline_ms / 1_000
        at = 0
        for part in parts(batch.asked):
            for answer in self._judged(part, due):
                batch.answer(at, answer)
                at += 1
        return cast("list[Decision | LimitforgeError]", batch.answers)

    def run(self, command: Command[Answer]) -> Answer:
        if is_local(command):
            return self._parts.resilience.local.run(command)
        due = time.monotonic() + COMMAND_SECONDS
        try:
            answer = self._carry(self._parts.command(command), due)
        except BaseException as error:
            self._parts.drop_after(command, error)
            raise
        drop = self._parts.drop(command)
        if drop is not None:
            self._tell_others(drop, due)
        return answer

    def status(self) -> StoreStatus:
        return self._parts.status()

    def close(self) -> None:
        """Let go of every connection. It may be used again."""
        with self._lock:
            listener, self._listener = self._listener, None
            pool, self._pool = self._pool, WirePool(self._address, MAX_CONNECTIONS)
        if listener is not None:
            listener.stop()
        pool.close()
        self._parts.resilience.close()

    # -- talking

    def _judged(self, checks: Sequence[Check], due: float) -> list[Decision | LimitforgeError]:
        """What one call tells, or what the failure behaviour of each check says."""
        answers: Sequence[Decision | LimitforgeError]
        try:
            answers = self._carry(self._parts.judge(checks), due)
        except LimitforgeError as error:
            answers = [error] * len(checks)
        decide = self._parts.resilience.decide
        return [
            decide(check, answer) if isinstance(answer, StoreUnavailable) else answer
            for check, answer in zip(checks, answers, strict=True)
        ]

    def _carry(self, flow: Flow[T], due: float) -> T:
        """Run a flow on one connection, or raise StoreUnavailable when it takes longer than that."""
        resilience = self._parts.resilience
        began_us = resilience.now_us()
        try:
            call = next(flow)
        except StopIteration as done:
            nothing_asked: T = done.value
            return nothing_asked
        resilience.admit()
        try:
            answer: T = self._pool.use(due, lambda wire: _walk(flow, call, wire, due))
        except StoreUnavailable as error:
            resilience.failed(error, began_us)
            raise
        except Exception as error:
            self._succeeded()  # whatever it said: it answered
            raise as_corrupt(error) from error
        self._succeeded(answer if isinstance(answer, list) else ())
        return answer

    def _succeeded(self, answers: Sequence[object] = ()) -> None:
        """What the store is owed after an outage is charged on a thread of its own: no caller waits for it."""
        if not self._parts.resilience.is_quiet:
            charges = self._parts.resilience.succeeded(answers)
            if charges:
                threading.Thread(target=self._charge, args=[charges], name="limitforge-charges", daemon=True).start()

    def _charge(self, charges: Sequence[Check]) -> None:
        answers: list[Decision | LimitforgeError] = []
        for part in parts(charges):
            answers += self._judged(part, time.monotonic() + COMMAND_SECONDS)
        self._parts.charged(charges, answers)

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

    def _tell_others(self, drop: Drop, due: float) -> None:
        try:
            self._pool.use(due, lambda wire: wire.publish(self._parts.channel, drop.message(), due))
        except LimitforgeError as error:
            self._parts.warn_untold(error)


def _walk(flow: Flow[T], call: Call, wire: SyncWire, due: float) -> T:
    try:
        while True:
            call = flow.send(wire.call(call, due))
    except StopIteration as done:
        answer: T = done.value
        return answer
    except StoreUnavailable:  # lost, or the answer to another call: nothing that comes here can be trusted
        wire.close()
        raise


_stores: "weakref.WeakSet[SyncRedisStore]" = weakref.WeakSet()


def _start_afresh() -> None:
    for store in list(_stores):
        store.start_afresh()


os.register_at_fork(after_in_child=_start_afresh)
