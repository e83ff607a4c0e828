"""What a configuration file says, piece by piece, and each piece as the catalog has it.

Plans go by their names. A section that is there (plans, policies, keys or overrides of a tenant) is the whole truth
about it; one that is None is left alone. A plain field that is absent has its default.
"""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any

import msgspec

from limitforge.catalog.model import (
    OPERATOR,
    Entity,
    Key,
    KeyScope,
    KeyType,
    Override,
    Plan,
    Policy,
    Tenant,
    TenantConfig,
    build_entity,
)
from limitforge.catalog.patterns import Pattern
from limitforge.core.check import Failure
from limitforge.core.exact import MAX_EXACT, short_repr
from limitforge.core.lanes import Lanes
from limitforge.core.limits import ALGORITHMS, Limit, Mode, Priority
from limitforge.core.overrides import ANY_RESOURCE, copy_changes
from limitforge.errors import InvalidInput

KEY_ID_PATTERN = re.compile(r"key_[0-9A-Za-z]{16}")
HASH_PATTERN = re.compile(r"[0-9a-f]{64}")
SECTIONS = ("plans", "policies", "keys", "overrides")
_PLAN_ID_FIELDS = {"plan": "plan_id", "shadow_plan": "shadow_plan_id", "default_plan": "default_plan_id"}


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file says of one thing."""


class PlanSpec(Spec, frozen=True, kw_only=True):
    """A named set of limits. The file may also give their text, or the fields of the only one."""

    name: str
    limits: tuple[dict[str, Any], ...]


class PolicySpec(Spec, frozen=True, kw_only=True):
    """Which plan applies to which resources."""

    resource: str
    plan: str
    mode: Mode = Mode.ON
    failure: Failure | None = None
    priority: Priority | None = None
    shadow_plan: str | None = None

    @property
    def canonical_pattern(self) -> str:
        return Pattern.parse(self.resource).canonical


class SecretSpec(Spec, frozen=True, kw_only=True):
    """What is kept of a key: `limitforge keys make` writes it."""

    hash: str
    pepper: int
    expires_at: datetime | None = None

    def __post_init__(self) -> None:
        if not HASH_PATTERN.fullmatch(self.hash):
            raise InvalidInput("hash", "must be 64 hexadecimal digits, as `limitforge keys make` prints them")
        if self.pepper < 1:
            raise InvalidInput("pepper", f"must be 1 or more, got {self.pepper}")
        _in_utc(self, "expires_at")


class KeySpec(Spec, frozen=True, kw_only=True):
    """An API key. One without `secrets` keeps those that it has."""

    id: str
    name: str
    type: KeyType = KeyType.LIVE
    plan: str | None = None
    scopes: tuple[KeyScope, ...] = tuple(KeyScope)
    expires_at: datetime | None = None
    metadata: dict[str, Any] = {}
    disabled: bool = False
    secrets: tuple[SecretSpec, ...] | None = None

    def __post_init__(self) -> None:
        if not KEY_ID_PATTERN.fullmatch(self.id):
            raise InvalidInput("id", f"must be key_ and 16 letters or digits, got {short_repr(self.id)}")
        _in_utc(self, "expires_at")
        _set(self, "scopes", tuple(sorted(self.scopes, key=list(KeyScope).index)))
        if self.secrets is not None:
            _set(self, "secrets", tuple(sorted(self.secrets, key=_newest_first)))


class OverrideSpec(Spec, frozen=True, kw_only=True):
    """Other numbers for one subject, until they expire."""

    resource: str = ANY_RESOURCE
    subject: str
    limits: dict[str, Any]
    expires_at: datetime
    reason: str = ""

    def __post_init__(self) -> None:
        _set(self, "limits", copy_changes(self.limits))
        _in_utc(self, "expires_at")


class TenantSpec(Spec, frozen=True, kw_only=True):
    """A tenant with all that is its own; a section that is None is left alone."""

    name: str
    mode: Mode = Mode.ON
    time_zone: str = "UTC"
    failure: Failure | None = None
    priority: Priority | None = None
    default_plan: str | None = None
    lanes: int | Lanes = 1
    suspended: bool = False
    plans: tuple[PlanSpec, ...] | None = None
    policies: tuple[PolicySpec, ...] | None = None
    keys: tuple[KeySpec, ...] | None = None
    overrides: tuple[OverrideSpec, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.lanes, Lanes) and self.lanes.then is None:
            _set(self, "lanes", self.lanes.count)


class OperatorSpec(Spec, frozen=True, kw_only=True):
    """What holds above all tenants: the fleet's mode, and the plan that every check goes through."""

    mode: Mode = Mode.ON
    time_zone: str = "UTC"
    plan: str | None = None
    plans: tuple[PlanSpec, ...] | None = None


class ConfigDocument(Spec, frozen=True, kw_only=True):
    """A whole file."""

    operator: OperatorSpec | None = None
    tenants: tuple[TenantSpec, ...] | None = None


