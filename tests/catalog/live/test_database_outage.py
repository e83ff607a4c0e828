"""A process that can't reach its database, and learns of changes through Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from limitforge import ManualClock
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database import database as databases
from limitforge.catalog.database.edits import Edit
from limitforge.catalog.model import Key, Tenant, to_datetime
from limitforge.core.clock import SystemClock
from limitforge.errors import CatalogUnavailable, Forbidden, UnknownKey
from limitforge.stores.redis.catalog_redis import CatalogRedis
from tests.catalog.backups import back_up, restore
from tests.catalog.replicas import Account, Replica, create_account, eventually, set_limits
from tests.catalog.reused_database import ReusedDatabase
from tests.postgres import PostgresServer
from tests.proxy import CloseConnections, DropReplies, Mode, Proxy
from tests.servers import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_polls")]

MODES = {"black hole": DropReplies(), "refused": CloseConnections()}


def in_one_mode(chosen: str) -> pytest.MarkDecorator:
    """Run a test in this mode, and in the others in `make soak`."""
    soak = pytest.mark.soak
    modes = [pytest.param(mode, id=name, marks=() if name == chosen else soak) for name, mode in MODES.items()]
    return pytest.mark.parametrize("mode", modes)


@dataclass
class Pair:
    """Two replicas. `there` reaches the database only through the proxy."""

    database_url: str
    redis_url: str
    proxy: Proxy
    peppers: Peppers
    stack: contextlib.AsyncExitStack
    here: Replica
    there: Replica

    async def another(self, **how: Any) -> Replica:
        """Start another replica behind the proxy."""
        url = self.through_proxy
        return await self.stack.enter_async_context(hasty(url, self.redis_url, peppers=self.peppers, **how))

    @property
    def through_proxy(self) -> str:
        before, _, name = self.database_url.rpartition("/")
        return f"{before.rpartition(':')[0]}:{self.proxy.port}/{name}"


def hasty(*where: Any, **how: Any) -> Replica:
    """Return a replica that waits one second for its database, not five: a black hole delays each read by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(databases, "TIMEOUT_SECONDS", 1.0)
        return Replica(*where, **how)


@pytest.fixture
async def pair(
    postgres_server: PostgresServer, reused_postgres: ReusedDatabase, redis_url: str, peppers: Peppers
) -> AsyncIterator[Pair]:
    url = await reused_postgres.emptied()
    with Proxy(postgres_server.port) as proxy:
        async with contextlib.AsyncExitStack() as stack:
            through = url.replace(f":{postgres_server.port}/", f":{proxy.port}/")
            here = await stack.enter_async_context(Replica(url, redis_url, peppers=peppers))
            there = await stack.enter_async_context(hasty(through, redis_url, peppers=peppers))
            await eventually(lambda: "redis" in there.live.status().listening)
            yield Pair(url, redis_url, proxy, peppers, stack, here, there)


Change = Callable[[Edit, Account], Awaitable[Any]]


async def expire(edit: Edit, account: Account) -> None:
    await edit.update(Key, account.key.id, {"expires_at": datetime.now(UTC) + timedelta(milliseconds=50)})


