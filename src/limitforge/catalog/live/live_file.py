"""A node that serves from a configuration file alone: no database. The file is watched, and what is wrong is not taken.

Ids come from names, so every node that reads the same file has the same ones, and so has this one after a restart.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import msgspec

from limitforge.catalog.config.diagnostics import Diagnostics
from limitforge.catalog.config.document import parse_document
from limitforge.catalog.config.specs import (
    ConfigDocument,
    OperatorSpec,
    TenantSpec,
    build_tenant_config,
    entity_fields,
    operator_as_tenant,
)
from limitforge.catalog.config.strict_yaml import MAX_FILE_BYTES
from limitforge.catalog.config.validation import validate
from limitforge.catalog.credentials import ALPHABET, ID_LENGTH, Peppers
from limitforge.catalog.database.outbox import Announcement
from limitforge.catalog.database.override_queries import DeletedOverride, OverrideRow
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.cache.entries import CacheStatus
from limitforge.catalog.live.override_reconciler import OverrideReconciler, ReconcilerStatus
from limitforge.catalog.live.override_sync import MAX_DELETED, OverrideSink, OverrideSync
from limitforge.catalog.live.shared_backend import SharedBackend
from limitforge.catalog.model import OPERATOR, Key, Override, Tenant, TenantConfig, build_entity, to_datetime
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import InvalidInput, LimitforgeError, StoreError

POLL_SECONDS = 0.5
SETTLE_SECONDS = 0.1  # whoever writes in place may not be done; what changes meanwhile is looked at again
AWAY_SECONDS = 5.0  # a file that is being replaced may be missing for a moment
MIRROR_SECONDS = 60.0

_log = logging.getLogger(__name__)
_Stamp = tuple[int, int, int, int]


class FileContents(msgspec.Struct, frozen=True):
    """What a file says, as the catalog has it: by tenant, and keys by their own ids."""

    configs: dict[str, TenantConfig]
    keys: dict[str, Key]
    overrides: dict[str, dict[tuple[str, str], Override]]


def load_contents(content: bytes, name: str, now: datetime) -> FileContents:
    """What a file's content says. Here a section that is absent is an empty one: there is nothing else to go by."""
    document, source = parse_document(content, name, now)
    problems = Diagnostics(source)
    validate(document, ConfigDocument(operator=OperatorSpec(), tenants=()), now, problems)
    for at, tenant in enumerate(document.tenants or ()):
        for number, key in enumerate(tenant.keys or ()):
            if key.secrets is None:
                path = f"tenants[{at}].keys[{number}].secrets"
                problems.add(path, "is required, since there is no database that has them")
    problems.raise_if_any()
    return compile_contents(document)


def compile_contents(document: ConfigDocument) -> FileContents:
    """Of a document that was checked."""
    operator = operator_as_tenant(document.operator or OperatorSpec())
    found = FileContents({OPERATOR: build_tenant_config(operator, stable_id)}, {}, {})
    for tenant in document.tenants or ():
        config = build_tenant_config(tenant, stable_id)
        tenant_id = config.tenant.id
        found.configs[tenant_id] = config
        found.keys.update({key.id: key for key in _keys(tenant, tenant_id)})
        overrides = {(each.resource, each.subject): each for each in _overrides(tenant, tenant_id)}
        if overrides:
            found.overrides[tenant_id] = overrides
    return found


def stable_id(kind: str, *names: str) -> str:
    """An id for whatever has these names: always the same one."""
    number = int.from_bytes(sha256("\0".join((kind, *names)).encode()).digest(), "big")
    digits = []
    for _ in range(ID_LENGTH):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return f"{kind}_{''.join(digits)}"


def _keys(tenant: TenantSpec, tenant_id: str) -> Iterable[Key]:
    for key in tenant.keys or ():
        fields = entity_fields(key, lambda name: stable_id("pla", tenant.name, name))
        yield build_entity(Key, {"tenant_id": tenant_id, **fields})


def _overrides(tenant: TenantSpec, tenant_id: str) -> Iterable[Override]:
    for override in tenant.overrides or ():
        identity = stable_id("ovr", tenant.name, override.resource, override.subject)
        own = {"id": identity, "tenant_id": tenant_id, "set_by": "file"}
        yield build_entity(Override, {**own, **entity_fields(override, str)})


