"""Random sequences of changes, restores, outages and restarts: in the end all replicas agree with the database."""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import Key, KeyScope, Plan, Tenant
from limitforge.core.limits import Mode as LimitMode
from limitforge.errors import Forbidden, LimitforgeError, NotFound, UnknownKey
from tests.catalog.backups import back_up, restore
from tests.catalog.replicas import Account, Replica, closing, create_account, eventually, set_limits, set_operator_mode
from tests.catalog.reused_database import ReusedDatabase
from tests.postgres import PostgresServer
from tests.proxy import CloseConnections, DropReplies, Forward, Mode, Proxy

pytestmark = pytest.mark.slow

STEPS = 25
ACCOUNTS = 3


class Simulation:
    """Two replicas, one of them behind a proxy, a command line, and a backup. Each move is one event."""

    def __init__(self, url: str, redis_url: str, proxy: Proxy, peppers: Peppers, random: Random, folder: Path) -> None:
        self.url, self.redis_url, self.proxy, self.peppers = url, redis_url, proxy, peppers
        self.random, self.folder = random, folder
        self.behind = url.replace(url.rpartition(":")[2].partition("/")[0], str(proxy.port))
        self.writer = Catalog(Database(url), peppers=peppers)
        self.replicas: list[Replica] = []
        self.accounts: list[Account] = []
        self.texts: set[str] = set()
        self.file: Path | None = None
        self.moves: list[str] = []

    async def start(self) -> None:
        self.replicas = [await self.start_replica(self.url), await self.start_replica(self.behind)]
        for index in range(ACCOUNTS):
            self.accounts.append(await create_account(self.writer, f"t{index}"))
        self.texts = {account.text for account in self.accounts}

    async def start_replica(self, url: str) -> Replica:
        replica = Replica(url, self.redis_url, peppers=self.peppers)
        await replica.live.start()
        return replica

    async def close(self) -> None:
        self.proxy.mode = Forward()
        for replica in self.replicas:
            await replica.close()
        await self.writer.database.close()

    @property
    def catalog(self) -> Catalog:
        """Return the catalog of a replica that reaches the database, or of a command line without Redis."""
        return self.random.choice([self.replicas[0].catalog, self.writer])

    async def move(self) -> None:
        moves: dict[str, Callable[[Account], Awaitable[Any]]] = {
            "limits": lambda account: set_limits(self.catalog, account, f"{self.random.randint(6, 99)}/minute"),
            "disable": lambda account: self.edit(lambda edit: edit.set_key_disabled(account.key.id, disabled=True)),
            "enable": lambda account: self.edit(lambda edit: edit.set_key_disabled(account.key.id, disabled=False)),
            "suspend": lambda account: self.suspend(account, True),
            "resume": lambda account: self.suspend(account, False),
            "rotate": self.rotate,
            "delete": lambda account: self.edit(lambda edit: edit.delete(Key, account.key.id)),
            "operator": lambda _: set_operator_mode(self.catalog, self.random.choice(list(LimitMode))),
            "back up": self.back_up,
            "restore": self.restore,
            "cut off": self.cut_off,
            "reconnect": self.reconnect,
            "restart": self.restart,
            "use": self.use,
        }
        name = self.random.choice([*moves, "restore", "limits", "use", "use"])
        self.moves.append(name)
        with contextlib.suppress(NotFound):  # what a restore has taken, or another move deleted
            await moves[name](self.random.choice(self.accounts))

    async def edit(self, change: Callable[[Any], Awaitable[Any]]) -> None:
        async with self.catalog.edit("test") as edit:
            await change(edit)

    async def suspend(self, account: Account, suspended: bool) -> None:
        await self.edit(lambda edit: edit.update(Tenant, account.tenant.id, {"suspended": suspended}))

    async def rotate(self, account: Account) -> None:
        async with self.catalog.edit("test") as edit:
            _, credential = await edit.rotate_key(account.key.id, self.random.choice([0, 3_600]))
        self.texts.add(credential.text)

    async def back_up(self, _: Account) -> None:
        self.file = await back_up(self.url, self.folder)

    async def restore(self, account: Account) -> None:
        if self.file is not None:
            await restore(self.url, self.file)
            for _ in range(self.random.choice([0, 1, 6])):  # it may get further than any replica has seen
                await set_limits(self.catalog, account, f"{self.random.randint(6, 99)}/minute")

    async def cut_off(self, _: Account) -> None:
        cuts: list[Mode] = [DropReplies(), CloseConnections()]
        self.proxy.mode = self.random.choice(cuts)

    async def reconnect(self, _: Account) -> None:
        self.proxy.mode = Forward()

    async def restart(self, _: Account) -> None:
        """Restart a replica. One that can't reach the database starts from copies."""
        index = self.random.randrange(2)
        await self.replicas[index].close()
        self.replicas[index] = await self.start_replica((self.url, self.behind)[index])

    async def use(self, _: Account) -> None:
        for replica in self.replicas:
            for text in self.texts:
                with contextlib.suppress(LimitforgeError, TimeoutError):
                    async with asyncio.timeout(0.5):
                        await replica.limit(text)

    async def expected_outcome(self, text: str) -> Any:
        """Return the result in a replica that was just started, and has no Redis."""
        async with Replica(self.url, peppers=self.peppers) as fresh:
            return await outcome(fresh, text)


async def outcome(replica: Replica, text: str) -> Any:
    """Return the limit of this key, or the error that it gets."""
    try:
        caller = replica.live.cache.callers.get(text) or await replica.live.cache.callers.find(text)
        caller.require(KeyScope.CHECK)
    except (Forbidden, UnknownKey) as error:
        return type(error)
    except LimitforgeError as error:
        return str(error)
    plans = {plan.id: plan for plan in caller.snapshot.config.plans}
    plan: Plan = plans[caller.snapshot.tenant.default_plan_id or ""]
    return plan.limits, caller.snapshot.operator.tenant.mode


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 6))])
async def test_after_any_sequence_all_replicas_agree_with_the_database(
    seed: int,
    postgres_server: PostgresServer,
    reused_postgres: ReusedDatabase,
    redis_url: str,
    peppers: Peppers,
    tmp_path: Path,
) -> None:
    url = await reused_postgres.emptied()
    with Proxy(postgres_server.port) as proxy:
        simulation = Simulation(url, redis_url, proxy, peppers, Random(seed), tmp_path)
        async with closing(simulation):
            await simulation.start()
            for _ in range(STEPS):
                await simulation.move()
            # A replica that is cut off only knows the changes that Redis has, so connect it again.
            await simulation.reconnect(simulation.accounts[0])
            for text in simulation.texts:
                wanted = await simulation.expected_outcome(text)
                for replica in simulation.replicas:

                    async def agrees(replica: Replica = replica, text: str = text, wanted: Any = wanted) -> bool:
                        return bool(await outcome(replica, text) == wanted)

                    try:
                        await eventually(agrees)
                    except AssertionError:
                        pytest.fail(f"after {simulation.moves}: {await outcome(replica, text)} instead of {wanted}")
    shutil.rmtree(tmp_path)
