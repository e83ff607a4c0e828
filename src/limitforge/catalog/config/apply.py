"""Bring the catalog to what a document says.

The whole document is checked before anything is written. Then it is written in short transactions of whole tenants: a
tenant is changed entirely or not at all, and other writers get their turn in between. An apply that was interrupted is
finished by applying the document again.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.config.diagnostics import Diagnostics
from limitforge.catalog.config.diff import Action, Change, diff_documents, spec_identity
from limitforge.catalog.config.export import CatalogState, read_state, state_to_document
from limitforge.catalog.config.specs import (
    ConfigDocument,
    KeySpec,
    OperatorSpec,
    OverrideSpec,
    Spec,
    entity_fields,
    operator_as_tenant,
)
from limitforge.catalog.config.strict_yaml import SourceFile
from limitforge.catalog.config.validation import validate
from limitforge.catalog.credentials import new_id
from limitforge.catalog.database import catalog_revision, queries
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.model import (
    Entity,
    Key,
    Override,
    Plan,
    Policy,
    Tenant,
    build_entity,
    current_fields,
    to_datetime,
)
from limitforge.errors import InvalidInput, VersionConflict

MAX_CHANGES = 500  # of one transaction that has more than one tenant: about 0.1 s on Postgres
MIN_PAUSE_SECONDS = 0.005
PAUSE_FRACTION = 0.25  # of what a transaction took: SQLite has no queue for its lock, so a waiter must find it free

OPERATOR_NAME = ""  # among the names of tenants

ProgressCallback = Callable[[int, int], None]
"""Called with the number of tenants that are applied, and of all that are to be."""


async def preview_document(
    catalog: Catalog, document: ConfigDocument, *, prune: bool = False, source: SourceFile | None = None
) -> list[Change]:
    """What `apply` would do now. Everything that is wrong with the document is refused here as there."""
    async with catalog.database.reading() as connection:
        wanted = _DesiredState(document, source, prune=prune)
        changes, _ = await wanted.compare(connection, to_datetime(catalog.clock.now_us()))
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
    """Make the catalog say what the document says, and return what that took. Where it does already, nothing is
    written.

    Each tenant is changed entirely or not at all. Cancelling it lets the current transaction end first. `source` is
    where the document was read, so that errors name its lines.
    """
    wanted = _DesiredState(document, source, prune=prune)
    async with catalog.database.reading() as connection:
        revision = (await catalog_revision.read_last_stamp(connection)).revision
        planned, state = await wanted.compare(connection, to_datetime(catalog.clock.now_us()))
    batches = _batches(planned, state)
    work = _BatchWriter(catalog, wanted, actor, state, revision)
    work.set_progress(batches, on_progress)
    for batch in batches:
        began = time.monotonic()
        await _complete_despite_cancellation(work.write(batch))
        if batch is not batches[-1]:
            await asyncio.sleep(max(MIN_PAUSE_SECONDS, PAUSE_FRACTION * (time.monotonic() - began)))
    return work.changes


class _DesiredState:
    """What a document says, to be compared with what is there."""

    def __init__(self, document: ConfigDocument, source: SourceFile | None, *, prune: bool) -> None:
        if prune and document.tenants is None:
            raise InvalidInput("tenants", "must be there for the others to be pruned, if only as an empty list")
        self._document = document
        self._source = source
        self._prune = prune

    async def compare(
        self, connection: AsyncConnection, now: datetime, only: Collection[str] | None = None
    ) -> tuple[list[Change], CatalogState]:
        """The changes to make, and the state that they start from: of all tenants, or of those that `only` names."""
        document = self._document if only is None else self._part(only)
        names: Collection[str] | None = only
        if only is None and not self._prune:
            names = [each.name for each in document.tenants or ()]
        state = await read_state(connection, names)
        current = state_to_document(state, now)
        problems = Diagnostics(self._source)
        validate(self._document, current, now, problems, only)
        await self._check_keys(connection, state, problems, only)
        problems.raise_if_any()
        return diff_documents(document, current, now, prune=self._prune), state

    def _part(self, only: Collection[str]) -> ConfigDocument:
        operator = self._document.operator if OPERATOR_NAME in only else None
        tenants = tuple(each for each in self._document.tenants or () if each.name in only)
        return ConfigDocument(operator=operator, tenants=tenants)

    async def _check_keys(
        self, connection: AsyncConnection, state: CatalogState, problems: Diagnostics, only: Collection[str] | None
    ) -> None:
        """What a file can't know of its keys: whether they are there, and whose they are."""
        tenants = self._document.tenants or ()
        placed = {
            key.id: (f"tenants[{at}].keys[{number}]", tenant.name, key)
            for at, tenant in enumerate(tenants)
            if only is None or tenant.name in only
            for number, key in enumerate(tenant.keys or ())
        }
        there = {key.id: key for key in await queries.find_where_in(connection, Key, "id", placed)}
        leaving = {each.tenant.id for each in state.tenants.values()} - {
            state.tenants[each.name].tenant.id for each in tenants if each.keys is None and each.name in state.tenants
        }
        for key_id, (path, tenant, wanted) in placed.items():
            known, owner = there.get(key_id), state.tenants.get(tenant)
            if known is not None and owner is not None and known.tenant_id == owner.tenant.id:
                if known.type != wanted.type:
                    problems.add(f"{path}.type", f"of this key is {known.type}, and can't be changed: make another key")
                continue
            if known is not None and known.tenant_id not in leaving:
                problems.add(f"{path}.id", "is that of another tenant's key")
            if wanted.secrets is None:
                why = "is required for a key that is not there yet: `limitforge keys make` makes one"
                problems.add(f"{path}.secrets", why)
        await self._check_secrets(connection, placed, there, leaving, problems)

    async def _check_secrets(
        self,
        connection: AsyncConnection,
        placed: Mapping[str, tuple[str, str, KeySpec]],
        there: Mapping[str, Key],
        leaving: Collection[str],
        problems: Diagnostics,
    ) -> None:
        """Refuse secrets that another key or token of the database has, unless this apply deletes that key first."""
        new = {
            secret.hash: f"{path}.secrets[{number}].hash"
            for key_id, (path, _, wanted) in placed.items()
            for number, secret in enumerate(wanted.secrets or ())
            if key_id not in there or secret.hash not in {each.hash for each in there[key_id].secrets}
        }
        kept = {key.id for tenant in self._document.tenants or () for key in tenant.keys or ()}
        for used, (key_id, tenant_id) in (await queries.secret_owners(connection, new)).items():
            if key_id is None or key_id in kept or tenant_id not in leaving:
                problems.add(new[used], "is that of another key or token")


