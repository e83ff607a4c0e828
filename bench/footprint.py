"""Measure the bytes of a live bucket in Redis: MEMORY USAGE of one key, and the average growth of used_memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from bench import ours, peers
from bench.harness import Contestant, progress
from bench.table import Target, at_most, table
from limitforge import SyncLimiter

SUBJECT = "user:12345"
BYTES = 160
LOG = "sliding window log"
LOG_HITS = (1, 10, 100, 1_000)


@dataclass(frozen=True, slots=True)
class Result:
    what: str
    keys: int
    key_length: int
    bytes: int
    """MEMORY USAGE of all keys of one subject."""
    average_bytes: float | None
    """Growth of used_memory per subject, over many subjects. It includes Redis's tables of keys and expiries."""


def run(url: str, *, quick: bool) -> tuple[list[Result], list[Target]]:
    redis: Any = Redis.from_url(url)
    many = 2_000 if quick else 100_000
    results = []
    for plan in ours.PLANS:
        if plan in ("two limits", "three limits"):
            continue
        progress(f"bytes: {plan}, {many} buckets")
        one = _memory_usage(redis, plan, lambda plan=plan: _single_bucket(ours.contestant(plan, url, key_prefix="lf")))  # type: ignore[misc]
        average = _average_growth(redis, ours.batch_contestant(plan, url, key_prefix="lf"), many)
        results.append(Result(f"limitforge, {plan}", one.keys, one.key_length, one.bytes, average))
    progress("bytes: logs of some length, and the peers")
    for hits in LOG_HITS:
        what = f"limitforge, {LOG}, {hits} {'hit' if hits == 1 else 'hits'}"
        results.append(_memory_usage(redis, what, lambda hits=hits: _log(url, hits)))  # type: ignore[misc]
    rivals = (
        peers.throttled_contestant("token_bucket", url),
        peers.throttled_contestant("fixed_window", url),
        peers.throttled_contestant("sliding_window", url),
        peers.limits_contestant(peers.FIXED, url, stats=False),
        peers.limits_contestant(peers.COUNTER, url, stats=False),
        peers.limits_contestant(peers.LOG, url, stats=False),
    )
    results += [_memory_usage(redis, each.name, lambda each=each: _single_bucket(each)) for each in rivals]  # type: ignore[misc]
    return results, [
        at_most(f"bytes, {result.what.removeprefix('limitforge, ')}", BYTES, result.bytes, "bytes")
        for result in results
        if result.average_bytes is not None and LOG not in result.what
    ]


def render(results: Sequence[Result]) -> str:
    rows = [
        (
            result.what,
            str(result.keys),
            str(result.key_length),
            str(result.bytes),
            "" if result.average_bytes is None else f"{result.average_bytes:.0f}",
        )
        for result in results
    ]
    return table(
        "Bytes per live bucket: tenant acme, resource GET:/orders, subject user:12345",
        ("one subject", "keys", "key length", "MEMORY USAGE", "memory grown by"),
        rows,
    )


def _single_bucket(contestant: Contestant) -> None:
    contestant.make(500)([SUBJECT])


def _log(url: str, hits: int) -> None:
    with SyncLimiter.connect(url, options=ours.REDIS_ONLY) as limiter:
        limits = ours.PLANS[LOG](1_000)
        for _ in range(hits):
            limiter.check(ours.RESOURCE, SUBJECT, limits=limits, tenant=ours.TENANT)


def _memory_usage(redis: Any, what: str, use: Callable[[], None]) -> Result:
    redis.flushall()
    use()
    keys: list[bytes] = redis.keys("*")
    size = sum(redis.memory_usage(key, samples=0) for key in keys)
    return Result(what, len(keys), max(map(len, keys)), size, None)


def _average_growth(redis: Any, contestant: Contestant, many: int) -> float:
    sweep = contestant.make(500)
    redis.flushall()
    sweep(["user:1"])  # connections and scripts are not buckets
    redis.flushall()
    before = redis.info("memory")["used_memory"]
    sweep([f"user:{number}" for number in range(100_000, 100_000 + many)])
    return float((redis.info("memory")["used_memory"] - before) / many)
