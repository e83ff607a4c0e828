"""Helpers for tests of `catalog.live`: replicas of a service, a source that can be paused, and small catalogs."""

import asyncio
import contextlib
import logging
import random
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from limitforge import Decision, Limiter, StoreOptions
from limitforge.catalog.announcements import Announcement
from limitforge.catalog.credentials import (
    ALPHABET,
    ID_LENGTH,
    PREFIXES,
    SECRET_LENGTH,
    Credential,
    Peppers,
    new_id,
)
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.cache.entries import Caller
from limitforge.catalog.live.cache.lookup_limiter import LookupLimiter
from limitforge.catalog.live.live_catalog import LiveCatalog
from limitforge.catalog.live.shared_copies import SharedCopies
from limitforge.catalog.live.signing import Signer
from limitforge.catalog.model import OPERATOR, Key, KeyScope, Override, Plan, Tenant, TenantConfig
from limitforge.catalog.plan_limits import normalize_limits
from limitforge.core.clock import Clock
from limitforge.core.limits import Mode
from limitforge.errors import CatalogUnavailable, LimitforgeError
from limitforge.stores.redis.catalog_redis import CatalogRedis

PATIENCE_SECONDS = 60.0
PATIENT = StoreOptions(deadline_ms=30_000, failure="raise")
UNLIMITED_LOOKUPS: Mapping[str, float] = {"per_second": 1e9, "burst": 10**9, "all_per_second": 1e9}


class FakeSource:
    """A `ConfigSource` in memory that can be changed, paused during a read, and made unavailable.

    A paused read returns the state from when it began.
    """

    def __init__(self) -> None:
        self.configs: dict[str, TenantConfig] = {OPERATOR: TenantConfig(Tenant(id=OPERATOR, name=OPERATOR), (), ())}
        self.keys: dict[str, Key] = {}
        self.set: dict[tuple[str, str, str], Override] = {}
        self.reads: list[str] = []
        self.is_down = False
        self._gates: dict[str, asyncio.Event] = {}
        self.waiting = 0

    async def config(self, tenant_id: str) -> TenantConfig | None:
        found: TenantConfig | None = await self._read(tenant_id, self.configs.get(tenant_id))
        return found

    async def key(self, key_id: str) -> Key | None:
        found: Key | None = await self._read(key_id, self.keys.get(key_id))
        return found

    async def overrides(self, tenant_id: str) -> list[Override]:
        theirs = [each for (owner, *_), each in self.set.items() if owner == tenant_id]
        found: list[Override] = await self._read("overrides", theirs)
        return found

    async def override(self, tenant_id: str, resource: str, subject: str) -> Override | None:
        found: Override | None = await self._read("override", self.set.get((tenant_id, resource, subject)))
        return found

    async def tenants_with_overrides(self) -> list[str]:
        found: list[str] = await self._read("tenants", sorted({owner for owner, *_ in self.set}))
        return found

    @contextlib.asynccontextmanager
    async def held(self, name: str) -> AsyncIterator[Callable[[], None]]:
        """Pause reads of this entity until the yielded function is called, or the block ends."""
        self._gates[name] = gate = asyncio.Event()
        try:
            yield gate.set
        finally:
            gate.set()
            self._gates.pop(name, None)

    async def until_waiting(self, number: int = 1) -> None:
        await eventually(lambda: self.waiting >= number)

    def change(self, tenant_id: str, **changes: Any) -> Announcement:
        """Change a tenant, and return the announcement."""
        revision = 1 + max(config.tenant.revision for config in self.configs.values())
        config = self.configs[tenant_id]
        tenant = msgspec.structs.replace(config.tenant, **{"revision": revision, **changes})
        self.configs[tenant_id] = msgspec.structs.replace(config, tenant=tenant)
        return Announcement(tenant.revision, tenant_id, config=True)

    def change_key(self, key: Key, **changes: Any) -> Announcement:
        self.keys[key.id] = msgspec.structs.replace(self.keys[key.id], version=self.keys[key.id].version + 1, **changes)
        return Announcement(1_000 + len(self.reads), key.tenant_id, keys=(key.id,))

    def drop_key(self, key: Key) -> Announcement:
        del self.keys[key.id]
        return Announcement(1_000 + len(self.reads), key.tenant_id, gone=(key.id,))

    def add_tenant(self, tenant_id: str, limits: str = "5/minute") -> TenantConfig:
        plan = Plan(id=f"pla_{tenant_id}", tenant_id=tenant_id, name="plan", limits=parsed(limits))
        tenant = Tenant(id=tenant_id, name=tenant_id, default_plan_id=plan.id, revision=1)
        config = self.configs[tenant_id] = TenantConfig(tenant, (plan,), ())
        return config

    def add_key(
        self, peppers: Peppers, tenant_id: str, number: int = 0, *, is_old: bool = False, **fields: Any
    ) -> tuple[Key, str]:
        """Add a key to a tenant, and return it with its text. An old key has the public checksum."""
        identity = str(number).rjust(ID_LENGTH, "0")
        live = PREFIXES["live"]
        credential = old_credential(live, identity) if is_old else Credential.generate(live, identity, peppers)
        key = Key(
            id=f"key_{identity}",
            tenant_id=tenant_id,
            name="key",
            secrets=(peppers.hash_credential(credential),),
            **fields,
        )
        self.keys[key.id] = key
        return key, credential.text

    async def _read(self, name: str, found: Any) -> Any:
        self.reads.append(name)
        if name in self._gates:
            self.waiting += 1
            try:
                await self._gates[name].wait()
            finally:
                self.waiting -= 1
        else:
            await asyncio.sleep(0)
        if self.is_down:
            raise CatalogUnavailable("the test says that there is no database")
        return found


