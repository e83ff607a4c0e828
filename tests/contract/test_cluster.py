"""Slots of a Cluster that move or have no owner, and limits that lie in several slots."""

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from limitforge import Decision, FixedWindow, Limiter, Limits, Request, StoreOptions, SyncLimiter, TokenBucket
from limitforge.core.check import build_check
from limitforge.core.decision import CheckResult
from limitforge.stores.redis.multi_step.cross_slot import FinishHold, HoldAction
from limitforge.stores.redis.topology.hash_slots import hash_slot
from tests.topologies import ClusterServer, RedisCluster, query

pytestmark = pytest.mark.slow

EXACT = StoreOptions(failure="raise", deadline_ms=30_000, denial_cache_ms=0)
CLOSED = StoreOptions(failure="closed", deadline_ms=100, denial_cache_ms=0)
FAR_TOO_LONG = 30.0  # much longer than any deadline of these tests
DAY = 86_400
SUBJECT = FixedWindow(name="subject", limit=1_000, window_seconds=DAY)
TENANT = FixedWindow(name="tenant", limit=1_000, window_seconds=DAY, scope="tenant")
GLOBAL = FixedWindow(name="global", limit=1_000, window_seconds=DAY, scope="global")


@pytest.fixture
def cluster(cluster_servers: RedisCluster) -> Iterator[RedisCluster]:
    cluster_servers.flush()
    yield cluster_servers
    cluster_servers.heal()


def slot_of(tenant: str) -> int:
    return hash_slot(f"{{{tenant}}}")


def moving(cluster: RedisCluster, tenant: str) -> ClusterServer:
    """Start to move a tenant's slot. Return its target."""
    source = cluster.master_of(slot_of(tenant))
    target = next(master for master in cluster.masters() if master is not source)
    cluster.start_migration(slot_of(tenant), target)
    return target


async def soon(decision: Any) -> Any:
    return await asyncio.wait_for(decision, FAR_TOO_LONG)


# -- limits on several slots


@pytest.mark.parametrize("rate", [1_000, 100_000])
async def test_a_hold_is_confirmed_after_its_bucket_is_full_again(cluster: RedisCluster, rate: int) -> None:
    bucket = TokenBucket(name="bucket", bucket_capacity=10, refill_rate_per_sec=rate)
    async with Limiter.connect(cluster.url, options=EXACT) as limiter:
        allowed = 0
        for number in range(60):
            answers = await asyncio.gather(
                *(limiter.check("r", f"u{number}-{at}", limits=Limits(GLOBAL, bucket)) for at in range(20))
            )
            allowed += sum(answer.allowed for answer in answers)
        assert allowed == 1_000


async def test_a_hold_is_confirmed_after_others_started_its_bucket_again(
    cluster: RedisCluster,
) -> None:
    fast = [
        TokenBucket(name=scope, bucket_capacity=1_000, refill_rate_per_sec=100_000, scope=scope)
        for scope in ("tenant", "global")
    ]
    async with Limiter.connect(cluster.url, options=EXACT) as limiter:

        async def ask_on(number: int) -> int:
            return sum([(await limiter.check("r", f"u{number}", limits=Limits(*fast))).allowed for _ in range(100)])

        assert await asyncio.gather(*map(ask_on, range(8))) == [100] * 8


async def test_a_hold_is_confirmed_after_its_window_has_ended(cluster: RedisCluster) -> None:
    edges = FixedWindow(name="edges", limit=10**6, window_seconds="0.02")
    async with Limiter.connect(cluster.url, options=EXACT) as limiter:
        ends = time.monotonic() + 1
        while time.monotonic() < ends:
            answers = await asyncio.gather(
                *(limiter.check("r", f"u{at}", limits=Limits(edges, GLOBAL), cost=0 if at else 1) for at in range(20))
            )
            assert all(answer.allowed or answer.binding == "global" for answer in answers)


