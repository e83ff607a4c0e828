"""Redis fails in every way while thousands of checks run: nobody hangs, nothing raises, and it mends itself."""

import time

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
KINDS: tuple[FailureName, ...] = ("open", "closed", "local")


def options_of(failure: FailureName) -> StoreOptions:
    return StoreOptions(failure=failure, deadline_ms=DEADLINE_MS, breaker_seconds=BREAKER_SECONDS, nodes=4)


def suffer(load: Load, fault: Fault, server: RedisServer, proxy: Proxy) -> float:
    """Broken for longer than the breaker waits, so that a probe fails too; tells how long the recovery took."""
    with fault.broken(server, proxy):
        load.answered(100, degraded=None if fault.passes else True)
        time.sleep(1.5 * BREAKER_SECONDS)
        load.answered(100, degraded=None if fault.passes else True)
    return load.answered(50, degraded=False)


def survive(shell: str, failure: FailureName, fault: Fault, server: RedisServer, proxy: Proxy) -> Load:
    options = options_of(failure)
    with load_of(shell, proxy.url if fault.proxied else server.url, options) as load:
        load.answered(300, degraded=False)
        recovery = suffer(load, fault, server, proxy)
        eventually(lambda: load.limiter.status().breaker == "closed")
        load.answered(200)
        load.stop()
        promises.every_degraded_answer_was_counted(load)
        if not fault.forgets:
            promises.the_count_is_between_what_was_admitted_and_what_was_sent(load)
    most = promises.recovery_seconds(load.record, BREAKER_SECONDS, DEADLINE_MS)
    assert recovery < most
    promises.nobody_hung(load.record, options)
    promises.every_answer_was_right(load.record, options)
    promises.no_more_was_admitted(load.record, options, lives=2 if fault.forgets else 1)
    return load


@pytest.mark.parametrize("shell", ["async", "sync"])
@pytest.mark.parametrize(
    "fault",
    FAULTS,
    ids=lambda fault: fault.name,
)
def test_a_fault_hangs_nobody_raises_nothing_and_mends_itself(
    own_redis_server: RedisServer, own_proxy: Proxy, fault: Fault, shell: str
) -> None:
    failure = KINDS[FAULTS.index(fault) % len(KINDS)]
    if fault.name == "full" and failure == "open":
        failure = "local"  # which is what open comes to where the store is only full
    survive(shell, failure, fault, own_redis_server, own_proxy)
