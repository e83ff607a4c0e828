"""The parts of a configuration file as structs, and how they map to the entities of the catalog.

Specs refer to plans by name. A section that is present (the plans, policies, keys or overrides of a tenant) lists all
of its entries; a section that is None is not changed. A plain field that is absent has its default.
"""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any

import msgspec

from limitforge.catalog.fields import described
from limitforge.catalog.model import (
    KEY_ID_PATTERN,
    OPERATOR,
    Disabled,
    Entity,
    Expiry,
    FailureField,
    Key,
    KeyScope,
    KeyScopes,
    KeyType,
    KeyTypeField,
    LaneCount,
    Metadata,
    ModeField,
    Name,
    Override,
    OverrideExpiry,
    OverrideLimits,
    Plan,
    Policy,
    PriorityField,
    Reason,
    Resource,
    Subject,
    Suspended,
    Tenant,
    TenantConfig,
    TimeZone,
    build_entity,
)
from limitforge.catalog.patterns import Pattern
from limitforge.core.exact import MAX_EXACT, short_repr
from limitforge.core.lanes import Lanes
from limitforge.core.limits import LIMIT_TYPES, Limit, Mode
from limitforge.core.overrides import ANY_RESOURCE, copy_changes
from limitforge.errors import InvalidInput

HASH_PATTERN = re.compile(r"[0-9a-f]{64}")
SECTIONS = ("plans", "policies", "keys", "overrides")
_PLAN_ID_FIELDS = {"plan": "plan_id", "shadow_plan": "shadow_plan_id", "default_plan": "default_plan_id"}

