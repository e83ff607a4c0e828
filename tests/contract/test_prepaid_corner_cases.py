"""Prepaid limits combined with overrides, resets, many callers, and an unavailable Redis."""

import asyncio
import threading
import time
from typing import Any, cast

import pytest

from limitforge import FixedWindow, Limiter, Limits, Request, StoreOptions, SyncLimiter, TokenBucket
from tests.contract.conftest import PATIENT
from tests.servers import RedisServer

DAY = 86_400
PREPAID = FixedWindow(name="prepaid", limit=100_000, window_seconds=DAY, align="first_hit", consistency="prepaid")
LOCAL = FixedWindow(name="local", limit=5_000, window_seconds=DAY, consistency="local")
EXACT = FixedWindow(name="exact", limit=5_000, window_seconds=DAY)
PATIENCE_SECONDS = 60.0


def wait_for(condition: Any, seconds: float = PATIENCE_SECONDS) -> None:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    assert condition()


def prepay(limiter: SyncLimiter, limits: Any = PREPAID) -> None:
    """Check until the process has a share."""

    def has_share() -> bool:
        for _ in range(10):
            limiter.check("r", "s", limits=limits, cost=5)  # enough demand for a share, on a slow machine too
        return limiter.status().prepaid_out > 0

    wait_for(has_share)


def admitted_until_denied(limiter: SyncLimiter, limits: Any) -> int:
    """Return how many checks are admitted before 20 in a row are denied."""
    passed = denied = 0
    while denied < 20:
        allowed = limiter.check("r", "s", limits=limits).allowed
        passed, denied = passed + allowed, 0 if allowed else denied + 1
    return passed


@pytest.mark.slow
def test_an_override_that_lifts_a_limit_leaves_nothing_to_spend_when_it_ends(redis_url: str) -> None:
    bucket = TokenBucket(name="bucket", bucket_capacity=200, refill_rate_per_sec="0.01", consistency="prepaid")
    with SyncLimiter.connect(redis_url, options=PATIENT) as limiter:
        passed = sum(limiter.check("r", "s", limits=bucket).allowed for _ in range(200))
        limiter.set_override("r", "s", {"bucket": "unlimited"}, limits=bucket, ttl_seconds=1)
        ends = time.monotonic() + 1.2
        while time.monotonic() < ends:
            limiter.check("r", "s", limits=bucket)
            time.sleep(0.001)
        passed += sum(limiter.check("r", "s", limits=bucket).allowed for _ in range(500))
        assert 200 <= passed <= 201


def test_an_override_applies_in_every_process_within_a_moment(redis_url: str) -> None:
    with (
        SyncLimiter.connect(redis_url, options=PATIENT) as limiter,
        SyncLimiter.connect(redis_url, options=PATIENT) as other,
    ):
        prepay(limiter)
        other.set_override("r", "s", {"prepaid": "blocked"}, limits=PREPAID, ttl_seconds=60)
        wait_for(lambda: not limiter.check("r", "s", limits=PREPAID).allowed)
        other.delete_override("r", "s")
        assert limiter.check("r", "s", limits=PREPAID).allowed


def test_a_reset_lets_pass_at_most_what_was_out(redis_url: str) -> None:
    small = FixedWindow(name="small", limit=2_000, window_seconds=DAY, align="first_hit", consistency="prepaid")
    with SyncLimiter.connect(redis_url, options=PATIENT) as limiter:
        prepay(limiter, small)
        admitted_until_denied(limiter, small)
        out = limiter.status().prepaid_out
        limiter.reset("r", "s", limits=small)
        passed = admitted_until_denied(limiter, small)
        assert 2_000 - out <= passed <= 2_000
        assert admitted_until_denied(limiter, small) == 0


def test_a_denial_of_a_prepaid_limit_is_answered_from_the_cache(redis_url: str) -> None:
    options = StoreOptions(failure="raise", deadline_ms=30_000)
    spent = FixedWindow(name="spent", limit=10, window_seconds=DAY, align="first_hit", consistency="prepaid")
    with SyncLimiter.connect(redis_url, options=options) as limiter:
        admitted_until_denied(limiter, spent)
        wait_for(lambda: not limiter.check("r", "s", limits=spent).allowed and limiter.status().denial_hits)
        for _ in range(500):
            limiter.check("r", "s", limits=spent)
        assert limiter.status().denial_hits > 400