# --- Transactions ----------------------------------------------------------------------------------------------------


class _Batch(msgspec.Struct, frozen=True):
    """The changes of some tenants, which are made in one transaction."""

    names: tuple[str, ...]
    changes: list[Change]


class _BatchWriter:
    """Writes batches, one transaction each. `state` is what was there at `revision`."""

    def __init__(self, catalog: Catalog, wanted: _DesiredState, actor: str, state: CatalogState, revision: int) -> None:
        self.changes: list[Change] = []
        self._catalog = catalog
        self._wanted = wanted
        self._actor = actor
        self._state = state
        self._revision = revision
        self._is_state_current = True  # whether nothing else was written since the state was read
        self._done = self._total = 0
        self._on_progress: ProgressCallback | None = None

    def set_progress(self, batches: Iterable[_Batch], on_progress: ProgressCallback | None) -> None:
        """Report from now on how many tenants of these batches are done."""
        self._total, self._on_progress = sum(len(batch.names) for batch in batches), on_progress
        self._report_progress()

    async def write(self, batch: _Batch) -> None:
        try:
            changes = await self._write(batch)
        except VersionConflict:  # such as an override that had expired, and was removed since the state was read
            self._is_state_current = False
            changes = await self._write(batch)
        self.changes += changes
        self._done += len(batch.names)
        self._report_progress()

    async def _write(self, batch: _Batch) -> list[Change]:
        known = {name: self._state.tenants[name] for name in batch.names if name in self._state.tenants}
        changes = batch.changes
        writes = _EntityChanges(
            CatalogState(self._state.operator, known), changes, self._actor
        )  # before others have to wait
        async with self._catalog.edit(self._actor) as edit:
            self._is_state_current = self._is_state_current and edit.revision == self._revision + 1
            if not self._is_state_current:
                changes, state = await self._wanted.compare(edit.connection, edit.now, batch.names)
                writes = _EntityChanges(state, changes, self._actor)
            await edit.write_changes(writes.pairs)
            await edit.set_default_plans(writes.created)
        self._revision = edit.revision
        return changes

    def _report_progress(self) -> None:
        if self._on_progress is not None and self._total:
            self._on_progress(self._done, self._total)


def _batches(changes: Sequence[Change], state: CatalogState) -> list[_Batch]:
    """The changes by transaction: those of a tenant together, and tenants between which a key moves."""
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
    """The names of tenants, those together that give a key, or its secret, to another."""
    owner: dict[str, str] = {}
    for name, tenant in state.tenants.items():
        for key in tenant.keys:
            owner |= dict.fromkeys((key.id, *(each.hash for each in key.secrets)), name)
    group = {name: [name] for name in by_name}
    for name, changes in by_name.items():
        for change in changes:
            if not isinstance(change.after, KeySpec):
                continue
            for mark in (change.after.id, *(each.hash for each in change.after.secrets or ())):
                before = owner.get(mark, name)
                if before in group and group[before] is not group[name]:
                    merged = group[before] + group[name]
                    group |= dict.fromkeys(merged, merged)
    return list({id(each): each for each in group.values()}.values())