PlanName = Annotated[str, described("The name of one of the tenant's `plans`.")]
OptionalPlanName = Annotated[str | None, described("The name of one of the tenant's `plans`.")]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a configuration file."""


class PlanSpec(Spec, frozen=True, kw_only=True):
    """A named set of limits. A file may also contain their text, or the fields of the only limit."""

    name: Name
    limits: Annotated[tuple[dict[str, Any], ...], described("A list of limits, or text such as 100/minute; 1000/hour.")]


class PolicySpec(Spec, frozen=True, kw_only=True):
    """Which plan applies to which resources."""

    resource: Resource
    plan: PlanName
    mode: ModeField = Mode.ON
    failure: FailureField = None
    priority: PriorityField = None
    shadow_plan: Annotated[
        str | None, described("The name of a plan that is evaluated beside `plan`, and never denies a check.")
    ] = None

    @property
    def canonical_pattern(self) -> str:
        return Pattern.parse(self.resource).canonical


class SecretSpec(Spec, frozen=True, kw_only=True):
    """What is stored of a secret. `limitforge keys make` prints it."""

    hash: Annotated[
        str,
        described("The key's HMAC-SHA256, as `limitforge keys make` prints it.", pattern=f"^{HASH_PATTERN.pattern}$"),
    ]
    pepper: Annotated[int, described("The version of the pepper that the hash was made with.", minimum=1)]
    expires_at: Expiry = None

    def __post_init__(self) -> None:
        if not HASH_PATTERN.fullmatch(self.hash):
            raise InvalidInput("hash", "must be 64 hexadecimal digits, as `limitforge keys make` prints them")
        if self.pepper < 1:
            raise InvalidInput("pepper", f"must be 1 or more, got {self.pepper}")
        _convert_to_utc(self, "expires_at")


class KeySpec(Spec, frozen=True, kw_only=True):
    """An API key. A key without `secrets` keeps those that it has in the database."""

    id: Annotated[
        str, described("The key's id, as `limitforge keys make` prints it.", pattern=f"^{KEY_ID_PATTERN.pattern}$")
    ]
    name: Name
    type: KeyTypeField = KeyType.LIVE
    plan: OptionalPlanName = None
    scopes: KeyScopes = tuple(KeyScope)
    expires_at: Expiry = None
    metadata: Metadata = {}
    disabled: Disabled = False
    secrets: Annotated[
        tuple[SecretSpec, ...] | None,
        described("The hashes of its secrets. If absent, a key in the database keeps those that it has."),
    ] = None

    def __post_init__(self) -> None:
        if not KEY_ID_PATTERN.fullmatch(self.id):
            raise InvalidInput("id", f"must be key_ and 16 letters or digits, got {short_repr(self.id)}")
        _convert_to_utc(self, "expires_at")
        _set(self, "scopes", tuple(sorted(self.scopes, key=list(KeyScope).index)))
        if self.secrets is not None:
            _set(self, "secrets", tuple(sorted(self.secrets, key=_secret_order)))


class OverrideSpec(Spec, frozen=True, kw_only=True):
    """Changed limits for one subject, until they expire."""

    resource: Resource = ANY_RESOURCE
    subject: Subject
    limits: OverrideLimits
    expires_at: OverrideExpiry
    reason: Reason = ""

    def __post_init__(self) -> None:
        _set(self, "limits", copy_changes(self.limits))
        _convert_to_utc(self, "expires_at")


PlanSection = Annotated[tuple[PlanSpec, ...] | None, described("All plans. If absent, they are not changed.")]


class TenantSpec(Spec, frozen=True, kw_only=True):
    """A tenant with its plans, policies, keys and overrides."""

    name: Name
    mode: ModeField = Mode.ON
    time_zone: TimeZone = "UTC"
    failure: FailureField = None
    priority: PriorityField = None
    default_plan: Annotated[
        str | None,
        described("The name of the plan of checks whose key has none. The plan of a matching policy applies as well."),
    ] = None
    lanes: LaneCount = 1
    suspended: Suspended = False
    plans: PlanSection = None
    policies: Annotated[
        tuple[PolicySpec, ...] | None,
        described("All policies: which plan applies to which resources. If absent, they are not changed."),
    ] = None
    keys: Annotated[tuple[KeySpec, ...] | None, described("All API keys. If absent, they are not changed.")] = None
    overrides: Annotated[
        tuple[OverrideSpec, ...] | None,
        described(
            "All overrides: changed limits for single subjects. If absent, they are not changed. Expired ones are "
            "ignored."
        ),
    ] = None

    def __post_init__(self) -> None:
        if isinstance(self.lanes, Lanes) and self.lanes.then is None:
            _set(self, "lanes", self.lanes.count)


class OperatorSpec(Spec, frozen=True, kw_only=True):
    """What applies to all tenants: the mode of the service, and a plan that every check must pass."""

    mode: ModeField = Mode.ON
    time_zone: TimeZone = "UTC"
    plan: OptionalPlanName = None
    plans: PlanSection = None


class ConfigDocument(Spec, frozen=True, kw_only=True):
    """A whole configuration file."""

    operator: Annotated[
        OperatorSpec | None, described("What applies to all tenants. If absent, it is not changed.")
    ] = None
    tenants: Annotated[
        tuple[TenantSpec, ...] | None,
        described("The tenants. Other tenants are not changed, unless they are pruned."),
    ] = None


OPERATOR_NAME = ""  # stands for the operator among the names of tenants
SPEC_TYPES: Mapping[str, type[Spec]] = {
    "plans": PlanSpec,
    "policies": PolicySpec,
    "keys": KeySpec,
    "overrides": OverrideSpec,
}
ENTITY_TYPE_BY_SPEC: Mapping[type[Spec], type[Entity]] = {
    PlanSpec: Plan,
    PolicySpec: Policy,
    KeySpec: Key,
    OverrideSpec: Override,
    TenantSpec: Tenant,
}


def order_limit_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a limit in the order in which people write them: name, algorithm and numbers first."""
    kind = LIMIT_TYPES[fields["algorithm"]]
    own = [name for name in kind.__dataclass_fields__ if name not in Limit.__dataclass_fields__]
    order = ["name", "algorithm", *sorted(own, key=lambda name: name != kind.size_field), *Limit.__dataclass_fields__]
    return {name: _without_fraction(fields[name]) for name in sorted(fields, key=order.index)}


def _without_fraction(value: Any) -> Any:
    """Convert a float such as 20.0 to an int."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT else value


def operator_as_tenant(operator: OperatorSpec) -> TenantSpec:
    """Return the operator's settings as those of a tenant."""
    return TenantSpec(
        name=OPERATOR,
        mode=operator.mode,
        time_zone=operator.time_zone,
        default_plan=operator.plan,
        plans=operator.plans,
    )


