"""Many processes, shared calls and cached denials admit exactly what the limit allows, never one more."""

from contextlib import ExitStack
from typing import Any

import pytest

from tests.chaos.concurrent_callers import Tally, send_tallies, total
from tests.child_processes import child_process

DAY = 86_400
PROCESSES = 4
PATIENCE_SECONDS = 150.0

THOUSAND: list[dict[str, Any]] = [
    {"algorithm": "token_bucket", "bucket_capacity": 1_000, "refill_rate_per_sec": "0.0001"},
    {"algorithm": "leaky_bucket", "bucket_capacity": 1_000, "leak_rate_per_sec": "0.0001"},
    {"algorithm": "fixed_window", "limit": 1_000, "window_seconds": DAY, "align": "first_hit"},
    {"algorithm": "sliding_window", "limit": 1_000, "window_seconds": DAY},
    {"algorithm": "sliding_window_counter", "limit": 1_000, "window_seconds": 50 * DAY},
    {"algorithm": "quota", "limit": 1_000, "period": "year"},
    {"algorithm": "concurrency", "max_concurrent": 1_000, "lease_ttl_seconds": DAY},
]
WINDOW = THOUSAND[2]

pytestmark = pytest.mark.slow


def hammer(ways: list[str], url: str, limits: list[dict[str, Any]], *, callers: int, calls: int) -> list[Tally]:
    """Return the sums over several concurrent processes for each limit. Each process has one kind of callers."""
    with ExitStack() as stack:
        running = [stack.enter_context(child_process(send_tallies, way, url, limits, callers, calls)) for way in ways]
        tallies: list[list[Tally]] = []
        for process in running:
            admitted, complaints = process.receive(PATIENCE_SECONDS)
            assert complaints == ""
            tallies.append(admitted)
    return [total(each) for each in zip(*tallies, strict=True)]


def exactly_a_thousand_each(tallies: list[Tally]) -> None:
    got = {str(fields["algorithm"]): tally for fields, tally in zip(THOUSAND, tallies, strict=True)}
    assert got == dict.fromkeys(got, (1_000, 0))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", ["tasks", "callbacks"])
def test_four_processes_of_coalesced_callers_admit_exactly_a_thousand(redis_url: str, way: str) -> None:
    """Each algorithm gets 2,048 checks."""
    exactly_a_thousand_each(hammer([way] * PROCESSES, redis_url, THOUSAND, callers=64, calls=8))


@pytest.mark.timeout(180)
def test_four_processes_of_threads_with_a_denial_cache_admit_exactly_a_thousand(redis_url: str) -> None:
    """Each algorithm gets 2,240 checks. Most denials come from the cache."""
    exactly_a_thousand_each(hammer(["threads"] * PROCESSES, redis_url, THOUSAND, callers=8, calls=70))


@pytest.mark.timeout(180)
def test_all_ways_at_once_admit_exactly_a_thousand(redis_url: str) -> None:
    ways = ["tasks", "callbacks", "threads"]
    assert hammer(ways, redis_url, [WINDOW], callers=16, calls=50) == [(1_000, 0)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", ["forks", "forks-in-mid-use", "forks-with-loops", "forks-beside-a-loop"])
def test_forked_workers_of_one_limiter_admit_exactly_a_thousand(redis_url: str, way: str) -> None:
    assert hammer([way], redis_url, [WINDOW], callers=8, calls=60) == [(1_000, 0)]
