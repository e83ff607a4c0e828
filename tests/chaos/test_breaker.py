"""The circuit breaker opens after three failures in a row, and later sends one probe at a time."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from limitforge import FixedWindow, SyncLimiter
from tests.chaos.conftest import Connect
from tests.chaos.waiting import eventually, wait_until_store_decides
from tests.proxy import CloseConnections, DropReplies, Forward, Proxy

pytestmark = pytest.mark.slow

MANY = FixedWindow(name="many", limit=10**9, window_seconds=86_400)


def degraded_kind(limiter: SyncLimiter) -> str | None:
    return limiter.check("r", "s", limits=MANY).degraded


def test_two_failures_do_not_open_it_and_a_success_resets_the_count(opened: Connect, proxy: Proxy) -> None:
    limiter = opened(proxy.url)
    for _ in range(3):
        assert degraded_kind(limiter) is None
        with proxy.in_mode(CloseConnections()):
            assert (degraded_kind(limiter), degraded_kind(limiter)) == ("open", "open")
        assert limiter.status().breaker == "closed"
    assert degraded_kind(limiter) is None


@pytest.mark.parametrize("failures", [1, 3, 5])
def test_that_many_failures_in_a_row_open_it(opened: Connect, proxy: Proxy, failures: int) -> None:
    limiter = opened(proxy.url, breaker_failures=failures)
    proxy.mode = CloseConnections()
    for _ in range(failures):
        assert limiter.status().breaker == "closed"
        degraded_kind(limiter)
    assert limiter.status().breaker == "open"


def test_while_it_is_open_no_caller_waits_and_redis_is_not_called(opened: Connect, proxy: Proxy) -> None:
    limiter = opened(proxy.url, deadline_ms=100, breaker_seconds=60)
    degraded_kind(limiter)
    proxy.mode = DropReplies()
    eventually(lambda: degraded_kind(limiter) and limiter.status().breaker == "open")
    proxy.mode = Forward()
    before, sent = proxy.accepted, proxy.requests
    for _ in range(200):
        assert degraded_kind(limiter) == "open"
    assert (proxy.accepted, proxy.requests) == (before, sent)  # nothing was sent, so no caller waited


def test_it_probes_after_its_time_and_not_before(opened: Connect, proxy: Proxy) -> None:
    limiter = opened(proxy.url, breaker_seconds=0.5)
    proxy.mode = CloseConnections()
    for _ in range(3):
        degraded_kind(limiter)
    began = time.monotonic()
    proxy.mode = Forward()
    assert degraded_kind(limiter) == "open"
    wait_until_store_decides(limiter)
    assert time.monotonic() - began > 0.45


def test_only_one_caller_probes_at_a_time(opened: Connect, proxy: Proxy) -> None:
    """Sixteen threads run until three probes were sent: no connection for each check, and one for each probe."""
    open_seconds = 0.1
    limiter = opened(proxy.url, breaker_seconds=open_seconds, denial_cache_ms=0)
    degraded_kind(limiter)
    proxy.mode = CloseConnections()
    for _ in range(3):
        degraded_kind(limiter)
    before, began = proxy.accepted, time.monotonic()

    def hammer(_: int) -> None:
        while proxy.accepted < before + 3:
            assert degraded_kind(limiter) == "open"
            time.sleep(0.002)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(hammer, range(16)))
    assert proxy.accepted - before <= 1 + (time.monotonic() - began) / open_seconds


def test_a_probe_that_hangs_keeps_the_others_from_asking(opened: Connect, proxy: Proxy) -> None:
    limiter = opened(proxy.url, deadline_ms=30_000, breaker_failures=1, breaker_seconds=0.05)
    proxy.mode = CloseConnections()
    degraded_kind(limiter)
    proxy.mode = DropReplies()
    time.sleep(0.1)  # longer than it is open
    sent = proxy.requests
    probe = threading.Thread(target=degraded_kind, args=(limiter,))
    probe.start()
    eventually(lambda: limiter.status().breaker == "half-open" and proxy.requests > sent)
    sent = proxy.requests
    assert [degraded_kind(limiter) for _ in range(10)] == ["open"] * 10
    assert limiter.status().breaker == "half-open"  # so the others waited neither for the probe nor for a deadline
    assert proxy.requests < sent + 10  # the probe itself sends several chunks
    proxy.mode = CloseConnections()  # which ends the probe
    probe.join()


def test_a_failed_probe_opens_it_for_the_same_time_again(opened: Connect, proxy: Proxy) -> None:
    open_seconds = 0.1
    limiter = opened(proxy.url, breaker_seconds=open_seconds)
    proxy.mode = CloseConnections()
    for _ in range(3):
        degraded_kind(limiter)
    first = time.monotonic()

    def has_probed(before: int) -> bool:
        return degraded_kind(limiter) == "open" and proxy.accepted > before

    for number in (1, 2, 3):
        eventually(partial(has_probed, proxy.accepted))
        assert limiter.status().breaker == "open"
        assert time.monotonic() - first > number * open_seconds * 0.9
    proxy.mode = Forward()
    wait_until_store_decides(limiter)


def test_it_works_again_after_a_silence(opened: Connect, proxy: Proxy) -> None:
    """Calls that wait for a lost answer must not prevent the next probe."""
    limiter = opened(proxy.url, deadline_ms=50, breaker_seconds=0.05)
    degraded_kind(limiter)
    with proxy.in_mode(DropReplies()):
        over = time.monotonic() + 0.3
        while time.monotonic() < over:
            degraded_kind(limiter)
            time.sleep(0.005)
    wait_until_store_decides(limiter)