SPEC_TYPES: Mapping[str, type[Spec]] = {
    "plans": PlanSpec,
    "policies": PolicySpec,
    "keys": KeySpec,
    "overrides": OverrideSpec,
}
ENTITY_TYPE_OF: Mapping[type[Spec], type[Entity]] = {
    PlanSpec: Plan,
    PolicySpec: Policy,
    KeySpec: Key,
    OverrideSpec: Override,
    TenantSpec: Tenant,
}


def order_limit_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a limit as people would write them: its name, its kind and its numbers first."""
    kind = ALGORITHMS[fields["algorithm"]]
    own = [name for name in kind.__dataclass_fields__ if name not in Limit.__dataclass_fields__]
    order = ["name", "algorithm", *sorted(own, key=lambda name: name != kind.size_field), *Limit.__dataclass_fields__]
    return {name: _without_fraction(fields[name]) for name in sorted(fields, key=order.index)}


def _without_fraction(value: Any) -> Any:
    """20.0 is 20 to everybody who reads it."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT else value


def operator_as_tenant(operator: OperatorSpec) -> TenantSpec:
    """The operator in the shape of a tenant."""
    return TenantSpec(
        name=OPERATOR,
        mode=operator.mode,
        time_zone=operator.time_zone,
        default_plan=operator.plan,
        plans=operator.plans,
    )


def spec_to_dict(spec: Spec) -> dict[str, Any]:
    """The spec as a file would have it, without what is the default. Times stay times."""
    found: dict[str, Any] = {}
    for name, default in _defaults(type(spec)):
        value = getattr(spec, name)
        if value != default:
            found[name] = _to_plain_value(value)
    return found


@cache
def _defaults(kind: type[Spec]) -> tuple[tuple[str, Any], ...]:
    """The fields of a kind of spec with their defaults. Cached: msgspec reads the annotations anew each time."""
    return tuple(
        (each.name, each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory())
        for each in msgspec.structs.fields(kind)
    )


def _to_plain_value(value: Any) -> Any:
    if isinstance(value, Spec):
        return spec_to_dict(value)
    if isinstance(value, tuple):
        return [_to_plain_value(each) for each in value]
    return msgspec.to_builtins(value, builtin_types=(datetime,))


def drop_expired(tenant: TenantSpec, now: datetime) -> TenantSpec:
    """Without the overrides and the keys' secrets whose time is over."""
    keys, overrides = tenant.keys, tenant.overrides
    if overrides is not None:
        overrides = tuple(each for each in overrides if each.expires_at > now)
    if keys is not None:
        keys = tuple(_drop_expired_secrets(each, now) for each in keys)
    return msgspec.structs.replace(tenant, keys=keys, overrides=overrides)


def entity_fields(spec: Spec, plan_id: Callable[[str], str]) -> dict[str, Any]:
    """What a spec says, as the catalog has it: plans by their ids, and nothing of its sections."""
    found: dict[str, Any] = {}
    for name in spec.__struct_fields__:
        value = getattr(spec, name)
        if name in _PLAN_ID_FIELDS:
            found[_PLAN_ID_FIELDS[name]] = None if value is None else plan_id(value)
        elif name == "secrets":
            found[name] = tuple(msgspec.to_builtins(each, builtin_types=(datetime,)) for each in value or ())
        elif name not in SECTIONS:
            found[name] = value
    return found


def build_tenant_config(tenant: TenantSpec, make_id: Callable[..., str], revision: int = 0) -> TenantConfig:
    """A tenant's plans and policies as the catalog has them, with ids by `identify`."""
    tenant_id = OPERATOR if tenant.name == OPERATOR else make_id("ten", tenant.name)

    def plan_id(name: str) -> str:
        return make_id("pla", tenant.name, name)

    own = {"id": tenant_id, "revision": revision, **entity_fields(tenant, plan_id)}
    plans = [
        build_entity(Plan, {"id": plan_id(each.name), "tenant_id": tenant_id, **entity_fields(each, plan_id)})
        for each in sorted(tenant.plans or (), key=lambda each: each.name)
    ]
    policies = [
        build_entity(
            Policy,
            {
                "id": make_id("pol", tenant.name, each.canonical_pattern),
                "tenant_id": tenant_id,
                **entity_fields(each, plan_id),
            },
        )
        for each in tenant.policies or ()
    ]
    return TenantConfig(build_entity(Tenant, own), tuple(plans), tuple(policies))


def _drop_expired_secrets(key: KeySpec, now: datetime) -> KeySpec:
    if key.secrets is None:
        return key
    living = tuple(each for each in key.secrets if each.expires_at is None or each.expires_at > now)
    return msgspec.structs.replace(key, secrets=living)


def _newest_first(secret: SecretSpec) -> tuple[bool, float, str]:
    at = secret.expires_at
    return at is not None, 0 if at is None else -at.timestamp(), secret.hash


def _set(spec: Spec, name: str, value: object) -> None:
    msgspec.structs.force_setattr(spec, name, value)


def _in_utc(spec: Spec, field: str) -> None:
    at = getattr(spec, field)
    if at is None:
        return
    if at.tzinfo is None:
        raise InvalidInput(field, "must say its time zone, such as 2026-12-31T00:00:00Z")
    try:
        _set(spec, field, at.astimezone(UTC))
    except OverflowError:
        raise InvalidInput(field, "is a time that no calendar has in UTC") from None
