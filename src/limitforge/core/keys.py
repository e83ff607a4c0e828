"""Redis keys: injective, readable, and with a hash tag that decides which shard holds them.

    lf:{acme}:sp:11:GET:/orders:7:user:42:hour:f3600
    |  |      || |              |         |    |shape of a window: limits of other shapes never share a count
    |  |      || |              |         |    algorithm
    |  |      || |              |         limit name
    |  |      || |              subject, after its length
    |  |      || resource, after its length
    |  |      |layer of the plan: operator, tenant, policy or shadow
    |  |      scope
    |  hash tag: everything of a tenant in one slot, or in one of its lanes ({acme/7})
    prefix

A part that may hold any character follows its length, so that no two buckets have the same key. In the process a key is
a `str`. Bytes from outside that are not UTF-8 become surrogate escapes, and `encode_key` restores the same bytes.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import lru_cache

from limitforge.core.clock import Clock, SystemClock
from limitforge.core.exact import short_repr
from limitforge.core.lanes import ONE_LANE, Lanes, LanesLike, TenantKeys, parse_lanes
from limitforge.core.limits import Scope
from limitforge.errors import InvalidInput

MAX_KEY_PART_BYTES = 512
MAX_CACHED_TENANTS = 16_384
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ESCAPED = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D", "/": "%2F"})
_EMPTY_TENANT = "%-"  # Redis ignores an empty tag; in an escaped tenant, two digits follow every "%"
_GLOBAL = "%"
_HEARTBEATS = "%m"
_SUBJECT = Scope.SUBJECT  # looking up a member of an enum takes longer than the rest of a comparison


class Layer(StrEnum):
    """The layer of a plan in a check. Limits of the same name in different layers have different buckets."""

    OPERATOR = "o"
    TENANT = "t"
    POLICY = "p"
    SHADOW = "s"


class Keys:
    """Makes every key of one store.

    All keys start with `prefix`. `lanes` gives the number of lanes of the tenants that have more than one. The clock
    says when a scheduled change of lanes is due. Raises `InvalidInput` if the prefix or a number of lanes is invalid.
    """

    def __init__(
        self, prefix: str = "lf", lanes: Mapping[str, LanesLike] | None = None, clock: Clock | None = None
    ) -> None:
        if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
            raise InvalidInput(
                "key_prefix", f"must be 1 to 64 letters, digits or -_.: characters, got {short_repr(prefix)}"
            )
        self.prefix = prefix
        self.lanes: dict[str, Lanes] = parse_lanes(lanes or {})
        self.generation = 0
        """Incremented when lanes are set. Keys of an earlier generation may be in the wrong lane."""
        self.on_lane_change: Callable[[TenantKeys, TenantKeys], None] | None = None
        """Called once for each scheduled change that is due, with the prefixes before and after it."""
        self._now_us = (clock or SystemClock()).now_us
        self._cached = lru_cache(maxsize=MAX_CACHED_TENANTS)(self._build_tenant_keys)

    def tenant_keys(self, tenant: str | bytes) -> TenantKeys:
        """Return the key prefixes of a tenant as they are now. Raise `InvalidInput` if the tenant is invalid."""
        try:
            keys = self._cached(tenant)
        except TypeError:  # not hashable
            raise InvalidInput("tenant", f"must be a string, got {type(tenant).__name__}") from None
        return keys if keys.scheduled_change is None else self.current(keys)

    def current(self, keys: TenantKeys) -> TenantKeys:
        """Return the prefixes of the same tenant as they are now, after a scheduled change that is due."""
        current = keys if keys.scheduled_change is None else keys.at_time(self._now_us())
        if current is not keys and not current.is_announced:
            current.is_announced = True
            if self.on_lane_change is not None:
                self.on_lane_change(keys, current)
        return current

    def _build_tenant_keys(self, tenant: str | bytes) -> TenantKeys:
        name = parse_key_part("tenant", tenant)
        tag = name.translate(_ESCAPED) or _EMPTY_TENANT
        return TenantKeys.build(self.prefix, tag, self.lanes.get(name, ONE_LANE))

    def set_lanes(self, tenant: str, lanes: Lanes) -> None:
        """Set the number of lanes of a tenant from now on, also while checks are running."""
        if self.lanes.get(tenant, ONE_LANE) != lanes:
            self.lanes[tenant] = lanes
            self._cached = lru_cache(maxsize=MAX_CACHED_TENANTS)(self._build_tenant_keys)
            self.generation += 1  # last: a thread that reads the new generation must find the new prefixes

    def bucket_prefix(
        self, scope: Scope, layer: str, tenant_keys: TenantKeys, lane_prefix: str, resource: str, subject: str
    ) -> str:
        """Return a bucket's key up to the limit. `lane_prefix` is that of the subject's lane, `layer` a letter."""
        if scope is _SUBJECT or scope is Scope.CALLER:
            return f"{self.subject_bucket_prefix(scope, layer, lane_prefix, resource)}{len(subject)}:{subject}:"
        if scope is Scope.RESOURCE:
            return f"{tenant_keys.resource_prefix(resource)}r{layer}:{len(resource)}:{resource}:"
        if scope is Scope.TENANT:
            return f"{tenant_keys.tenant_prefix}t{layer}:"
        return f"{self.prefix}:{{{_GLOBAL}}}:g{layer}:"

    @staticmethod
    def subject_bucket_prefix(scope: Scope, layer: str, lane_prefix: str, resource: str) -> str:
        """Return a bucket's key up to the subject, for the two scopes that have a subject."""
        return f"{lane_prefix}s{layer}:{len(resource)}:{resource}:" if scope is _SUBJECT else f"{lane_prefix}c{layer}:"

    def without_prefix(self, key: str) -> str:
        """Return the part of a key that is the same in every store."""
        return key[len(self.prefix) + 1 :]

    def heartbeat_key(self) -> str:
        """Return the key of the set of live processes."""
        return f"{self.prefix}:{{{_HEARTBEATS}}}:n"

    @staticmethod
    def overrides_key(lane_prefix: str, subject: str) -> str:
        """Return the key of all overrides of one subject, in the slot of its buckets."""
        return f"{lane_prefix}o:{subject}"

    @staticmethod
    def override_index_key(lane_prefix: str) -> str:
        """Return the key of the subjects in one lane that have overrides."""
        return f"{lane_prefix}x"

    @staticmethod
    def reservation_key(lane_prefix: str, token: bytes) -> str:
        """Return the key of the record of a reservation."""
        return f"{lane_prefix}v:{token.hex()}"


