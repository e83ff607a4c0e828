"""Decisions while Redis is unavailable: they follow the failure behaviour of each check, and say so."""

import time

import pytest

from limitforge import (
    Concurrency,
    Decision,
    Entry,
    FixedWindow,
    Limits,
    Request,
    StoreUnavailable,
    TokenBucket,
)
from limitforge.core.check import FailureName
from tests.chaos.conftest import Connect
from tests.chaos.waiting import wait_until_store_decides
from tests.proxy import CloseConnections, DropReplies, Forward, Proxy
from tests.servers import RedisServer

DAY = 86_400
HANGS_SECONDS = 20.0  # hundreds of deadlines: only a caller that hangs for ever takes longer
TEN = FixedWindow(name="ten", limit=10, window_seconds=DAY, align="first_hit")
ONE = FixedWindow(name="one", limit=1, window_seconds=DAY, align="first_hit")
SLOTS = Concurrency(name="slots", max_concurrent=8, lease_ttl_seconds=60)

each_kind = pytest.mark.parametrize("failure", ["open", "closed", "local"])


@pytest.fixture
def gone(proxy: Proxy) -> Proxy:
    proxy.mode = CloseConnections()
    return proxy


def test_open_lets_pass_and_knows_no_limits(opened: Connect, gone: Proxy) -> None:
    decision = opened(gone.url, failure="open").check("r", "s", limits=[TEN, ONE], cost=11)
    assert (decision.allowed, decision.degraded, decision.limits) == (True, "open", {})
    assert (decision.limit, decision.remaining, decision.binding, decision.retry_after_ms) == (None, None, None, 0)


def test_closed_denies_and_says_when_to_come_back(opened: Connect, gone: Proxy) -> None:
    limiter = opened(gone.url, failure="closed", breaker_seconds=7)
    for _ in range(5):  # before and after the breaker has opened
        decision = limiter.check("r", "s", limits=TEN)
        assert (decision.allowed, decision.degraded) == (False, "closed")
        assert 0 < (decision.retry_after_ms or 0) <= 7_000


@pytest.mark.parametrize(
    ("limit", "nodes", "share"), [(TEN, 1, 10), (TEN, 4, 2), (TEN, 10, 1), (TEN, 11, 1), (ONE, 4, 1)]
)
def test_local_decides_by_this_processs_part_of_the_limit(
    opened: Connect, gone: Proxy, limit: FixedWindow, nodes: int, share: int
) -> None:
    limiter = opened(gone.url, failure="local", processes=nodes)
    decisions = [limiter.check("r", "s", limits=limit) for _ in range(share + 3)]
    assert [decision.allowed for decision in decisions] == [True] * share + [False] * 3
    assert {decision.degraded for decision in decisions} == {"local"}
    assert all(decision.retry_after_ms for decision in decisions[share:])
    assert limiter.check("r", "other", limits=limit).allowed


def test_local_takes_all_or_nothing(opened: Connect, gone: Proxy) -> None:
    limiter = opened(gone.url, failure="local", processes=2)
    assert limiter.check("r", "s", limits=[TEN, ONE]).allowed
    assert not limiter.check("r", "s", limits=[TEN, ONE]).allowed
    assert [limiter.check("r", "s", limits=TEN).allowed for _ in range(5)] == [True] * 4 + [False]


def test_a_local_share_refills_at_its_part_of_the_rate(opened: Connect, gone: Proxy) -> None:
    limiter = opened(gone.url, failure="local", processes=4)
    bucket = TokenBucket(name="b", bucket_capacity=40, refill_rate_per_sec=1)
    assert limiter.check("r", "s", limits=bucket, cost=10).allowed
    denied = limiter.check("r", "s", limits=bucket)
    assert 1_000 < (denied.retry_after_ms or 0) <= 4_000  # a quarter of a token a second


def test_raise_leaves_it_to_the_caller(opened: Connect, gone: Proxy) -> None:
    limiter = opened(gone.url, failure="raise")
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            limiter.check("r", "s", limits=TEN)
    assert sum(limiter.status().degraded.values()) == 0


@each_kind
def test_a_check_can_have_its_own_failure_behaviour(opened: Connect, gone: Proxy, failure: FailureName) -> None:
    limiter = opened(gone.url, failure="raise")
    assert limiter.check("r", "s", limits=TEN, failure=failure).degraded == failure
    assert limiter.check_entries([Entry(TEN, "r", "s")], failure=failure).degraded == failure
    assert limiter.reserve("r", "s", limits=TEN, cost=1, failure=failure).degraded == failure
    with pytest.raises(StoreUnavailable):
        opened(gone.url, failure=failure).check("r", "s", limits=TEN, failure="raise")


def test_each_check_of_a_batch_has_its_own_failure_behaviour(opened: Connect, gone: Proxy) -> None:
    kinds: list[FailureName | None] = [None, "open", "closed", "local", "raise"]
    answers = opened(gone.url, failure="closed").check_many(
        [Request(resource="r", subject="s", limits=TEN, failure=kind) for kind in kinds]
    )
    assert [answer.degraded for answer in answers[:4] if isinstance(answer, Decision)] == [
        "closed",
        "open",
        "closed",
        "local",
    ]
    assert isinstance(answers[4], StoreUnavailable)