def test_an_undone_confirmation_affects_only_its_own_window(cluster: RedisCluster) -> None:
    short = FixedWindow(name="short", limit=10, window_seconds="0.3")
    with SyncLimiter.connect(cluster.url, options=EXACT) as limiter:
        store = cast("Any", limiter._store)
        _, key, *_ = build_check(store.keys, Limits(short), "r", "s", 1, None, "default", "P0").debits[0]
        decision = limiter.check("r", "s", limits=short, cost=5)
        time.sleep((decision.reset_after_ms or 0) / 1_000 + 0.002)
        assert limiter.check("r", "s", limits=short, cost=10).allowed
        undo = FinishHold(HoldAction.UNDO_CONFIRM, b"01234567", [key], [False], amounts=[5], sources=[(1, 0)])
        store._flows.run_steps([undo], time.monotonic() + 10)
        assert limiter.check("r", "s", limits=short, cost=0).remaining in (0, 10)  # or the next window has begun


async def test_a_cancelled_check_is_not_charged_for_good(cluster: RedisCluster) -> None:
    async with Limiter.connect(cluster.url, options=EXACT) as limiter:
        await limiter.check("r", "s", limits=Limits(GLOBAL, SUBJECT))
        for _ in range(20):
            gone = asyncio.ensure_future(limiter.check("r", "s", limits=Limits(GLOBAL, SUBJECT)))
            await asyncio.sleep(0.0003)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        await asyncio.sleep(6)  # what is held for a check that is never confirmed lapses after five seconds
        ends = time.monotonic() + 30
        while True:
            peek = await limiter.check("r", "s", limits=Limits(GLOBAL, SUBJECT), cost=0)
            if peek.limits["global"].remaining == peek.limits["subject"].remaining:
                break
            assert time.monotonic() < ends, peek
            await asyncio.sleep(0.05)


def test_a_denial_is_final_although_another_shard_is_unavailable(cluster: RedisCluster) -> None:
    blocked = FixedWindow(name="blocked", limit=0, window_seconds=DAY, scope="global")
    dead = next(master for master in cluster.masters() if master is not cluster.master_of(hash_slot("{%}")))
    options = StoreOptions(failure="open", deadline_ms=100, denial_cache_ms=0)
    with SyncLimiter.connect(cluster.url, options=options) as limiter:
        tenants = [f"t{number}" for number in range(200)]
        tenant = next(t for t in tenants if cluster.master_of(slot_of(t)) is dead)
        limiter.check("r", "s", limits=Limits(SUBJECT, blocked), tenant=tenant)
        dead.pause()
        try:
            decision = limiter.check("r", "s", limits=Limits(SUBJECT, blocked), tenant=tenant)
        finally:
            dead.resume()
        assert (decision.allowed, decision.binding, decision.degraded) == (False, "blocked", None)


def test_a_long_batch_of_cross_slot_checks_fits_into_its_deadline(cluster: RedisCluster) -> None:
    options = StoreOptions(failure="raise", deadline_ms=5_000, denial_cache_ms=0)
    with SyncLimiter.connect(cluster.url, options=options) as limiter:
        many = [Request(resource="r", subject=f"u{at}", limits=Limits(GLOBAL, SUBJECT)) for at in range(1_100)]
        answers: list[CheckResult] = list(limiter.check_many(many))
        assert sum(isinstance(answer, Decision) and answer.allowed for answer in answers) == 1_000


# -- many slots of one server


def calls(cluster: RedisCluster) -> int:
    """Return how many calls of the script all servers have counted."""
    replies = (server.command("INFO commandstats") for server in cluster.servers)
    return sum(int(count) for reply in replies for count in re.findall(rb"cmdstat_evalsha:calls=(\d+)", reply))


async def test_checks_of_many_slots_of_a_server_share_a_call(cluster: RedisCluster) -> None:
    async with Limiter.connect(cluster.url, options=EXACT) as limiter:
        tenants = [f"t{number}" for number in range(90)]
        await asyncio.gather(*(limiter.check("r", "s", limits=SUBJECT, tenant=tenant) for tenant in tenants[:3]))
        before = calls(cluster)
        answers = await asyncio.gather(
            *(limiter.check("r", "s", limits=SUBJECT, tenant=tenant, cost=2) for tenant in tenants)
        )
        assert calls(cluster) - before <= 9  # in halves, and one for late checks
        assert [answer.remaining for answer in answers[3:]] == [998] * 87