class FileSource:
    """The truth as a file has it. What replaces it has a higher revision wherever it differs."""

    def __init__(self) -> None:
        self.revision = 0
        self._contents = FileContents({}, {}, {})
        self._deleted: dict[str, list[DeletedOverride]] = {}

    def replace(self, contents: FileContents) -> list[Announcement]:
        """Take this instead, and tell what is different now."""
        self.revision += 1
        before, self._contents = self._contents, self._renewed(contents)
        after = self._contents
        told: dict[str, Announcement] = {}

        def tell(tenant_id: str, **said: Any) -> None:
            known = told.get(tenant_id) or Announcement(self.revision, tenant_id)
            told[tenant_id] = msgspec.structs.replace(known, **said)

        for tenant_id in before.configs.keys() | after.configs.keys():
            if before.configs.get(tenant_id) is not after.configs.get(tenant_id):
                tell(tenant_id, config=True)
            if before.overrides.get(tenant_id) != after.overrides.get(tenant_id):
                tell(tenant_id, overrides=True)
                gone = before.overrides.get(tenant_id, {}).keys() - after.overrides.get(tenant_id, {}).keys()
                known = self._deleted.get(tenant_id, [])
                self._deleted[tenant_id] = [*known, *(DeletedOverride(self.revision, *place) for place in gone)][
                    -MAX_DELETED:
                ]
        by_owner: dict[tuple[str, str], list[str]] = {}
        for key_id in before.keys.keys() | after.keys.keys():
            was, is_now = before.keys.get(key_id), after.keys.get(key_id)
            owner = is_now or was
            if was is not is_now and owner is not None:
                by_owner.setdefault((owner.tenant_id, "gone" if is_now is None else "keys"), []).append(key_id)
        for (tenant_id, field), ids in by_owner.items():
            tell(tenant_id, **{field: tuple(ids)})
        return list(told.values())

    def tenants(self) -> list[str]:
        return [tenant_id for tenant_id in self._contents.configs if tenant_id != OPERATOR]

    async def config(self, tenant_id: str) -> TenantConfig | None:
        return self._contents.configs.get(tenant_id)

    async def key(self, key_id: str) -> Key | None:
        return self._contents.keys.get(key_id)

    async def overrides(self, tenant_id: str) -> list[Override]:
        return list(self._contents.overrides.get(tenant_id, {}).values())

    async def override(self, tenant_id: str, resource: str, subject: str) -> Override | None:
        return self._contents.overrides.get(tenant_id, {}).get((resource, subject))

    async def tenants_with_overrides(self) -> list[str]:
        return list(self._contents.overrides)

    async def configs(self, tenant_ids: Iterable[str]) -> dict[str, TenantConfig]:
        return {each: self._contents.configs[each] for each in tenant_ids if each in self._contents.configs}

    async def revisions(self, tenant_ids: Iterable[str]) -> dict[str, int]:
        return {each: config.tenant.revision for each, config in (await self.configs(tenant_ids)).items()}

    async def overrides_by_id(self, ids: Iterable[str]) -> list[Override]:
        wanted = set(ids)
        return [each for theirs in self._contents.overrides.values() for each in theirs.values() if each.id in wanted]

    async def override_rows(self, after: OverrideRow | None, expires_after: datetime, limit: int) -> list[OverrideRow]:
        """Return a page of all overrides that expire later, behind the last row of the page before."""

        def order(one: Override | OverrideRow) -> tuple[str, str, str]:
            return one.tenant_id, one.subject, one.resource

        live = [
            each
            for theirs in self._contents.overrides.values()
            for each in theirs.values()
            if each.expires_at > expires_after and (after is None or order(each) > order(after))
        ]
        lanes = {tenant_id: config.tenant.lanes for tenant_id, config in self._contents.configs.items()}
        return [
            OverrideRow(each.id, each.version, each.tenant_id, each.resource, each.subject, lanes[each.tenant_id])
            for each in sorted(live, key=order)[:limit]
        ]

    async def deleted_overrides(self, tenant_id: str, after: int, since: datetime, limit: int) -> list[DeletedOverride]:
        return [each for each in self._deleted.get(tenant_id, ()) if each.number > after][-limit:]

    async def pending_tenants(self, tenant_ids: Iterable[str], since: datetime) -> set[str]:
        return set()  # a file is taken and its overrides are set before anything else looks at it

    def _renewed(self, contents: FileContents) -> FileContents:
        """What is the same stays the very same; the rest gets this revision."""
        before = self._contents
        configs = {}
        for tenant_id, config in contents.configs.items():
            known = before.configs.get(tenant_id)
            if known is not None and _with_revision(config, known.tenant.revision) == known:
                configs[tenant_id] = known
            else:
                configs[tenant_id] = _with_revision(config, self.revision)
        keys = {}
        for key_id, key in contents.keys.items():
            kept = before.keys.get(key_id)
            if kept is not None and msgspec.structs.replace(key, version=kept.version) == kept:
                keys[key_id] = kept
            else:
                keys[key_id] = msgspec.structs.replace(key, version=self.revision)
        return FileContents(configs, keys, contents.overrides)


