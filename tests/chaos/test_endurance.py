"""Half a minute and more of faults at random, one after the other, under load. `make chaos` runs these."""

import logging
import random
import time

import pytest

from limitforge import StoreOptions
from limitforge.core.check import FailureName
from tests import run_report
from tests.chaos import guarantees
from tests.chaos.faults import FAULTS, SERVER_FAULTS, Fault
from tests.chaos.load import APIS, Load, start_load
from tests.chaos.waiting import eventually
from tests.proxy import Proxy
from tests.servers import RedisServer

SECONDS = 30.0
DEADLINE_MS = 100
BREAKER_SECONDS = 0.5
KINDS: tuple[FailureName, ...] = ("open", "closed", "local")

_log = logging.getLogger(__name__)


def inject_at_random(
    load: Load, server: RedisServer, proxy: Proxy, draw: random.Random, faults: tuple[Fault, ...]
) -> list[str]:
    """Inject one fault after the other, each for a moment or for several breaker intervals. Return their names."""
    injected = []
    over = time.monotonic() + SECONDS
    while time.monotonic() < over:
        fault = draw.choice(faults)
        injected.append(fault.name)
        with fault.injected(server, proxy):
            time.sleep(draw.choice((0.0, 0.05, 0.2, 0.8, 2.0)))
        if draw.random() < 0.7:
            took = load.wait_for_answers(50, degraded=False)
            most = guarantees.recovery_seconds(load.record, BREAKER_SECONDS, DEADLINE_MS)
            assert took < most, fault.name
        else:
            time.sleep(draw.random() / 5)  # the next fault begins before the recovery
    return injected


@pytest.mark.chaos
@pytest.mark.parametrize("failure", KINDS)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("which", ["every", "kept"])
def test_half_a_minute_of_faults_breaks_no_guarantee(
    own_redis_server: RedisServer, own_proxy: Proxy, api: str, failure: FailureName, which: str
) -> None:
    """With `kept`, only faults that keep the data, so that the counts can be compared at the end."""
    draw = run_report.seeded_random()
    faults = FAULTS if which == "every" else tuple(fault for fault in FAULTS if not fault.loses_data)
    options = StoreOptions(failure=failure, deadline_ms=DEADLINE_MS, breaker_seconds=BREAKER_SECONDS, processes=4)
    with start_load(api, own_proxy.url, options, ease=4) as load:
        load.wait_for_answers(100, degraded=False)
        injected = inject_at_random(load, own_redis_server, own_proxy, draw, faults)
        load.wait_for_answers(100, degraded=False)
        eventually(lambda: load.limiter.status().breaker == "closed")
        load.stop()
        guarantees.assert_degraded_checks_are_counted(load)
        if which == "kept":
            guarantees.assert_counts_match_admissions(load)
    _log.warning("%s: %s", load.record.kinds, " ".join(injected))
    forgot = sum(fault.loses_data for name in injected for fault in FAULTS if fault.name == name)
    guarantees.assert_no_caller_hung(load.record, options)
    guarantees.assert_answers_are_valid(load.record, options)
    guarantees.assert_limits_held(load.record, options, lives=1 + forgot, outages=len(injected))


@pytest.mark.chaos
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("fault", SERVER_FAULTS, ids=lambda fault: fault.name)
def test_ten_times_the_same_fault_breaks_no_guarantee(
    own_redis_server: RedisServer, own_proxy: Proxy, api: str, fault: Fault
) -> None:
    options = StoreOptions(failure="local", deadline_ms=DEADLINE_MS, breaker_seconds=BREAKER_SECONDS, processes=4)
    with start_load(api, own_redis_server.url, options) as load:
        for _ in range(10):
            load.wait_for_answers(200, degraded=False)
            with fault.injected(own_redis_server, own_proxy):
                time.sleep(0.3)
        load.wait_for_answers(200, degraded=False)
        load.stop()
        guarantees.assert_degraded_checks_are_counted(load)
        if not fault.loses_data:
            guarantees.assert_counts_match_admissions(load)
    guarantees.assert_no_caller_hung(load.record, options)
    guarantees.assert_answers_are_valid(load.record, options)
    guarantees.assert_limits_held(load.record, options, lives=11 if fault.loses_data else 1, outages=10)
