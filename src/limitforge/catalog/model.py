"""The entities of the catalog: tenants, plans, policies, keys, overrides, tokens. They are
immutable and always valid.

Their fields have the names of the wire format, and each is described here once: the admin API, the OpenAPI document,
the command line and configuration files take descriptions and examples from these annotations. This module does not
know the database.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from limitforge.catalog.conversion import convert
from limitforge.catalog.field_validation import (
    MAX_METADATA_BYTES,
    NAME_PATTERN,
    validate_failure,
    validate_lanes,
    validate_metadata,
    validate_name,
    validate_scopes,
    validate_storable,
    validate_text,
    validate_time,
)
from limitforge.catalog.fields import IMMUTABLE, READ_ONLY, described, example_of, immutable_fields, settable_fields
from limitforge.catalog.patterns import Pattern
from limitforge.catalog.plan_limits import compile_limits, decode_limits
from limitforge.core.calendar import zone
from limitforge.core.check import Failure
from limitforge.core.exact import TEN_YEARS_US, US_PER_SECOND
from limitforge.core.keys import MAX_KEY_PART_BYTES, parse_key_part
from limitforge.core.lanes import ONE_LANE, Lanes
from limitforge.core.limits import Mode, Priority, Scope
from limitforge.core.overrides import ANY_RESOURCE, copy_changes
from limitforge.core.plan import Limits
from limitforge.errors import InvalidInput, InvalidLimit

OPERATOR = "operator"
"""The id and the name of the operator, whose plan and mode apply to all tenants."""

MAX_PLANS_PER_TENANT = 1_000
MAX_POLICIES_PER_TENANT = 20_000
MAX_REASON_LENGTH = 512
MAX_OVERRIDE_DURATION = timedelta(microseconds=TEN_YEARS_US)

KEY_ID_PATTERN = re.compile(r"key_[0-9A-Za-z]{16}")
_EPOCH = datetime.fromtimestamp(0, UTC)


class KeyType(StrEnum):
    """The type of an API key. Checks with a test key have priority P3 by default."""

    LIVE = "live"
    TEST = "test"


class KeyScope(StrEnum):
    """What an API key allows. PLANS lets a call name a `plan_id`, and thereby choose its limits."""

    CHECK = "check"
    USAGE = "usage"
    PLANS = "plans"


class TokenScope(StrEnum):
    """What an admin token allows."""

    READ = "read"
    WRITE = "write"


# --- Fields that several entities or the configuration file share ----------------------------------------------------

_EXAMPLE_ID = "1a2b3c4d5e6f7g8h"
_UNIQUE_LIST_SCHEMA = {"minItems": 1, "uniqueItems": True}


def _described_name(example: str) -> msgspec.Meta:
    return described(
        "1 to 64 letters, digits or -_./ characters.", example=example, pattern=f"^{NAME_PATTERN.pattern}$"
    )


Name = Annotated[str, _described_name("acme")]
OwnerId = Annotated[str, described("The tenant that owns it.", example=f"ten_{_EXAMPLE_ID}"), IMMUTABLE]
PlanId = Annotated[str, described("The plan that applies.", example=f"pla_{_EXAMPLE_ID}")]
ModeField = Annotated[
    Mode,
    described(
        "`on` enforces limits, `monitor` evaluates and reports them but allows every check, `off` ignores them.",
        example="on",
    ),
]
TimeZone = Annotated[
    str,
    described(
        "IANA time zone such as Europe/Berlin. It decides when the days and months of quotas begin.",
        example="Europe/Berlin",
        minLength=1,
    ),
]
FailureField = Annotated[
    Failure | None,
    described(
        "What happens to checks while the store is unavailable: `open` allows them, `closed` denies them, `local` "
        "counts them in each process."
    ),
]
PriorityField = Annotated[
    Priority | None, described("The default priority of checks. It matters for limits with `shares`; P0 may use all.")
]
LaneCount = Annotated[
    int | Lanes, described("The number of lanes that its keys are spread over on a Redis Cluster.", example=1)
]
Suspended = Annotated[bool, described("True if all API keys of this tenant are rejected.", example=False)]
Resource = Annotated[
    str,
    described(
        "A resource such as GET:/orders, GET:/orders/{id}, POST:* or *.",
        example="GET:/orders/{id}",
        minLength=1,
        maxLength=MAX_KEY_PART_BYTES,
    ),
]
Subject = Annotated[
    str,
    described(
        "The subject whose limits it changes, such as user:42.",
        example="user:42",
        minLength=1,
        maxLength=MAX_KEY_PART_BYTES,
    ),
]
KeyTypeField = Annotated[KeyType, described("Checks with a `test` key have priority P3 by default.", example="live")]
KeyScopes = Annotated[
    tuple[KeyScope, ...],
    described(
        "What the key allows. Omit `plans` for keys that leave your own servers: it lets a call name its plan.",
        example=["check", "usage", "plans"],
        contains={"enum": ["check", "usage"]},
        **_UNIQUE_LIST_SCHEMA,
    ),
]
Expiry = Annotated[datetime | None, described("When it expires, such as 2026-12-31T00:00:00Z. Null means never.")]
Metadata = Annotated[
    dict[str, Any],
    described(f"Any JSON object, up to {MAX_METADATA_BYTES} bytes.", example={"team": "checkout"}),
]
Disabled = Annotated[bool, described("True if the key is rejected.", example=False)]
OverrideLimits = Annotated[
    dict[str, Any],
    described(
        "The changed fields by the name of a limit, or one of the words `unlimited` and `blocked`.",
        example={"burst": {"limit": 500}},
    ),
]
OverrideExpiry = Annotated[
    datetime, described("When it expires, such as 2026-12-31T00:00:00Z.", example="2026-02-02T00:00:00Z")
]
Reason = Annotated[
    str, described("Why it was set, for later readers.", example="launch day", maxLength=MAX_REASON_LENGTH)
]
LastUsed = Annotated[
    datetime | None, described("When it was last used, within a minute.", example="2026-02-01T08:00:00Z"), READ_ONLY
]


# --- Entities --------------------------------------------------------------------------------------------------------


class Entity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all entities have in common."""

    kind: ClassVar[str]
    id_prefix: ClassVar[str]

    id: Annotated[str, described("Its id. The catalog assigns it."), READ_ONLY]
    version: Annotated[
        int, described("Counts the changes of this entity; it is also its ETag.", example=3), READ_ONLY
    ] = 1
    created_at: Annotated[datetime, described("When it was created.", example="2026-01-01T00:00:00Z"), READ_ONLY] = (
        _EPOCH
    )
    updated_at: Annotated[
        datetime, described("When it was last changed.", example="2026-02-01T00:00:00Z"), READ_ONLY
    ] = _EPOCH


