"""Measure the catalog: warm and cold look-ups, a match among many policies, the memory of a tenant."""

import asyncio
import gc
import logging
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import delete, insert

from bench.harness import Spread, progress, settle
from bench.table import Target, at_most, table
from limitforge.catalog.credentials import ID_LENGTH, PREFIXES, SECRET_LENGTH, Credential, Peppers, crc_checksum
from limitforge.catalog.database import tables
from limitforge.catalog.database.database import Database
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.database_source import DatabaseSource
from limitforge.catalog.model import Plan, Policy, Tenant, TenantConfig
from limitforge.catalog.snapshot import Snapshot
from limitforge.errors import CatalogError

POLICIES = 10
LOOKUP_US = 3.0
MATCH_US = 2.0
NOW = datetime(2026, 1, 1, tzinfo=UTC)
OPERATOR = TenantConfig(Tenant(id="operator", name="operator"), (), ())


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    value: Spread | float
    unit: str


def run(*, quick: bool) -> tuple[list[Result], list[Target]]:
    with tempfile.TemporaryDirectory(prefix="limitforge-bench-") as folder:
        results = asyncio.run(_measure(Path(folder), tenants=200 if quick else 10_000, rounds=3 if quick else 9))
    found = {result.name: _median(result) for result in results}
    return results, [
        at_most("catalog, warm look-up of key, snapshot and policy", LOOKUP_US, found[WARM], "us"),
        at_most("catalog, match among 10,000 policies", MATCH_US, found[MATCH_MANY], "us"),
        at_most("catalog, 1,000 first requests of one tenant", 1, found[SINGLE_FLIGHT], "loads"),
    ]


WARM = "warm: key, snapshot and policy"
MATCH_MANY = "match among 10,000 policies, not seen before"
SINGLE_FLIGHT = "loads of one tenant for 1,000 first requests at once"


def render(results: Sequence[Result]) -> str:
    rows = [
        (each.name, each.value.text() if isinstance(each.value, Spread) else f"{each.value:,.1f}", each.unit)
        for each in results
    ]
    return table("Catalog on SQLite: median (lowest-highest) of the rounds", ("", "", ""), rows)


async def _measure(folder: Path, tenants: int, rounds: int) -> list[Result]:
    logging.getLogger("limitforge").setLevel(logging.ERROR)
    database = Database(f"sqlite:///{folder}/catalog.db")
    peppers = Peppers.parse(Peppers.generate_text())
    await database.upgrade()
    progress(f"catalog: writing {tenants:,} tenants with {POLICIES} policies each")
    keys = await _seed(database, peppers, tenants)
    results = [*await _cold(database, peppers, keys), *await _concurrent_loads(database, peppers, keys)]
    results += await _warm(database, peppers, keys, rounds)
    results += [*_policy_matches(rounds), await _memory_per_tenant(database, peppers, keys)]
    async with database.writing() as connection:
        await connection.execute(delete(tables.policies))
    results.append(await _memory_per_tenant(database, peppers, keys, policies=0))
    await database.close()
    return results


async def _seed(database: Database, peppers: Peppers, count: int) -> list[Credential]:
    """Insert rows directly into the tables, because only reads are measured."""
    book = {"version": 1, "created_at": NOW, "updated_at": NOW}
    rows: dict[str, list[dict[str, object]]] = {name: [] for name in ("tenants", "plans", "plan_versions", "policies")}
    rows |= {"keys": [], "secrets": []}
    credentials = []
    for number in range(count):
        tenant, plan = f"ten_{number:016}", f"pla_{number:016}"
        plain = {"mode": "on", "time_zone": "UTC", "lanes": 1, "suspended": False, "revision": 1}
        rows["tenants"].append({"id": tenant, "name": f"tenant-{number}", **plain, **book})
        rows["plans"].append({"id": plan, "tenant_id": tenant, "name": "free", **book})
        rows["plan_versions"].append(
            {"plan_id": plan, "version": 1, "limits": _limits(), "created_at": NOW, "created_by": "bench"}
        )
        for at in range(POLICIES):
            resource = f"GET:/area{at}/{{id}}"
            where = {"resource": resource, "pattern": resource.replace("{id}", "{}"), "plan_id": plan, "mode": "on"}
            rows["policies"].append({"id": f"pol_{number:013}{at:03}", "tenant_id": tenant, **where, **book})
        credential = Credential.generate(PREFIXES["live"], f"{number:016}", peppers)
        sealed = peppers.hash_credential(credential)
        own = {"type": "live", "scopes": ["check"], "metadata": {}, "disabled": False}
        rows["keys"].append({"id": f"key_{number:016}", "tenant_id": tenant, "name": "web", **own, **book})
        secret = {"hash": sealed.hash, "key_id": f"key_{number:016}", "pepper": sealed.pepper, "created_at": NOW}
        rows["secrets"].append(secret)
        credentials.append(credential)
    async with database.writing() as connection:
        for name, each in rows.items():
            await connection.execute(insert(tables.metadata.tables[name]), each)
    return credentials