@pytest.mark.parametrize("failure", ["open", "local"])
@pytest.mark.parametrize("back", [False, True], ids=["still-gone", "back-again"])
def test_what_was_reserved_without_the_store_settles_without_error(
    opened: Connect, gone: Proxy, failure: FailureName, back: bool
) -> None:
    limiter = opened(gone.url, failure=failure, breaker_seconds=0.01)
    held = limiter.reserve("r", "s", limits=TEN, cost=4)
    assert held.allowed
    assert held.reservation_id
    if back:
        gone.mode = Forward()
        wait_until_store_decides(limiter)
    limiter.settle(held.reservation_id, 2)
    limiter.settle(held.reservation_id, 2)


@pytest.mark.parametrize("failure", ["open", "local"])
@pytest.mark.parametrize("back", [False, True], ids=["still-gone", "back-again"])
def test_a_slot_that_was_taken_without_the_store_is_released_without_error(
    opened: Connect, gone: Proxy, failure: FailureName, back: bool
) -> None:
    limiter = opened(gone.url, failure=failure, processes=4, breaker_seconds=0.01)
    held = limiter.check("r", "s", limits=SLOTS, cost=2)
    assert held.allowed
    assert held.lease_id
    if back:
        gone.mode = Forward()
        wait_until_store_decides(limiter)
    limiter.release(held.lease_id)
    if not back:
        assert limiter.check("r", "s", limits=SLOTS, cost=2).allowed  # the part of this process is free again


@pytest.mark.parametrize("failure", ["open", "local"])
def test_releasing_it_twice_is_fine(opened: Connect, gone: Proxy, failure: FailureName) -> None:
    limiter = opened(gone.url, failure=failure)
    first, second = (limiter.check("r", "s", limits=SLOTS) for _ in range(2))
    assert first.lease_id
    assert second.lease_id
    for _ in range(2):
        limiter.release(first.lease_id)
    assert limiter.renew(second.lease_id)  # releasing one twice does not release another


def test_a_lost_answer_is_degraded_and_may_have_been_counted(opened: Connect, proxy: Proxy) -> None:
    limiter = opened(proxy.url, failure="open", deadline_ms=500, breaker_seconds=0.01)
    limiter.check("r", "s", limits=TEN)
    with proxy.in_mode(DropReplies()):
        assert limiter.check("r", "s", limits=TEN).degraded == "open"
    wait_until_store_decides(limiter)
    assert limiter.check("r", "s", limits=TEN, cost=0).remaining == 8


def test_status_reports_the_health_of_the_store(opened: Connect, proxy: Proxy) -> None:
    limiter = opened(proxy.url, failure="open", breaker_failures=3, breaker_seconds=0.05)
    limiter.check("r", "s", limits=TEN)
    status = limiter.status()
    assert (status.breaker, status.since, sum(status.degraded.values())) == ("closed", None, 0)
    proxy.mode = CloseConnections()
    for number in range(1, 4):
        assert limiter.status().breaker == "closed"
        limiter.check("r", "s", limits=TEN)
        assert limiter.status().degraded["open"] == number
    opened_at = limiter.status().since
    assert opened_at is not None
    assert limiter.status().breaker == "open"
    limiter.check("r", "s", limits=TEN, failure="closed")
    assert limiter.status().degraded["closed"] == 1
    proxy.mode = Forward()
    wait_until_store_decides(limiter)
    status = limiter.status()
    assert status.breaker == "closed"
    assert (status.since or 0) > opened_at


def test_limits_that_only_watch_or_are_off_do_not_deny_locally(opened: Connect, gone: Proxy) -> None:
    limiter = opened(gone.url, failure="local")
    watched = FixedWindow(name="watched", limit=1, window_seconds=DAY, mode="monitor")
    decisions = [limiter.check("r", "s", limits=Limits(TEN, watched)) for _ in range(3)]
    assert [(decision.allowed, decision.would_deny) for decision in decisions] == [
        (True, ()),
        (True, ("watched",)),
        (True, ("watched",)),
    ]


@pytest.mark.parametrize("form", ["check", "check_entries", "check_many", "reserve"])
def test_every_form_of_a_check_is_answered_in_time(opened: Connect, own_redis_server: RedisServer, form: str) -> None:
    limiter = opened(own_redis_server.url, failure="closed", deadline_ms=50, breaker_seconds=60)
    limiter.check("r", "s", limits=TEN)
    own_redis_server.pause()
    for _ in range(5):
        began = time.monotonic()
        if form == "check":
            kind = limiter.check("r", "s", limits=TEN).degraded
        elif form == "check_entries":
            kind = limiter.check_entries([Entry(TEN, "r", "s")]).degraded
        elif form == "reserve":
            kind = limiter.reserve("r", "s", limits=TEN, cost=1).degraded
        else:
            answers = limiter.check_many([Request(resource="r", subject="s", limits=TEN)] * 50)
            (kind,) = {answer.degraded if isinstance(answer, Decision) else str(answer) for answer in answers}
        assert kind == "closed"
        assert time.monotonic() - began < HANGS_SECONDS
    own_redis_server.resume()


def test_a_connection_that_was_closed_while_idle_costs_no_answer(
    opened: Connect, own_redis_server: RedisServer
) -> None:
    limiter = opened(own_redis_server.url, failure="closed", deadline_ms=5_000)
    for _ in range(5):
        assert limiter.check("r", "other", limits=TEN, cost=0).degraded is None
        own_redis_server.command("CLIENT KILL TYPE normal")
        time.sleep(0.05)
