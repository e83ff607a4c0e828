"""The configuration file of one process: a cache that follows the file, without a database.

The file is polled. A version with errors is not used: the one before stays in force.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import msgspec

from limitforge.catalog.config.strict_yaml import MAX_FILE_BYTES
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.live.background import BackgroundTasks
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.cache.entries import CacheStatus
from limitforge.catalog.live.file_source import FileContents, FileSource, parse_contents
from limitforge.catalog.live.overrides.override_sync import OverrideStore, OverrideSync
from limitforge.catalog.live.overrides.reconciler import OverrideReconciler, ReconcilerStatus
from limitforge.catalog.live.shared_redis import SharedRedis
from limitforge.catalog.model import OPERATOR, Tenant, to_datetime
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import InvalidInput, StoreError
from limitforge.observability.events import log_event

POLL_SECONDS = 0.5
SETTLE_SECONDS = 0.1  # a program that writes the file in place may not have finished
MISSING_SECONDS = 5.0  # a file that is being replaced may be missing for a moment
SYNC_OVERRIDES_SECONDS = 60.0

_log = logging.getLogger(__name__)
_FileVersion = tuple[int, int, int, int]


class LiveFileStatus(msgspec.Struct, frozen=True):
    """`file` is ok or degraded; `since` is when that began (epoch seconds).

    `error` says why the newest version is not in force.
    """

    file: str
    since: float
    error: str | None
    revision: int
    cache: CacheStatus
    overrides: ReconcilerStatus = ReconcilerStatus()


class LiveFile:
    """A configuration file and its cache, kept up to date from `start` until `close`.

    The arguments are those of `LiveCatalog`. `catalog_redis` is the Redis of the limiter's store, if it has one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        peppers: Peppers,
        *,
        override_store: OverrideStore | None = None,
        catalog_redis: SharedRedis | None = None,
        on_tenant_loaded: Callable[[Tenant], None] | None = None,
        key_prefix: str = "lf",
        clock: Clock | None = None,
        on_overrides_restored: Callable[[int], None] | None = None,
        on_redis_memory_limit: Callable[[int], None] | None = None,
        **cache_options: Any,
    ) -> None:
        self._path = Path(path)
        self._clock = clock or SystemClock()
        self._source = FileSource()
        self._override_sync = (
            None
            if override_store is None
            else OverrideSync(self._source, override_store, self._clock, on_tenant_loaded)
        )
        self._reconciler: OverrideReconciler | None = None
        if override_store is not None and catalog_redis is not None and self._override_sync is not None:
            self._reconciler = OverrideReconciler(
                self._source,
                override_store,
                self._override_sync,
                self._clock,
                catalog_redis=catalog_redis,
                prefix=key_prefix,
                on_overrides_restored=on_overrides_restored,
                on_redis_memory_limit=on_redis_memory_limit,
            )
        self.cache = CatalogCache(
            self._source, peppers, on_tenant_loaded=on_tenant_loaded, clock=self._clock, **cache_options
        )
        self._version: _FileVersion | None = None
        self._digest: bytes | None = None  # of the content that was last loaded or refused
        self._content_error: str | None = None
        self._missing_since_us: int | None = None
        self._error: str | None = None
        self._since_us = self._clock.now_us()
        self._pending_sync: dict[str, bool] = {}  # tenants whose overrides must be synced, and whether by force
        self._polling = asyncio.Lock()
        self._background = BackgroundTasks()

    async def start(self) -> None:
        """Load the file, and start to follow it. Raises `InvalidInput` if it can't be read or has errors."""
        self.cache.open()
        version = await asyncio.to_thread(_file_version, self._path)
        content = await asyncio.to_thread(_read_bytes, self._path)
        self._source.set_contents(await self._parse_in_thread(content))
        self._version, self._digest = version, sha256(content).digest()
        self._since_us = self._clock.now_us()
        self._pending_sync = dict.fromkeys(self._source.tenants(), False)
        await self._sync_pending()
        self._background.start_periodic("poll_file", lambda: POLL_SECONDS, self.poll)
        if self._override_sync is not None:
            self._background.start_periodic("sync_overrides", lambda: SYNC_OVERRIDES_SECONDS, self._sync_all)
        if self._reconciler is not None:
            self._background.start_periodic("reconcile_overrides", self._reconciler.pause_seconds, self._reconcile)

    async def close(self) -> None:
        await self._background.close()
        await self.cache.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def status(self) -> LiveFileStatus:
        """Return the status without I/O."""
        return LiveFileStatus(
            "ok" if self._error is None else "degraded",
            self._since_us / US_PER_SECOND,
            self._error,
            self._source.revision,
            self.cache.status(),
            ReconcilerStatus() if self._reconciler is None else self._reconciler.status(),
        )

    async def poll(self) -> None:
        """Load the file if it has changed. If it is missing or has errors, the previous version stays in force."""
        async with self._polling:
            try:
                version = await asyncio.to_thread(_file_version, self._path)
            except InvalidInput as error:
                self._set_error(str(error))
                return
            if version is None:
                self._note_missing()
                return
            self._missing_since_us = None
            if version == self._version:
                self._set_error(self._content_error)
            else:
                await self._reload(version)
            await self._sync_pending()

    async def _reload(self, version: _FileVersion) -> None:
        await asyncio.sleep(SETTLE_SECONDS)
        try:
            content = await asyncio.to_thread(_read_bytes, self._path)
        except InvalidInput as error:
            if await asyncio.to_thread(_file_version, self._path) is not None:  # it exists, but is not readable
                self._set_error(str(error))
            return
        if await asyncio.to_thread(_file_version, self._path) != version:
            return  # it is being written: the next poll loads it
        self._version = version
        digest = sha256(content).digest()
        if digest != self._digest:
            self._digest = digest
            await self._apply_content(content)
        self._set_error(self._content_error)

    async def _apply_content(self, content: bytes) -> None:
        try:
            loaded = await self._parse_in_thread(content)
        except Exception as error:  # noqa: BLE001 - the previous version stays in force, however wrong this one is
            self._content_error = str(error) or type(error).__name__
            return
        self._content_error = None
        announcements = self._source.set_contents(loaded)
        await self.cache.apply_changes(announcements)
        for each in announcements:
            if each.config or each.overrides:
                self._pending_sync[each.tenant_id] = self._pending_sync.get(each.tenant_id, False) or each.config
        self._pending_sync.pop(OPERATOR, None)
        log_event(
            _log,
            logging.INFO,
            "catalog.file_loaded",
            "a new version of the configuration file is in force",
            path=self._path,
            changed_tenants=len(announcements),
        )

    async def _parse_in_thread(self, content: bytes) -> FileContents:
        now = to_datetime(self._clock.now_us())
        return await asyncio.to_thread(parse_contents, content, str(self._path), now)

    def _note_missing(self) -> None:
        now_us = self._clock.now_us()
        if self._missing_since_us is None:
            self._missing_since_us = now_us
        elif now_us - self._missing_since_us >= MISSING_SECONDS * US_PER_SECOND:
            self._set_error(f"{self._path} does not exist")

    def _set_error(self, error: str | None) -> None:
        """Set the state of the file, and log each change once."""
        if error == self._error:
            return
        self._error, self._since_us = error, self._clock.now_us()
        if error is None:
            log_event(
                _log, logging.WARNING, "catalog.file_accepted", "the configuration file is valid again", path=self._path
            )
        else:
            log_event(
                _log,
                logging.ERROR,
                "catalog.file_rejected",
                "could not load the configuration file, keeping the previous version",
                path=self._path,
                error=error,
            )

    async def _sync_pending(self) -> None:
        while self._override_sync is not None and self._pending_sync:
            tenant_id, force = self._pending_sync.popitem()
            try:
                await self._override_sync.sync_tenant(tenant_id, force=force)
            except StoreError as error:
                self._pending_sync[tenant_id] = force or self._pending_sync.get(tenant_id, False)
                log_event(
                    _log,
                    logging.WARNING,
                    "overrides.sync_failed",
                    "could not write overrides to the store, will retry",
                    error=error,
                )
                return

    async def _sync_all(self) -> None:
        for tenant_id in await self._source.tenants_with_overrides():
            self._pending_sync.setdefault(tenant_id, False)
        await self._sync_pending()

    async def _reconcile(self) -> None:
        """Restore lost overrides. Not while a new version is loaded: its new overrides are missing, but not lost."""
        if self._reconciler is not None:
            async with self._polling:
                await self._reconciler.step()


def _file_version(path: Path) -> _FileVersion | None:
    """Return what tells one version of the file from the next, or None if it is missing."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as opened:
            return opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(str(path), f"can't be read: {error.strerror or error}")