async def _complete_despite_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Await it; if that is cancelled, let it end all the same, so that what was done is known."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        raise


# --- From changes to rows --------------------------------------------------------------------------------------------

# What refers to others is written after them, and deleted before them.
_WRITE_ORDER = (
    ("tenant", Action.DELETE),
    ("override", Action.DELETE),
    ("key", Action.DELETE),
    ("policy", Action.DELETE),
    ("tenant", Action.CREATE),
    ("plan", Action.CREATE),
    ("plan", Action.UPDATE),
    ("operator", Action.UPDATE),
    ("tenant", Action.UPDATE),
    ("policy", Action.CREATE),
    ("policy", Action.UPDATE),
    ("key", Action.CREATE),
    ("key", Action.UPDATE),
    ("override", Action.CREATE),
    ("override", Action.UPDATE),
    ("plan", Action.DELETE),
)
_ID_PREFIX: Mapping[str, str] = {"tenant": "ten", "plan": "pla", "policy": "pol", "override": "ovr"}
_ENTITY_TYPES: Mapping[str, type[Entity]] = {
    "tenant": Tenant,
    "operator": Tenant,
    "plan": Plan,
    "policy": Policy,
    "key": Key,
    "override": Override,
}


class _EntityChanges:
    """Changes of specs as changes of entities: names become ids, new ones get theirs."""

    def __init__(self, state: CatalogState, changes: Sequence[Change], actor: str) -> None:
        self._actor = actor
        owners = [state.operator, *state.tenants.values()]
        self._tenants = {_owner_name(each.tenant): each.tenant.id for each in owners}
        self._existing: dict[tuple[str, str, Hashable], Entity] = {}
        self._plans: dict[tuple[str, str], str] = {}
        for owner in owners:
            name = _owner_name(owner.tenant)
            self._existing["tenant" if name else "operator", name, ""] = owner.tenant
            self._plans |= {(name, plan.name): plan.id for plan in owner.plans}
            for entity in (*owner.plans, *owner.policies, *owner.keys, *owner.overrides):
                self._existing[entity.kind, name, _entity_identity(entity)] = entity
        for change in changes:
            if change.kind == "tenant" and change.action is Action.CREATE:
                self._tenants[change.tenant] = new_id("ten")
            elif change.kind == "plan" and change.action is Action.CREATE:
                self._plans[change.tenant, change.name] = new_id("pla")
        ordered = sorted(changes, key=lambda change: _WRITE_ORDER.index((change.kind, change.action)))
        self.pairs = [self._pair(change) for change in ordered]
        self.created = [after for before, after in self.pairs if before is None and isinstance(after, Tenant)]

    def _pair(self, change: Change) -> tuple[Entity | None, Entity | None]:
        spec = change.after or change.before
        identity = "" if change.kind in ("tenant", "operator") else spec_identity(spec)
        before = self._existing.get((change.kind, change.tenant, identity))
        return before, None if change.after is None else self._entity(change, change.after, before)

    def _entity(self, change: Change, spec: Spec, before: Entity | None) -> Entity:
        spec = operator_as_tenant(spec) if isinstance(spec, OperatorSpec) else spec
        fields = {} if before is None else current_fields(before)
        said = entity_fields(spec, lambda name: self._plans[change.tenant, name])
        if isinstance(spec, KeySpec) and spec.secrets is None:
            del said["secrets"]
        fields |= said
        if before is None:
            fields |= self._identity_fields(change)
        if isinstance(spec, OverrideSpec):
            fields["set_by"] = self._actor
        return build_entity(_ENTITY_TYPES[change.kind], fields)

    def _identity_fields(self, change: Change) -> dict[str, str]:
        if change.kind == "tenant":
            return {"id": self._tenants[change.tenant]}
        own = {"tenant_id": self._tenants[change.tenant]}
        if change.kind == "plan":
            own["id"] = self._plans[change.tenant, change.name]
        elif change.kind != "key":
            own["id"] = new_id(_ID_PREFIX[change.kind])
        return own


def _owner_name(tenant: Tenant) -> str:
    return "" if tenant.is_operator else tenant.name


def _entity_identity(entity: Any) -> Hashable:
    match entity:
        case Plan():
            return entity.name
        case Policy():
            return entity.pattern.canonical
        case Override():
            return entity.resource, entity.subject
    identity: str = entity.id
    return identity
