"""Two processes: how soon a change of one takes effect in the other."""

import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import Key, Tenant
from limitforge.core.limits import Mode
from tests.catalog.conftest import PEPPERS
from tests.catalog.replicas import Account, Replica, closing, create_account, eventually, set_limits, set_operator_mode
from tests.catalog.reused_database import ReusedDatabase
from tests.catalog.second_process import SecondProcess, second_process
from tests.postgres import PostgresServer
from tests.servers import RedisServer

ROUNDS = 2
KINDS = ["postgres and redis", "postgres", "sqlite", "sqlite and redis"]
WRITERS = ["node", "command line"]

Record = Callable[[str, object], None]


@dataclass
class Pair:
    """The replica that writes, in this process, and the one that decides, in the other."""

    catalog: Catalog
    other: SecondProcess
    account: Account
    kind: str
    redis: RedisServer | None

    async def delay(self, change: Awaitable[object], wanted: Any) -> float:
        """Return the seconds from before the change until a decision in the other process reflects it."""
        began = time.time()
        await change
        return await self.other.seconds_until(self.account.text, wanted, began)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def own_redis(kind: str) -> Iterator[RedisServer | None]:
    if "redis" not in kind:
        yield None
        return
    with RedisServer() as server:
        yield server


@pytest.fixture
async def pair(
    kind: str, writer: str, own_redis: RedisServer | None, request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Pair]:
    redis_url = None if own_redis is None else own_redis.url
    async with AsyncExitStack() as stack:
        if kind.startswith("sqlite"):
            shutil.copy(request.getfixturevalue("migrated_sqlite"), tmp_path / "catalog.db")
            url = f"sqlite:///{tmp_path}/catalog.db"
        else:
            reused: ReusedDatabase = request.getfixturevalue("reused_postgres")
            url = await reused.emptied()
        other = stack.enter_context(second_process(url, redis_url, PEPPERS))
        peppers = Peppers.parse(PEPPERS)
        if writer == "node":
            catalog = (await stack.enter_async_context(Replica(url, redis_url, peppers=peppers))).catalog
        else:
            database = Database(url)
            await stack.enter_async_context(closing(database))
            catalog = Catalog(database, peppers=peppers)
        account = await create_account(catalog)
        await other.started()
        assert await other.limit(account.text) == 5
        await listening(other, kind)
        yield Pair(catalog, other, account, kind, own_redis)


async def listening(other: SecondProcess, kind: str) -> None:
    """Wait until all its subscriptions are active."""
    expected = {name for name in ("postgres", "redis") if name in kind}

    async def is_so() -> bool:
        return set((await other.status())["listening"]) == expected

    await eventually(is_so)


def format_delays(delays: list[float]) -> str:
    return f"median {median(delays) * 1_000:.0f} ms, worst {max(delays) * 1_000:.0f} ms of {len(delays)}"


async def changes(pair: Pair, rounds: int) -> dict[str, list[float]]:
    """Make every kind of change that must be announced, and return how long each took."""
    catalog, account = pair.catalog, pair.account
    delays: dict[str, list[float]] = {}

    async def measured(name: str, change: Awaitable[object], wanted: Any) -> None:
        delays.setdefault(name, []).append(await pair.delay(change, wanted))

    for number in range(rounds):
        await measured("plan", set_limits(catalog, account, f"{6 + number}/minute"), 6 + number)
        await measured("disabled key", disable(catalog, account, disabled=True), "Forbidden")
        await measured("enabled key", disable(catalog, account, disabled=False), 6 + number)
        await measured("kill switch", set_operator_mode(catalog, Mode.OFF), None)
        await measured("kill switch back", set_operator_mode(catalog, Mode.ON), 6 + number)
        await measured("suspended tenant", suspend(catalog, account, suspended=True), "Forbidden")
        await measured("resumed tenant", suspend(catalog, account, suspended=False), 6 + number)
    return delays


async def disable(catalog: Catalog, account: Account, *, disabled: bool) -> None:
    async with catalog.edit("test") as edit:
        await edit.set_key_disabled(account.key.id, disabled=disabled)


async def suspend(catalog: Catalog, account: Account, *, suspended: bool) -> None:
    async with catalog.edit("test") as edit:
        await edit.update(Tenant, account.tenant.id, {"suspended": suspended})


async def delete(catalog: Catalog, account: Account) -> None:
    async with catalog.edit("test") as edit:
        await edit.delete(Key, account.key.id)


# A command line publishes nothing, with Redis or without: the other process finds its changes in the database.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "kind"),
    [*(("node", kind) for kind in KINDS), ("command line", "sqlite"), ("command line", "postgres and redis")],
    indirect=True,
)
async def test_a_change_in_one_process_decides_in_the_other(pair: Pair, record_property: Record) -> None:
    spent = [await pair.other.admits(pair.account.text, "spender") for _ in range(6)]
    assert spent == [True] * 5 + [False]
    delays = await changes(pair, 1 if pair.kind == "sqlite" else ROUNDS)  # there, each change waits for the next poll
    await set_limits(pair.catalog, pair.account, "5/minute")
    delays["deleted key"] = [await pair.delay(delete(pair.catalog, pair.account), "UnknownKey")]
    record_property("delays", {name: format_delays(each) for name, each in delays.items()})
    everything = [delay for each in delays.values() for delay in each]
    record_property("all", format_delays(everything))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "kind"), [("node", "postgres and redis"), ("command line", "sqlite and redis")], indirect=True
)
async def test_a_change_decides_in_the_other_process_after_redis_was_restarted_and_is_empty(
    pair: Pair, record_property: Record
) -> None:
    assert pair.redis is not None
    delays = []
    for number in range(6, 6 + ROUNDS):
        pair.redis.restart()
        delays.append(await pair.delay(set_limits(pair.catalog, pair.account, f"{number}/minute"), number))
    await listening(pair.other, pair.kind)
    record_property("delays", format_delays(delays))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "kind"), [("node", "sqlite and redis"), ("command line", "postgres and redis")], indirect=True
)
async def test_a_change_decides_in_the_other_process_after_its_subscription_was_cut(
    pair: Pair, record_property: Record
) -> None:
    assert pair.redis is not None
    delays = []
    for number in range(6, 6 + ROUNDS):
        pair.redis.command("CLIENT KILL TYPE pubsub")
        delays.append(await pair.delay(set_limits(pair.catalog, pair.account, f"{number}/minute"), number))
    await listening(pair.other, pair.kind)
    record_property("delays", format_delays(delays))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "kind"), [("node", "postgres and redis"), ("command line", "postgres")], indirect=True
)
async def test_a_change_decides_in_the_other_process_after_its_listen_was_cut(
    pair: Pair, postgres_server: PostgresServer, record_property: Record
) -> None:
    delays = []
    for number in range(6, 6 + ROUNDS):
        assert cut_listeners(postgres_server) >= 1
        delays.append(await pair.delay(set_limits(pair.catalog, pair.account, f"{number}/minute"), number))
        await listening(pair.other, pair.kind)
    record_property("delays", format_delays(delays))


def cut_listeners(server: PostgresServer) -> int:
    """End the connections of all listeners, and return their number."""
    return int(
        server.sql(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE query ILIKE 'LISTEN%' AND pid <> pg_backend_pid()"
        )
    )