def _with_revision(config: TenantConfig, revision: int) -> TenantConfig:
    tenant = msgspec.structs.replace(config.tenant, revision=revision)
    return msgspec.structs.replace(config, tenant=tenant)


class LiveFileStatus(msgspec.Struct, frozen=True):
    """`file` is ok or degraded, since `since` (epoch seconds); `error` says why the newest version is not in force."""

    file: str
    since: float
    error: str | None
    revision: int
    cache: CacheStatus
    overrides: ReconcilerStatus = ReconcilerStatus()


class LiveFile:
    """A file with its memory, kept up to date until it is closed: what `Node` is to a database.

    `sink` is where overrides act, `shared` the Redis behind it, if there is one; `placed` hears of each tenant that is
    read, before anything of it is decided. `on_restored` is called with the number of overrides that the store had
    lost, each time some are set again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        peppers: Peppers,
        *,
        sink: OverrideSink | None = None,
        shared: SharedBackend | None = None,
        on_tenant_loaded: Callable[[Tenant], None] | None = None,
        key_prefix: str = "lf",
        clock: Clock | None = None,
        on_restored: Callable[[int], None] | None = None,
        on_memory: Callable[[int], None] | None = None,
        **bounds: Any,
    ) -> None:
        self._path = Path(path)
        self._clock = clock or SystemClock()
        self._source = FileSource()
        self._override_sync = None if sink is None else OverrideSync(self._source, sink, self._clock, on_tenant_loaded)
        self._reconciler: OverrideReconciler | None = None
        if sink is not None and shared is not None and self._override_sync is not None:
            self._reconciler = OverrideReconciler(
                self._source,
                sink,
                self._override_sync,
                self._clock,
                shared=shared,
                prefix=key_prefix,
                on_restored=on_restored,
                on_memory=on_memory,
            )
        self.cache = CatalogCache(self._source, peppers, on_tenant_loaded=on_tenant_loaded, clock=self._clock, **bounds)
        self._stamp: _Stamp | None = None
        self._tried: bytes | None = None  # a digest of the content that was last taken or refused
        self._refused: str | None = None
        self._away_since_us: int | None = None
        self._error: str | None = None
        self._since_us = self._clock.now_us()
        self._owed: dict[str, bool] = {}  # tenants whose overrides are to be mirrored, and whether all of them anew
        self._looking = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Ready once the file is read; one that is wrong is refused."""
        self.cache.open()
        stamp = await asyncio.to_thread(_stamp, self._path)
        content = await asyncio.to_thread(_content, self._path)
        self._source.replace(await self._load(content))
        self._stamp, self._tried = stamp, sha256(content).digest()
        self._since_us = self._clock.now_us()
        self._owed = dict.fromkeys(self._source.tenants(), False)
        await self._mirror_owed()
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._every(lambda: POLL_SECONDS, self.poll)))
        if self._override_sync is not None:
            self._tasks.append(loop.create_task(self._every(lambda: MIRROR_SECONDS, self._mirror_all)))
        if self._reconciler is not None:
            self._tasks.append(loop.create_task(self._every(self._reconciler.pause_seconds, self._sweep_overrides)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self.cache.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def status(self) -> LiveFileStatus:
        """How it is doing, without looking."""
        said = "ok" if self._error is None else "degraded"
        swept = ReconcilerStatus() if self._reconciler is None else self._reconciler.status()
        revision, cache = self._source.revision, self.cache.status()
        return LiveFileStatus(said, self._since_us / US_PER_SECOND, self._error, revision, cache, swept)

    async def poll(self) -> None:
        """Take the file if it has changed. What is wrong, or away, leaves in force what was."""
        async with self._looking:
            try:
                stamp = await asyncio.to_thread(_stamp, self._path)
            except InvalidInput as error:
                self._say(str(error))
                return
            if stamp is None:
                self._is_away()
                return
            self._away_since_us = None
            if stamp == self._stamp:
                self._say(self._refused)
            else:
                await self._take(stamp)
            await self._mirror_owed()

    async def _take(self, stamp: _Stamp) -> None:
        await asyncio.sleep(SETTLE_SECONDS)
        try:
            content = await asyncio.to_thread(_content, self._path)
        except InvalidInput as error:
            if await asyncio.to_thread(_stamp, self._path) is not None:  # there, and not to be read
                self._say(str(error))
            return
        if await asyncio.to_thread(_stamp, self._path) != stamp:
            return  # somebody is writing: it is looked at again
        self._stamp = stamp
        digest = sha256(content).digest()
        if digest != self._tried:
            self._tried = digest
            await self._use(content)
        self._say(self._refused)

    async def _use(self, content: bytes) -> None:
        try:
            loaded = await self._load(content)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a file, the one before stays in force
            self._refused = str(error) or type(error).__name__
            return
        self._refused = None
        announcements = self._source.replace(loaded)
        await self.cache.apply_changes(announcements)
        for told in announcements:
            if told.config or told.overrides:
                self._owed[told.tenant_id] = self._owed.get(told.tenant_id, False) or told.config
        self._owed.pop(OPERATOR, None)
        _log.info("%s was read again: %d tenants have changed", self._path, len(announcements))

    async def _load(self, content: bytes) -> FileContents:
        now = to_datetime(self._clock.now_us())
        return await asyncio.to_thread(load_contents, content, str(self._path), now)

    def _is_away(self) -> None:
        now_us = self._clock.now_us()
        if self._away_since_us is None:
            self._away_since_us = now_us
        elif now_us - self._away_since_us >= AWAY_SECONDS * US_PER_SECOND:
            self._say(f"{self._path} is not there")

    def _say(self, error: str | None) -> None:
        """How the file is from now on; each change of that is logged once."""
        if error == self._error:
            return
        self._error, self._since_us = error, self._clock.now_us()
        if error is None:
            _log.warning("%s is good again, and in force", self._path)
        else:
            _log.error("what was read of %s before stays in force: %s", self._path, error)

    async def _mirror_owed(self) -> None:
        while self._override_sync is not None and self._owed:
            tenant_id, anew = self._owed.popitem()
            try:
                await self._override_sync.sync_tenant(tenant_id, force=anew)
            except StoreError as error:
                self._owed[tenant_id] = anew or self._owed.get(tenant_id, False)
                _log.warning("overrides could not be mirrored, and will be: %s", error)
                return

    async def _mirror_all(self) -> None:
        for tenant_id in await self._source.tenants_with_overrides():
            self._owed.setdefault(tenant_id, False)
        await self._mirror_owed()

    async def _sweep_overrides(self) -> None:
        """Look for lost overrides, but not while a new version of the file is taken: those it adds are not lost."""
        if self._reconciler is not None:
            async with self._looking:
                await self._reconciler.step()

    async def _every(self, pause: Callable[[], float], work: Callable[[], Any]) -> None:
        while True:
            await asyncio.sleep(pause())
            with contextlib.suppress(LimitforgeError):
                await work()


def _stamp(path: Path) -> _Stamp | None:
    """What tells one version of the file from the next; None if it is away."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as opened:
            return opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(str(path), f"can't be read: {error.strerror or error}")