async def test_a_slot_that_moves_affects_no_other_slot(cluster: RedisCluster) -> None:
    options = StoreOptions(failure="closed", deadline_ms=2_000, denial_cache_ms=0)
    async with Limiter.connect(cluster.url, options=options) as limiter:
        tenants = [f"t{number}" for number in range(60)]
        await limiter.check("r", "s", limits=SUBJECT, tenant="acme")
        moving(cluster, "acme")
        for _ in range(3):
            asked = asyncio.ensure_future(limiter.check("r", "s", limits=SUBJECT, tenant="acme"))
            answers = await asyncio.gather(*(limiter.check("r", "s", limits=TENANT, tenant=t) for t in tenants))
            assert {answer.degraded for answer in answers} == {None}
            asked.cancel()
        assert (await limiter.check("r", "s", limits=TENANT, tenant="t0", cost=0)).remaining == 997


async def test_the_multi_slot_script_is_loaded_again_where_it_is_missing(cluster: RedisCluster) -> None:
    async with Limiter.connect(cluster.url, options=EXACT) as limiter:
        tenants = [f"t{number}" for number in range(30)]
        for left in (999, 998, 997):
            answers = await asyncio.gather(*(limiter.check("r", "s", limits=SUBJECT, tenant=t) for t in tenants))
            assert {answer.remaining for answer in answers} == {left}
            for node in cluster.masters():
                node.command_ok("SCRIPT FLUSH")


async def test_a_full_shard_still_denies_and_answers_peeks(cluster: RedisCluster) -> None:
    """A Redis that can't write refuses a multi-slot call as a whole. The client then repeats it for each slot."""
    options = StoreOptions(failure="closed", deadline_ms=5_000, denial_cache_ms=0)
    async with Limiter.connect(cluster.url, options=options) as limiter:
        tenants = [f"t{number}" for number in range(30)]
        await asyncio.gather(*(limiter.check("r", "s", limits=SUBJECT, tenant=t, cost=1_000) for t in tenants))
        for node in cluster.masters():
            node.command_ok("CONFIG SET maxmemory 1")
        try:
            answers = await asyncio.gather(*(limiter.check("r", "s", limits=SUBJECT, tenant=t) for t in tenants))
        finally:
            for node in cluster.masters():
                node.command_ok("CONFIG SET maxmemory 0")
        assert {(answer.allowed, answer.degraded) for answer in answers} == {(False, None)}


# -- slots that move


async def test_while_keys_migrate_no_caller_waits_longer_than_the_deadline(cluster: RedisCluster) -> None:
    # The deadline is far longer than a check takes on a busy machine: Redis has to answer the last one.
    async with Limiter.connect(cluster.url, options=replace(CLOSED, deadline_ms=1_000)) as limiter:
        await limiter.check("r", "s", limits=SUBJECT, tenant="acme")
        moving(cluster, "acme")  # the bucket is on the source, the overrides do not exist: TRYAGAIN
        answers = await soon(
            asyncio.gather(*(limiter.check("r", "s", limits=SUBJECT, tenant="acme") for _ in range(5)))
        )
        assert {answer.degraded for answer in answers} == {"closed"}
        other = next(
            f"t{at}" for at in range(100) if cluster.master_of(slot_of(f"t{at}")) is cluster.master_of(slot_of("acme"))
        )
        assert (await limiter.check("r", "s", limits=SUBJECT, tenant=other)).degraded is None
        assert limiter.status().breaker == "closed"


@pytest.mark.parametrize("api", ["async", "sync"])
async def test_a_server_without_a_connection_gets_the_checks_of_a_slot_that_moves_to_it(
    cluster: RedisCluster, api: str
) -> None:
    """A check of one key that does not exist yet is decided on the target of the slot: ASK."""
    moving(cluster, "acme")
    options = StoreOptions(failure="raise", deadline_ms=5_000, denial_cache_ms=0)
    if api == "sync":
        with SyncLimiter.connect(cluster.url, options=options) as blocking:
            left = [blocking.check("r", "s", limits=TENANT, tenant="acme").remaining for _ in range(3)]
    else:
        async with Limiter.connect(cluster.url, options=options) as limiter:
            left = [(await soon(limiter.check("r", "s", limits=TENANT, tenant="acme"))).remaining for _ in range(3)]
    assert left == [999, 998, 997]