class Tenant(Entity, frozen=True, kw_only=True):
    """An account whose traffic is limited."""

    kind: ClassVar[str] = "tenant"
    id_prefix: ClassVar[str] = "ten"

    name: Name
    mode: ModeField = Mode.ON
    time_zone: TimeZone = "UTC"
    failure: FailureField = None
    priority: PriorityField = None
    default_plan_id: Annotated[
        str | None,
        described(
            "The plan of checks whose key has none. The plan of a matching policy applies as well.",
            example=f"pla_{_EXAMPLE_ID}",
        ),
    ] = None
    lanes: LaneCount = 1
    suspended: Suspended = False
    revision: Annotated[
        int,
        described("The number of the last change to this tenant, its plans or its policies.", example=42),
        READ_ONLY,
    ] = 0

    def __post_init__(self) -> None:
        validate_name("name", self.name)
        validate_failure(self.failure)
        zone(self.time_zone)
        if not isinstance(self.lanes, Lanes):
            validate_lanes(self.lanes)

    @property
    def is_operator(self) -> bool:
        return self.id == OPERATOR

    @property
    def lane_layout(self) -> Lanes:
        """The lanes over which its keys are spread."""
        return self.lanes if isinstance(self.lanes, Lanes) else ONE_LANE if self.lanes == 1 else Lanes(self.lanes)


