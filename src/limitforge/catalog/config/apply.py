"""Apply a configuration document to the catalog.

The whole document is validated before anything is written. Then it is written in short transactions of whole tenants: a
tenant changes entirely or not at all, and other writers can proceed in between. Applying is idempotent: to complete an
interrupted apply, apply the document again.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.config.diagnostics import Diagnostics
from limitforge.catalog.config.diff import Change, diff_documents
from limitforge.catalog.config.entity_changes import EntityChanges
from limitforge.catalog.config.export import CatalogState, read_state, state_to_document
from limitforge.catalog.config.specs import (
    OPERATOR_NAME,
    ConfigDocument,
    KeySpec,
)
from limitforge.catalog.config.strict_yaml import SourceFile
from limitforge.catalog.config.validation import validate
from limitforge.catalog.database import catalog_revision, queries
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.model import (
    Key,
    to_datetime,
)
from limitforge.errors import InvalidInput, VersionConflict

MAX_CHANGES = 500  # in a transaction with more than one tenant: about 0.1 s on Postgres
MIN_PAUSE_SECONDS = 0.005
PAUSE_FRACTION = 0.25  # of the last transaction's time: SQLite does not queue writers, so they need a gap

ProgressCallback = Callable[[int, int], None]
"""Called with the number of applied tenants and the number of tenants to apply."""


async def preview_document(
    catalog: Catalog, document: ConfigDocument, *, prune: bool = False, source: SourceFile | None = None
) -> list[Change]:
    """Return the changes that `apply_document` would make now. Raises the same errors for an invalid document."""
    async with catalog.database.reading() as connection:
        desired = _DesiredState(document, source, prune=prune)
        changes, _ = await desired.compare(connection, to_datetime(catalog.clock.now_us()))
        return changes


async def apply_document(
    catalog: Catalog,
    document: ConfigDocument,
    actor: str,
    *,
    prune: bool = False,
    source: SourceFile | None = None,
    on_progress: ProgressCallback | None = None,
) -> list[Change]:
    """Make the catalog match the document, and return the changes. Raises `InvalidFile` for an invalid document.

    Each tenant changes entirely or not at all. A cancelled apply completes the current transaction first. `source` is
    the file from which the document was read, so that errors name its lines.
    """
    desired = _DesiredState(document, source, prune=prune)
    async with catalog.database.reading() as connection:
        revision = (await catalog_revision.read_last_stamp(connection)).revision
        planned, state = await desired.compare(connection, to_datetime(catalog.clock.now_us()))
    batches = _batches(planned, state)
    writer = _BatchWriter(catalog, desired, actor, state, revision)
    writer.set_progress(batches, on_progress)
    for batch in batches:
        began = time.monotonic()
        await _complete_despite_cancellation(writer.write(batch))
        if batch is not batches[-1]:
            await asyncio.sleep(max(MIN_PAUSE_SECONDS, PAUSE_FRACTION * (time.monotonic() - began)))
    return writer.changes


class _DesiredState:
    """The state that a document describes, to be compared with the catalog."""

    def __init__(self, document: ConfigDocument, source: SourceFile | None, *, prune: bool) -> None:
        if prune and document.tenants is None:
            raise InvalidInput("tenants", "is required to prune other tenants; it may be an empty list")
        self._document = document
        self._source = source
        self._prune = prune

    async def compare(
        self, connection: AsyncConnection, now: datetime, only: Collection[str] | None = None
    ) -> tuple[list[Change], CatalogState]:
        """Return the changes to make and the current state, of all tenants or of those in `only`."""
        document = self._document if only is None else self._restrict_to(only)
        names: Collection[str] | None = only
        if only is None and not self._prune:
            names = [each.name for each in document.tenants or ()]
        state = await read_state(connection, names)
        current = state_to_document(state, now)
        diagnostics = Diagnostics(self._source)
        validate(self._document, current, now, diagnostics, only)
        await self._validate_keys(connection, state, diagnostics, only)
        diagnostics.raise_if_any()
        return diff_documents(document, current, now, prune=self._prune), state

    def _restrict_to(self, only: Collection[str]) -> ConfigDocument:
        operator = self._document.operator if OPERATOR_NAME in only else None
        tenants = tuple(each for each in self._document.tenants or () if each.name in only)
        return ConfigDocument(operator=operator, tenants=tenants)

    async def _validate_keys(
        self, connection: AsyncConnection, state: CatalogState, diagnostics: Diagnostics, only: Collection[str] | None
    ) -> None:
        """Check keys against the database: whether they exist, and which tenant owns them."""
        tenants = self._document.tenants or ()
        wanted_keys = {
            key.id: _WantedKey(f"tenants[{tenant_index}].keys[{index}]", tenant.name, key)
            for tenant_index, tenant in enumerate(tenants)
            if only is None or tenant.name in only
            for index, key in enumerate(tenant.keys or ())
        }
        existing = {key.id: key for key in await queries.find_where_in(connection, Key, "id", wanted_keys)}
        # This apply deletes the unlisted keys of tenants with a list of keys, and of those that are pruned.
        tenants_losing_unlisted_keys = {each.tenant.id for each in state.tenants.values()} - {
            state.tenants[each.name].tenant.id for each in tenants if each.keys is None and each.name in state.tenants
        }
        for key_id, wanted in wanted_keys.items():
            known, owner = existing.get(key_id), state.tenants.get(wanted.tenant)
            if known is not None and owner is not None and known.tenant_id == owner.tenant.id:
                if known.type != wanted.spec.type:
                    problem = f"can't be changed from {known.type}; create another key"
                    diagnostics.add(f"{wanted.path}.type", problem)
                continue
            if known is not None and known.tenant_id not in tenants_losing_unlisted_keys:
                diagnostics.add(f"{wanted.path}.id", "is the id of another tenant's key")
            if wanted.spec.secrets is None:
                problem = "is required for a new key: `limitforge keys make` generates one"
                diagnostics.add(f"{wanted.path}.secrets", problem)
        await self._validate_secrets(connection, wanted_keys, existing, tenants_losing_unlisted_keys, diagnostics)

    async def _validate_secrets(
        self,
        connection: AsyncConnection,
        wanted_keys: Mapping[str, "_WantedKey"],
        existing: Mapping[str, Key],
        tenants_losing_unlisted_keys: Collection[str],
        diagnostics: Diagnostics,
    ) -> None:
        """Refuse secrets that another key or token of the database has, unless this apply deletes that key first."""
        new = {
            secret.hash: f"{wanted.path}.secrets[{index}].hash"
            for key_id, wanted in wanted_keys.items()
            for index, secret in enumerate(wanted.spec.secrets or ())
            if key_id not in existing or secret.hash not in {each.hash for each in existing[key_id].secrets}
        }
        kept = {key.id for tenant in self._document.tenants or () for key in tenant.keys or ()}
        for used, (key_id, tenant_id) in (await queries.secret_owners(connection, new)).items():
            if key_id is None or key_id in kept or tenant_id not in tenants_losing_unlisted_keys:
                diagnostics.add(new[used], "is the hash of another key or token")


class _WantedKey(msgspec.Struct, frozen=True):
    """A key of the document, with its path and the name of its tenant."""

    path: str
    tenant: str
    spec: KeySpec


# --- Transactions ----------------------------------------------------------------------------------------------------


class _Batch(msgspec.Struct, frozen=True):
    """The changes of some tenants, which are written in one transaction."""

    names: tuple[str, ...]
    changes: list[Change]


class _BatchWriter:
    """Writes batches, one transaction each. `state` is the state of the catalog at `revision`."""

    def __init__(
        self, catalog: Catalog, desired: _DesiredState, actor: str, state: CatalogState, revision: int
    ) -> None:
        self.changes: list[Change] = []
        self._catalog = catalog
        self._desired = desired
        self._actor = actor
        self._state = state
        self._revision = revision
        self._others_have_written = False
        self._done = self._total = 0
        self._on_progress: ProgressCallback | None = None

    def set_progress(self, batches: Iterable[_Batch], on_progress: ProgressCallback | None) -> None:
        """Report the progress of these batches to `on_progress`."""
        self._total, self._on_progress = sum(len(batch.names) for batch in batches), on_progress
        self._report_progress()

    async def write(self, batch: _Batch) -> None:
        """Write one batch. If another writer interfered, compare again and retry once."""
        try:
            changes = await self._write(batch)
        except VersionConflict:  # the clean-up may have deleted an expired override, for example
            self._others_have_written = True
            changes = await self._write(batch)
        self.changes += changes
        self._done += len(batch.names)
        self._report_progress()

    async def _write(self, batch: _Batch) -> list[Change]:
        known = {name: self._state.tenants[name] for name in batch.names if name in self._state.tenants}
        changes = batch.changes
        # Prepared before the transaction, so that other writers wait less.
        entity_changes = EntityChanges(CatalogState(self._state.operator, known), changes, self._actor)
        # A catalog of the command line has no `on_commit`: the outbox relay of a running service publishes the changes.
        async with self._catalog.edit(self._actor) as edit:
            self._others_have_written = self._others_have_written or edit.revision != self._revision + 1
            if self._others_have_written:
                changes, state = await self._desired.compare(edit.connection, edit.now, batch.names)
                entity_changes = EntityChanges(state, changes, self._actor)
            await edit.write_changes(entity_changes.pairs)
            await edit.set_default_plans(entity_changes.created_tenants)
        self._revision = edit.revision
        return changes

    def _report_progress(self) -> None:
        if self._on_progress is not None and self._total:
            self._on_progress(self._done, self._total)


def _batches(changes: Sequence[Change], state: CatalogState) -> list[_Batch]:
    """Group changes into transactions: each has whole tenants, and tenants that exchange keys stay together."""
    by_name: dict[str, list[Change]] = {}
    for change in changes:
        by_name.setdefault(change.tenant, []).append(change)
    batches: list[_Batch] = []
    names: list[str] = []
    count = 0
    for group in _group_linked_tenants(by_name, state):
        size = sum(len(by_name[name]) for name in group)
        if names and count + size > MAX_CHANGES:
            batches.append(_batch(names, by_name))
            names, count = [], 0
        names += group
        count += size
    if names:
        batches.append(_batch(names, by_name))
    return batches


def _batch(names: Iterable[str], by_name: Mapping[str, list[Change]]) -> _Batch:
    return _Batch(tuple(names), [change for name in names for change in by_name[name]])


def _group_linked_tenants(by_name: Mapping[str, Sequence[Change]], state: CatalogState) -> list[list[str]]:
    """Group the names of tenants, so that tenants between which a key or a secret moves are in one group."""
    owner: dict[str, str] = {}
    for name, tenant in state.tenants.items():
        for key in tenant.keys:
            owner |= dict.fromkeys((key.id, *(each.hash for each in key.secrets)), name)
    group = {name: [name] for name in by_name}
    for name, changes in by_name.items():
        for change in changes:
            if not isinstance(change.after, KeySpec):
                continue
            for key_or_hash in (change.after.id, *(each.hash for each in change.after.secrets or ())):
                before = owner.get(key_or_hash, name)
                if before in group and group[before] is not group[name]:
                    merged = group[before] + group[name]
                    group |= dict.fromkeys(merged, merged)
    return list({id(each): each for each in group.values()}.values())


async def _complete_despite_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Await the work. If the caller is cancelled, wait until the work ends, so that it is never half done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        raise
