"""Redis fails in every way under load: no caller hangs or gets an exception, and limiters recover by themselves."""

import time
from contextlib import ExitStack

import pytest

from limitforge import StoreOptions
from limitforge.core.check import FailureName
from tests.chaos import guarantees
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.load import Load, start_load
from tests.chaos.waiting import eventually
from tests.proxy import Proxy
from tests.servers import RedisServer

pytestmark = pytest.mark.slow

DEADLINE_MS = 100
BREAKER_SECONDS = 0.3
EASE = 6  # a sixth of the checks: the callers, not the limiters, took most of the time of these tests
KINDS: tuple[FailureName, ...] = ("open", "closed", "local")


def options_of(failure: FailureName) -> StoreOptions:
    return StoreOptions(failure=failure, deadline_ms=DEADLINE_MS, breaker_seconds=BREAKER_SECONDS, processes=4)


def inject_under_load(loads: list[Load], fault: Fault, server: RedisServer, proxy: Proxy) -> float:
    """Inject a fault for longer than the breaker interval, so that a probe fails, too. Return the recovery time."""
    with fault.injected(server, proxy):
        for load in loads:
            load.wait_for_answers(50, degraded=None if fault.may_go_unnoticed else True)
        time.sleep(1.5 * BREAKER_SECONDS)
        for load in loads:
            load.wait_for_answers(50, degraded=None if fault.may_go_unnoticed else True)
    return max(load.wait_for_answers(50, degraded=False) for load in loads)


def run_under_fault(failure: FailureName, fault: Fault, server: RedisServer, proxy: Proxy) -> None:
    """Async and sync callers at once, each with a database of its own, so that they share no buckets."""
    options = options_of(failure)
    url = (proxy.url if fault.needs_proxy else server.url).removesuffix("/0")
    with ExitStack() as stack:
        loads = [
            stack.enter_context(start_load(api, f"{url}/{database}", options, ease=EASE))
            for database, api in enumerate(("async", "sync"))
        ]
        for load in loads:
            load.wait_for_answers(100, degraded=False)
        recovery = inject_under_load(loads, fault, server, proxy)
        for load in loads:
            eventually(lambda load=load: load.limiter.status().breaker == "closed")  # type: ignore[misc]
            load.wait_for_answers(300)  # now the limits are full
        for load in loads:
            load.stop()
            guarantees.assert_degraded_checks_are_counted(load)
            if not fault.loses_data:
                guarantees.assert_counts_match_admissions(load)
    for load in loads:
        assert recovery < guarantees.recovery_seconds(load.record, BREAKER_SECONDS, DEADLINE_MS)
        guarantees.assert_no_caller_hung(load.record, options)
        guarantees.assert_answers_are_valid(load.record, options)
        guarantees.assert_limits_held(load.record, options, lives=2 if fault.loses_data else 1)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_under_a_fault_no_caller_hangs_or_raises_and_limiters_recover(
    own_redis_server: RedisServer, own_proxy: Proxy, fault: Fault
) -> None:
    failure = KINDS[FAULTS.index(fault) % len(KINDS)]
    if fault.name == "full" and failure == "open":
        failure = "local"  # `open` decides locally if the store is only full
    run_under_fault(failure, fault, own_redis_server, own_proxy)
