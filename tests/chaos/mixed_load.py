"""A load of async and sync callers on one deployment, and what the callers can expect while its servers fail.

The callers of an event loop and those in threads share buckets, so each bound applies to all of them together.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from limitforge import Decision, FixedWindow, Limiter, Limits, SlidingWindow, StoreOptions, SyncLimiter
from limitforge.core.check import FailureName
from limitforge.stores.redis.topology.hash_slots import SLOT_COUNT, hash_slot
from tests import run_report
from tests.chaos import guarantees
from tests.chaos.callers import PATIENCE_SECONDS, TaskCallers, ThreadCallers
from tests.chaos.load import Load
from tests.chaos.load_record import DAY, TICK_SECONDS, CheckRecord, LoadRecord, Workload, record_check

DEADLINE_MS = 500  # long enough that a busy machine does not look like a fault
BREAKER_SECONDS = 0.3
PAUSE_SECONDS = 0.03
TASKS, THREADS = 2, 1  # callers for each workload
HOLD_SECONDS = 6.0  # after which no hold of a cross-slot check is left
KINDS: tuple[FailureName, ...] = ("open", "closed", "local")


@dataclass(frozen=True, slots=True)
class TenantWorkload(Workload):
    """The workload of one tenant."""

    tenant: str = "default"

    @property
    def is_cross_slot(self) -> bool:
        """True if its limits lie in several slots of a Cluster."""
        return len({limit.scope for limit in self.limits}) > 1

    @property
    def slots(self) -> set[int]:
        """The slots of its keys on a Cluster, without lanes."""
        tags = {"%" if limit.scope == "global" else self.tenant for limit in self.limits}
        return {hash_slot(f"{{{tag}}}") for tag in tags}


def unlimited_workload(tenant: str) -> TenantWorkload:
    """A workload that never reaches its limit, so that counts can be compared with admissions."""
    return TenantWorkload(
        f"wide-{tenant}", Limits(FixedWindow(name="wide", limit=10**9, window_seconds=50 * DAY)), 10**9, tenant=tenant
    )


def limited_workload(tenant: str, most: int = 200) -> TenantWorkload:
    """A workload that reaches its limit in the middle of a test, for good."""
    limits = Limits(FixedWindow(name="tight", limit=most, window_seconds=DAY, align="first_hit"))
    return TenantWorkload(f"tight-{tenant}", limits, most, tenant=tenant)


def two_limit_workload(tenant: str, most: int = 150) -> TenantWorkload:
    """A workload of two buckets in one slot."""
    limits = Limits(
        FixedWindow(name="wide", limit=10**9, window_seconds=50 * DAY),
        SlidingWindow(name="log", limit=most, window_seconds=DAY),
    )
    return TenantWorkload(f"pair-{tenant}", limits, most, tenant=tenant)


def cross_slot_workload(tenant: str, most: int = 10**9) -> TenantWorkload:
    """A workload of two buckets in two slots of a Cluster: one of the caller, and a global one."""
    limits = Limits(
        FixedWindow(name="own", limit=10**9, window_seconds=50 * DAY),
        FixedWindow(name=f"world-{tenant}-{most}", limit=most, window_seconds=50 * DAY, scope="global"),
    )
    return TenantWorkload(f"spread-{tenant}-{most}", limits, most, tenant=tenant)


def lanes_workload(most: int = 10**9) -> TenantWorkload:
    """A workload of the default tenant, whose lanes put the caller's bucket and the tenant-wide one in two slots."""
    limits = Limits(
        FixedWindow(name="own", limit=10**9, window_seconds=50 * DAY),
        FixedWindow(name=f"wide-{most}", limit=most, window_seconds=50 * DAY, scope="tenant"),
    )
    return TenantWorkload(f"lanes-{most}", limits, most)


