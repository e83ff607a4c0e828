"""Cross-slot checks while masters fail: no limit is exceeded, and holds are refunded."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from limitforge import Decision, Limiter, SyncLimiter
from limitforge.stores.redis.core import RedisCore
from limitforge.stores.redis.multi_step.cross_slot import FinishHold
from tests import run_report
from tests.chaos.conftest import BlockingLimiter
from tests.chaos.mixed_load import (
    KINDS,
    MixedLoad,
    TenantWorkload,
    assert_eventually_counted,
    cross_slot_workload,
    lanes_workload,
    options_of,
    unlimited_workload,
)
from tests.chaos.servers_under_test import (
    TENANTS,
    ClusterUnderTest,
    InjectFault,
    cluster,
    failed_over,
    fault_parameters,
    frozen_for_a_moment,
    frozen_until_replaced,
    killed,
    scripts_flushed,
)
from tests.chaos.waiting import eventually
from tests.topologies import query_text

__all__ = ["cluster"]
pytestmark = pytest.mark.slow

FAR_TOO_LONG = 10.0  # for refunds: a caller that waits for one is noticed

FAULTS: tuple[InjectFault, ...] = (failed_over, killed, frozen_for_a_moment, frozen_until_replaced, scripts_flushed)
LONG: tuple[InjectFault, ...] = (frozen_until_replaced, scripts_flushed)


@pytest.mark.parametrize("inject", fault_parameters(FAULTS, LONG))
def test_holds_are_refunded_after_a_master_failed(cluster: ClusterUnderTest, inject: InjectFault) -> None:
    cluster.workloads = [
        *(cross_slot_workload(tenant, most) for tenant in TENANTS for most in (10**9, 150)),
        *(lanes_workload(most) for most in (10**9, 150)),
    ]
    with MixedLoad(cluster.url, cluster.workloads, options_of(KINDS[FAULTS.index(inject) % len(KINDS)])) as mixed_load:
        mixed_load.wait_until_decided()
        run_report.record_fault(inject.__name__)
        doubtful = inject(mixed_load, cluster)
        mixed_load.wait_until_decided()
        mixed_load.stop()

        def lost(workload: TenantWorkload) -> int:
            return 0 if doubtful is None else mixed_load.admitted(workload, *doubtful)

        assert_eventually_counted(mixed_load, lost)
    mixed_load.assert_served_well()
    mixed_load.assert_limits_held(lost)


@contextmanager
def frozen_before_it_is_confirmed(cluster: ClusterUnderTest, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Freeze a master after both slots of a check had room. Yield how long the caller waited, after closing it."""
    victim, finish = cluster.victim(), RedisCore.finish_flow
    workload = cross_slot_workload(cluster.tenant)

    frozen = threading.Event()

    def freeze_first(parts: RedisCore, finishes: Sequence[FinishHold]) -> Any:
        if not frozen.is_set():  # once: refunds call this as well, perhaps late
            frozen.set()
            victim.pause()
        return finish(parts, finishes)

    monkeypatch.setattr("limitforge.stores.redis.sync.store.COMMAND_TIMEOUT_SECONDS", FAR_TOO_LONG)
    limiter = SyncLimiter.connect(f"{cluster.url}?client_name=giver", options=options_of("closed"))
    limiter.check(workload.resource, workload.subject, limits=workload.limits, tenant=workload.tenant, cost=0)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(RedisCore, "finish_flow", freeze_first)
            decision, waited = timed(
                lambda: limiter.check(
                    workload.resource, workload.subject, limits=workload.limits, tenant=workload.tenant
                )
            )
        limiter.close()
        victim.resume()
        assert decision.degraded == "closed"
        eventually(lambda: not [thread for thread in threading.enumerate() if "undo" in thread.name])
        yield waited
    finally:
        limiter.close()  # again, because of connections that were opened later


def test_a_thread_does_not_wait_for_refunds(cluster: ClusterUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    with frozen_before_it_is_confirmed(cluster, monkeypatch) as waited:
        assert waited < FAR_TOO_LONG / 2


def test_refunds_after_a_close_leave_no_connection_behind(
    cluster: ClusterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with frozen_before_it_is_confirmed(cluster, monkeypatch):
        eventually(
            lambda: not any("name=giver" in query_text(node, "CLIENT", "LIST") for node in cluster.servers.servers)
        )


def test_a_check_on_a_frozen_master_does_not_wait_for_a_refund_there(
    cluster: ClusterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slot gives no answer, so the other one is refunded, with a long timeout. A later check has a shorter one."""
    (world,) = cross_slot_workload(TENANTS[0]).slots - unlimited_workload(TENANTS[0]).slots
    first = cluster.servers.master_of(world)
    tenant = next(name for name in TENANTS if cluster.servers.master_of(*unlimited_workload(name).slots) is not first)
    workload, wide = cross_slot_workload(tenant), unlimited_workload(tenant)
    second = cluster.servers.master_of(*wide.slots)
    monkeypatch.setattr("limitforge.stores.redis.aio.event_loop.COMMAND_TIMEOUT_SECONDS", FAR_TOO_LONG)
    limiter = BlockingLimiter(Limiter.connect(cluster.url, options=options_of("closed")))
    try:
        limiter.check(workload.resource, workload.subject, limits=workload.limits, tenant=workload.tenant)
        first.pause()
        assert not limiter.check(
            workload.resource, workload.subject, limits=workload.limits, tenant=workload.tenant
        ).allowed
        second.pause()
        decision, waited = timed(
            lambda: limiter.check(wide.resource, wide.subject, limits=wide.limits, tenant=wide.tenant)
        )
    finally:
        for server in (first, second):
            server.resume()
        limiter.close()
    assert decision.degraded == "closed"
    assert waited < FAR_TOO_LONG / 2


def timed(check: Callable[[], Decision]) -> tuple[Decision, float]:
    began = time.monotonic()
    return check(), time.monotonic() - began
