"""Unknown keys are kept away from the database, and valid ones are not."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from itertools import count

import pytest

from limitforge import ManualClock
from limitforge.catalog.credentials import Credential, Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.live.cache import lookup_limiter as lookup_limiter_module
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.cache.entries import Caller
from limitforge.catalog.live.cache.lookup_limiter import LookupLimiter
from limitforge.catalog.live.database_source import DatabaseSource
from limitforge.catalog.model import Key
from limitforge.errors import CatalogUnavailable, TooManyUnknownKeys, UnknownKey
from tests.catalog.environments import one_database
from tests.catalog.replicas import (
    FakeSource,
    add_old_keys,
    cache_of,
    create_account,
    eventually,
    old_credential,
    wrong_key,
)

SECOND_US = 1_000_000


@pytest.fixture
def lookup_limiter(clock: ManualClock) -> LookupLimiter:
    return LookupLimiter(clock=clock)


@pytest.fixture
async def cache(
    database: Database, peppers: Peppers, clock: ManualClock, lookup_limiter: LookupLimiter
) -> AsyncIterator[CatalogCache]:
    cache = cache_of(DatabaseSource(database), peppers, clock, lookup_limiter=lookup_limiter)
    yield cache
    await cache.close()


@pytest.fixture
async def counting(peppers: Peppers, clock: ManualClock, lookup_limiter: LookupLimiter) -> AsyncIterator[CatalogCache]:
    """A cache of an empty source, where only unknown keys are looked up."""
    cache = cache_of(FakeSource(), peppers, clock, lookup_limiter=lookup_limiter)
    yield cache
    await cache.close()


NUMBERS = count()


async def allowed(cache: CatalogCache, source: str, attempts: int) -> int:
    """Send different unknown keys, and return how many of them were looked up."""
    through = 0
    for _ in range(attempts):
        try:
            await cache.callers.find(wrong_key(index=next(NUMBERS)), source)
        except TooManyUnknownKeys:
            continue
        except UnknownKey:
            through += 1
    return through


# --- The count -------------------------------------------------------------------------------------------------------


async def test_a_source_has_a_burst_and_then_so_many_a_second(counting: CatalogCache, clock: ManualClock) -> None:
    assert await allowed(counting, "a", 100) == 5
    through = 0
    for _ in range(100):
        clock.advance_us(SECOND_US // 10)
        through += await allowed(counting, "a", 10)
    assert 19 <= through <= 20


async def test_the_error_for_a_refused_client_has_a_retry_time(counting: CatalogCache, clock: ManualClock) -> None:
    await allowed(counting, "a", 100)
    with pytest.raises(TooManyUnknownKeys) as refused:
        await counting.callers.find(wrong_key(index=next(NUMBERS)), "a")
    assert refused.value.retry_after_ms == 500
    clock.advance_us(refused.value.retry_after_ms * 1_000)
    assert await allowed(counting, "a", 1) == 1


async def test_one_source_does_not_use_up_what_another_has(counting: CatalogCache) -> None:
    await allowed(counting, "a", 100)
    assert await allowed(counting, "b", 100) == 5


async def test_all_sources_together_have_a_bound_of_their_own(counting: CatalogCache, clock: ManualClock) -> None:
    sources = count()
    assert sum([await allowed(counting, str(next(sources)), 1) for _ in range(200)]) == 40
    for _ in range(3):
        clock.advance_us(SECOND_US)
        assert sum([await allowed(counting, str(next(sources)), 1) for _ in range(100)]) == 20


async def test_sources_that_are_remembered_are_bounded(
    counting: CatalogCache, lookup_limiter: LookupLimiter, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_limiter_module, "MAX_CLIENTS", 100)
    for index in range(300):
        clock.advance_us(SECOND_US // 10)
        await allowed(counting, str(index), 1)
    assert len(lookup_limiter._budgets) == 100


# --- What the database sees ------------------------------------------------------------------------------------------


@one_database
async def test_wrong_keys_of_one_source_cost_a_handful_of_queries_a_second(
    database: Database, cache: CatalogCache, clock: ManualClock
) -> None:
    """Of two thousand keys in ten seconds, the first five and then two a second take one query each."""
    before, refused = database.statement_count, 0
    for index in range(2_000):
        clock.advance_us(SECOND_US // 200)
        try:
            await cache.callers.find(wrong_key(index=index), "10.0.0.1")
        except TooManyUnknownKeys:
            refused += 1
        except UnknownKey:
            pass
    assert 23 <= database.statement_count - before <= 25
    assert refused == 2_000 - (database.statement_count - before)


@one_database
async def test_wrong_keys_of_many_sources_cost_a_bounded_number_of_queries(
    database: Database, cache: CatalogCache, clock: ManualClock
) -> None:
    before = database.statement_count
    for index in range(1_000):
        clock.advance_us(SECOND_US // 200)
        with pytest.raises((UnknownKey, TooManyUnknownKeys)):
            await cache.callers.find(wrong_key(index=index), f"10.0.{index // 256 % 256}.{index % 256}")
    assert database.statement_count - before <= 40 + 5 * 20


@one_database
async def test_wrong_keys_all_at_once_cost_no_more_than_one_after_the_other(
    database: Database, cache: CatalogCache
) -> None:
    before = database.statement_count
    texts = [wrong_key(index=index) for index in range(500)]
    answers = await asyncio.gather(*(cache.callers.find(text, "10.0.0.1") for text in texts), return_exceptions=True)
    assert {type(answer) for answer in answers} == {UnknownKey, TooManyUnknownKeys}
    assert database.statement_count - before == 5


@one_database
async def test_the_same_wrong_key_is_looked_up_once_in_a_while(
    database: Database, cache: CatalogCache, clock: ManualClock
) -> None:
    before, text = database.statement_count, wrong_key()
    for _ in range(100):
        with pytest.raises(UnknownKey):
            await cache.callers.find(text, "10.0.0.1")
    assert database.statement_count - before == 1
    clock.advance_us(10 * SECOND_US)
    with pytest.raises(UnknownKey):
        await cache.callers.find(text, "10.0.0.1")
    assert database.statement_count - before == 2


@one_database
async def test_typos_cost_nothing(
    database: Database, catalog: Catalog, cache: CatalogCache, lookup_limiter: LookupLimiter
) -> None:
    account = await create_account(catalog)
    before, chance = database.statement_count, random.Random(1)
    for _ in range(100):
        index = chance.randrange(len(account.text))
        wrong = account.text[:index] + chance.choice("0aZ-") + account.text[index + 1 :]
        if wrong != account.text:
            with pytest.raises(UnknownKey):
                await cache.callers.find(wrong, "10.0.0.1")
    assert database.statement_count == before
    assert await allowed(cache, "10.0.0.1", 100) == 5


@one_database
async def test_a_wrong_secret_of_a_key_that_is_known_costs_nothing(
    database: Database, catalog: Catalog, cache: CatalogCache, peppers: Peppers
) -> None:
    account = await create_account(catalog)
    await cache.callers.find(account.text, "10.0.0.1")
    right = Credential.parse(account.text, peppers)
    others = [old_credential(right.prefix, right.id), Credential.generate(right.prefix, right.id, peppers)]
    before = database.statement_count
    for index in range(100):
        with pytest.raises(UnknownKey):
            await cache.callers.find(others[index % 2].text, "10.0.0.1")
    assert database.statement_count == before


@one_database
async def test_right_keys_of_a_source_that_sent_wrong_ones_come_in(
    catalog: Catalog, cache: CatalogCache, clock: ManualClock
) -> None:
    """Cached keys and keys with a keyed checksum are served at once, others after `retry_after`."""
    account = await create_account(catalog)
    copies, cold, other = await add_old_keys(catalog, account.tenant.id, 3)
    await cache.callers.find(copies, "10.0.0.1")
    await allowed(cache, "10.0.0.1", 100)
    await cache.callers.find(copies, "10.0.0.1")
    await cache.callers.find(account.text, "10.0.0.1")
    await cache.callers.find(cold, "10.0.0.2")
    with pytest.raises(TooManyUnknownKeys) as refused:
        await cache.callers.find(other, "10.0.0.1")
    clock.advance_us(refused.value.retry_after_ms * 1_000)
    await cache.callers.find(other, "10.0.0.1")


@one_database
async def test_right_keys_one_after_the_other_use_nothing_up(catalog: Catalog, cache: CatalogCache) -> None:
    account = await create_account(catalog)
    for text in await add_old_keys(catalog, account.tenant.id, 60):
        await cache.callers.find(text, "10.0.0.1")


@pytest.mark.parametrize("sources", [1, 60], ids=["one source", "many sources"])
@one_database
async def test_right_keys_all_at_once_come_in(
    sources: int, catalog: Catalog, cache: CatalogCache, database: Database
) -> None:
    """A process was just started, and gets all clients of the previous one."""
    account = await create_account(catalog)
    made = await add_old_keys(catalog, account.tenant.id, 60)
    answers = await asyncio.gather(
        *(cache.callers.find(text, f"10.0.0.{index % sources}") for index, text in enumerate(made)),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert not refused, f"{len(refused)} of {len(made)} right keys were refused: {refused[0]!r}"


async def test_wrong_keys_among_right_ones_are_still_counted(peppers: Peppers, clock: ManualClock) -> None:
    """Running lookups may succeed or fail: at most a burst of them fails."""
    source = FakeSource()
    source.add_tenant("acme")
    rights = [source.add_key(peppers, "acme", number, is_old=True)[1] for number in range(50)]
    wrongs = [wrong_key(index=10**9 + index) for index in range(50)]
    cache = cache_of(source, peppers, clock, lookup_limiter=LookupLimiter(clock=clock))
    mixed = [text for pair in zip(rights, wrongs, strict=True) for text in pair]
    answers = await asyncio.gather(*(cache.callers.find(text, "a") for text in mixed), return_exceptions=True)
    assert 1 <= sum(isinstance(answer, UnknownKey) for answer in answers) <= 5
    assert not [answer for answer in answers[1::2] if not isinstance(answer, UnknownKey | TooManyUnknownKeys)]
    await cache.close()


async def test_look_ups_that_the_database_did_not_answer_are_not_held_against_anybody(
    peppers: Peppers, clock: ManualClock
) -> None:
    source = FakeSource()
    source.add_tenant("acme")
    texts = [source.add_key(peppers, "acme", number, is_old=True)[1] for number in range(10)]
    cache = cache_of(source, peppers, clock, lookup_limiter=LookupLimiter(clock=clock))
    source.is_down = True
    for text in texts:
        with pytest.raises(CatalogUnavailable):
            await cache.callers.find(text, "10.0.0.1")
    source.is_down = False
    for text in texts:
        await cache.callers.find(text, "10.0.0.1")
    await eventually(lambda: not cache._flights)
    await cache.close()


# --- Keys that are not limited, and the reserve ----------------------------------------------------------------------

ATTACKERS = [f"192.0.2.{number}" for number in range(20)]


@one_database
async def test_a_key_with_a_keyed_checksum_is_looked_up_at_once_while_others_send_unknown_ones(
    catalog: Catalog, cache: CatalogCache
) -> None:
    account = await create_account(catalog)
    async with catalog.edit("test") as edit:
        made = [await edit.create_key({"tenant_id": account.tenant.id, "name": f"k{index}"}) for index in range(15)]
    for source in (*ATTACKERS, "10.0.0.1"):
        await allowed(cache, source, 20)
    for _, credential in made:
        await cache.callers.find(credential.text, "10.0.0.1")


@one_database
async def test_a_key_that_was_deleted_costs_one_look_up_in_ten_seconds(
    database: Database, catalog: Catalog, cache: CatalogCache, clock: ManualClock
) -> None:
    """The limiter lets it pass, so the cache has to keep it from the database."""
    account = await create_account(catalog)
    async with catalog.edit("test") as edit:
        await edit.delete(Key, account.key.id)
    before = database.statement_count
    for index in range(200):
        clock.advance_us(SECOND_US // 10)
        with pytest.raises(UnknownKey):
            await cache.callers.find(account.text, f"10.0.{index % 2}.1")
    assert database.statement_count - before == 2


async def test_sources_with_failures_leave_half_of_the_common_budget_to_the_others(
    counting: CatalogCache, clock: ManualClock
) -> None:
    first = [await allowed(counting, source, 1) for source in ATTACKERS]
    assert sum(first) == 20, "none of them had failed before"
    assert [await allowed(counting, source, 10) for source in ATTACKERS] == [0] * 20
    assert sum([await allowed(counting, f"10.0.0.{index}", 1) for index in range(40)]) == 20
    clock.advance_us(300 * SECOND_US)
    assert sum([await allowed(counting, source, 1) for source in ATTACKERS]) == 20, "that is forgotten"


@one_database
async def test_an_old_key_of_a_source_without_failures_comes_in_while_many_others_fail(
    catalog: Catalog, cache: CatalogCache, clock: ManualClock
) -> None:
    account = await create_account(catalog)
    texts = await add_old_keys(catalog, account.tenant.id, 45)
    for index in range(3):
        for source in ATTACKERS:
            await allowed(cache, source, 10)
        for text in texts[15 * index : 15 * index + 8]:
            await cache.callers.find(text, "10.0.0.1")
            await allowed(cache, ATTACKERS[index], 10)
        rest = texts[15 * index + 8 : 15 * index + 15]
        await asyncio.gather(*(cache.callers.find(text, "10.0.0.1") for text in rest))
        clock.advance_us(SECOND_US // 2)


async def test_a_refused_source_that_presents_the_id_of_a_key_does_not_keep_its_owner_out(
    peppers: Peppers, clock: ManualClock
) -> None:
    """The id of a key is not secret: with it and the public checksum, an attacker asks for the same row."""
    source = FakeSource()
    source.add_tenant("acme")
    texts = [source.add_key(peppers, "acme", index, is_old=is_old)[1] for index, is_old in ((0, True), (1, False))]
    cache = cache_of(source, peppers, clock, lookup_limiter=LookupLimiter(clock=clock))
    await allowed(cache, "stranger", 10)
    for text in texts:
        forged = old_credential("lf_live_", Credential.parse(text, peppers).id).text
        answers = await asyncio.gather(
            cache.callers.find(forged, "stranger"), cache.callers.find(text, "owner"), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [TooManyUnknownKeys, Caller]
    await cache.close()


@pytest.mark.parametrize(
    ("sources", "has_failed", "most"),
    [
        (1, True, lookup_limiter_module.MAX_LOOKUPS_PER_FAILED_CLIENT),
        (1, False, lookup_limiter_module.MAX_LOOKUPS),
        (50, False, lookup_limiter_module.MAX_LOOKUPS),
    ],
    ids=["one that failed", "one", "many"],
)
async def test_look_ups_that_wait_are_bounded_and_the_rest_is_refused_at_once(
    sources: int, has_failed: bool, most: int, peppers: Peppers, clock: ManualClock, lookup_limiter: LookupLimiter
) -> None:
    """The database answers none of them. There is still room for a key that was issued."""
    source = FakeSource()
    source.add_tenant("acme")
    cache = cache_of(source, peppers, clock, lookup_limiter=lookup_limiter)
    if has_failed:
        with pytest.raises(UnknownKey):
            await cache.callers.find(wrong_key(index=10**9), "s0")
    texts = [wrong_key(index=index) for index in range(most + 300)]
    async with contextlib.AsyncExitStack() as stack:
        for text in texts:
            await stack.enter_async_context(source.held(f"key_{Credential.parse(text, peppers).id}"))
        tasks = [
            asyncio.create_task(cache.callers.find(text, f"s{index % sources}")) for index, text in enumerate(texts)
        ]
        await eventually(lambda: sum(task.done() for task in tasks) >= len(tasks) - most)
        assert sum(not task.done() for task in tasks) == most
        assert len(cache._flights) <= 2 * most
        _, text = source.add_key(peppers, "acme", 10**9)
        await cache.callers.find(text, "s0")
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(answer) for answer in answers} == {UnknownKey, TooManyUnknownKeys}
    assert not lookup_limiter._active
    assert not lookup_limiter._queue_without_failures
    assert not lookup_limiter._queue_with_failures
    await cache.close()


async def test_sources_with_failures_take_half_of_the_places_at_most(
    clock: ManualClock, lookup_limiter: LookupLimiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_limiter_module, "MAX_LOOKUPS", 10)
    waits = asyncio.Event()

    async def found() -> None:
        await waits.wait()

    async def missing() -> None:
        raise UnknownKey("no such key")

    for source in ATTACKERS:
        with pytest.raises(UnknownKey):
            await lookup_limiter.run(source, missing)
    clock.advance_us(SECOND_US)
    failed = [asyncio.create_task(lookup_limiter.run(source, found)) for source in ATTACKERS]
    clean = [asyncio.create_task(lookup_limiter.run(f"10.0.0.{index}", found)) for index in range(20)]
    await eventually(lambda: sum(task.done() for task in failed + clean) == 30)
    waits.set()
    answers = [await asyncio.gather(*tasks, return_exceptions=True) for tasks in (failed, clean)]
    assert [each.count(None) for each in answers] == [5, 5]


async def test_a_wait_that_is_cancelled_as_a_look_up_ends_is_just_cancelled(clock: ManualClock) -> None:
    lookup_limiter, gate = LookupLimiter(clock=clock, max_reads=1), asyncio.Event()
    first, second = (asyncio.create_task(lookup_limiter.run("s", gate.wait)) for _ in range(2))
    await asyncio.sleep(0.01)
    gate.set()  # the first one ends in the next iteration, and wakes the second one, ...
    second.cancel()  # which has stopped waiting by then
    await first
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not lookup_limiter._active


async def test_a_cancelled_lookup_does_not_block_the_queue(lookup_limiter: LookupLimiter) -> None:
    gate, found = asyncio.Event(), []

    async def read(name: int) -> None:
        await gate.wait()
        found.append(name)

    tasks = [asyncio.create_task(lookup_limiter.run("a", lambda name=index: read(name))) for index in range(20)]  # type: ignore[misc]
    await asyncio.sleep(0)
    for task in tasks[5:20:2]:
        task.cancel()
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(found) == [0, 1, 2, 3, 4, *range(6, 20, 2)]
    assert not lookup_limiter._active


async def test_a_wait_for_the_limiter_ends_after_its_time(lookup_limiter: LookupLimiter) -> None:
    gate = asyncio.Event()
    tasks = [asyncio.create_task(lookup_limiter.run("a", gate.wait)) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(CatalogUnavailable):
        await lookup_limiter.run("a", gate.wait, seconds=0.01)
    assert not lookup_limiter._active["a"].queue
    gate.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("source", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff:ffff:ffff:ffff", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::ffff:c000:202", "192.0.2.2"),
        ("not: an address", "not: an address"),
        ("", ""),
    ],
)
def test_the_addresses_of_an_ipv6_network_are_one_source(source: str, network: str) -> None:
    assert lookup_limiter_module.network_of(source) == network


async def test_one_ipv6_network_has_one_budget(counting: CatalogCache) -> None:
    assert sum([await allowed(counting, f"2001:db8::{index:x}", 1) for index in range(100)]) == 5
    assert await allowed(counting, "2001:db8:0:1::1", 1) == 1
