"""The catalog while its database and its Redis are stopped, killed and frozen under load; how long everything takes.

Nothing here asserts how long: what was measured is in the report (`--junitxml`), as properties of each test.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from statistics import median
from typing import Any, Self

import pytest

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.live.live_catalog import LiveCatalog
from limitforge.errors import CatalogUnavailable, Forbidden, LimitforgeError, StoreUnavailable
from limitforge.stores.redis.catalog_redis import ServerMemory
from tests import run_report
from tests.catalog.conftest import PEPPERS
from tests.catalog.live.test_processes import cut_listeners, format_delays
from tests.catalog.replicas import (
    Account,
    Replica,
    closing,
    copied_config,
    create_account,
    decide,
    eventually,
    set_limits,
)
from tests.catalog.second_process import second_process
from tests.postgres import PostgresServer
from tests.proxy import DropReplies, Proxy
from tests.servers import RedisServer

pytestmark = pytest.mark.chaos

Record = Callable[[str, object], None]
TENANTS = 20
SAMPLES = 20


class CatalogLoad:
    """Requests of all accounts in turn, while the context is open."""

    def __init__(self, member: Replica, accounts: list[Account]) -> None:
        self._member = member
        self._accounts = accounts
        self.answers: Counter[str] = Counter()
        self.stale = 0
        self.slowest = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        run_report.record_checks(sum(self.answers.values()), self.slowest)

    async def _run(self) -> None:
        number = 0
        while True:
            for account in self._accounts:
                number += 1
                began = time.monotonic()
                try:
                    snapshots = self._member.live.cache
                    caller = snapshots.callers.get(account.text) or await snapshots.callers.find(
                        account.text, "10.0.0.1"
                    )
                    await decide(caller, self._member.limiter, subject=str(number))
                    self.stale += caller.is_stale
                    self.answers["decided"] += 1
                except LimitforgeError as error:
                    self.answers[type(error).__name__] += 1
                self.slowest = max(self.slowest, time.monotonic() - began)
            await asyncio.sleep(0.001)

    async def run_for(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@contextlib.asynccontextmanager
async def loaded(
    postgres: PostgresServer, redis_url: str | None = None, url: str | None = None, **bounds: Any
) -> AsyncIterator[tuple[Replica, list[Account]]]:
    """A process that has cached all accounts."""
    peppers = Peppers.parse(PEPPERS)
    database = Database(postgres.url)
    async with closing(database):
        await database.upgrade()
        catalog = Catalog(database, peppers=peppers)
        accounts = [await create_account(catalog, f"tenant-{at}") for at in range(TENANTS)]
    async with Replica(url or postgres.url, redis_url, peppers=peppers, **bounds) as member:
        for account in accounts:
            await member.limit(account.text)
        await eventually(lambda: "postgres" in member.live.status().listening)
        yield member, accounts


# --- Without the database --------------------------------------------------------------------------------------------

DOWN: dict[str, Callable[[PostgresServer], None]] = {
    "stopped": PostgresServer._shut_down,
    "killed": PostgresServer.kill,
    "frozen": PostgresServer.pause,
}


def stop_server(server: PostgresServer, how: str) -> None:
    run_report.record_fault(f"database {how}")
    DOWN[how](server)


def restart_server(server: PostgresServer, how: str) -> None:
    if how == "frozen":
        server.resume()
    else:
        server.restart()


@pytest.mark.parametrize("with_redis", [False, True], ids=["alone", "with redis"])
@pytest.mark.parametrize("how", DOWN)
async def test_no_decision_fails_while_the_database_is_away_and_all_is_well_by_itself_when_it_is_back(
    how: str,
    with_redis: bool,
    own_postgres_server: PostgresServer,
    own_redis_server: RedisServer,
    record_property: Record,
) -> None:
    """Snapshots are refreshed every 300 ms, so that the loss has an effect at once."""
    redis_url = own_redis_server.url if with_redis else None
    async with loaded(own_postgres_server, redis_url, fresh_seconds=0.3) as (member, accounts):
        async with CatalogLoad(member, accounts) as load:
            await load.run_for(1)
            assert load.stale == 0
            gone_at = time.time()
            await asyncio.to_thread(stop_server, own_postgres_server, how)
            took = await eventually(lambda: member.live.status().database == "degraded")
            record_property("seconds until degraded", round(took, 2))
            assert member.live.status().since == pytest.approx(gone_at, abs=30)
            if not with_redis:
                await eventually(lambda: load.stale > 0)
            await load.run_for(4)
            await asyncio.to_thread(restart_server, own_postgres_server, how)
            record_property(
                "seconds until ok", round(await eventually(lambda: member.live.status().database == "ok"), 2)
            )
            before = load.stale

            async def is_fresh() -> bool:
                nonlocal before
                was, before = before, load.stale
                await asyncio.sleep(0.1)
                return was == load.stale

            record_property("seconds until nothing is stale", round(await eventually(is_fresh), 2))
            await set_limits(member.catalog, accounts[0], "77/minute")
            await member.seconds_until(accounts[0].text, 77)
        record_property("answers", dict(load.answers))
        record_property("slowest ms", round(load.slowest * 1_000, 1))
        assert set(load.answers) == {"decided"}
        await eventually(lambda: "postgres" in member.live.status().listening)


@pytest.mark.parametrize("how", DOWN)
async def test_what_is_too_old_is_refused_as_unavailable_and_comes_back(
    how: str, own_postgres_server: PostgresServer, record_property: Record
) -> None:
    async with loaded(own_postgres_server, fresh_seconds=0.3, stale_seconds=3) as (member, accounts):
        await asyncio.to_thread(stop_server, own_postgres_server, how)
        async with CatalogLoad(member, accounts) as load:
            await load.run_for(1)
            assert set(load.answers) == {"decided"}
            await load.run_for(4)
            load.answers.clear()
            refused = [await member.error(account.text) for account in accounts[:3]]
            assert set(refused) == {CatalogUnavailable}
            await asyncio.to_thread(restart_server, own_postgres_server, how)
            for account in accounts:
                await member.seconds_until(account.text, 5)
        record_property("answers", dict(load.answers))
        assert set(load.answers) <= {"decided", "CatalogUnavailable"}


async def test_a_database_that_comes_and_goes_never_costs_a_decision(
    own_postgres_server: PostgresServer, record_property: Record
) -> None:
    async with (
        loaded(own_postgres_server, fresh_seconds=0.2) as (member, accounts),
        CatalogLoad(member, accounts) as load,
    ):
        for _ in range(5):
            await asyncio.to_thread(stop_server, own_postgres_server, "killed")
            await load.run_for(0.7)
            await asyncio.to_thread(own_postgres_server.restart)
            await load.run_for(0.7)
        await eventually(lambda: member.live.status().database == "ok")
        await set_limits(member.catalog, accounts[3], "33/minute")
        await member.seconds_until(accounts[3].text, 33)
        record_property("answers", dict(load.answers))
        assert set(load.answers) == {"decided"}


@pytest.mark.parametrize("how", DOWN)
async def test_a_node_can_be_closed_while_the_database_is_away(
    how: str, own_postgres_server: PostgresServer, record_property: Record
) -> None:
    async with loaded(own_postgres_server, fresh_seconds=0.2) as (member, accounts):
        await asyncio.to_thread(stop_server, own_postgres_server, how)
        async with CatalogLoad(member, accounts) as load:
            await load.run_for(1)
        began = time.monotonic()
        await asyncio.wait_for(member.live.close(), 60)
        record_property("seconds", round(time.monotonic() - began, 2))
        left = [task for task in asyncio.all_tasks() if "limitforge/catalog" in str(task)]
        assert not left
        await asyncio.to_thread(restart_server, own_postgres_server, how)


async def test_a_key_that_is_disabled_while_one_node_can_not_reach_the_database_is_refused_there_when_it_can(
    own_postgres_server: PostgresServer, own_redis_server: RedisServer, record_property: Record
) -> None:
    """The message arrives over Redis, while the database with the change can't be read."""
    peppers = Peppers.parse(PEPPERS)
    with Proxy(own_postgres_server.port) as proxy:
        url = own_postgres_server.url.replace(str(own_postgres_server.port), str(proxy.port))
        async with (
            loaded(own_postgres_server, own_redis_server.url, url) as (there, accounts),
            Replica(own_postgres_server.url, own_redis_server.url, peppers=peppers) as here,
        ):
            await eventually(lambda: "redis" in there.live.status().listening)
            with proxy.in_mode(DropReplies()):
                async with here.catalog.edit("test") as edit:
                    await edit.set_key_disabled(accounts[0].key.id, disabled=True)
                await asyncio.sleep(7)
            took = await there.seconds_until(accounts[0].text, Forbidden)
            record_property("seconds", round(took, 2))


