"""Wrong keys are kept away from the database, and right ones are not."""

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import count

import pytest

from limitforge import ManualClock
from limitforge.catalog import guard as guards
from limitforge.catalog.cache import Snapshots
from limitforge.catalog.catalog import Catalog
from limitforge.catalog.credentials import Credential, Peppers
from limitforge.catalog.database import Database
from limitforge.catalog.guard import Guard
from limitforge.catalog.sources import DatabaseSource
from limitforge.errors import CatalogUnavailable, TooManyUnknownKeys, UnknownKey
from tests.catalog.live import FakeSource, eventually, open_account, remembering, wrong_key

SECOND_US = 1_000_000


@pytest.fixture
def guard(clock: ManualClock) -> Guard:
    return Guard(clock=clock)


@pytest.fixture
async def snapshots(database: Database, peppers: Peppers, clock: ManualClock, guard: Guard) -> AsyncIterator[Snapshots]:
    snapshots = remembering(DatabaseSource(database), peppers, clock, guard=guard)
    yield snapshots
    await snapshots.close()


@pytest.fixture
async def counting(peppers: Peppers, clock: ManualClock, guard: Guard) -> AsyncIterator[Snapshots]:
    """On a database in memory, where nothing but wrong keys is looked up."""
    snapshots = remembering(FakeSource(), peppers, clock, guard=guard)
    yield snapshots
    await snapshots.close()


NUMBERS = count()


async def allowed(snapshots: Snapshots, source: str, attempts: int) -> int:
    """How many of these wrong keys, each another one, are looked up."""
    through = 0
    for _ in range(attempts):
        try:
            await snapshots.find(wrong_key(at=next(NUMBERS)), source)
        except TooManyUnknownKeys:
            continue
        except UnknownKey:
            through += 1
    return through


# --- The count -------------------------------------------------------------------------------------------------------