class Plan(Entity, frozen=True, kw_only=True):
    """A named set of limits, each as its JSON fields. A change adds a version; old versions are kept."""

    kind: ClassVar[str] = "plan"
    id_prefix: ClassVar[str] = "pla"

    tenant_id: OwnerId
    name: Annotated[str, _described_name("free")]
    limits: Annotated[
        tuple[dict[str, Any], ...],
        described(
            "The limits, all of which a check must pass.",
            example=[{"name": "burst", "algorithm": "token_bucket", "bucket_capacity": 10, "refill_rate_per_sec": 2}],
        ),
    ]

    def __post_init__(self) -> None:
        validate_name("name", self.name)
        msgspec.structs.force_setattr(self, "limits", decode_limits(msgspec.json.encode(self.limits)))
        for index, limit in enumerate(self.compile("UTC")):
            if limit.scope is Scope.GLOBAL and self.tenant_id != OPERATOR:
                raise InvalidLimit(f"limits[{index}].scope", "only the operator's plan may have global limits")

    def compile(self, time_zone: str) -> Limits:
        """Compile the limits; `time_zone` is for quotas that have none. Equal plans share the result."""
        return compile_limits(msgspec.json.encode(self.limits), time_zone)


class Policy(Entity, frozen=True, kw_only=True):
    """Which plan applies to which resources of a tenant."""

    kind: ClassVar[str] = "policy"
    id_prefix: ClassVar[str] = "pol"

    tenant_id: OwnerId
    resource: Resource
    plan_id: PlanId
    mode: ModeField = Mode.ON
    failure: FailureField = None
    priority: PriorityField = None
    shadow_plan_id: Annotated[
        str | None, described("A plan that is evaluated beside the other one, and never denies a check.")
    ] = None

    def __post_init__(self) -> None:
        Pattern.parse(self.resource)
        validate_storable("resource", self.resource)
        validate_failure(self.failure)

    @property
    def pattern(self) -> Pattern:
        return Pattern.parse(self.resource)