LESS: dict[str, tuple[Change, type[Exception]]] = {
    "disabled": (lambda edit, account: edit.set_key_disabled(account.key.id, disabled=True), Forbidden),
    "rotated": (lambda edit, account: edit.rotate_key(account.key.id), UnknownKey),
    "rotated with grace": (lambda edit, account: edit.rotate_key(account.key.id, 0.05), UnknownKey),
    "expired": (expire, UnknownKey),
    "deleted": (lambda edit, account: edit.delete(Key, account.key.id), UnknownKey),
    "scope taken": (lambda edit, account: edit.update(Key, account.key.id, {"scopes": ["usage"]}), Forbidden),
    "suspended": (lambda edit, account: edit.update(Tenant, account.tenant.id, {"suspended": True}), Forbidden),
    "tenant deleted": (lambda edit, account: edit.delete(Tenant, account.tenant.id), UnknownKey),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
async def test_what_takes_something_away_acts_on_a_process_that_is_cut_off(pair: Pair, mode: Mode) -> None:
    """The change takes effect during the outage: the database comes back only at the end."""
    accounts = {name: await create_account(pair.here.catalog, name.replace(" ", "-")) for name in LESS}
    copies = await create_account(pair.here.catalog, "warm")
    for each in (*accounts.values(), copies):
        await pair.there.seconds_until(each.text, 5)
    with pair.proxy.in_mode(mode):
        for name, account in accounts.items():
            change, refusal = LESS[name]
            async with pair.here.catalog.edit("test") as edit:
                await change(edit, account)
            await pair.there.seconds_until(account.text, refusal)
        for _ in range(10):  # and it stays so while it reads on
            for name, account in accounts.items():
                assert await pair.there.error(account.text) is LESS[name][1], name
            await asyncio.sleep(0.2)
        assert await pair.there.limit(copies.text) == 5
    await eventually(lambda: pair.there.live.status().database == "ok")
    for name, account in accounts.items():
        await pair.there.seconds_until(account.text, LESS[name][1])


@in_one_mode("black hole")
async def test_a_plan_that_is_lowered_and_one_that_is_raised_act_on_a_process_that_is_cut_off(
    pair: Pair, mode: Mode
) -> None:
    account = await create_account(pair.here.catalog)
    await pair.there.seconds_until(account.text, 5)
    with pair.proxy.in_mode(mode):
        for number in (3, 9, 4):
            await set_limits(pair.here.catalog, account, f"{number}/minute")
            await pair.there.seconds_until(account.text, number)


@in_one_mode("refused")
async def test_the_new_secret_of_a_rotated_key_is_good_on_a_process_that_is_cut_off(pair: Pair, mode: Mode) -> None:
    account = await create_account(pair.here.catalog)
    await pair.there.seconds_until(account.text, 5)
    with pair.proxy.in_mode(mode):
        async with pair.here.catalog.edit("test") as edit:
            _, credential = await edit.rotate_key(account.key.id, 3_600)
        await pair.there.seconds_until(credential.text, 5)
        assert await pair.there.limit(account.text) == 5


async def test_a_process_that_is_cut_off_and_missed_the_message_finds_the_copy(
    pair: Pair, redis_server: RedisServer
) -> None:
    account = await create_account(pair.here.catalog)
    await pair.there.seconds_until(account.text, 5)
    with pair.proxy.in_mode(CloseConnections()):
        await eventually(lambda: pair.there.live.status().database == "degraded")
        redis_server.command("CLIENT KILL TYPE pubsub")
        async with pair.here.catalog.edit("test") as edit:
            await edit.set_key_disabled(account.key.id, disabled=True)
        await pair.there.seconds_until(account.text, Forbidden)


async def test_a_process_that_is_cut_off_and_gets_no_messages_compares_its_entries_with_the_copies(
    pair: Pair,
) -> None:
    class Deaf(CatalogRedis):
        async def listen(self, channel: str) -> Any:
            await asyncio.sleep(600)
            yield None

    deaf = await pair.another(shared=Deaf(pair.redis_url))
    account = await create_account(pair.here.catalog)
    await deaf.seconds_until(account.text, 5)
    with pair.proxy.in_mode(CloseConnections()):
        await eventually(lambda: deaf.live.status().database == "degraded")
        async with pair.here.catalog.edit("test") as edit:
            await edit.set_key_disabled(account.key.id, disabled=True)
        await deaf.seconds_until(account.text, Forbidden)


@in_one_mode("refused")
async def test_a_key_that_is_revoked_and_of_which_there_is_no_copy_is_not_served(
    pair: Pair, mode: Mode, redis_server: RedisServer
) -> None:
    """The message says that the key lost rights, but not which: the key is refused until it can be read."""
    account, other = await create_account(pair.here.catalog), await create_account(pair.here.catalog, "other")
    for each in (account, other):
        await pair.there.seconds_until(each.text, 5)
    messages: list[bytes] = []

    class Forgetful(CatalogRedis):
        """A Redis that evicts copies before they are read."""

        async def publish(self, channel: str, message: bytes) -> None:
            for each in (account.key.id, account.tenant.id, other.tenant.id):
                for kind in "ck":
                    await self._call(f"lf:{{{each}}}:%{kind}", "DEL", f"lf:{{{each}}}:%{kind}")
            messages.append(message)
            await super().publish(channel, message)

    url = pair.database_url
    writer = Replica(url, peppers=pair.peppers, shared=Forgetful(pair.redis_url))
    await pair.here.live.close()  # it would publish too
    with pair.proxy.in_mode(mode):
        async with writer:
            async with writer.catalog.edit("test") as edit:
                await edit.set_key_disabled(account.key.id, disabled=True)
            async with writer.catalog.edit("test") as edit:
                await edit.update(Tenant, other.tenant.id, {"suspended": True})
            await eventually(lambda: len(messages) >= 2)
            for each in (account, other):
                await eventually(lambda each=each: _is_refused(pair.there, each))
    for each in (account, other):
        await pair.there.seconds_until(each.text, Forbidden)


async def _is_refused(replica: Replica, account: Account) -> bool:
    return await replica.error(account.text) in (CatalogUnavailable, Forbidden)


async def test_a_process_that_starts_without_its_database_obeys_the_copies(pair: Pair) -> None:
    accounts = {name: await create_account(pair.here.catalog, name.replace(" ", "-")) for name in LESS}
    healthy = await create_account(pair.here.catalog, "healthy")
    for each in (*accounts.values(), healthy):
        await pair.here.seconds_until(each.text, 5)
    with pair.proxy.in_mode(CloseConnections()):
        for name, account in accounts.items():
            async with pair.here.catalog.edit("test") as edit:
                await LESS[name][0](edit, account)
        cold = await pair.another()
        assert cold.live.status().database == "degraded"
        for name, account in accounts.items():
            await cold.seconds_until(account.text, LESS[name][1])
        assert await cold.limit(healthy.text) == 5
        async with pair.here.catalog.edit("test") as edit:
            await edit.set_key_disabled(healthy.key.id, disabled=True)
        await cold.seconds_until(healthy.text, Forbidden)


async def test_a_key_ends_at_its_time_on_a_process_that_is_cut_off_without_any_message(pair: Pair) -> None:
    clock = ManualClock(SystemClock().now_us())
    there = await pair.another(clock=clock)
    account = await create_account(pair.here.catalog)
    ends = to_datetime(clock.now_us()) + timedelta(hours=1)
    async with pair.here.catalog.edit("test") as edit:
        _, credential = await edit.create_key({"tenant_id": account.tenant.id, "name": "short", "expires_at": ends})
    await there.seconds_until(credential.text, 5)
    with pair.proxy.in_mode(DropReplies()):
        await pair.here.live.close()
        clock.advance_us(3_599 * 1_000_000)
        assert await there.error(credential.text) is None
        clock.advance_us(1_000_000)
        assert await there.error(credential.text) is UnknownKey


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
async def test_a_restore_while_a_process_is_cut_off_reaches_it_by_redis(pair: Pair, mode: Mode, tmp_path: Path) -> None:
    """Its revision is higher than those of the restored database."""
    account = await create_account(pair.here.catalog)
    file = await back_up(pair.database_url, tmp_path)
    for number in (6, 7, 8):
        await set_limits(pair.here.catalog, account, f"{number}/minute")
    await pair.there.seconds_until(account.text, 8)
    with pair.proxy.in_mode(mode):
        await restore(pair.database_url, file)
        await set_limits(pair.here.catalog, account, "15/minute")
        assert await pair.here.limit(account.text) == 15
        await pair.there.seconds_until(account.text, 15)
        async with pair.here.catalog.edit("test") as edit:
            await edit.set_key_disabled(account.key.id, disabled=True)
        await pair.there.seconds_until(account.text, Forbidden)
    await eventually(lambda: pair.there.live.status().database == "ok")
    await pair.there.seconds_until(account.text, Forbidden)
