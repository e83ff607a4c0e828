"""Redis fails in every way while hundreds of checks run: no caller hangs, nothing raises, and it mends itself."""

import time
from contextlib import ExitStack

import pytest

from limitforge import StoreOptions
from limitforge.core.check import FailureName
from tests.chaos import promises
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.load import Load, load_of
from tests.chaos.waiting import eventually
from tests.proxy import Proxy
from tests.servers import RedisServer

pytestmark = pytest.mark.slow

DEADLINE_MS = 100
BREAKER_SECONDS = 0.3
EASE = 6  # asks a sixth as often: the callers, not the limiters, took most of the time of these tests
KINDS: tuple[FailureName, ...] = ("open", "closed", "local")


def options_of(failure: FailureName) -> StoreOptions:
    return StoreOptions(failure=failure, deadline_ms=DEADLINE_MS, breaker_seconds=BREAKER_SECONDS, nodes=4)


def suffer(loads: list[Load], fault: Fault, server: RedisServer, proxy: Proxy) -> float:
    """Broken for longer than the breaker waits, so that a probe fails too; returns how long the recovery took."""
    with fault.broken(server, proxy):
        for load in loads:
            load.answered(50, degraded=None if fault.passes else True)
        time.sleep(1.5 * BREAKER_SECONDS)
        for load in loads:
            load.answered(50, degraded=None if fault.passes else True)
    return max(load.answered(50, degraded=False) for load in loads)


def survive(failure: FailureName, fault: Fault, server: RedisServer, proxy: Proxy) -> None:
    """Both shells at once, each with a database of its own, so that each has buckets of its own."""
    options = options_of(failure)
    url = (proxy.url if fault.proxied else server.url).removesuffix("/0")
    with ExitStack() as stack:
        loads = [
            stack.enter_context(load_of(shell, f"{url}/{database}", options, ease=EASE))
            for database, shell in enumerate(("async", "sync"))
        ]
        for load in loads:
            load.answered(100, degraded=False)
        recovery = suffer(loads, fault, server, proxy)
        for load in loads:
            eventually(lambda load=load: load.limiter.status().breaker == "closed")  # type: ignore[misc]
            load.answered(300)  # now the limits are full
        for load in loads:
            load.stop()
            promises.every_degraded_answer_was_counted(load)
            if not fault.forgets:
                promises.the_count_is_between_what_was_admitted_and_what_was_sent(load)
    for load in loads:
        assert recovery < promises.recovery_seconds(load.record, BREAKER_SECONDS, DEADLINE_MS)
        promises.nobody_hung(load.record, options)
        promises.every_answer_was_right(load.record, options)
        promises.no_more_was_admitted(load.record, options, lives=2 if fault.forgets else 1)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_hangs_nobody_raises_nothing_and_mends_itself(
    own_redis_server: RedisServer, own_proxy: Proxy, fault: Fault
) -> None:
    failure = KINDS[FAULTS.index(fault) % len(KINDS)]
    if fault.name == "full" and failure == "open":
        failure = "local"  # which is what open comes to where the store is only full
    survive(failure, fault, own_redis_server, own_proxy)
