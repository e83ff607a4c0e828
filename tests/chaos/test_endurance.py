"""Half a minute and more of faults at random, one after the other, under load. `make chaos` runs these."""

import logging
import random
import time

import pytest

from limitforge import StoreOptions
from limitforge.core.check import FailureName
from tests import report
from tests.chaos import promises
from tests.chaos.faults import FAULTS, OF_THE_SERVER, Fault
from tests.chaos.load import SHELLS, Load, load_of
from tests.chaos.waiting import eventually
from tests.proxy import Proxy
from tests.servers import RedisServer

SECONDS = 30.0
DEADLINE_MS = 100
BREAKER_SECONDS = 0.5
KINDS: tuple[FailureName, ...] = ("open", "closed", "local")

_log = logging.getLogger(__name__)


def torment(load: Load, server: RedisServer, proxy: Proxy, draw: random.Random, faults: tuple[Fault, ...]) -> list[str]:
    """One fault after the other, from a blink to several times the breaker's time; tells which."""
    suffered = []
    over = time.monotonic() + SECONDS
    while time.monotonic() < over:
        fault = draw.choice(faults)
        suffered.append(fault.name)
        with fault.broken(server, proxy):
            time.sleep(draw.choice((0.0, 0.05, 0.2, 0.8, 2.0)))
        if draw.random() < 0.7:
            took = load.answered(50, degraded=False)
            most = promises.recovery_seconds(load.record, BREAKER_SECONDS, DEADLINE_MS)
            assert took < most, fault.name
        else:
            time.sleep(draw.random() / 5)  # the next comes before it has recovered
    return suffered


@pytest.mark.chaos
@pytest.mark.parametrize("failure", KINDS)
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("which", ["every", "kept"])
def test_half_a_minute_of_faults_breaks_no_promise(
    own_redis_server: RedisServer, own_proxy: Proxy, shell: str, failure: FailureName, which: str
) -> None:
    """With `kept` only faults that leave the data alone, so that the counts can be told at the end."""
    draw = report.draw()
    faults = FAULTS if which == "every" else tuple(fault for fault in FAULTS if not fault.forgets)
    options = StoreOptions(failure=failure, deadline_ms=DEADLINE_MS, breaker_seconds=BREAKER_SECONDS, nodes=4)
    with load_of(shell, own_proxy.url, options, ease=4) as load:
        load.answered(100, degraded=False)
        suffered = torment(load, own_redis_server, own_proxy, draw, faults)
        load.answered(100, degraded=False)
        eventually(lambda: load.limiter.status().breaker == "closed")
        load.stop()
        promises.every_degraded_answer_was_counted(load)
        if which == "kept":
            promises.the_count_is_between_what_was_admitted_and_what_was_sent(load)
    _log.warning("%s: %s", load.record.kinds, " ".join(suffered))
    forgot = sum(fault.forgets for name in suffered for fault in FAULTS if fault.name == name)
    promises.nobody_hung(load.record, options)
    promises.every_answer_was_right(load.record, options)
    promises.no_more_was_admitted(load.record, options, lives=1 + forgot, outages=len(suffered))


@pytest.mark.chaos
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("fault", OF_THE_SERVER, ids=lambda fault: fault.name)
def test_ten_times_the_same_fault_breaks_no_promise(
    own_redis_server: RedisServer, own_proxy: Proxy, shell: str, fault: Fault
) -> None:
    options = StoreOptions(failure="local", deadline_ms=DEADLINE_MS, breaker_seconds=BREAKER_SECONDS, nodes=4)
    with load_of(shell, own_redis_server.url, options) as load:
        for _ in range(10):
            load.answered(200, degraded=False)
            with fault.broken(own_redis_server, own_proxy):
                time.sleep(0.3)
        load.answered(200, degraded=False)
        load.stop()
        promises.every_degraded_answer_was_counted(load)
        if not fault.forgets:
            promises.the_count_is_between_what_was_admitted_and_what_was_sent(load)
    promises.nobody_hung(load.record, options)
    promises.every_answer_was_right(load.record, options)
    promises.no_more_was_admitted(load.record, options, lives=11 if fault.forgets else 1, outages=10)