async def test_a_check_that_is_cancelled_while_its_slot_moves_affects_no_other(cluster: RedisCluster) -> None:
    options = StoreOptions(failure="raise", deadline_ms=5_000, denial_cache_ms=0)
    async with Limiter.connect(cluster.url, options=options) as limiter:
        left = (await limiter.check("r", "s", limits=SUBJECT, tenant="other")).remaining
        moving(cluster, "acme")
        for number in range(1, 21):
            gone = asyncio.ensure_future(limiter.check("r", "s", limits=TENANT, tenant="acme"))
            await asyncio.sleep(0.0002)
            gone.cancel()
            decision = await soon(limiter.check("r", "s", limits=SUBJECT, tenant="other"))
            assert (decision.allowed, decision.remaining) == (True, (left or 0) - number)


# -- misconfiguration


@pytest.mark.parametrize("api", ["async", "sync"])
async def test_the_url_of_a_single_server_for_a_cluster_is_an_error_that_says_so(
    cluster: RedisCluster, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = cluster.masters()[0]
    url = f"redis://127.0.0.1:{node.port}/0"
    tenants = [f"t{at}" for at in range(50) if cluster.master_of(slot_of(f"t{at}")) is not node][:5]
    options = StoreOptions(failure="closed", deadline_ms=1_000, denial_cache_ms=0)
    if api == "sync":
        with SyncLimiter.connect(url, options=options) as blocking:
            answers = [blocking.check("r", "s", limits=SUBJECT, tenant=tenant) for tenant in tenants]
    else:
        async with Limiter.connect(url, options=options) as limiter:
            answers = [await soon(limiter.check("r", "s", limits=SUBJECT, tenant=tenant)) for tenant in tenants]
    assert {answer.degraded for answer in answers} == {"closed"}
    assert "redis+cluster://" in caplog.text


@pytest.mark.parametrize("api", ["async", "sync"])
async def test_an_uncovered_slot_does_not_cause_a_discovery_for_each_check(api: str) -> None:
    with RedisCluster(masters=3, replicas=0) as cluster:
        slot = slot_of("acme")
        for node in cluster.servers:
            query(node, "CLUSTER", "DELSLOTS", slot)
        before = connections(cluster)
        if api == "sync":
            with SyncLimiter.connect(cluster.url, options=CLOSED) as blocking:
                answers = [blocking.check("r", "s", limits=SUBJECT, tenant="acme") for _ in range(20)]
        else:
            async with Limiter.connect(cluster.url, options=CLOSED) as limiter:
                answers = [await soon(limiter.check("r", "s", limits=SUBJECT, tenant="acme")) for _ in range(20)]
        assert {answer.degraded for answer in answers} == {"closed"}
        assert connections(cluster) - before < 60


def connections(cluster: RedisCluster) -> int:
    """Return how many connections all servers have ever accepted."""
    replies = (server.command("INFO stats") for server in cluster.servers)
    return sum(int(re.findall(rb"total_connections_received:(\d+)", reply)[0]) for reply in replies)


async def test_a_check_that_takes_what_the_store_told_is_told_of_a_candidate_on_another_shard(
    cluster: RedisCluster,
) -> None:
    async with Limiter.connect(cluster.url, options=EXACT) as limiter:
        plan = Limits(FixedWindow(name="own", limit=10, window_seconds=DAY))
        prepared = limiter.prepare("r", limits=plan, tenant="acme", shadow=GLOBAL)
        for left in (9, 8):
            result: asyncio.Future[CheckResult] = asyncio.get_running_loop().create_future()
            limiter.submit_prepared(prepared.bind("s"), result.set_result)
            decision = await soon(result)
            assert isinstance(decision, Decision)
            assert decision.remaining == left
            assert decision.shadow is not None
            assert decision.shadow.remaining == 990 + left