async def test_a_notice_of_postgres_that_is_lost_is_made_up_for(
    own_postgres_server: PostgresServer, record_property: Record
) -> None:
    """A firewall has dropped an idle connection: it looks alive, but no message arrives."""
    peppers = Peppers.parse(PEPPERS)
    delays = []
    with Proxy(own_postgres_server.port) as proxy:
        url = own_postgres_server.url.replace(str(own_postgres_server.port), str(proxy.port))
        writing = Database(own_postgres_server.url)
        async with loaded(own_postgres_server, None, url) as (there, accounts), closing(writing):
            for number in (6, 7, 8):
                await asyncio.sleep(1)  # so that nothing else is in progress
                with proxy.in_mode(DropReplies()):
                    began = time.monotonic()
                    await set_limits(Catalog(writing, peppers=peppers), accounts[0], f"{number}/minute")
                    await asyncio.sleep(0.3)
                await there.seconds_until(accounts[0].text, number)
                delays.append(time.monotonic() - began)
    record_property("delays", format_delays(delays))


# --- Without Redis ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_without_redis_nothing_fails_and_changes_arrive_through_the_database(
    how: str, own_postgres_server: PostgresServer, own_redis_server: RedisServer, record_property: Record
) -> None:
    async with loaded(own_postgres_server, own_redis_server.url, fresh_seconds=0.3) as (member, accounts):
        peppers = Peppers.parse(PEPPERS)
        async with Replica(own_postgres_server.url, own_redis_server.url, peppers=peppers) as here:
            cold = [await create_account(here.catalog, f"cold-{at}") for at in range(3)]
            async with CatalogLoad(member, accounts) as load:
                await load.run_for(1)
                run_report.record_fault(f"redis {how}")
                own_redis_server.kill() if how == "killed" else own_redis_server.pause()
                delays, edits = [], []
                for number in range(6, 12):
                    began = time.monotonic()
                    await set_limits(here.catalog, accounts[0], f"{number}/minute")
                    edits.append(time.monotonic() - began)
                    await member.seconds_until(accounts[0].text, number)
                    delays.append(time.monotonic() - began)
                colds = []
                for account in cold:
                    began = time.monotonic()
                    assert await member.limit(account.text) == 5
                    colds.append(time.monotonic() - began)
                    await asyncio.sleep(1.5)
                if how == "killed":
                    own_redis_server.restart()
                else:
                    own_redis_server.resume()
                await eventually(lambda: "redis" in member.live.status().listening)
            record_property("delay of a change, with the write itself", format_delays(delays))
            record_property("a write takes", format_delays(edits))
            record_property("a first look-up takes", format_delays(colds))
            record_property("slowest ms", round(load.slowest * 1_000, 1))
            assert set(load.answers) == {"decided"}


