"""Convert changes of specs to changes of entities: names of plans become ids, and new entities receive ids."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from limitforge.catalog.config.diff import Action, Change, spec_identity
from limitforge.catalog.config.export import CatalogState
from limitforge.catalog.config.specs import (
    OPERATOR_NAME,
    KeySpec,
    OperatorSpec,
    OverrideSpec,
    Spec,
    entity_fields,
    operator_as_tenant,
)
from limitforge.catalog.credentials import new_id
from limitforge.catalog.model import (
    ENTITY_TYPES,
    Entity,
    Override,
    Plan,
    Policy,
    Tenant,
    build_entity,
    current_fields,
)

# An entity is written after those that it refers to, and deleted before them.
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
_ENTITY_TYPES: Mapping[str, type[Entity]] = {**ENTITY_TYPES, "operator": Tenant}


class EntityChanges:
    """The changes of entities. `pairs` are in the order in which they must be written, each as before and after.

    `created_tenants` need their default plans set after all changes are written.
    """

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
                self._tenants[change.tenant] = new_id(Tenant.id_prefix)
            elif change.kind == "plan" and change.action is Action.CREATE:
                self._plans[change.tenant, change.name] = new_id(Plan.id_prefix)
        ordered = sorted(changes, key=lambda change: _WRITE_ORDER.index((change.kind, change.action)))
        self.pairs = [self._before_and_after(change) for change in ordered]
        self.created_tenants = [after for before, after in self.pairs if before is None and isinstance(after, Tenant)]

    def _before_and_after(self, change: Change) -> tuple[Entity | None, Entity | None]:
        spec = change.after or change.before
        identity = "" if change.kind in ("tenant", "operator") else spec_identity(spec)
        before = self._existing.get((change.kind, change.tenant, identity))
        return before, None if change.after is None else self._entity_after(change, change.after, before)

    def _entity_after(self, change: Change, spec: Spec, before: Entity | None) -> Entity:
        spec = operator_as_tenant(spec) if isinstance(spec, OperatorSpec) else spec
        fields = {} if before is None else current_fields(before)
        wanted = entity_fields(spec, lambda name: self._plans[change.tenant, name])
        if isinstance(spec, KeySpec) and spec.secrets is None:
            del wanted["secrets"]
        fields |= wanted
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
            own["id"] = new_id(_ENTITY_TYPES[change.kind].id_prefix)
        return own


def _owner_name(tenant: Tenant) -> str:
    return OPERATOR_NAME if tenant.is_operator else tenant.name


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