def parse_key_part(field: str, value: str | bytes) -> str:
    """Return a tenant, resource or subject from outside as it stands in a key.

    Bytes that are not UTF-8 become surrogate escapes. Raise `InvalidInput` for more than 512 bytes or another type.
    """
    if type(value) is str:
        if value.isascii():
            if len(value) <= MAX_KEY_PART_BYTES:
                return value
            raise InvalidInput(field, f"at most {MAX_KEY_PART_BYTES} bytes, got {len(value)}")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise InvalidInput(field, "must be valid Unicode; pass bytes for anything else") from None
        if size <= MAX_KEY_PART_BYTES:
            return value
        raise InvalidInput(field, f"at most {MAX_KEY_PART_BYTES} bytes of UTF-8, got {size}")
    if isinstance(value, bytes):
        if len(value) <= MAX_KEY_PART_BYTES:
            return value.decode("utf-8", "surrogateescape")
        raise InvalidInput(field, f"at most {MAX_KEY_PART_BYTES} bytes, got {len(value)}")
    if isinstance(value, str):
        return parse_key_part(field, str.__str__(value))  # a member of a StrEnum is its value
    raise InvalidInput(field, f"must be a string, got {type(value).__name__}")


def encode_key(key: str) -> bytes:
    """Return the bytes of a key as they go to Redis."""
    return key.encode("utf-8", "surrogateescape")


def decode_key(key: bytes) -> str:
    """Return the key of these bytes: the inverse of `encode_key`."""
    return key.decode("utf-8", "surrogateescape")


def spread_offset(key: str) -> int:
    """Return the phase of a spread window: 48 bits of the hash of its key."""
    return int.from_bytes(hashlib.sha1(encode_key(key), usedforsecurity=False).digest()[:6], "big")


def lane_prefix_of(key: str) -> str:
    """Return what all keys in the lane of `key` start with: the prefix and the hash tag."""
    return key[: key.index("}") + 2]


def new_bucket_counter_key(lane_prefix: str) -> str:
    """Return the key that counts the buckets which a tenant began in one lane."""
    return f"{lane_prefix}b"


def overflow_key(key: str, suffix: str) -> str:
    """Return the key of the overflow bucket that new subjects of a limit share, in the lane of `key`."""
    return f"{lane_prefix_of(key)}w{suffix}"


def is_overflow(key: str) -> bool:
    """Return True for the key of an overflow bucket."""
    return key[len(lane_prefix_of(key))] == "w"


def override_index_of(overrides: str) -> str:
    """Return the key of the index that lists the subject of these overrides."""
    return Keys.override_index_key(lane_prefix_of(overrides))


def layer_of(key: str) -> Layer | None:
    """Return the layer in the key of a bucket; None for any other key."""
    _, _, rest = key.partition("}:")
    return Layer(rest[1]) if rest[1:2] in tuple(Layer) else None