async def test_many_hybrid_checks_are_decided_without_an_error(redis_url: str) -> None:
    options = StoreOptions(failure="raise", deadline_ms=30_000, denial_cache_ms=0)
    async with Limiter.connect(redis_url, options=options) as limiter:
        both = Limits(LOCAL, EXACT)
        for _ in range(2):
            answers = await asyncio.gather(*(limiter.check("r", "s", limits=both) for _ in range(900)))
            assert all(answer.allowed and answer.degraded is None for answer in answers)
        crowd = await asyncio.gather(
            *(limiter.check("r", "s", limits=both, failure="closed") for _ in range(2_000)), return_exceptions=True
        )
        assert not [answer for answer in crowd if isinstance(answer, BaseException)]


def test_a_long_batch_of_prepaid_checks_meets_its_deadline(redis_url: str) -> None:
    with SyncLimiter.connect(redis_url, options=StoreOptions(failure="closed", deadline_ms=2_000)) as limiter:
        many = [Request(resource="r", subject=f"u{at}", limits=PREPAID) for at in range(1_000)]
        assert {getattr(answer, "degraded", "error") for answer in limiter.check_many(many)} == {None}
        assert limiter.status().breaker == "closed"


@pytest.mark.slow
def test_thousands_of_shares_are_kept_in_sync(redis_url: str) -> None:
    options = StoreOptions(failure="raise", deadline_ms=30_000, denial_cache_ms=0, sync_interval_ms=5_000)
    with SyncLimiter.connect(redis_url, options=options) as limiter:
        store = cast("Any", limiter._store)

        def all_have_shares() -> bool:
            for _ in range(6):
                limiter.check_many([Request(resource="r", subject=f"u{at}", limits=PREPAID) for at in range(2_500)])
            held: list[int] = [share.balance for share in store._hybrid.shares._shares.values()]
            return sum(left > 0 for left in held) > 2_200

        wait_for(all_have_shares, 90)  # so many checks take long on a busy machine


def test_while_redis_is_gone_a_share_is_spent_and_then_the_failure_behaviour_decides(
    own_redis_server: RedisServer,
) -> None:
    options = StoreOptions(failure="closed", deadline_ms=200)
    with SyncLimiter.connect(own_redis_server.url, options=options) as limiter:
        prepay(limiter)
        own_redis_server.kill()
        share = limiter.status().prepaid_out
        answers = [limiter.check("r", "s", limits=PREPAID) for _ in range(share + 10)]
        spent = [answer for answer in answers if answer.degraded is None]
        assert 0 < len(spent) <= share
        assert {answer.degraded for answer in answers if answer not in spent} == {"closed"}


@pytest.mark.parametrize("shell", ["sync", "async"])
def test_a_limiter_that_was_closed_leaves_nothing_running(redis_url: str, shell: str) -> None:
    if shell == "sync":
        with SyncLimiter.connect(redis_url, options=PATIENT) as limiter:
            prepay(limiter)
    else:

        async def use_and_close() -> set[Any]:
            async with Limiter.connect(redis_url, options=PATIENT) as limiter:
                for _ in range(30):
                    await asyncio.gather(*(limiter.check("r", "s", limits=PREPAID) for _ in range(50)))
                    await asyncio.sleep(0.02)
            return asyncio.all_tasks() - {asyncio.current_task()}

        assert asyncio.run(use_and_close()) == set()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("limitforge")]


def test_a_local_denial_needs_no_redis(own_redis_server: RedisServer) -> None:
    none = FixedWindow(name="none", limit=0, window_seconds=DAY, consistency="local")
    with SyncLimiter.connect(own_redis_server.url, options=StoreOptions(failure="open", deadline_ms=200)) as limiter:
        own_redis_server.kill()
        assert not limiter.check("r", "s", limits=Limits(none, EXACT)).allowed