async def test_a_source_has_a_burst_and_then_so_many_a_second(counting: Snapshots, clock: ManualClock) -> None:
    assert await allowed(counting, "a", 100) == 5
    through = 0
    for _ in range(100):
        clock.advance_us(SECOND_US // 10)
        through += await allowed(counting, "a", 10)
    assert 19 <= through <= 20


async def test_a_refused_source_is_told_when_it_may_try_again(counting: Snapshots, clock: ManualClock) -> None:
    await allowed(counting, "a", 100)
    with pytest.raises(TooManyUnknownKeys) as refused:
        await counting.find(wrong_key(at=next(NUMBERS)), "a")
    assert refused.value.retry_after_ms == 500
    clock.advance_us(refused.value.retry_after_ms * 1_000)
    assert await allowed(counting, "a", 1) == 1


async def test_one_source_does_not_use_up_what_another_has(counting: Snapshots) -> None:
    await allowed(counting, "a", 100)
    assert await allowed(counting, "b", 100) == 5


async def test_all_sources_together_have_a_bound_of_their_own(counting: Snapshots, clock: ManualClock) -> None:
    sources = count()
    assert sum([await allowed(counting, str(next(sources)), 1) for _ in range(200)]) == 40
    for _ in range(10):
        clock.advance_us(SECOND_US)
        assert sum([await allowed(counting, str(next(sources)), 1) for _ in range(100)]) == 20


async def test_sources_that_are_remembered_are_bounded(
    counting: Snapshots, guard: Guard, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "MAX_SOURCES", 100)
    for at in range(300):
        clock.advance_us(SECOND_US // 10)
        await allowed(counting, str(at), 1)
    assert len(guard._sources) == 100


# --- What the database sees ------------------------------------------------------------------------------------------


async def test_wrong_keys_of_one_source_cost_a_handful_of_queries_a_second(
    database: Database, snapshots: Snapshots, clock: ManualClock
) -> None:
    """Ten thousand of them in ten seconds: one query each for the first five and then for two a second."""
    before, refused = database.statements, 0
    for at in range(10_000):
        clock.advance_us(SECOND_US // 1_000)
        try:
            await snapshots.find(wrong_key(at=at), "10.0.0.1")
        except TooManyUnknownKeys:
            refused += 1
        except UnknownKey:
            pass
    assert 23 <= database.statements - before <= 25
    assert refused == 10_000 - (database.statements - before)


async def test_wrong_keys_of_many_sources_cost_a_bounded_number_of_queries(
    database: Database, snapshots: Snapshots, clock: ManualClock
) -> None:
    before = database.statements
    for at in range(10_000):
        clock.advance_us(SECOND_US // 1_000)
        with pytest.raises((UnknownKey, TooManyUnknownKeys)):
            await snapshots.find(wrong_key(at=at), f"10.0.{at // 256 % 256}.{at % 256}")
    assert database.statements - before <= 40 + 10 * 20


async def test_wrong_keys_all_at_once_cost_no_more_than_one_after_the_other(
    database: Database, snapshots: Snapshots
) -> None:
    before = database.statements
    texts = [wrong_key(at=at) for at in range(2_000)]
    answers = await asyncio.gather(*(snapshots.find(text, "10.0.0.1") for text in texts), return_exceptions=True)
    assert {type(answer) for answer in answers} == {UnknownKey, TooManyUnknownKeys}
    assert database.statements - before == 5


async def test_the_same_wrong_key_is_looked_up_once_in_a_while(
    database: Database, snapshots: Snapshots, clock: ManualClock
) -> None:
    before, text = database.statements, wrong_key()
    for _ in range(1_000):
        with pytest.raises(UnknownKey):
            await snapshots.find(text, "10.0.0.1")
    assert database.statements - before == 1
    clock.advance_us(10 * SECOND_US)
    with pytest.raises(UnknownKey):
        await snapshots.find(text, "10.0.0.1")
    assert database.statements - before == 2


async def test_typos_cost_nothing(database: Database, catalog: Catalog, snapshots: Snapshots, guard: Guard) -> None:
    account = await open_account(catalog)
    before, chance = database.statements, random.Random(1)
    for _ in range(500):
        at = chance.randrange(len(account.text))
        wrong = account.text[:at] + chance.choice("0aZ-") + account.text[at + 1 :]
        if wrong != account.text:
            with pytest.raises(UnknownKey):
                await snapshots.find(wrong, "10.0.0.1")
    assert database.statements == before
    assert await allowed(snapshots, "10.0.0.1", 100) == 5


async def test_a_wrong_secret_of_a_key_that_is_known_costs_nothing(
    database: Database, catalog: Catalog, snapshots: Snapshots
) -> None:
    account = await open_account(catalog)
    await snapshots.find(account.text, "10.0.0.1")
    right = Credential.read(account.text)
    before = database.statements
    for _ in range(100):
        with pytest.raises(UnknownKey):
            await snapshots.find(Credential.make(right.prefix, right.id).text, "10.0.0.1")
    assert database.statements == before


async def test_right_keys_of_a_source_that_sent_wrong_ones_come_in(
    catalog: Catalog, snapshots: Snapshots, clock: ManualClock
) -> None:
    """Those that are known at once, the others as soon as it was told."""
    warm, cold = await open_account(catalog, "warm"), await open_account(catalog, "cold")
    await snapshots.find(warm.text, "10.0.0.1")
    for at in range(100):
        with pytest.raises((UnknownKey, TooManyUnknownKeys)):
            await snapshots.find(wrong_key(at=at), "10.0.0.1")
    await snapshots.find(warm.text, "10.0.0.1")
    await snapshots.find(cold.text, "10.0.0.2")
    other = await open_account(catalog, "other")
    with pytest.raises(TooManyUnknownKeys) as refused:
        await snapshots.find(other.text, "10.0.0.1")
    clock.advance_us(refused.value.retry_after_ms * 1_000)
    await snapshots.find(other.text, "10.0.0.1")


async def test_right_keys_one_after_the_other_use_nothing_up(catalog: Catalog, snapshots: Snapshots) -> None:
    account = await open_account(catalog)
    async with catalog.edit("test") as edit:
        made = [await edit.create_key({"tenant_id": account.tenant.id, "name": f"k{at}"}) for at in range(60)]
    for _, credential in made:
        await snapshots.find(credential.text, "10.0.0.1")


@pytest.mark.parametrize("sources", [1, 60], ids=["one source", "many sources"])
async def test_right_keys_all_at_once_come_in(
    sources: int, catalog: Catalog, snapshots: Snapshots, database: Database
) -> None:
    """A node that was just started, with whoever was connected to the one before."""
    account = await open_account(catalog)
    async with catalog.edit("test") as edit:
        made = [await edit.create_key({"tenant_id": account.tenant.id, "name": f"k{at}"}) for at in range(60)]
    answers = await asyncio.gather(
        *(snapshots.find(each.text, f"10.0.0.{at % sources}") for at, (_, each) in enumerate(made)),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert not refused, f"{len(refused)} of {len(made)} right keys were refused: {refused[0]!r}"


async def test_wrong_keys_among_right_ones_are_still_counted(peppers: Peppers, clock: ManualClock) -> None:
    """Look-ups that are under way may turn out either way: the wrong ones are no more than the burst."""
    source = FakeSource()
    source.add_tenant("acme")
    rights = [source.add_key(peppers, "acme", number)[1] for number in range(50)]
    wrongs = [wrong_key(at=10**9 + at) for at in range(50)]
    snapshots = remembering(source, peppers, clock, guard=Guard(clock=clock))
    mixed = [text for pair in zip(rights, wrongs, strict=True) for text in pair]
    answers = await asyncio.gather(*(snapshots.find(text, "a") for text in mixed), return_exceptions=True)
    assert sum(isinstance(answer, UnknownKey) for answer in answers) <= 5
    await snapshots.close()


async def test_look_ups_that_the_database_did_not_answer_are_not_held_against_anybody(
    peppers: Peppers, clock: ManualClock
) -> None:
    source = FakeSource()
    source.add_tenant("acme")
    texts = [source.add_key(peppers, "acme", number)[1] for number in range(10)]
    snapshots = remembering(source, peppers, clock, guard=Guard(clock=clock))
    source.is_down = True
    for text in texts:
        with pytest.raises(CatalogUnavailable):
            await snapshots.find(text, "10.0.0.1")
    source.is_down = False
    for text in texts:
        await snapshots.find(text, "10.0.0.1")
    await eventually(lambda: not snapshots._flights)
    await snapshots.close()