def tenants_by_third() -> list[str]:
    """Return a tenant of each of three masters that share the slots evenly."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < 3:
        name = f"tenant-{number}"
        found.setdefault(hash_slot(f"{{{name}}}") * 3 // SLOT_COUNT, name)
        number += 1
    return [found[third] for third in range(3)]


def options_of(failure: FailureName) -> StoreOptions:
    return StoreOptions(failure=failure, deadline_ms=DEADLINE_MS, breaker_seconds=BREAKER_SECONDS, processes=2)


async def _by_tenant(limiter: Limiter, workload: Workload, cost: int = 1) -> Decision:
    assert isinstance(workload, TenantWorkload)
    return await limiter.check(
        workload.resource, workload.subject, limits=workload.limits, cost=cost, tenant=workload.tenant
    )


class TenantTaskCallers(TaskCallers):
    """Callers on one event loop, some for each workload."""

    def __init__(self, limiter: Limiter, workloads: Sequence[TenantWorkload], callers: int, pause: float) -> None:
        super().__init__(limiter, pause=pause, by=_by_tenant)
        self._workloads = [workload for workload in workloads for _ in range(callers)]

    def start(self, record: LoadRecord) -> None:
        async def begin() -> None:
            self._ticker = asyncio.create_task(record.loop.measure_loop())
            self._tasks = [asyncio.create_task(self._call(workload, record)) for workload in self._workloads]

        self._loop.run(begin())

    def check(self, workload: Workload, cost: int = 1) -> Decision:
        return self._loop.run(_by_tenant(self.limiter, workload, cost))


class TenantThreadCallers(ThreadCallers):
    """Callers in threads, some for each workload."""

    def __init__(self, limiter: SyncLimiter, workloads: Sequence[TenantWorkload], callers: int, pause: float) -> None:
        super().__init__(limiter, pause=pause)
        self._workloads = [workload for workload in workloads for _ in range(callers)]

    def start(self, record: LoadRecord) -> None:
        self._threads = [
            threading.Thread(target=self._call, args=(workload, record), daemon=True) for workload in self._workloads
        ]
        for thread in self._threads:
            thread.start()

    def check(self, workload: Workload, cost: int = 1) -> Decision:
        assert isinstance(workload, TenantWorkload)
        return self.limiter.check(
            workload.resource, workload.subject, limits=workload.limits, cost=cost, tenant=workload.tenant
        )


class MixedLoad:
    """Async and sync callers, each kind with a limiter of its own, that send checks while the context is open."""

    def __init__(
        self, url: str, workloads: Sequence[TenantWorkload], options: StoreOptions, *, pause: float = PAUSE_SECONDS
    ) -> None:
        self.workloads = list(workloads)
        self.extra_workloads: list[TenantWorkload] = []  # sent by the test itself
        self.options = options
        tasks = TenantTaskCallers(Limiter.connect(url, options=options), workloads, TASKS, pause)
        threads = TenantThreadCallers(SyncLimiter.connect(url, options=options), workloads, THREADS, pause)
        self.loads = {"async": Load(tasks), "sync": Load(threads)}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        for load in self.loads.values():
            self._open.enter_context(load)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()

    def stop(self) -> None:
        """Stop all callers. The limiters stay open until the end of the context."""
        for load in self.loads.values():
            load.stop()

    @property
    def lag(self) -> float:
        """The longest delay of the machine or the event loop."""
        return max(max(load.record.machine.worst, load.record.loop.worst) for load in self.loads.values())

    def check_once(self, workload: TenantWorkload) -> None:
        """Send and record one more check through each limiter."""
        if workload not in self.extra_workloads:
            self.extra_workloads.append(workload)
        for load in self.loads.values():
            _record_check(load, workload)

    # -- waiting

    def wait_for_answers(self, workloads: Iterable[TenantWorkload], count: int = 5, *, degraded: bool) -> None:
        """Wait until each limiter has answered `count` checks of each workload that began from now on."""
        began = time.monotonic()
        for api, load in self.loads.items():
            for workload in workloads:
                wait_until(
                    lambda load=load, workload=workload: (
                        count
                        <= sum(  # type: ignore[misc]
                            call.began >= began and call.error is None and degraded is (call.degraded is not None)
                            for call in load.record.of(workload)
                        )
                    ),
                    lambda api=api, load=load, workload=workload: (  # type: ignore[misc]
                        f"{api}: {workload.resource} was not answered {count} times with degraded={degraded}; "
                        f"since then {_kinds(load.record.of(workload), began)}; {load.limiter.status()}"
                    ),
                )

    def wait_until_decided(self, workloads: Iterable[TenantWorkload] | None = None, count: int = 5) -> None:
        """Wait until the store decides checks of these workloads, or of all."""
        self.wait_for_answers(self.workloads if workloads is None else workloads, count, degraded=False)

    # -- the records of both

    def calls(self, workload: TenantWorkload) -> list[CheckRecord]:
        return [call for load in self.loads.values() for call in load.record.of(workload)]

    def admitted(self, workload: TenantWorkload, since: float = 0.0, until: float = float("inf")) -> int:
        """How many checks the store admitted and answered in that time."""
        return sum(
            call.allowed and call.degraded is None and since <= call.began + call.seconds <= until
            for call in self.calls(workload)
        )

    def degraded_count(self, workload: TenantWorkload) -> int:
        """How many checks were decided without the store. It may have counted them as well."""
        return sum(call.degraded is not None for call in self.calls(workload))

    def count_in_store(self, workload: TenantWorkload) -> dict[str, int]:
        """The counts in the store, by limit."""
        load = next(iter(self.loads.values()))
        look = load.check(workload, cost=0)
        began = time.monotonic()
        while look.degraded is not None:
            assert time.monotonic() - began < PATIENCE_SECONDS, f"{workload.resource} is never decided by the store"
            time.sleep(TICK_SECONDS)
            look = load.check(workload, cost=0)
        return {name: (state.limit or 0) - (state.remaining or 0) for name, state in look.limits.items()}

    # -- guarantees

    def assert_served_well(self) -> None:
        """Assert that no caller hung, none got an exception, and degraded answers follow the failure behaviour."""
        for load in self.loads.values():
            guarantees.assert_no_caller_hung(load.record, self.options)
            assert load.record.exceptions == {}, load.record.exceptions
            assert set(load.record.kinds) <= {None, self.options.failure}, load.record.kinds
            odd = [
                call.inconsistency for call in load.record.checks if call.inconsistency and not _has_unknown_limit(call)
            ]
            assert not odd, odd[:3]

    def assert_unaffected(self, workloads: Iterable[TenantWorkload], since: float = 0.0) -> None:
        """Assert that the store decided every check of workloads that the fault did not affect.

        This proves nothing if the machine was too busy.
        """
        if self.lag < self.options.deadline_ms / 2_000:
            for workload in workloads:
                assert _kinds(self.calls(workload), since).keys() <= {None}, workload.resource

    def assert_limits_held(self, lost: Callable[[TenantWorkload], int] = lambda _record_check: 0) -> None:
        """Assert that no more was admitted than the limits, apart from what a failover may have lost."""
        for workload in self.workloads + self.extra_workloads:
            admitted, most = self.admitted(workload), workload.max_admitted + lost(workload)
            if workload.is_finite:
                run_report.record_admitted(admitted, most)
            assert admitted <= most, workload.resource

    def assert_counted(self, lost: Callable[[TenantWorkload], int] = lambda _record_check: 0) -> None:
        """Assert that every admission is counted unless it was lost, and at most the unsure ones are counted, too."""
        for workload in self.workloads + self.extra_workloads:
            admitted, unsure = self.admitted(workload), self.degraded_count(workload)
            for name, counted in self.count_in_store(workload).items():
                assert admitted - lost(workload) <= counted <= admitted + unsure, (workload.resource, name)


def assert_eventually_counted(
    mixed_load: MixedLoad, lost: Callable[[TenantWorkload], int] = lambda _record_check: 0
) -> None:
    """Assert the counts once the holds of cross-slot checks have lapsed, within HOLD_SECONDS."""
    deadline = time.monotonic() + HOLD_SECONDS
    while time.monotonic() < deadline:
        with suppress(AssertionError):
            mixed_load.assert_counted(lost)
            return
        time.sleep(0.1)
    mixed_load.assert_counted(lost)


def _record_check(load: Load, workload: TenantWorkload) -> None:
    began = time.monotonic()
    answer: Decision | BaseException
    try:
        answer = load.check(workload)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        answer = error
    load.record.checks.append(record_check(workload, began, answer))


def _has_unknown_limit(call: CheckRecord) -> bool:
    """Return True if one slot denied while another did not answer, so that the state of one limit is unknown."""
    workload = call.workload
    return (
        not call.allowed and call.degraded is None and isinstance(workload, TenantWorkload) and workload.is_cross_slot
    )


def _kinds(calls: Iterable[CheckRecord], since: float) -> dict[str | None, int]:
    found: dict[str | None, int] = {}
    for call in calls:
        if call.began >= since:
            kind = repr(call.error) if call.error is not None else call.degraded
            found[kind] = found.get(kind, 0) + 1
    return found


def wait_until(is_so: Callable[[], bool], why: Callable[[], str], seconds: float = PATIENCE_SECONDS) -> None:
    """Poll until a condition holds, or fail with the reason."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(TICK_SECONDS)