def _limits() -> list[dict[str, object]]:
    window = {"algorithm": "sliding_window_counter", "limit": 1_000, "window_seconds": 60}
    bucket = {"algorithm": "token_bucket", "bucket_capacity": 100, "refill_rate_per_sec": 20}
    return [{"name": "minute", **window}, {"name": "burst", **bucket}]


async def _cold(database: Database, peppers: Peppers, keys: list[Credential]) -> list[Result]:
    cache = CatalogCache(DatabaseSource(database), peppers)
    await cache.callers.find(keys[0].text)  # loads the operator, and other one-time work
    took, statements = [], 0
    for credential in keys[1:101]:
        before, started = database.statement_count, time.perf_counter_ns()
        await cache.callers.find(credential.text)
        took.append((time.perf_counter_ns() - started) / 1e6)
        statements = max(statements, database.statement_count - before)
    await cache.close()
    return [
        Result("cold: key and tenant from the database", Spread.of(took), "ms"),
        Result("queries of that, at most", float(statements), "queries"),
    ]


async def _concurrent_loads(database: Database, peppers: Peppers, keys: list[Credential]) -> list[Result]:
    cache = CatalogCache(DatabaseSource(database), peppers)
    await cache.callers.find(keys[0].text)
    before = cache.status().loads
    await asyncio.gather(*(cache.callers.find(keys[-1].text) for _ in range(1_000)))
    loads = cache.status().loads - before - 1  # minus the load of the key
    statements, started = database.statement_count, time.monotonic()
    for number in range(10_000):
        body = f"{PREFIXES['live']}wrong{number:011}".ljust(len(PREFIXES["live"]) + ID_LENGTH + SECRET_LENGTH, "0")
        try:
            await cache.callers.find(body + crc_checksum(body), client="192.0.2.1")
        except CatalogError:
            continue
    seconds = time.monotonic() - started
    await cache.close()
    return [
        Result(SINGLE_FLIGHT, float(loads), "loads"),
        Result("10,000 wrong keys of one source, one after the other", seconds, "s"),
        Result("queries of those", float(database.statement_count - statements), "queries"),
    ]


async def _warm(database: Database, peppers: Peppers, keys: list[Credential], rounds: int) -> list[Result]:
    cache = CatalogCache(DatabaseSource(database), peppers)
    some = [credential.text for credential in keys[:1_000]]
    for text in some:
        await cache.callers.find(text)

    def look_up() -> None:
        for text in some:
            caller = cache.callers.get(text)
            if caller is not None:
                caller.snapshot.select("GET:/area3/17", caller.key.plan_id)

    results = [Result(WARM, _time_per_call(look_up, len(some), rounds), "us")]
    await cache.close()
    return results


def _policy_matches(rounds: int) -> list[Result]:
    results = []
    for count, what in ((10, "match among 10 policies, not seen before"), (10_000, MATCH_MANY)):
        snapshot = Snapshot(_config(count), OPERATOR)
        fresh = _resources(count)

        def match(snapshot: Snapshot = snapshot, fresh: Iterator[str] = fresh) -> None:
            for _ in range(1_000):
                snapshot.select(next(fresh))

        for at in range(count):
            snapshot.select(f"GET:/area{at}/1")  # every policy is loaded before the measurement
        results.append(Result(what, _time_per_call(match, 1_000, rounds), "us"))
    return results


def _resources(count: int) -> Iterator[str]:
    """Yield resources of ten areas in turn, each time with another id."""
    number = 0
    while True:
        number += 1
        yield f"GET:/area{number % 10 * (count // 10)}/{number}"


def _config(count: int) -> TenantConfig:
    plan = Plan(id="pla_1", tenant_id="ten_1", name="free", limits=tuple(_limits()))
    policies = [
        Policy(id=f"pol_{at}", tenant_id="ten_1", resource=f"GET:/area{at}/{{id}}", plan_id="pla_1")
        for at in range(count)
    ]
    return TenantConfig(Tenant(id="ten_1", name="acme", default_plan_id="pla_1"), (plan,), tuple(policies))


async def _memory_per_tenant(
    database: Database, peppers: Peppers, keys: list[Credential], policies: int = POLICIES
) -> Result:
    """Measure with every policy used once, as in a process that has run for a while."""
    cache = CatalogCache(DatabaseSource(database), peppers)
    await cache.callers.find(keys[0].text)
    gc.collect()
    tracemalloc.start()
    some = keys[1 : min(len(keys), 1_001)]
    for credential in some:
        caller = await cache.callers.find(credential.text)
        for at in range(max(policies, 1)):
            caller.snapshot.select(f"GET:/area{at}/17")
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await cache.close()
    return Result(f"memory of a cached key and tenant, {policies} policies", kept / len(some) / 1_024, "KiB")


def _time_per_call(work: Callable[[], None], count: int, rounds: int) -> Spread:
    took = []
    for _ in range(rounds):
        settle()
        started = time.perf_counter_ns()
        work()
        took.append((time.perf_counter_ns() - started) / 1_000 / count)
    return Spread.of(took)


def _median(result: Result) -> float:
    return result.value.median if isinstance(result.value, Spread) else result.value
