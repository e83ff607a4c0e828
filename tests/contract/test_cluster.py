"""What is particular about a Cluster: slots that move, that nobody has, and limits that lie on several of them."""

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
from limitforge.stores.redis.topology.cross_slot import FinishHold, HoldAction
from limitforge.stores.redis.topology.hash_slots import hash_slot
from tests.topologies import ClusterServer, RedisCluster, query

pytestmark = pytest.mark.slow

EXACT = StoreOptions(failure="raise", deadline_ms=30_000, denial_cache_ms=0)
CLOSED = StoreOptions(failure="closed", deadline_ms=100, denial_cache_ms=0)
FAR_TOO_LONG = 30.0  # no deadline of these tests is near it
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
    """Begin to move a tenant's slot; where to."""
    source = cluster.master_of(slot_of(tenant))
    target = next(master for master in cluster.masters() if master is not source)
    cluster.start_migration(slot_of(tenant), target)
    return target


async def soon(decision: Any) -> Any:
    return await asyncio.wait_for(decision, FAR_TOO_LONG)


# -- limits on several slots


@pytest.mark.parametrize("rate", [1_000, 100_000])
async def test_a_bucket_that_is_full_again_before_it_is_confirmed_was_held_all_the_same(
    cluster: RedisCluster, rate: int
) -> None:
    bucket = TokenBucket(name="bucket", bucket_capacity=10, refill_rate_per_sec=rate)
    async with Limiter.connect(cluster.url, options=EXACT) as limiter:
        allowed = 0
        for number in range(60):
            answers = await asyncio.gather(
                *(limiter.check("r", f"u{number}-{at}", limits=Limits(GLOBAL, bucket)) for at in range(20))
            )
            allowed += sum(answer.allowed for answer in answers)
        assert allowed == 1_000


