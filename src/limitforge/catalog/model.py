"""What the catalog holds: tenants, plans, policies, keys, overrides, tokens. Frozen, and valid once built.

The fields are those of the wire format, by the same names. Nothing here knows a database.
"""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import msgspec

from limitforge.catalog.patterns import Pattern
from limitforge.core.calendar import zone
from limitforge.core.check import Failure
from limitforge.core.exact import US_PER_SECOND, Rate, short_repr
from limitforge.core.keys import parse_key_part
from limitforge.core.lanes import ONE_LANE, Lanes
from limitforge.core.limits import Limit, Mode, Priority, Quota, Scope, limit_from_fields, limit_to_fields
from limitforge.core.overrides import ANY_RESOURCE, copy_changes
from limitforge.core.plan import Limits
from limitforge.errors import InvalidInput, InvalidLimit

OPERATOR = "operator"
"""The id and the name of the one above all tenants."""

MAX_LIMITS_PER_PLAN = 10  # the plans of operator, tenant and policy decide together, and a check has room for 32 limits
MAX_PLANS_PER_TENANT = 1_000  # of one tenant
MAX_POLICIES_PER_TENANT = 20_000
MAX_METADATA_BYTES = 4_096
MAX_REASON_LENGTH = 512

NAME_PATTERN = re.compile(r"[A-Za-z0-9_./-]{1,64}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_EPOCH = datetime.fromtimestamp(0, UTC)


class KeyType(StrEnum):
    """Test keys are the first to be shed."""

    LIVE = "live"
    TEST = "test"


class KeyScope(StrEnum):
    """What an API key may do. PLANS allows calls to name a `plan_id`, and with that to choose their limits."""

    CHECK = "check"
    USAGE = "usage"
    PLANS = "plans"


class TokenScope(StrEnum):
    """What an admin token may do."""

    READ = "read"
    WRITE = "write"


class Entity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all have. `version` counts the changes of this one thing: whoever changes it says which one was read."""

    kind: ClassVar[str]
    settable: ClassVar[tuple[str, ...]]
    """The fields that a caller sets; the others are the catalog's own."""
    immutable: ClassVar[tuple[str, ...]] = ()
    """Those of them that can't be changed later."""

    id: str
    version: int = 1
    created_at: datetime = _EPOCH
    updated_at: datetime = _EPOCH


class Tenant(Entity, frozen=True, kw_only=True):
    """An account whose traffic is limited. `revision` is that of the last change to anything that decides for it."""

    kind: ClassVar[str] = "tenant"
    settable: ClassVar[tuple[str, ...]] = (
        "name",
        "mode",
        "time_zone",
        "failure",
        "priority",
        "default_plan_id",
        "lanes",
        "suspended",
    )

    name: str
    mode: Mode = Mode.ON
    time_zone: str = "UTC"
    failure: Failure | None = None
    priority: Priority | None = None
    default_plan_id: str | None = None
    lanes: int | Lanes = 1
    suspended: bool = False
    revision: int = 0

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        _check_failure(self.failure)
        zone(self.time_zone)
        if not isinstance(self.lanes, Lanes):
            _check_lanes("lanes", Lanes, self.lanes)

    @property
    def is_operator(self) -> bool:
        return self.id == OPERATOR

    @property
    def placement(self) -> Lanes:
        return self.lanes if isinstance(self.lanes, Lanes) else ONE_LANE if self.lanes == 1 else Lanes(self.lanes)


class Plan(Entity, frozen=True, kw_only=True):
    """A named set of limits, each as the fields of the wire format. A change is a new version; the old ones stay."""

    kind: ClassVar[str] = "plan"
    settable: ClassVar[tuple[str, ...]] = ("tenant_id", "name", "limits")
    immutable: ClassVar[tuple[str, ...]] = ("tenant_id",)

    tenant_id: str
    name: str
    limits: tuple[dict[str, Any], ...]

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        msgspec.structs.force_setattr(self, "limits", _decode_limits(msgspec.json.encode(self.limits)))
        for at, limit in enumerate(self.compile("UTC")):
            if limit.scope is Scope.GLOBAL and self.tenant_id != OPERATOR:
                raise InvalidLimit(f"limits[{at}].scope", "only the operator's plan may have global limits")

    def compile(self, time_zone: str) -> Limits:
        """Its limits; `time_zone` is for quotas that name none. Equal plans of many tenants share them."""
        return _compile_limits(msgspec.json.encode(self.limits), time_zone)


class Policy(Entity, frozen=True, kw_only=True):
    """Which plan applies to which resources of a tenant."""

    kind: ClassVar[str] = "policy"
    settable: ClassVar[tuple[str, ...]] = (
        "tenant_id",
        "resource",
        "plan_id",
        "mode",
        "failure",
        "priority",
        "shadow_plan_id",
    )
    immutable: ClassVar[tuple[str, ...]] = ("tenant_id",)

    tenant_id: str
    resource: str
    plan_id: str
    mode: Mode = Mode.ON
    failure: Failure | None = None
    priority: Priority | None = None
    shadow_plan_id: str | None = None

    def __post_init__(self) -> None:
        Pattern.parse(self.resource)
        _check_storable("resource", self.resource)
        _check_failure(self.failure)

    @property
    def pattern(self) -> Pattern:
        return Pattern.parse(self.resource)


class SecretHash(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of a key: its HMAC (hex) under a version of the pepper, and until when it is good."""

    hash: str
    pepper: int
    expires_at: datetime | None = None


class Key(Entity, frozen=True, kw_only=True):
    """An API key of a tenant: whoever has it may check. It has one secret, and during a rotation the old ones too."""

    kind: ClassVar[str] = "key"
    settable: ClassVar[tuple[str, ...]] = ("tenant_id", "name", "type", "plan_id", "scopes", "expires_at", "metadata")
    immutable: ClassVar[tuple[str, ...]] = ("tenant_id", "type")

    tenant_id: str
    name: str
    type: KeyType = KeyType.LIVE
    plan_id: str | None = None
    scopes: tuple[KeyScope, ...] = tuple(KeyScope)
    expires_at: datetime | None = None
    metadata: dict[str, Any] = {}
    disabled: bool = False
    last_used_at: datetime | None = None
    secrets: tuple[SecretHash, ...] = ()

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        _check_scopes(self.scopes, KeyScope)
        if self.scopes == (KeyScope.PLANS,):
            raise InvalidInput("scopes", "must have check or usage: plans alone allows no call")
        in_order = tuple(each for each in KeyScope if each in self.scopes)  # the database keeps no order
        msgspec.structs.force_setattr(self, "scopes", in_order)
        _check_time("expires_at", self.expires_at)
        _check_metadata(self.metadata)


class Override(Entity, frozen=True, kw_only=True):
    """Other numbers for one subject, until they expire."""

    kind: ClassVar[str] = "override"
    settable: ClassVar[tuple[str, ...]] = ("tenant_id", "resource", "subject", "limits", "expires_at", "reason")
    immutable: ClassVar[tuple[str, ...]] = ("tenant_id", "resource", "subject")

    tenant_id: str
    resource: str = ANY_RESOURCE
    subject: str
    limits: dict[str, Any]
    expires_at: datetime
    reason: str = ""
    set_by: str = ""

    def __post_init__(self) -> None:
        for field in ("resource", "subject"):
            if not parse_key_part(field, getattr(self, field)):
                raise InvalidInput(field, "must not be empty")
            _check_storable(field, getattr(self, field))
        if not self.limits:
            raise InvalidInput("limits", "must map limit names to their changed fields, 'unlimited' or 'blocked'")
        copy_changes(self.limits)
        _check_time("expires_at", self.expires_at)
        _check_text("reason", self.reason, MAX_REASON_LENGTH)


class Token(Entity, frozen=True, kw_only=True):
    """An admin token: who may see and change the catalog, of one tenant or of all."""

    kind: ClassVar[str] = "token"
    settable: ClassVar[tuple[str, ...]] = ("name", "scopes", "tenant_id", "expires_at")
    immutable: ClassVar[tuple[str, ...]] = ("tenant_id",)

    name: str
    scopes: tuple[TokenScope, ...] = (TokenScope.READ,)
    tenant_id: str | None = None
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    secrets: tuple[SecretHash, ...] = ()

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        _check_scopes(self.scopes, TokenScope)
        _check_time("expires_at", self.expires_at)


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change: who, when, what, before and after. Secrets are never in it."""

    id: int
    at: datetime
    actor: str
    action: str
    tenant_id: str | None
    entity_id: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a tenant that decides: what a snapshot is compiled from, and what the warm copy holds."""

    tenant: Tenant
    plans: tuple[Plan, ...]
    policies: tuple[Policy, ...]


AnyEntity = TypeVar("AnyEntity", bound=Entity)
ENTITY_TYPES: Mapping[str, type[Entity]] = {
    entity.kind: entity for entity in (Tenant, Plan, Policy, Key, Override, Token)
}


def build_entity(entity: type[AnyEntity], fields: Mapping[str, Any]) -> AnyEntity:
    """An entity from plain fields; what is wrong with one is refused by its name."""
    return convert(entity, dict(fields))


def with_changes(entity: AnyEntity, changes: Mapping[str, Any]) -> AnyEntity:
    """The entity with other fields, of those that may be set."""
    for field in changes:
        if field not in entity.settable:
            raise InvalidInput(str(field)[:64], f"is no field of a {entity.kind}; it has {', '.join(entity.settable)}")
        if field in entity.immutable and changes[field] != getattr(entity, field):
            raise InvalidInput(field, f"of a {entity.kind} can't be changed")
    return build_entity(type(entity), {**current_fields(entity), **changes})


def require_settable(entity: type[Entity], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those fields of a new entity that a caller may give, the others refused by name."""
    for field in fields:
        if field not in entity.settable:
            raise InvalidInput(str(field)[:64], f"is no field of a {entity.kind}; it has {', '.join(entity.settable)}")
    return dict(fields)


def current_fields(entity: Entity) -> dict[str, Any]:
    return {name: getattr(entity, name) for name in entity.__struct_fields__}


def to_public_dict(entity: Entity) -> dict[str, Any]:
    """For people and programs: as JSON would have it, without what must stay secret."""
    fields: dict[str, Any] = msgspec.to_builtins(entity)
    for secret in fields.get("secrets", ()):
        del secret["hash"]
    return fields


def parse_plan_limits(name: str, fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The limits of a plan in any of its shapes: a list of limits, their text, or one limit's own fields (flat)."""
    if "limits" not in fields:
        flat = {field: value for field, value in fields.items() if field not in ("tenant_id", "name")}
        if not flat:
            raise InvalidInput("limits", "is required: a list of limits, or text such as '100/minute; 10/second'")
        return normalize_limits([{"name": name, **flat}], path="")
    for field in fields:
        if field not in Plan.settable:
            problem = "belongs inside `limits`, or there are no `limits`: a plan has one of the two shapes"
            raise InvalidInput(str(field)[:64], problem)
    return normalize_limits(fields["limits"])


def normalize_limits(limits: object, path: str = "limits") -> tuple[dict[str, Any], ...]:
    """Limits as they are kept: every field that was given or is not the default, as plain values."""
    if isinstance(limits, str):
        return tuple(_as_storable(at, limit_to_fields(limit)) for at, limit in enumerate(Limits.parse(limits)))
    if isinstance(limits, Mapping) or not isinstance(limits, Iterable):
        raise InvalidLimit("limits", f"must be a list of limits, or their text, got {short_repr(limits)}")
    found: list[dict[str, Any]] = []
    for at, each in enumerate(limits):
        if at == MAX_LIMITS_PER_PLAN:
            raise InvalidLimit("limits", f"at most {MAX_LIMITS_PER_PLAN} in one plan")
        if not isinstance(each, Mapping | Limit):
            raise InvalidLimit(f"{path}[{at}]", f"must be the fields of a limit, got {short_repr(each)}")
        try:
            limit = each if isinstance(each, Limit) else limit_from_fields(each)
        except InvalidLimit as error:
            where = f"{path}[{at}].{error.field}" if path else error.field
            raise InvalidLimit(where, error.problem) from None
        fields = _as_storable(at, limit_to_fields(limit))
        if isinstance(limit, Quota) and isinstance(each, Mapping) and "time_zone" in each:
            fields["time_zone"] = limit.time_zone  # the default is the tenant's, so a stated UTC must stay
        found.append(fields)
    return tuple(found)


def _as_storable(at: int, fields: dict[str, Any]) -> dict[str, Any]:
    for field, value in fields.items():
        if isinstance(value, Rate):
            raise InvalidLimit(f"limits[{at}].{field}", "can't be written as a number per second: choose a rounder one")
        if not isinstance(value, str | int | float | bool | dict | None):  # a Decimal
            fields[field] = str(value)
    return fields


@lru_cache(maxsize=4_096)
def _decode_limits(limits: bytes) -> tuple[dict[str, Any], ...]:
    """Equal plans of many tenants keep their fields once."""
    return tuple(msgspec.json.decode(limits))


@lru_cache(maxsize=4_096)
def _compile_limits(limits: bytes, time_zone: str) -> Limits:
    built = []
    fields: list[dict[str, Any]] = msgspec.json.decode(limits)
    if len(fields) > MAX_LIMITS_PER_PLAN:
        raise InvalidLimit("limits", f"at most {MAX_LIMITS_PER_PLAN} in one plan, got {len(fields)}")
    for at, each in enumerate(fields):
        zoned = {"time_zone": time_zone, **each} if each.get("algorithm") == Quota.algorithm else each
        try:
            built.append(limit_from_fields(zoned))
        except InvalidLimit as error:
            raise InvalidLimit(f"limits[{at}].{error.field}", error.problem) from None
    return Limits(*built)


Kind = TypeVar("Kind")
_ERROR_LOCATION = re.compile(r"^(?P<problem>.*?)(?: - at `\$(?P<key>\.\.\.)?\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_EXPECTED = re.compile(r"Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`")


def convert(kind: type[Kind], value: object) -> Kind:
    """Plain values as what they mean; the error names the field by its path."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise translate_validation_error(error) from None


def translate_validation_error(error: msgspec.ValidationError) -> InvalidInput:
    """An error of msgspec in our words: the path to the field, and what it must be."""
    found = _ERROR_LOCATION.match(str(error))
    problem, path = (found["problem"], found["path"] or "") if found else (str(error), "")
    cause = error.__cause__
    if isinstance(cause, InvalidInput):
        return InvalidInput(_join_path(path, cause.field), cause.problem)
    if missing := _MISSING.match(problem):
        return InvalidInput(_join_path(path, missing["field"]), "is required")
    if unknown := _UNKNOWN.match(problem):
        return InvalidInput(_join_path(path, unknown["field"][:64]), "is not a field here")
    if wrong := _EXPECTED.match(problem):
        return InvalidInput(
            path or "value",
            f"must be {_WORDS.get(wrong['expected'], wrong['expected'])}, got {_WORDS.get(wrong['got'], wrong['got'])}",
        )
    return InvalidInput(path or "value", problem[:1].lower() + problem[1:])


_WORDS = {
    "str": "text",
    "int": "a whole number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
    "str | null": "text or null",
    "datetime": "a time such as 2026-12-31T00:00:00Z",
    "datetime | null": "a time such as 2026-12-31T00:00:00Z, or null",
}


def _join_path(path: str, field: str) -> str:
    if not path or field == path or field.startswith(f"{path}."):
        return field  # some errors know where they are
    return f"{path}.{field}"


def to_datetime(now_us: int) -> datetime:
    return datetime.fromtimestamp(now_us / US_PER_SECOND, UTC)


def _check_name(field: str, name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidInput(field, f"must be 1 to 64 letters, digits or -_./ characters, got {short_repr(name)}")


def _check_text(field: str, value: str, maximum: int) -> None:
    if len(value) > maximum:
        raise InvalidInput(field, f"must be at most {maximum} characters")
    _check_storable(field, value)


def _check_storable(field: str, value: str) -> None:
    if not is_storable(value):
        raise InvalidInput(field, "must be valid Unicode without NUL characters, which databases can't keep")


def is_storable(value: str) -> bool:
    """Whether a database can keep it, or be asked for it."""
    return "\0" not in value and _SURROGATE.search(value) is None


def _check_metadata(metadata: dict[str, Any]) -> None:
    """Whatever is taken must come back the same: from either database as JSON, from other nodes as MessagePack."""
    try:
        text = json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode()
        carried = len(text) > MAX_METADATA_BYTES or msgspec.msgpack.decode(msgspec.msgpack.encode(metadata)) == metadata
        carried = carried and json.loads(text) == metadata
    except (ValueError, TypeError, RecursionError, OverflowError, msgspec.MsgspecError):
        raise InvalidInput("metadata", "must be JSON: text, numbers of up to 64 bits, lists, mappings") from None
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidInput("metadata", f"at most {MAX_METADATA_BYTES} bytes of JSON, got {len(text)}")
    if not carried:
        raise InvalidInput("metadata", "must be JSON, whose keys are text")


def _check_failure(failure: Failure | None) -> None:
    if failure is Failure.RAISE:
        raise InvalidInput("failure", "must be one of open, closed, local: a service always answers")


def _check_scopes(scopes: tuple[StrEnum, ...], kind: type[StrEnum]) -> None:
    if not scopes or len(set(scopes)) != len(scopes):
        raise InvalidInput("scopes", f"must be one or more of {', '.join(kind)}, each once")


def _check_time(field: str, at: datetime | None) -> None:
    if at is not None and at.tzinfo is None:
        raise InvalidInput(field, "must say its time zone, such as 2026-12-31T00:00:00Z")
    try:
        if at is not None:
            at.astimezone(UTC)
    except OverflowError:
        raise InvalidInput(field, "must lie in the years 1 to 9999, in UTC too") from None


def _check_lanes(field: str, kind: type[Lanes], value: int) -> None:
    try:
        kind(value)
    except InvalidInput as error:
        raise InvalidInput(field, error.problem) from None
