"""Bucket keys: injective, readable, and hash-tagged by placement.

    lf:{acme}:sp:11:GET:/orders:7:user:42:hour:f3600
    |  |      || |              |         |    |shape of a window: other shapes never share a count
    |  |      || |              |         |    algorithm
    |  |      || |              |         limit name
    |  |      || |              subject, behind its length
    |  |      || resource, behind its length
    |  |      |place of the plan in the join
    |  |      scope
    |  placement: everything of a tenant in one slot, or in one lane of it ({acme/7})
    prefix

Lengths come before the parts that may hold any character, so no two tuples make the same key. Inside the process a key
is `str`; bytes from outside that are not UTF-8 are carried by surrogate escapes, which the encoder turns back into the
same bytes.
"""

import hashlib
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache

from limitforge.core.exact import short_repr
from limitforge.core.lanes import ONE_LANE, Lanes, LanesLike, TenantKeys, parse_lanes
from limitforge.core.limits import Scope
from limitforge.errors import InvalidInput

MAX_KEY_PART_BYTES = 512
MAX_CACHED_TENANTS = 16_384
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ESCAPED = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D", "/": "%2F"})
_EMPTY_TENANT = "%-"  # an empty tag would not be one; "%" is always followed by two digits in an escaped tenant
_GLOBAL = "%"
_MEMBERS = "%m"
_SUBJECT = Scope.SUBJECT  # looking up a member of an enum takes longer than the rest of a comparison


class Layer(StrEnum):
    """Which place a plan has among those that join in a check: limits of equal names in different places are apart."""

    OPERATOR = "o"
    TENANT = "t"
    POLICY = "p"
    SHADOW = "s"


class Keys:
    """Makes every key of one store: all start with the same prefix. `lanes` says which tenants have more than one."""

    def __init__(self, prefix: str = "lf", lanes: Mapping[str, LanesLike] | None = None) -> None:
        if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
            raise InvalidInput(
                "key_prefix", f"must be 1 to 64 letters, digits or -_.: characters, got {short_repr(prefix)}"
            )
        self.prefix = prefix
        self.lanes: dict[str, Lanes] = parse_lanes(lanes or {})
        self.generation = 0
        """Whoever remembers where a tenant's keys are remembers this too: with another number it may be elsewhere."""
        self.scheduled_tenant_keys = lru_cache(maxsize=MAX_CACHED_TENANTS)(self._build_tenant_keys)

    def tenant_keys(self, tenant: str | bytes) -> TenantKeys:
        """Where the keys of a tenant are."""
        try:
            home = self.scheduled_tenant_keys(tenant)
        except TypeError:  # not hashable
            raise InvalidInput("tenant", f"must be a string, got {type(tenant).__name__}") from None
        return home if home.scheduled_change is None else home.current()

    def _build_tenant_keys(self, tenant: str | bytes) -> TenantKeys:
        name = parse_key_part("tenant", tenant)
        tag = name.translate(_ESCAPED) or _EMPTY_TENANT
        return TenantKeys.build(self.prefix, tag, self.lanes.get(name, ONE_LANE))

    def set_lanes(self, tenant: str, lanes: Lanes) -> None:
        """How many a tenant has from now on: for who learns it while checks are under way."""
        if self.lanes.get(tenant, ONE_LANE) != lanes:
            self.lanes[tenant] = lanes
            self.scheduled_tenant_keys = lru_cache(maxsize=MAX_CACHED_TENANTS)(self._build_tenant_keys)
            self.generation += 1  # last: who reads the new number finds the new homes

    def bucket_prefix(self, scope: Scope, place: str, home: TenantKeys, own: str, resource: str, subject: str) -> str:
        """All of a bucket's key but its limit; `own` is what the subject's keys start with, `place` its letter."""
        if scope is _SUBJECT or scope is Scope.CALLER:
            return f"{self.subject_bucket_prefix(scope, place, own, resource)}{len(subject)}:{subject}:"
        if scope is Scope.RESOURCE:
            return f"{home.resource_prefix(resource)}r{place}:{len(resource)}:{resource}:"
        if scope is Scope.TENANT:
            return f"{home.tenant_prefix}t{place}:"
        return f"{self.prefix}:{{{_GLOBAL}}}:g{place}:"

    @staticmethod
    def subject_bucket_prefix(scope: Scope, place: str, own: str, resource: str) -> str:
        """The same up to the subject, for scopes that have one."""
        return f"{own}s{place}:{len(resource)}:{resource}:" if scope is _SUBJECT else f"{own}c{place}:"

    def without_prefix(self, key: str) -> str:
        """The key as any store would have it."""
        return key[len(self.prefix) + 1 :]

    def heartbeats(self) -> str:
        """Which processes are alive."""
        return f"{self.prefix}:{{{_MEMBERS}}}:n"

    @staticmethod
    def overrides(own: str, subject: str) -> str:
        """Where all overrides of one subject are: beside its buckets."""
        return f"{own}o:{subject}"

    @staticmethod
    def override_index(own: str) -> str:
        """Which subjects of a tenant have overrides, of those whose keys start like this."""
        return f"{own}x"

    @staticmethod
    def reservation(own: str, token: bytes) -> str:
        return f"{own}v:{token.hex()}"


def parse_key_part(field: str, value: str | bytes) -> str:
    """A part of a key from outside, bounded; bytes that are not UTF-8 survive as they are."""
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
        return parse_key_part(field, str.__str__(value))  # an enum of strings is its value
    raise InvalidInput(field, f"must be a string, got {type(value).__name__}")


def encode_key(key: str) -> bytes:
    """The key as it goes over the wire."""
    return key.encode("utf-8", "surrogateescape")


def spread_offset(key: str) -> int:
    """The phase of a spread window: 48 bits of its key's hash."""
    return int.from_bytes(hashlib.sha1(encode_key(key), usedforsecurity=False).digest()[:6], "big")


def lane_prefix_of(key: str) -> str:
    """What a key starts with: its prefix and its place."""
    return key[: key.index("}") + 2]


def new_bucket_counter_key(own: str) -> str:
    """Return where the buckets that a tenant began in one lane are counted."""
    return f"{own}b"


def overflow_key(key: str, suffix: str) -> str:
    """Return the bucket that a limit's new subjects share once their tenant may begin no more, in the lane of `key`."""
    return f"{lane_prefix_of(key)}w{suffix}"


def is_overflow(key: str) -> bool:
    return key[len(lane_prefix_of(key))] == "w"


def override_index_of(overrides: str) -> str:
    """The index that has the subject of these overrides."""
    return Keys.override_index(lane_prefix_of(overrides))


def layer_of(key: str) -> Layer | None:
    """Which place the plan of a bucket has; None if it is not the key of one."""
    _, _, rest = key.partition("}:")
    return Layer(rest[1]) if rest[1:2] in tuple(Layer) else None


def decode_key(key: bytes) -> str:
    """The opposite of `encoded`."""
    return key.decode("utf-8", "surrogateescape")
