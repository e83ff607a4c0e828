"""The usage recorder: counts are added up by the hour, kept during an outage of the database, and pruned."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from limitforge import ManualClock
from limitforge.catalog.database import service_records
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.service_records import StoredResponse, UsageRow
from limitforge.catalog.model import to_datetime
from limitforge.service.admin.usage_recorder import UsageRecorder
from limitforge.service.counters.process_counters import KeyUsage, ProcessCounters

HOUR_US = 3_600_000_000
FIRST = datetime(2023, 11, 15, 0, tzinfo=UTC)  # the start of a manual clock


class FakeCounters(ProcessCounters):
    """Counters whose result the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[KeyUsage] = []

    def drain(self) -> list[KeyUsage]:
        drained, self.waiting = self.waiting, []
        return drained


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    sqlite = f"sqlite:///{tmp_path}/usage.db"
    database = Database(sqlite if request.param == "sqlite" else request.getfixturevalue("postgres_url"))
    await database.upgrade()
    yield database
    await database.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def counters() -> FakeCounters:
    return FakeCounters()


async def rows(database: Database, **query: Any) -> list[UsageRow]:
    async with database.reading() as connection:
        return (await service_records.usage_page(connection, None, 1_000, **query)).items


async def test_counts_of_an_hour_are_added_up(database: Database, counters: FakeCounters, clock: ManualClock) -> None:
    log, other = UsageRecorder(database, counters, clock=clock), UsageRecorder(database, counters, clock=clock)
    for each, used in ((log, (1, 2, 3, 4)), (other, (10, 20, 30, 40)), (log, (100, 0, 0, 0))):
        counters.waiting = [KeyUsage("ten_a", "key_a", *used)]
        await each.flush()
    clock.advance_us(HOUR_US)
    counters.waiting = [KeyUsage("ten_a", "key_a", 7, 0, 0, 0), KeyUsage("ten_b", "key_b", 0, 1, 0, 0)]
    await log.flush()
    assert await rows(database) == [
        UsageRow(FIRST + timedelta(hours=1), "ten_a", "key_a", 7, 0, 0, 0),
        UsageRow(FIRST + timedelta(hours=1), "ten_b", "key_b", 0, 1, 0, 0),
        UsageRow(FIRST, "ten_a", "key_a", 111, 22, 33, 44),
    ]
    assert len(await rows(database, tenant_id="ten_b")) == 1
    assert len(await rows(database, since=FIRST + timedelta(hours=1))) == 2
    assert len(await rows(database, until=FIRST + timedelta(hours=1))) == 1


async def test_a_page_of_usage_continues_after_the_previous_one(
    database: Database, counters: FakeCounters, clock: ManualClock
) -> None:
    log = UsageRecorder(database, counters, clock=clock)
    for _ in range(3):
        counters.waiting = [KeyUsage(f"ten_{a}", f"key_{b}", 1, 0, 0, 0) for a in range(3) for b in range(2)]
        await log.flush()
        clock.advance_us(HOUR_US)
    found: list[UsageRow] = []
    cursor: str | None = None
    async with database.reading() as connection:
        while True:
            page = await service_records.usage_page(connection, cursor, 4)
            found += page.items
            cursor = page.cursor
            if cursor is None:
                break
    assert found == await rows(database)
    assert len(found) == 18


async def test_nothing_is_lost_while_the_database_is_away(
    database: Database, counters: FakeCounters, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    used = {"tok_a": to_datetime(clock.now_us())}
    log = UsageRecorder(database, counters, take_last_used=lambda: dict(used), clock=clock)
    async with database.writing() as connection:
        await connection.execute(text("ALTER TABLE usage RENAME TO gone"))
    for _ in range(3):
        counters.waiting = [KeyUsage("ten_a", "key_a", 1, 0, 0, 0)]
        await log.flush()
        clock.advance_us(HOUR_US)
    assert "usage.write_failed" in caplog.text
    async with database.writing() as connection:
        await connection.execute(text("ALTER TABLE gone RENAME TO usage"))
    await log.flush()
    assert [row.allowed for row in await rows(database)] == [1, 1, 1]


async def test_old_rows_are_removed(database: Database, counters: FakeCounters, clock: ManualClock) -> None:
    log = UsageRecorder(database, counters, clock=clock)
    for _ in range(3):
        counters.waiting = [KeyUsage("ten_a", "key_a", 1, 0, 0, 0)]
        await log.flush()
        clock.advance_us(10 * 24 * HOUR_US)
    creation = StoredResponse("f", 201, {"id": "x"})
    now = to_datetime(clock.now_us())
    async with database.writing() as connection:
        await service_records.add_stored_response(connection, "tok_a", "old", creation, now - timedelta(hours=24))
        await service_records.add_stored_response(connection, "tok_a", "new", creation, now - timedelta(hours=23))
    clock.advance_us(24 * 60_000_000)
    await log.flush()
    assert len(await rows(database)) == 2
    async with database.reading() as connection:
        long_ago = now - timedelta(days=9)
        assert await service_records.find_stored_response(connection, "tok_a", "old", long_ago) is None
        assert await service_records.find_stored_response(connection, "tok_a", "new", long_ago) == creation


async def test_an_idempotency_key_is_free_again_after_a_day(database: Database) -> None:
    now = FIRST
    async with database.writing() as connection:
        await service_records.add_stored_response(connection, "tok_a", "k", StoredResponse("f", 201, {"id": "x"}), now)
        since = now
        assert await service_records.find_stored_response(connection, "tok_a", "k", since) is None
        later = StoredResponse("g", 201, {"id": "y"})
        await service_records.add_stored_response(connection, "tok_a", "k", later, now + timedelta(days=1))
        assert await service_records.find_stored_response(connection, "tok_a", "k", since) == later
        assert await service_records.find_stored_response(connection, "tok_b", "k", since) is None
