"""A load in the background while a test injects faults:

    with load_of("async", server.url, options) as load:
        load.answered(500)
        server.kill()
        load.answered(100, degraded=True)
    assert not load.record.exceptions

The load runs in threads of its own for every API, so a test is a plain function and may block.
"""

import threading
import time
from types import TracebackType
from typing import Self

from limitforge import Decision, Limiter, StoreOptions, SyncLimiter
from tests import run_report
from tests.chaos.callers import PATIENCE_SECONDS, Callers, TaskCallers, ThreadCallers, by_check, by_submit
from tests.chaos.load_record import TICK_SECONDS, LoadRecord, Workload

APIS = ("async", "submit", "sync")


def start_load(api: str, url: str, options: StoreOptions, *, ease: float = 1) -> "Load":
    """Return a load on a new limiter: 64 tasks or 16 threads. An `ease` of 2 means half as many checks per second."""
    if api == "sync":
        return Load(ThreadCallers(SyncLimiter.connect(url, options=options), pause=0.005 * ease))
    by = {"async": by_check, "submit": by_submit}[api]
    return Load(TaskCallers(Limiter.connect(url, options=options), pause=0.01 * ease, by=by))


class Load:
    """Callers that send checks while the context is open, and the record of their results."""

    def __init__(self, api: Callers) -> None:
        self._callers = api
        self._over = threading.Event()
        self.record = LoadRecord()
        self._ticker = threading.Thread(target=self.record.machine.measure_thread, args=(self._over,), daemon=True)

    @property
    def limiter(self) -> Limiter | SyncLimiter:
        return self._callers.limiter

    def __enter__(self) -> Self:
        self._ticker.start()
        self._callers.start(self.record)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.stop()
        finally:
            began = time.monotonic()
            self._callers.close()
            self.record.close_seconds = time.monotonic() - began

    def stop(self) -> LoadRecord:
        """Stop all callers. The limiter stays open until the end of the context."""
        if not self._over.is_set():
            self._over.set()
            self.record.hung = self._callers.end()
            self._ticker.join()
            run_report.record_checks(len(self.record.checks), self.record.slowest)
        return self.record

    def wait_for_answers(self, count: int, *, degraded: bool | None = None) -> float:
        """Wait for that many results of checks that began from now on. Return how long that took.

        With `degraded`, only results that are degraded, or are not, count. An exception does not count.
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

    def check(self, workload: Workload, cost: int = 1) -> Decision:
        """Send one more check, from the test itself."""
        return self._callers.check(workload, cost)

    def count_in_store(self, workload: Workload) -> int:
        """The count in the store of a workload's first limit. On a busy machine, the peek may have to be repeated."""
        peek = self.check(workload, cost=0)
        while peek.degraded is not None:
            time.sleep(TICK_SECONDS)
            peek = self.check(workload, cost=0)
        state = peek.limits[next(iter(workload.limits)).name]
        assert state.limit is not None
        assert state.remaining is not None
        return state.limit - state.remaining