def spec_to_dict(spec: Spec) -> dict[str, Any]:
    """Return the fields of a spec that differ from their defaults, as a file would contain them. Times stay times."""
    fields: dict[str, Any] = {}
    for name, default in _defaults(type(spec)):
        value = getattr(spec, name)
        if value != default:
            fields[name] = _to_plain_value(value)
    return fields


@cache
def _defaults(kind: type[Spec]) -> tuple[tuple[str, Any], ...]:
    """Return the names and defaults of a spec's fields. Cached, since msgspec parses the annotations on each call."""
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
    """Return the tenant without overrides and secrets that have expired."""
    keys, overrides = tenant.keys, tenant.overrides
    if overrides is not None:
        overrides = tuple(each for each in overrides if each.expires_at > now)
    if keys is not None:
        keys = tuple(_drop_expired_secrets(each, now) for each in keys)
    return msgspec.structs.replace(tenant, keys=keys, overrides=overrides)


# --- Specs and entities ----------------------------------------------------------------------------------------------


def entity_fields(spec: Spec, plan_id_of: Callable[[str], str]) -> dict[str, Any]:
    """Return the fields of the entity that a spec describes: plans by id, without the sections of a tenant."""
    fields: dict[str, Any] = {}
    for name in spec.__struct_fields__:
        value = getattr(spec, name)
        if name in _PLAN_ID_FIELDS:
            fields[_PLAN_ID_FIELDS[name]] = None if value is None else plan_id_of(value)
        elif name == "secrets":
            fields[name] = tuple(msgspec.to_builtins(each, builtin_types=(datetime,)) for each in value or ())
        elif name not in SECTIONS:
            fields[name] = value
    return fields


def spec_fields(kind: type[Spec], entity: Entity, plan_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the spec that describes an entity: plans by name, without sections and secrets."""
    fields: dict[str, Any] = {}
    for name in kind.__struct_fields__:
        if name in _PLAN_ID_FIELDS:
            plan_id = getattr(entity, _PLAN_ID_FIELDS[name])
            fields[name] = None if plan_id is None else plan_names[plan_id]
        elif name not in (*SECTIONS, "secrets"):
            fields[name] = getattr(entity, name)
    return fields


def build_tenant_config(tenant: TenantSpec, make_id: Callable[..., str], revision: int = 0) -> TenantConfig:
    """Build the entities of a tenant, its plans and its policies. `make_id` returns an id for a prefix and names."""
    tenant_id = OPERATOR if tenant.name == OPERATOR else make_id(Tenant.id_prefix, tenant.name)

    def plan_id(name: str) -> str:
        return make_id(Plan.id_prefix, tenant.name, name)

    own = {"id": tenant_id, "revision": revision, **entity_fields(tenant, plan_id)}
    plans = [
        build_entity(Plan, {"id": plan_id(each.name), "tenant_id": tenant_id, **entity_fields(each, plan_id)})
        for each in sorted(tenant.plans or (), key=lambda each: each.name)
    ]
    policies = [
        build_entity(
            Policy,
            {
                "id": make_id(Policy.id_prefix, tenant.name, each.canonical_pattern),
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
    valid = tuple(each for each in key.secrets if each.expires_at is None or each.expires_at > now)
    return msgspec.structs.replace(key, secrets=valid)


def _secret_order(secret: SecretSpec) -> tuple[bool, float, str]:
    expiry = secret.expires_at
    return expiry is not None, 0 if expiry is None else -expiry.timestamp(), secret.hash


def _set(spec: Spec, name: str, value: object) -> None:
    msgspec.structs.force_setattr(spec, name, value)


def _convert_to_utc(spec: Spec, field: str) -> None:
    value = getattr(spec, field)
    if value is None:
        return
    if value.tzinfo is None:
        raise InvalidInput(field, "must have a time zone, such as 2026-12-31T00:00:00Z")
    try:
        _set(spec, field, value.astimezone(UTC))
    except OverflowError:
        raise InvalidInput(field, "must be in the years 1 to 9999, in UTC too") from None
