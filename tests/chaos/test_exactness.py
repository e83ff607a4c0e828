"""Many processes, coalesced callers, denials from the cache: exactly what the limit allows, never one more."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.chaos.hammer import Tally, total

DAY = 86_400
PROCESSES, CALLERS, CALLS = 4, 64, 20  # 5,120 checks on a limit of 1,000, most of them denials

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


def hammer(way: str, url: str, fields: dict[str, Any], *, processes: int, callers: int, calls: int) -> Tally:
    """The sum over some processes, all at once."""
    program = [sys.executable, "-m", "tests.chaos.hammer", way, url, json.dumps(fields), str(callers), str(calls)]
    running = [
        subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    tallies: list[Tally] = []
    try:
        for process in running:
            output, complaints = process.communicate(timeout=90)
            assert process.returncode == 0, complaints
            assert complaints == ""
            tallies.append(json.loads(output))
    finally:
        for process in running:
            process.kill()
    return total(tallies)


@pytest.mark.slow
@pytest.mark.parametrize("fields", THOUSAND, ids=lambda fields: str(fields["algorithm"]))
@pytest.mark.parametrize("way", ["tasks", "callbacks"])
def test_four_processes_of_coalesced_callers_admit_exactly_a_thousand(
    redis_url: str, way: str, fields: dict[str, Any]
) -> None:
    assert hammer(way, redis_url, fields, processes=PROCESSES, callers=CALLERS, calls=CALLS) == (1_000, 0)


@pytest.mark.slow
@pytest.mark.parametrize("fields", THOUSAND, ids=lambda fields: str(fields["algorithm"]))
def test_four_processes_of_threads_with_a_denial_cache_admit_exactly_a_thousand(
    redis_url: str, fields: dict[str, Any]
) -> None:
    assert hammer("threads", redis_url, fields, processes=PROCESSES, callers=8, calls=100) == (1_000, 0)


@pytest.mark.slow
def test_all_ways_at_once_admit_exactly_a_thousand(redis_url: str) -> None:
    program = [sys.executable, "-m", "tests.chaos.hammer"]
    running = [
        subprocess.Popen([*program, way, redis_url, json.dumps(WINDOW), "16", "50"], stdout=subprocess.PIPE, text=True)
        for way in ("tasks", "callbacks", "threads")
    ]
    outputs = [process.communicate(timeout=90)[0] for process in running]
    assert total(map(json.loads, outputs)) == (1_000, 0)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["forks", "forks-in-mid-use", "forks-with-loops", "forks-beside-a-loop"])
def test_forked_workers_of_one_limiter_admit_exactly_a_thousand(redis_url: str, way: str) -> None:
    assert hammer(way, redis_url, WINDOW, processes=1, callers=8, calls=60) == (1_000, 0)
