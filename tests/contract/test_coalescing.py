"""Concurrent checks share calls, in order and bounded, and each check is decided on its own."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis as redis_py

from limitforge import (
    Decision,
    FixedWindow,
    Limiter,
    LimitforgeError,
    Limits,
    Quota,
    Request,
    SlidingWindow,
    StoreCorrupt,
    StoreOptions,
    TokenBucket,
)
from limitforge.stores.redis.codec import MAX_CALL_US
from tests.contract.conftest import PATIENT
from tests.servers import RedisServer

DAY = 86_400
TEN = Limits(FixedWindow(name="w", limit=10, window_seconds=DAY, align="first_hit"))
MANY = Limits(TokenBucket(name="t", bucket_capacity=1_000, refill_rate_per_sec=1))


@pytest.fixture
async def limiter(redis_url: str) -> AsyncIterator[Limiter]:
    """A connected limiter, so that the next check finds an idle connection."""
    async with Limiter.connect(redis_url, options=PATIENT) as limiter:
        await limiter.check("first", "peek", limits=TEN, cost=0)
        yield limiter


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis_py.Redis.from_url(redis_url) as client:
        yield client


def calls(raw: Any) -> int:
    return int(raw.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


async def test_a_lone_check_is_one_call_and_does_not_wait(limiter: Limiter, raw: Any) -> None:
    raw.config_resetstat()
    for _ in range(5):
        await limiter.check("r", "s", limits=MANY)
    assert calls(raw) == 5


async def test_checks_of_one_loop_iteration_share_two_calls(limiter: Limiter, raw: Any) -> None:
    raw.config_resetstat()
    decisions = await asyncio.gather(*(limiter.check("r", f"s{n}", limits=MANY) for n in range(64)))
    assert all(decision.remaining == 999 for decision in decisions)
    assert calls(raw) == 2  # halves: Redis works on one while we read the other


async def test_after_batches_that_were_too_long_calls_are_halved_as_before(limiter: Limiter, raw: Any) -> None:
    """The queue is weighed: a weight that is not removed would make the next calls too long."""
    await asyncio.gather(*(limiter.check("r", f"s{n}", limits=MANY) for n in range(500)))
    raw.config_resetstat()
    await asyncio.gather(*(limiter.check("r", f"s{n}", limits=MANY) for n in range(64)))
    assert calls(raw) == 2


async def test_at_most_two_calls_are_in_flight(own_redis_server: RedisServer) -> None:
    """Checks that are submitted meanwhile share the next call."""
    async with Limiter.connect(own_redis_server.url, options=PATIENT) as limiter:
        await limiter.check("first", "peek", limits=TEN, cost=0)
        own_redis_server.command_ok("CONFIG RESETSTAT")
        own_redis_server.pause()
        checks = []
        for n in range(5):
            checks.append(asyncio.create_task(limiter.check("r", f"s{n}", limits=MANY)))
            for _ in range(3):
                await asyncio.sleep(0)  # it submits the check, and the queue is sent at the end of the iteration
        own_redis_server.resume()
        assert all(decision.allowed for decision in await asyncio.gather(*checks))
        with redis_py.Redis.from_url(own_redis_server.url) as raw:
            assert calls(raw) == 3


async def test_a_batch_of_one_caller_is_one_call(limiter: Limiter, raw: Any) -> None:
    """It is not sent in halves, and only split if it is too long for one call."""
    raw.config_resetstat()
    await limiter.check_many([Request(resource="r", subject=f"s{n}", limits=MANY) for n in range(64)])
    assert calls(raw) == 1


async def test_sixty_four_callers_share_their_calls(limiter: Limiter, raw: Any) -> None:
    async def caller(subject: str) -> None:
        for _ in range(20):
            await limiter.check("r", subject, limits=MANY)

    raw.config_resetstat()
    await asyncio.gather(*(caller(f"s{n}") for n in range(64)))
    assert calls(raw) <= 64 * 20 / 8


async def test_a_batch_is_bounded_by_its_time_in_redis(limiter: Limiter, raw: Any) -> None:
    heavy = Limits(SlidingWindow(name="log", limit=1_000, window_seconds=60))
    for limits in (MANY, heavy):
        weight_us = limits.plan("P0").weight_us
        checks = 5 * MAX_CALL_US // weight_us
        raw.config_resetstat()
        await asyncio.gather(*(limiter.check("r", f"s{n}", limits=limits) for n in range(checks)))
        assert calls(raw) >= 5


async def test_checks_of_one_loop_are_decided_in_the_order_of_submission(limiter: Limiter) -> None:
    decisions = await asyncio.gather(*(limiter.check("r", "s", limits=TEN) for _ in range(200)))
    assert [decision.remaining for decision in decisions[:10]] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert [decision.allowed for decision in decisions] == [True] * 10 + [False] * 190


async def test_a_poisoned_bucket_affects_no_other_check_of_its_batch(limiter: Limiter, raw: Any) -> None:
    await limiter.check("r", "bad", limits=MANY)
    (key,) = raw.keys("*bad*")
    raw.set(key, "not ours")
    subjects = [f"s{n}" for n in range(20)]
    subjects[7] = "bad"
    answers = await asyncio.gather(
        *(limiter.check("r", subject, limits=MANY) for subject in subjects), return_exceptions=True
    )
    assert isinstance(answers.pop(7), StoreCorrupt)
    assert all(isinstance(answer, Decision) and answer.allowed for answer in answers)


async def test_a_quota_that_needs_a_second_call_delays_no_other_check(redis_url: str) -> None:
    """The clock of the caller is a year behind: every quota needs a second call, with windows for the time of Redis."""

    class YearBehind:
        def now_us(self) -> int:
            return 0

    async with Limiter.connect(redis_url, options=PATIENT) as limiter:
        limiter._store._core._clock = YearBehind()  # type: ignore[attr-defined]
        month = Limits(Quota(name="q", limit=10, period="month"))
        decisions = await asyncio.gather(
            *(limiter.check("r", f"s{n % 4}", limits=month if n % 2 else MANY) for n in range(40))
        )
    assert all(decision.allowed for decision in decisions)
    assert sorted(decision.limit or 0 for decision in decisions) == [10] * 20 + [1_000] * 20


async def test_a_full_queue_is_answered_by_the_failure_behaviour_at_once(redis_url: str) -> None:
    options = StoreOptions(deadline_ms=30_000, failure="closed", max_waiting=5)
    async with Limiter.connect(redis_url, options=options) as limiter:
        decisions = await asyncio.gather(*(limiter.check("r", f"s{n}", limits=MANY) for n in range(8)))
        assert [decision.degraded for decision in decisions] == [None] * 5 + ["closed"] * 3
        assert not decisions[-1].allowed
        assert (await limiter.check("r", "s", limits=MANY)).degraded is None


async def test_a_callback_gets_the_decision_without_a_task(limiter: Limiter) -> None:
    results: list[Decision | LimitforgeError] = []
    tasks = asyncio.all_tasks()
    for _ in range(12):
        limiter.submit(results.append, "r", "s", limits=TEN)
    assert asyncio.all_tasks() == tasks
    await limiter.check("r", "s", limits=TEN, cost=0)  # its answer comes after theirs
    assert [isinstance(result, Decision) and result.allowed for result in results] == [True] * 10 + [False] * 2


async def test_a_callback_that_fails_harms_no_other(limiter: Limiter) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    results: list[Decision | LimitforgeError] = []

    def broken(_: object) -> None:
        raise ValueError("a bug of the caller's")

    for answer in (results.append, broken, results.append):
        limiter.submit(answer, "r", "s", limits=TEN)
    await limiter.check("r", "s", limits=TEN)
    assert len(results) == 2
    assert [type(context["exception"]) for context in reported] == [ValueError]


async def test_a_check_that_is_cancelled_before_it_is_sent_takes_nothing(redis_url: str) -> None:
    async with Limiter.connect(redis_url, options=PATIENT) as limiter:
        callers = [asyncio.create_task(limiter.check("r", "s", limits=TEN)) for _ in range(5)]
        await asyncio.sleep(0)  # all checks are submitted, and there is no connection yet
        for caller in callers[:3]:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        assert (await limiter.check("r", "s", limits=TEN, cost=0)).remaining == 8


async def test_an_invalid_argument_is_raised_and_not_passed_to_the_callback(limiter: Limiter) -> None:
    with pytest.raises(ValueError, match="cost"):
        limiter.submit(lambda _: None, "r", "s", limits=TEN, cost=-1)


async def test_a_batch_of_one_caller_shares_one_time_beside_the_others(limiter: Limiter, raw: Any) -> None:
    raw.config_resetstat()
    batch, others = await asyncio.gather(
        limiter.check_many([Request(resource="r", subject="s", limits=TEN)] * 12),
        asyncio.gather(*(limiter.check("r", f"other {n}", limits=TEN) for n in range(10))),
    )
    assert sum(isinstance(one, Decision) and one.allowed for one in batch) == 10
    assert all(other.remaining == 9 for other in others)
    assert calls(raw) <= 3


async def test_the_connection_is_the_only_one(redis_url: str, own_redis_server: RedisServer) -> None:
    async with Limiter.connect(own_redis_server.url, options=PATIENT) as limiter:
        await asyncio.gather(*(limiter.check("r", f"s{n}", limits=TEN) for n in range(500)))
        await limiter.reset("r", "s1", limits=TEN)
        with redis_py.Redis.from_url(own_redis_server.url) as raw:
            clients: Any = raw.client_list()
    assert len(clients) == 2  # ours, and the connection that asks