def shared_copies(shared: Any, peppers: Peppers, **how: Any) -> SharedCopies:
    """Return the copies that a process with these peppers reads and writes."""
    return SharedCopies(shared, "lf", Signer(peppers), **how)


async def copied_config(copies: SharedCopies | None, tenant_id: str) -> TenantConfig | None:
    """Return the tenant in Redis, or None if it is deleted or has no valid copy."""
    assert copies is not None
    copy = await copies.get_config(tenant_id)
    return None if copy is None else copy.value


async def copied_key(copies: SharedCopies | None, key_id: str) -> Key | None:
    assert copies is not None
    copy = await copies.get_key(key_id)
    return None if copy is None else copy.value


def parsed(limits: str) -> tuple[dict[str, Any], ...]:
    return normalize_limits(limits)


def cache_of(source: Any, peppers: Peppers, clock: Clock, **how: Any) -> CatalogCache:
    """Return a cache of this source, with unlimited lookups and a long deadline unless given."""
    how.setdefault("lookup_seconds", PATIENCE_SECONDS)
    how.setdefault("lookup_limiter", LookupLimiter(**UNLIMITED_LOOKUPS, clock=clock))  # type: ignore[arg-type]
    return CatalogCache(source, peppers, clock=clock, **how)


def old_credential(prefix: str, identity: str) -> Credential:
    """Make a key with the old public checksum. Anyone can do that, so keys can be made up like this."""
    body = prefix + identity + "".join(random.choices(ALPHABET, k=SECRET_LENGTH))
    number, digits = zlib.crc32(body.encode()), ""
    for _ in range(6):
        number, digit = divmod(number, 62)
        digits = ALPHABET[digit] + digits
    return Credential(prefix, identity, body + digits)


async def add_old_keys(catalog: Catalog, tenant_id: str, number: int) -> list[str]:
    """Add keys with the old public checksum to a tenant, and return their texts."""
    assert catalog.peppers is not None
    texts = []
    async with catalog.edit("test") as edit:
        for index in range(number):
            credential = old_credential(PREFIXES["live"], new_id("key").removeprefix("key_"))
            secrets = (catalog.peppers.hash_credential(credential),)
            key = Key(id=f"key_{credential.id}", tenant_id=tenant_id, name=f"old-{index}", secrets=secrets)
            await edit.add_key(key)
            texts.append(credential.text)
    return texts


