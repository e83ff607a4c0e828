"""Overrides apply from the next check on, although their keys are sent only after the script has asked for them."""

import asyncio
from typing import Any

import pytest
import redis as redis_py

from limitforge import FixedWindow, Limiter, Limits, ManualClock, SyncLimiter
from limitforge.core.check import build_check
from limitforge.core.keys import Keys
from limitforge.stores.redis.codec import encode_checks
from limitforge.stores.redis.key_hints import HINT_TTL_US, MAX_HINTS, KeyHints
from tests.contract.conftest import PATIENT

TEN = Limits(FixedWindow(name="w", limit=10, window_seconds=86_400))
MORE = {"w": {"limit": 500}}


async def limit_of(limiter: Limiter, subject: str, tenant: str = "t") -> int | None:
    return (await limiter.check("r", subject, limits=TEN, tenant=tenant)).limit


async def test_an_override_of_another_process_applies_from_the_next_check_on(redis_url: str) -> None:
    async with (
        Limiter.connect(redis_url, options=PATIENT) as here,
        Limiter.connect(redis_url, options=PATIENT) as there,
    ):
        assert await limit_of(here, "a") == 10
        await there.set_override("r", "a", MORE, limits=TEN, ttl_seconds=60, tenant="t")
        assert await limit_of(here, "a") == 500
        assert await limit_of(here, "b") == 10
        await there.delete_override("r", "a", tenant="t")
        assert await limit_of(here, "a") == 10
        await there.set_override("*", "b", MORE, limits=TEN, ttl_seconds=60, tenant="t")
        assert await limit_of(here, "b") == 500


def test_the_same_for_threads(redis_url: str) -> None:
    with SyncLimiter.connect(redis_url, options=PATIENT) as here, SyncLimiter.connect(redis_url) as there:
        assert here.check("r", "a", limits=TEN).limit == 10
        there.set_override("r", "a", MORE, limits=TEN, ttl_seconds=60)
        assert here.check("r", "a", limits=TEN).limit == 500


async def test_a_batch_of_many_tenants_with_and_without_overrides_takes_each_limit_once(redis_url: str) -> None:
    async with Limiter.connect(redis_url, options=PATIENT) as limiter:
        for number in range(0, 20, 3):
            await limiter.set_override("r", "a", MORE, limits=TEN, ttl_seconds=60, tenant=f"t{number}")
    async with Limiter.connect(redis_url, options=PATIENT) as limiter:
        for turn in range(1, 4):
            decisions = await asyncio.gather(
                *(limiter.check("r", "a", limits=TEN, tenant=f"t{number}") for number in range(20))
            )
            wanted = [500 if number % 3 == 0 else 10 for number in range(20)]
            assert [decision.limit for decision in decisions] == wanted
            assert [decision.remaining for decision in decisions] == [limit - turn for limit in wanted]


async def test_a_subject_with_overrides_needs_one_call_the_next_time(redis_url: str) -> None:
    raw: Any = redis_py.Redis.from_url(redis_url)

    def calls() -> int:
        return int(raw.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])

    async with Limiter.connect(redis_url, options=PATIENT) as limiter:
        await limiter.set_override("r", "a", MORE, limits=TEN, ttl_seconds=60, tenant="t")
        raw.config_resetstat()
        assert await limit_of(limiter, "a") == 500
        assert calls() == 2
        assert await limit_of(limiter, "a") == 500
        assert calls() == 3
    raw.close()


@pytest.mark.parametrize("count", [1, 25])
def test_a_tenant_without_overrides_costs_one_key_however_many_of_its_subjects_ask(count: int) -> None:
    keys, overridden = Keys(), KeyHints(ManualClock(0))
    checks = [build_check(keys, TEN, "r", f"s{number}", 1, None, "t", "P0") for number in range(count)]
    assert len(encode_checks(checks, 0, overridden).keys) == count + 1
    assert "lf:{t}:x" in encode_checks(checks, 0, overridden).keys
    overridden.add("lf:{t}:x")
    assert len(encode_checks(checks, 0, overridden).keys) == 2 * count
    assert "lf:{t}:x" not in encode_checks(checks, 0, overridden).keys


def test_a_subject_of_any_characters_has_the_index_of_its_tenant() -> None:
    keys, overridden = Keys(lanes={"t": 4}), KeyHints(ManualClock(0))
    for subject in ("}:x", "{a}", "o:o:", "é"):
        check = build_check(keys, TEN, "r", subject, 1, None, "t", "P0")
        assert (
            keys.override_index_key(keys.tenant_keys("t").subject_prefix(subject))
            in encode_checks([check], 0, overridden).keys
        )


def test_hints_last_a_minute_and_are_bounded() -> None:
    clock = ManualClock(0)
    overridden = KeyHints(clock)
    overridden.add("a")
    clock.advance_us(HINT_TTL_US - 1)
    assert "a" in overridden
    clock.advance_us(1)
    assert "a" not in overridden
    for number in range(MAX_HINTS + 10):
        overridden.add(str(number))
    assert len(overridden._expires_us) <= MAX_HINTS
