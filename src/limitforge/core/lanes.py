"""The key prefixes of a tenant: one hash tag for everything, or lanes with a hash tag each.

A Redis Cluster keeps all keys with one tag on one shard, where one script call can decide about them. A tenant that is
too big for one shard gets lanes. Its subjects are spread over `{acme/0}`, `{acme/1}`, … by a hash, so that all limits
of one subject stay together. Its resource-wide limits are spread over `{acme/r0}`, …, and its tenant-wide limits stay
at `{acme}`.
"""

import zlib
from collections.abc import Mapping

import msgspec

from limitforge.core.exact import parse_integer, short_repr
from limitforge.errors import InvalidInput

MAX_LANES = 1_024


class Lanes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of lanes of a tenant: `count`, and from `at` on (epoch seconds) `then`.

    Another number of lanes moves the keys. So at that moment the tenant's counters start afresh, and its overrides must
    be set again. Open leases and reservations stay where they are and can be ended. Raises `InvalidInput` if a number
    is not from 1 to 1,024, or if only one of `then` and `at` is given.
    """

    count: int = 1
    then: int | None = None
    at: float | None = None

    def __post_init__(self) -> None:
        parse_integer("lanes.count", self.count, minimum=1, maximum=MAX_LANES)
        if (self.then is None) != (self.at is None):
            raise InvalidInput("lanes", "a scheduled change needs both `then` (the new number) and `at` (when)")
        if self.then is not None:
            parse_integer("lanes.then", self.then, minimum=1, maximum=MAX_LANES)
            if not isinstance(self.at, int | float) or isinstance(self.at, bool) or not 0 <= self.at < 1e11:
                raise InvalidInput("lanes.at", f"must be epoch seconds, got {short_repr(self.at)}")


LanesLike = int | Lanes
ONE_LANE = Lanes()


def parse_lanes(given: Mapping[str, LanesLike]) -> dict[str, Lanes]:
    """Return the validated lanes of each tenant. Raise `InvalidInput` that names the tenant of an invalid number."""
    if not isinstance(given, Mapping):
        raise InvalidInput("lanes", f"must map tenants to numbers of lanes, got {short_repr(given)}")
    parsed: dict[str, Lanes] = {}
    for tenant, lanes in given.items():
        if not isinstance(tenant, str):
            raise InvalidInput("lanes", f"must map tenants to numbers of lanes, got the tenant {short_repr(tenant)}")
        if not isinstance(lanes, Lanes):
            lanes = Lanes(parse_integer(f"lanes.{tenant:.64}", lanes, minimum=1, maximum=MAX_LANES))  # noqa: PLW2901
        parsed[tenant] = lanes
    return parsed


class TenantKeys(msgspec.Struct, eq=False):
    """The key prefixes of one tenant."""

    tenant_prefix: str
    """The prefix of keys that all its subjects share."""
    lane_prefixes: tuple[str, ...]
    """The prefixes of its subjects' keys, one for each lane."""
    resource_prefixes: tuple[str, ...]
    """The prefixes of its resource-wide keys, one for each lane."""
    all_prefixes: tuple[str, ...]
    """What every key of the tenant starts with, under any number of lanes."""
    scheduled_change: tuple[int, "TenantKeys"] | None = None
    """When the number of lanes changes (microseconds since the epoch), and the prefixes from then on."""
    is_announced: bool = False
    """True once `Keys.on_lane_change` was called with these prefixes."""

    @classmethod
    def build(cls, prefix: str, tag: str, lanes: Lanes) -> "TenantKeys":
        keys = cls._with_lane_count(prefix, tag, lanes.count)
        if lanes.then is not None and lanes.at is not None and lanes.then != lanes.count:
            keys.scheduled_change = int(1e6 * lanes.at), cls._with_lane_count(prefix, tag, lanes.then)
        return keys

    @classmethod
    def _with_lane_count(cls, prefix: str, tag: str, count: int) -> "TenantKeys":
        tenant_prefix = f"{prefix}:{{{tag}}}:"
        all_prefixes = (tenant_prefix, f"{prefix}:{{{tag}/")
        if count == 1:
            return cls(tenant_prefix, (tenant_prefix,), (tenant_prefix,), all_prefixes)
        subjects, resources = (
            tuple(f"{prefix}:{{{tag}/{kind}{lane}}}:" for lane in range(count)) for kind in ("", "r")
        )
        return cls(tenant_prefix, subjects, resources, all_prefixes)

    def at_time(self, now_us: int) -> "TenantKeys":
        """Return the prefixes that hold at `now_us`: these, or those of a change that is due."""
        if self.scheduled_change is None or now_us < self.scheduled_change[0]:
            return self
        return self.scheduled_change[1]

    def subject_prefix(self, subject: str) -> str:
        """Return the prefix of the lane that holds a subject's keys."""
        return _pick_lane(self.lane_prefixes, subject)

    def resource_prefix(self, resource: str) -> str:
        """Return the prefix of the lane that holds the keys of resource-wide limits."""
        return _pick_lane(self.resource_prefixes, resource)


def _pick_lane(lanes: tuple[str, ...], name: str) -> str:
    if len(lanes) == 1:
        return lanes[0]
    return lanes[zlib.crc32(name.encode("utf-8", "surrogateescape")) % len(lanes)]
