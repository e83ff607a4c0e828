"""Checks over several slots while masters fail: never more than each limit has room for; what was held comes back."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from limitforge import Decision, Limiter, SyncLimiter
from limitforge.stores.redis_parts import Parts
from limitforge.stores.spread import Finish
from tests import report
from tests.chaos.conftest import OnALoop
from tests.chaos.shards import (
    KINDS,
    Crowd,
    TenantAsk,
    eventually_counted,
    lanes_of_default,
    options_of,
    spread_of,
    wide_of,
)
from tests.chaos.stages import (
    TENANTS,
    ClusterStage,
    Suffer,
    cluster,
    failed_over,
    frozen_for_a_moment,
    frozen_until_replaced,
    killed,
    marked,
    scripts_flushed,
)
from tests.chaos.waiting import eventually
from tests.constellations import ask_text

__all__ = ["cluster"]
pytestmark = pytest.mark.slow

FAR_TOO_LONG = 10.0  # to give back, so that whoever waits for it is seen to

FAULTS: tuple[Suffer, ...] = (failed_over, killed, frozen_for_a_moment, frozen_until_replaced, scripts_flushed)
LONG: tuple[Suffer, ...] = (frozen_until_replaced, scripts_flushed)


@pytest.mark.parametrize("suffer", marked(FAULTS, LONG))
def test_what_was_held_when_a_master_failed_comes_back(cluster: ClusterStage, suffer: Suffer) -> None:
    cluster.asks = [
        *(spread_of(tenant, most) for tenant in TENANTS for most in (10**9, 150)),
        *(lanes_of_default(most) for most in (10**9, 150)),
    ]
    with Crowd(cluster.url, cluster.asks, options_of(KINDS[FAULTS.index(suffer) % len(KINDS)])) as crowd:
        crowd.decided()
        report.fault(suffer.__name__)
        doubtful = suffer(crowd, cluster)
        crowd.decided()
        crowd.stop()

        def lost(one: TenantAsk) -> int:
            return 0 if doubtful is None else crowd.admitted(one, *doubtful)

        eventually_counted(crowd, lost)
    crowd.was_served_well()
    crowd.got_no_more_than(lost)


@contextmanager
def frozen_before_it_is_confirmed(cluster: ClusterStage, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """A master freezes when both parts of a check had room. Tells how long the caller waited; the limiter is closed."""
    victim, finish = cluster.victim(), Parts.finish
    one = spread_of(cluster.tenant)

    frozen = threading.Event()

    def freeze_first(parts: Parts, finishes: Sequence[Finish]) -> Any:
        if not frozen.is_set():  # once: what is given back comes here as well, perhaps late
            frozen.set()
            victim.pause()
        return finish(parts, finishes)

    monkeypatch.setattr("limitforge.stores.redis_sync.COMMAND_SECONDS", FAR_TOO_LONG)
    limiter = SyncLimiter.connect(f"{cluster.url}?client_name=giver", options=options_of("closed"))
    limiter.check(one.resource, one.subject, limits=one.limits, tenant=one.tenant, cost=0)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Parts, "finish", freeze_first)
            decision, waited = timed(
                lambda: limiter.check(one.resource, one.subject, limits=one.limits, tenant=one.tenant)
            )
        limiter.close()
        victim.resume()
        assert decision.degraded == "closed"
        eventually(lambda: not [thread for thread in threading.enumerate() if "undo" in thread.name])
        yield waited
    finally:
        limiter.close()  # again: what came later is not the next test's affair


def test_who_asks_in_a_thread_does_not_wait_for_what_is_given_back(
    cluster: ClusterStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with frozen_before_it_is_confirmed(cluster, monkeypatch) as waited:
        assert waited < FAR_TOO_LONG / 2


def test_what_is_given_back_after_a_limiter_was_closed_leaves_no_connection_behind(
    cluster: ClusterStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with frozen_before_it_is_confirmed(cluster, monkeypatch):
        eventually(lambda: not any("name=giver" in ask_text(node, "CLIENT", "LIST") for node in cluster.servers.nodes))


def test_who_asks_a_master_that_freezes_does_not_wait_for_what_is_given_back_there(
    cluster: ClusterStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part had no answer, so the other is given back, in no hurry; who asks there later is in more of a hurry."""
    (world,) = spread_of(TENANTS[0]).slots - wide_of(TENANTS[0]).slots
    first = cluster.servers.master_of(world)
    tenant = next(name for name in TENANTS if cluster.servers.master_of(*wide_of(name).slots) is not first)
    one, wide = spread_of(tenant), wide_of(tenant)
    second = cluster.servers.master_of(*wide.slots)
    monkeypatch.setattr("limitforge.stores.line.COMMAND_SECONDS", FAR_TOO_LONG)
    limiter = OnALoop(Limiter.connect(cluster.url, options=options_of("closed")))
    try:
        limiter.check(one.resource, one.subject, limits=one.limits, tenant=one.tenant)
        first.pause()
        assert not limiter.check(one.resource, one.subject, limits=one.limits, tenant=one.tenant).allowed
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