def wrong_key(prefix: str = PREFIXES["live"], index: int = 0) -> str:
    """Return a well-formed key with a valid public checksum that does not exist."""
    digits = []
    for _ in range(ID_LENGTH):
        index, digit = divmod(index, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return old_credential(prefix, "".join(digits)).text


@dataclass(frozen=True)
class Account:
    """A tenant in a catalog with a plan and a key."""

    tenant: Tenant
    plan: Plan
    key: Key
    text: str


async def create_account(catalog: Catalog, name: str = "acme", limits: str = "5/minute") -> Account:
    async with catalog.edit("test") as edit:
        tenant = await edit.create(Tenant, {"name": name})
        plan = await edit.create(Plan, {"tenant_id": tenant.id, "name": "plan", "limits": limits})
        tenant = await edit.update(Tenant, tenant.id, {"default_plan_id": plan.id})
        key, credential = await edit.create_key({"tenant_id": tenant.id, "name": "key"})
    return Account(tenant, plan, key, credential.text)


async def set_limits(catalog: Catalog, account: Account, limits: str) -> None:
    async with catalog.edit("test") as edit:
        await edit.update(Plan, account.plan.id, {"limits": limits})


async def set_operator_mode(catalog: Catalog, mode: Mode) -> None:
    async with catalog.edit("test") as edit:
        await edit.update(Tenant, OPERATOR, {"mode": mode})


async def decide(caller: Caller, limiter: Limiter, resource: str = "r", subject: str = "s", cost: int = 1) -> Decision:
    """Decide a check as the service does."""
    selection = caller.snapshot.select(resource, caller.key.plan_id)
    return await limiter.check(
        resource, subject, limits=selection.limits, cost=cost, tenant=caller.key.tenant_id, failure="raise"
    )


async def limit_of(caller: Caller, limiter: Limiter, subject: str = "s") -> int | None:
    """Return the caller's current limit, read from a decision."""
    return (await decide(caller, limiter, subject=subject, cost=0)).limit


async def eventually(
    is_so: Callable[[], Any] | Callable[[], Awaitable[Any]], seconds: float = PATIENCE_SECONDS
) -> float:
    """Wait until a condition is true, and return the seconds that it took."""
    began, pause = time.monotonic(), 0.001
    while True:
        answer: Any = is_so()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return time.monotonic() - began
        assert time.monotonic() - began < seconds, "the condition did not become true"
        await asyncio.sleep(pause)
        pause = min(1.3 * pause, 0.03)


def events_of(records: Iterable[logging.LogRecord]) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and fields of the logged events."""
    return [(vars(record)["event"], vars(record)["fields"]) for record in records]


class Replica:
    """The parts of one process of the service: a live catalog, its database, its Redis, and a limiter."""

    def __init__(
        self,
        database_url: str,
        redis_url: str | None = None,
        *,
        peppers: Peppers,
        shared: Any = None,
        limiter_url: str = "memory://",
        options: StoreOptions = PATIENT,
        **how: Any,
    ) -> None:
        self.database = Database(database_url)
        self.shared: Any = shared or (None if redis_url is None else CatalogRedis(redis_url))
        self.limiter = Limiter.connect(limiter_url, options=options)
        how.setdefault("override_store", self.limiter)
        how.setdefault("lookup_seconds", PATIENCE_SECONDS)
        self.live = LiveCatalog(self.database, peppers, catalog_redis=self.shared, **how)

    @property
    def catalog(self) -> Catalog:
        return self.live.catalog

    async def limit(self, text: str) -> int | None:
        """Return the current limit of the caller with this key, read from a decision."""
        caller = self.live.cache.callers.get(text) or await self.live.cache.callers.find(text)
        caller.require(KeyScope.CHECK)
        return await limit_of(caller, self.limiter)

    async def error(self, text: str) -> type[Exception] | None:
        """Return the error that the caller with this key gets, if any."""
        try:
            await self.limit(text)
        except LimitforgeError as error:
            return type(error)
        return None

    async def seconds_until(self, text: str, wanted: Any) -> float:
        """Wait until a check has this limit, or fails with this error, and return the seconds that it took."""

        async def is_so() -> bool:
            if isinstance(wanted, type):
                return await self.error(text) is wanted
            return await self.error(text) is None and await self.limit(text) == wanted

        return await eventually(is_so)

    async def __aenter__(self) -> Self:
        try:
            await self.live.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.live.close()
        if self.shared is not None:
            await self.shared.close()
        await self.limiter.close()
        await self.database.close()


@contextlib.asynccontextmanager
async def closing(*things: Any) -> AsyncIterator[None]:
    """Close these things even if the test fails, so that it does not affect the next one."""
    try:
        yield
    finally:
        for thing in things:
            await thing.close()