async def test_a_bucket_that_others_wrote_afresh_before_it_is_confirmed_was_held_all_the_same(
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


async def test_a_window_that_ends_before_it_is_confirmed_was_held_all_the_same(cluster: RedisCluster) -> None:
    edges = FixedWindow(name="edges", limit=10**6, window_seconds="0.02")
    async with Limiter.connect(cluster.url, options=EXACT) as limiter:
        ends = time.monotonic() + 1
        while time.monotonic() < ends:
            answers = await asyncio.gather(
                *(limiter.check("r", f"u{at}", limits=Limits(edges, GLOBAL), cost=0 if at else 1) for at in range(20))
            )
            assert all(answer.allowed or answer.binding == "global" for answer in answers)


def test_what_was_confirmed_goes_back_to_its_own_window_only(cluster: RedisCluster) -> None:
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


async def test_a_caller_that_is_gone_is_charged_nothing_for_good(cluster: RedisCluster) -> None:
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
            look = await limiter.check("r", "s", limits=Limits(GLOBAL, SUBJECT), cost=0)
            if look.limits["global"].remaining == look.limits["subject"].remaining:
                break
            assert time.monotonic() < ends, look
            await asyncio.sleep(0.05)


def test_a_denial_stands_although_another_shard_is_gone(cluster: RedisCluster) -> None:
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


def test_a_long_batch_of_spread_checks_fits_into_its_deadline(cluster: RedisCluster) -> None:
    options = StoreOptions(failure="raise", deadline_ms=5_000, denial_cache_ms=0)
    with SyncLimiter.connect(cluster.url, options=options) as limiter:
        many = [Request(resource="r", subject=f"u{at}", limits=Limits(GLOBAL, SUBJECT)) for at in range(1_100)]
        answers: list[CheckResult] = list(limiter.check_many(many))
        assert sum(isinstance(answer, Decision) and answer.allowed for answer in answers) == 1_000


# -- many slots of one server


def calls(cluster: RedisCluster) -> int:
    """How often the script was called."""
    told = (node.command("INFO commandstats") for node in cluster.servers)
    return sum(int(count) for one in told for count in re.findall(rb"cmdstat_evalsha:calls=(\d+)", one))


async def test_what_waits_for_many_slots_of_a_server_shares_a_call(cluster: RedisCluster) -> None:
    async with Limiter.connect(cluster.url, options=EXACT) as limiter:
        tenants = [f"t{number}" for number in range(90)]
        await asyncio.gather(*(limiter.check("r", "s", limits=SUBJECT, tenant=tenant) for tenant in tenants[:3]))
        before = calls(cluster)
        answers = await asyncio.gather(
            *(limiter.check("r", "s", limits=SUBJECT, tenant=tenant, cost=2) for tenant in tenants)
        )
        assert calls(cluster) - before <= 9  # in halves, and one for who comes too late
        assert [answer.remaining for answer in answers[3:]] == [998] * 87


async def test_a_slot_that_moves_takes_nobody_else_along(cluster: RedisCluster) -> None:
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


async def test_the_script_for_several_slots_is_loaded_again_where_it_was_forgotten(cluster: RedisCluster) -> None:
    async with Limiter.connect(cluster.url, options=EXACT) as limiter:
        tenants = [f"t{number}" for number in range(30)]
        for left in (999, 998, 997):
            answers = await asyncio.gather(*(limiter.check("r", "s", limits=SUBJECT, tenant=t) for t in tenants))
            assert {answer.remaining for answer in answers} == {left}
            for node in cluster.masters():
                node.command_ok("SCRIPT FLUSH")


async def test_a_full_shard_still_denies_and_tells(cluster: RedisCluster) -> None:
    """A Redis that may not write refuses the call for several slots as a whole: each slot is then asked by itself."""
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


async def test_while_keys_are_on_their_way_nobody_waits_longer_than_the_deadline(cluster: RedisCluster) -> None:
    # The deadline is far longer than a check takes on a busy machine: the last one has to be answered by Redis.
    async with Limiter.connect(cluster.url, options=replace(CLOSED, deadline_ms=1_000)) as limiter:
        await limiter.check("r", "s", limits=SUBJECT, tenant="acme")
        moving(cluster, "acme")  # the bucket is here, the overrides are nowhere: TRYAGAIN
        answers = await soon(
            asyncio.gather(*(limiter.check("r", "s", limits=SUBJECT, tenant="acme") for _ in range(5)))
        )
        assert {answer.degraded for answer in answers} == {"closed"}
        other = next(
            f"t{at}" for at in range(100) if cluster.master_of(slot_of(f"t{at}")) is cluster.master_of(slot_of("acme"))
        )
        assert (await limiter.check("r", "s", limits=SUBJECT, tenant=other)).degraded is None
        assert limiter.status().breaker == "closed"


@pytest.mark.parametrize("shell", ["async", "sync"])
async def test_a_server_that_nobody_has_spoken_to_is_asked_for_what_moves_to_it(
    cluster: RedisCluster, shell: str
) -> None:
    """A limit of one key that does not exist yet is decided where the slot goes to: ASK."""
    moving(cluster, "acme")
    options = StoreOptions(failure="raise", deadline_ms=5_000, denial_cache_ms=0)
    if shell == "sync":
        with SyncLimiter.connect(cluster.url, options=options) as blocking:
            left = [blocking.check("r", "s", limits=TENANT, tenant="acme").remaining for _ in range(3)]
    else:
        async with Limiter.connect(cluster.url, options=options) as limiter:
            left = [(await soon(limiter.check("r", "s", limits=TENANT, tenant="acme"))).remaining for _ in range(3)]
    assert left == [999, 998, 997]


async def test_a_caller_that_is_gone_when_its_slot_moves_harms_nobody(cluster: RedisCluster) -> None:
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


# -- what is set up wrong


@pytest.mark.parametrize("shell", ["async", "sync"])
async def test_one_node_of_a_cluster_as_if_it_were_alone_is_an_error_that_says_so(
    cluster: RedisCluster, shell: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = cluster.masters()[0]
    url = f"redis://127.0.0.1:{node.port}/0"
    tenants = [f"t{at}" for at in range(50) if cluster.master_of(slot_of(f"t{at}")) is not node][:5]
    options = StoreOptions(failure="closed", deadline_ms=1_000, denial_cache_ms=0)
    if shell == "sync":
        with SyncLimiter.connect(url, options=options) as blocking:
            answers = [blocking.check("r", "s", limits=SUBJECT, tenant=tenant) for tenant in tenants]
    else:
        async with Limiter.connect(url, options=options) as limiter:
            answers = [await soon(limiter.check("r", "s", limits=SUBJECT, tenant=tenant)) for tenant in tenants]
    assert {answer.degraded for answer in answers} == {"closed"}
    assert "redis+cluster://" in caplog.text


@pytest.mark.parametrize("shell", ["async", "sync"])
async def test_a_slot_that_nobody_has_is_not_looked_for_all_the_time(shell: str) -> None:
    with RedisCluster(masters=3, replicas=0) as cluster:
        slot = slot_of("acme")
        for node in cluster.servers:
            query(node, "CLUSTER", "DELSLOTS", slot)
        before = connections(cluster)
        if shell == "sync":
            with SyncLimiter.connect(cluster.url, options=CLOSED) as blocking:
                answers = [blocking.check("r", "s", limits=SUBJECT, tenant="acme") for _ in range(20)]
        else:
            async with Limiter.connect(cluster.url, options=CLOSED) as limiter:
                answers = [await soon(limiter.check("r", "s", limits=SUBJECT, tenant="acme")) for _ in range(20)]
        assert {answer.degraded for answer in answers} == {"closed"}
        assert connections(cluster) - before < 60


def connections(cluster: RedisCluster) -> int:
    """How many were ever opened."""
    told = (node.command("INFO stats") for node in cluster.servers)
    return sum(int(re.findall(rb"total_connections_received:(\d+)", one)[0]) for one in told)


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