# --- Two processes, in figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["none", "redis restarted", "subscription cut", "listen cut"])
@pytest.mark.parametrize("writer", ["node", "command line"])
async def test_how_soon_a_change_decides_in_another_process(
    fault: str,
    writer: str,
    own_postgres_server: PostgresServer,
    own_redis_server: RedisServer,
    record_property: Record,
) -> None:
    peppers = Peppers.parse(PEPPERS)
    database = Database(own_postgres_server.url)
    await database.upgrade()
    delays = []
    with second_process(own_postgres_server.url, own_redis_server.url, PEPPERS) as other:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(closing(database))
            catalog = Catalog(database, peppers=peppers)
            if writer == "node":
                member = Replica(own_postgres_server.url, own_redis_server.url, peppers=peppers)
                catalog = (await stack.enter_async_context(member)).catalog
            account = await create_account(catalog)
            await other.started()
            assert await other.limit(account.text) == 5
            for number in range(6, 6 + SAMPLES):
                await until_listening(other)
                if fault != "none":
                    run_report.record_fault(fault)
                if fault == "redis restarted":
                    await asyncio.to_thread(own_redis_server.restart)
                elif fault == "subscription cut":
                    own_redis_server.command("CLIENT KILL TYPE pubsub")
                elif fault == "listen cut":
                    await asyncio.to_thread(cut_listeners, own_postgres_server)
                began = time.time()
                await set_limits(catalog, account, f"{number}/minute")
                delays.append(await other.seconds_until(account.text, number, began))
    record_property("delays", format_delays(delays))


