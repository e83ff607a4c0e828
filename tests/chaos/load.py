"""A load in the background while a test breaks things:

    with load_of("async", server.url, options) as load:
        load.answered(500)
        server.kill()
        load.answered(100, degraded=True)
    assert not load.record.exceptions

The load runs in threads of its own, whatever the shell, so a test is a plain function and may block.
"""

import threading
import time
from types import TracebackType
from typing import Self

from limitforge import Decision, Limiter, StoreOptions, SyncLimiter
from tests import run_report
from tests.chaos.callers import PATIENCE_SECONDS, Callers, TaskCallers, ThreadCallers, by_check, by_submit
from tests.chaos.load_record import TICK_SECONDS, LoadRecord, Workload

SHELLS = ("async", "submit", "sync")


def start_load(shell: str, url: str, options: StoreOptions, *, ease: float = 1) -> "Load":
    """A load on a limiter of its own: 64 tasks, or 16 threads. An `ease` of 2 asks half as often."""
    if shell == "sync":
        return Load(ThreadCallers(SyncLimiter.connect(url, options=options), pause=0.005 * ease))
    by = {"async": by_check, "submit": by_submit}[shell]
    return Load(TaskCallers(Limiter.connect(url, options=options), pause=0.01 * ease, by=by))


class Load:
    """Callers that are asking from `with` to its end, and the record of what became of them."""

    def __init__(self, shell: Callers) -> None:
        self._shell = shell
        self._over = threading.Event()
        self.record = LoadRecord()
        self._ticker = threading.Thread(target=self.record.machine.measure_thread, args=(self._over,), daemon=True)

    @property
    def limiter(self) -> Limiter | SyncLimiter:
        return self._shell.limiter

    def __enter__(self) -> Self:
        self._ticker.start()
        self._shell.start(self.record)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.stop()
        finally:
            began = time.monotonic()
            self._shell.close()
            self.record.close_seconds = time.monotonic() - began

    def stop(self) -> LoadRecord:
        """No further checks; the limiter stays open until the end of `with`."""
        if not self._over.is_set():
            self._over.set()
            self.record.hung = self._shell.end()
            self._ticker.join()
            run_report.record_checks(len(self.record.checks), self.record.slowest)
        return self.record

    def wait_for_answers(self, count: int, *, degraded: bool | None = None) -> float:
        """Wait for that many answers to checks that began from now on; tells how long that took.

        With `degraded`, only for those that were, or were not. What raises is no answer.
        """
        began, seen, found = time.monotonic(), len(self.record.checks), 0
        while True:
            calls = self.record.checks[seen:]
            seen += len(calls)
            found += sum(
                call.began >= began and call.error is None and degraded in {None, call.degraded is not None}
                for call in calls
            )
            took = time.monotonic() - began
            if found >= count:
                return took
            if took > PATIENCE_SECONDS:
                raise AssertionError(
                    f"{found} of {count} answers (degraded: {degraded}) in {took:.0f} s; "
                    f"all: {self.record.kinds}; raised: {self.record.exceptions.most_common(3)}"
                )
            time.sleep(TICK_SECONDS)

    def check(self, ask: Workload, cost: int = 1) -> Decision:
        """One more, from the test itself."""
        return self._shell.check(ask, cost)

    def count_in_store(self, ask: Workload) -> int:
        """What the store has counted of an ask, by the first of its limits. A busy machine may need a second look."""
        look = self.check(ask, cost=0)
        while look.degraded is not None:
            time.sleep(TICK_SECONDS)
            look = self.check(ask, cost=0)
        state = look.limits[next(iter(ask.limits)).name]
        assert state.limit is not None
        assert state.remaining is not None
        return state.limit - state.remaining
