"""Bring the catalog to what a document says: everything in one transaction, or nothing."""

from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog import queries
from limitforge.catalog.catalog import Catalog
from limitforge.catalog.changes import Action, Change, identity_of, plan_changes
from limitforge.catalog.consistency import check
from limitforge.catalog.credentials import new_id
from limitforge.catalog.export import State, described, read_state
from limitforge.catalog.markup import Source
from limitforge.catalog.model import Entity, Key, Override, Plan, Policy, Tenant, at_time, build, fields_now
from limitforge.catalog.problems import Problems
from limitforge.catalog.specs import Document, KeySpec, OperatorSpec, OverrideSpec, Spec, as_tenant, entity_fields
from limitforge.errors import InvalidInput


async def preview(
    catalog: Catalog, document: Document, *, prune: bool = False, source: Source | None = None
) -> list[Change]:
    """What `apply` would do now. Everything that is wrong with the document is refused here as there."""
    async with catalog.database.reading() as connection:
        changes, _ = await _compare(connection, document, at_time(catalog.clock.now_us()), source, prune=prune)
        return changes


async def apply(
    catalog: Catalog, document: Document, actor: str, *, prune: bool = False, source: Source | None = None
) -> list[Change]:
    """Make the catalog say what the document says, and tell what that took. Where it does already, nothing is written.

    `source` is where the document was read, so that errors name its lines.
    """
    if not await preview(catalog, document, prune=prune, source=source):
        return []
    async with catalog.edit(actor) as edit:
        changes, state = await _compare(edit.connection, document, edit.now, source, prune=prune)
        writes = _Writes(state, changes, actor)
        await edit.write(writes.pairs)
        await edit.set_default_plans(writes.created)
    return changes


async def _compare(
    connection: AsyncConnection, document: Document, now: datetime, source: Source | None, *, prune: bool
) -> tuple[list[Change], State]:
    if prune and document.tenants is None:
        raise InvalidInput("tenants", "must be there for the others to be pruned, if only as an empty list")
    state = await read_state(connection, None if prune else [each.name for each in document.tenants or ()])
    current = described(state, now)
    problems = Problems(source)
    check(document, current, now, problems)
    await _check_keys(connection, document, state, problems)
    problems.stop()
    return plan_changes(document, current, now, prune=prune), state


async def _check_keys(connection: AsyncConnection, document: Document, state: State, problems: Problems) -> None:
    """What a file can't know of its keys: whether they are there, and whose they are."""
    placed = {
        key.id: (f"tenants[{at}].keys[{number}]", tenant.name, key)
        for at, tenant in enumerate(document.tenants or ())
        for number, key in enumerate(tenant.keys or ())
    }
    there = {key.id: key for key in await queries.some(connection, Key, "id", placed)}
    leaving = {each.tenant.id for each in state.tenants.values()} - {
        state.tenants[each.name].tenant.id
        for each in document.tenants or ()
        if each.keys is None and each.name in state.tenants
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


# --- From changes to rows --------------------------------------------------------------------------------------------

# What refers to others is written after them, and deleted before them.
_ORDER = (
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
_PREFIX: Mapping[str, str] = {"tenant": "ten", "plan": "pla", "policy": "pol", "override": "ovr"}
_KIND: Mapping[str, type[Entity]] = {
    "tenant": Tenant,
    "operator": Tenant,
    "plan": Plan,
    "policy": Policy,
    "key": Key,
    "override": Override,
}


class _Writes:
    """Changes of specs as changes of entities: names become ids, new ones get theirs."""

    def __init__(self, state: State, changes: Sequence[Change], actor: str) -> None:
        self._actor = actor
        owners = [state.operator, *state.tenants.values()]
        self._tenants = {_owner_name(each.tenant): each.tenant.id for each in owners}
        self._there: dict[tuple[str, str, Hashable], Entity] = {}
        self._plans: dict[tuple[str, str], str] = {}
        for owner in owners:
            name = _owner_name(owner.tenant)
            self._there["tenant" if name else "operator", name, ""] = owner.tenant
            self._plans |= {(name, plan.name): plan.id for plan in owner.plans}
            for entity in (*owner.plans, *owner.policies, *owner.keys, *owner.overrides):
                self._there[entity.kind, name, _identity(entity)] = entity
        for change in changes:
            if change.kind == "tenant" and change.action is Action.CREATE:
                self._tenants[change.tenant] = new_id("ten")
            elif change.kind == "plan" and change.action is Action.CREATE:
                self._plans[change.tenant, change.name] = new_id("pla")
        ordered = sorted(changes, key=lambda change: _ORDER.index((change.kind, change.action)))
        self.pairs = [self._pair(change) for change in ordered]
        self.created = [after for before, after in self.pairs if before is None and isinstance(after, Tenant)]

    def _pair(self, change: Change) -> tuple[Entity | None, Entity | None]:
        spec = change.after or change.before
        identity = "" if change.kind in ("tenant", "operator") else identity_of(spec)
        before = self._there.get((change.kind, change.tenant, identity))
        return before, None if change.after is None else self._entity(change, change.after, before)

    def _entity(self, change: Change, spec: Spec, before: Entity | None) -> Entity:
        spec = as_tenant(spec) if isinstance(spec, OperatorSpec) else spec
        fields = {} if before is None else fields_now(before)
        said = entity_fields(spec, lambda name: self._plans[change.tenant, name])
        if isinstance(spec, KeySpec) and spec.secrets is None:
            del said["secrets"]
        fields |= said
        if before is None:
            fields |= self._own(change)
        if isinstance(spec, OverrideSpec):
            fields["set_by"] = self._actor
        return build(_KIND[change.kind], fields)

    def _own(self, change: Change) -> dict[str, str]:
        if change.kind == "tenant":
            return {"id": self._tenants[change.tenant]}
        own = {"tenant_id": self._tenants[change.tenant]}
        if change.kind == "plan":
            own["id"] = self._plans[change.tenant, change.name]
        elif change.kind != "key":
            own["id"] = new_id(_PREFIX[change.kind])
        return own


def _owner_name(tenant: Tenant) -> str:
    return "" if tenant.is_operator else tenant.name


def _identity(entity: Any) -> Hashable:
    match entity:
        case Plan():
            return entity.name
        case Policy():
            return entity.pattern.canonical
        case Override():
            return entity.resource, entity.subject
    identity: str = entity.id
    return identity