async def until_listening(other: Any) -> None:
    async def is_so() -> bool:
        return set((await other.status())["listening"]) == {"postgres", "redis"}

    await eventually(is_so)


class FailingCopies:
    """Shared copies that fail once their process is dead."""

    async def get(self, key: str) -> bytes | None:
        return None

    async def put(self, key: str, copy: bytes, ttl_seconds: float) -> None:
        raise StoreUnavailable("it was killed")

    async def put_many(self, copies: Mapping[str, bytes], ttl_seconds: float) -> None:
        raise StoreUnavailable("it was killed")

    async def claim(self, key: str, ttl_seconds: float) -> bool:
        raise StoreUnavailable("it was killed")

    async def memory(self) -> dict[str, ServerMemory]:
        raise StoreUnavailable("it was killed")

    async def acquire_lock(self, key: str, owner: bytes, ttl_seconds: float) -> bool:
        raise StoreUnavailable("it was killed")

    async def release_lock(self, key: str, owner: bytes) -> None:
        raise StoreUnavailable("it was killed")

    async def publish(self, channel: str, message: bytes) -> None:
        raise StoreUnavailable("it was killed")

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        raise StoreUnavailable("it was killed")
        yield

    async def close(self) -> None: ...


async def test_a_writer_that_is_killed_between_commit_and_publishing_loses_nothing(
    own_postgres_server: PostgresServer, own_redis_server: RedisServer, record_property: Record
) -> None:
    """The writer loses its Redis at that moment, and then it is killed."""
    peppers = Peppers.parse(PEPPERS)

    database = Database(own_postgres_server.url)
    async with closing(database):
        await database.upgrade()
        writer = LiveCatalog(database, peppers, catalog_redis=FailingCopies())
        account = await create_account(writer.catalog)
        delays, copies = [], []
        async with (
            Replica(own_postgres_server.url, own_redis_server.url, peppers=peppers) as one,
            Replica(own_postgres_server.url, own_redis_server.url, peppers=peppers) as two,
        ):
            await one.limit(account.text)
            await two.limit(account.text)
            for number in range(6, 6 + SAMPLES):
                began = time.monotonic()
                await set_limits(writer.catalog, account, f"{number}/minute")
                await one.seconds_until(account.text, number)
                await two.seconds_until(account.text, number)
                delays.append(time.monotonic() - began)

                async def is_copied(number: int = number) -> bool:
                    copy = await copied_config(one.live._copies, account.tenant.id)
                    return copy is not None and copy.plans[0].limits[0]["limit"] == number

                await eventually(is_copied)
                copies.append(time.monotonic() - began)
        record_property("both know", format_delays(delays))
        record_property("the copy is right", format_delays(copies))
        await writer.cache.close()
    assert median(delays) > 0