class SecretHash(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is stored of a secret: its HMAC (hex) under one version of the pepper, and its expiry."""

    hash: str
    pepper: int
    expires_at: datetime | None = None


Secrets = Annotated[
    tuple[SecretHash, ...],
    described("Its secrets: one, and during a rotation the old ones too.", example=[{"pepper": 1, "expires_at": None}]),
    READ_ONLY,
]


class Key(Entity, frozen=True, kw_only=True):
    """An API key of a tenant."""

    kind: ClassVar[str] = "key"
    id_prefix: ClassVar[str] = "key"

    tenant_id: OwnerId
    name: Annotated[str, _described_name("web")]
    type: Annotated[KeyTypeField, IMMUTABLE] = KeyType.LIVE
    plan_id: Annotated[
        str | None,
        described(
            "The plan of checks with this key, instead of the tenant's default plan. The plan of a matching policy "
            "applies as well."
        ),
    ] = None
    scopes: KeyScopes = tuple(KeyScope)
    expires_at: Expiry = None
    metadata: Metadata = {}
    disabled: Annotated[Disabled, READ_ONLY] = False
    last_used_at: LastUsed = None
    secrets: Secrets = ()

    def __post_init__(self) -> None:
        validate_name("name", self.name)
        validate_scopes(self.scopes, KeyScope)
        if self.scopes == (KeyScope.PLANS,):
            raise InvalidInput("scopes", "must have check or usage: plans alone allows no call")
        in_order = tuple(each for each in KeyScope if each in self.scopes)  # the database keeps no order
        msgspec.structs.force_setattr(self, "scopes", in_order)
        validate_time("expires_at", self.expires_at)
        validate_metadata(self.metadata)


class Override(Entity, frozen=True, kw_only=True):
    """Changed limits for one subject, until they expire."""

    kind: ClassVar[str] = "override"
    id_prefix: ClassVar[str] = "ovr"

    tenant_id: OwnerId
    resource: Annotated[
        Resource,
        described(
            "The resource for which it changes limits; * is any.",
            example=ANY_RESOURCE,
            minLength=1,
            maxLength=MAX_KEY_PART_BYTES,
        ),
        IMMUTABLE,
    ] = ANY_RESOURCE
    subject: Annotated[Subject, IMMUTABLE]
    limits: OverrideLimits
    expires_at: OverrideExpiry
    reason: Reason = ""
    set_by: Annotated[str, described("The actor that set it.", example=f"token:tok_{_EXAMPLE_ID}"), READ_ONLY] = ""

    def __post_init__(self) -> None:
        for field in ("resource", "subject"):
            if not parse_key_part(field, getattr(self, field)):
                raise InvalidInput(field, "must not be empty")
            validate_storable(field, getattr(self, field))
        if not self.limits:
            raise InvalidInput("limits", "must map limit names to their changed fields, 'unlimited' or 'blocked'")
        copy_changes(self.limits)
        validate_time("expires_at", self.expires_at)
        validate_text("reason", self.reason, MAX_REASON_LENGTH)


class Token(Entity, frozen=True, kw_only=True):
    """An admin token, which allows reading or changing the catalog of one tenant or of all."""

    kind: ClassVar[str] = "token"
    id_prefix: ClassVar[str] = "tok"

    name: Annotated[str, _described_name("deploy")]
    scopes: Annotated[
        tuple[TokenScope, ...], described("What the token allows.", example=["read", "write"], **_UNIQUE_LIST_SCHEMA)
    ] = (TokenScope.READ,)
    tenant_id: Annotated[
        str | None, described("The only tenant that it gives access to. Null means all tenants."), IMMUTABLE
    ] = None
    expires_at: Expiry = None
    last_used_at: LastUsed = None
    secrets: Secrets = ()

    def __post_init__(self) -> None:
        validate_name("name", self.name)
        validate_scopes(self.scopes, TokenScope)
        validate_time("expires_at", self.expires_at)


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change: who made it, when, and the entity before and after. It contains no secrets."""

    id: int
    at: datetime
    actor: str
    action: str
    tenant_id: str | None
    entity_id: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a tenant that decides checks: snapshots are compiled from it, and copies in Redis contain it."""

    tenant: Tenant
    plans: tuple[Plan, ...]
    policies: tuple[Policy, ...]


AnyEntity = TypeVar("AnyEntity", bound=Entity)
ENTITY_TYPES: Mapping[str, type[Entity]] = {
    entity.kind: entity for entity in (Tenant, Plan, Policy, Key, Override, Token)
}


# --- Building and changing -------------------------------------------------------------------------------------------


def build_entity(entity: type[AnyEntity], fields: Mapping[str, Any]) -> AnyEntity:
    """Build an entity from plain values. Raises `InvalidInput` with the name of the wrong field."""
    return convert(entity, dict(fields))


def with_changes(entity: AnyEntity, changes: Mapping[str, Any]) -> AnyEntity:
    """Return the entity with some fields changed. Raises `InvalidInput` for fields that a caller can't change."""
    immutable = immutable_fields(type(entity))
    for field, value in require_settable(type(entity), changes).items():
        if field in immutable and value != getattr(entity, field):
            raise InvalidInput(field, f"of a {entity.kind} can't be changed")
    return build_entity(type(entity), {**current_fields(entity), **changes})


def require_settable(entity_type: type[Entity], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields as they are. Raises `InvalidInput` if a caller may not set one of them."""
    settable = settable_fields(entity_type)
    for field in fields:
        if field not in settable:
            raise InvalidInput(str(field)[:64], f"is not a field of a {entity_type.kind}; it has {', '.join(settable)}")
    return dict(fields)


def current_fields(entity: Entity) -> dict[str, Any]:
    """Return the fields of an entity with their values."""
    return {name: getattr(entity, name) for name in entity.__struct_fields__}


def to_public_dict(entity: Entity) -> dict[str, Any]:
    """Return an entity as plain JSON values, without the hashes of its secrets."""
    fields: dict[str, Any] = msgspec.to_builtins(entity)
    for secret in fields.get("secrets", ()):
        del secret["hash"]
    return fields


def example_entity(entity_type: type[Entity]) -> dict[str, Any]:
    """Return an example of an entity as plain values, for the reference."""
    return {**example_of(entity_type), "id": f"{entity_type.id_prefix}_{_EXAMPLE_ID}"}


def to_datetime(now_us: int) -> datetime:
    """Convert microseconds since 1970 to a time in UTC."""
    return datetime.fromtimestamp(now_us / US_PER_SECOND, UTC)
