"""Where a tenant's keys are: all under one hash tag, or spread over lanes, each with a tag of its own.

A Redis Cluster keeps what has one tag on one shard, where it decides together. A tenant that is too big for one shard
gets lanes: its subjects are spread over `{acme/0}`, `{acme/1}`, … by a hash, all limits of one subject still together;
its resource-wide limits over `{acme/r0}`, …; what is tenant-wide stays at `{acme}`.
"""

import logging
import zlib
from collections.abc import Mapping

import msgspec

from limitforge.core.clock import SystemClock
from limitforge.core.exact import parse_integer, short_repr
from limitforge.errors import InvalidInput

MAX_LANES = 1_024

_log = logging.getLogger(__name__)


class Lanes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many lanes a tenant has; from `at` on (epoch seconds) it has `then` instead.

    The other number of lanes puts the keys elsewhere, so at that moment the tenant's counters start afresh, and so do
    its overrides: set those again. Leases and reservations that are open stay where they are, and can be ended.
    """

    count: int = 1
    then: int | None = None
    at: float | None = None

    def __post_init__(self) -> None:
        parse_integer("lanes.count", self.count, minimum=1, maximum=MAX_LANES)
        if (self.then is None) != (self.at is None):
            raise InvalidInput("lanes", "a change needs both: `then`, and the moment `at` which it happens")
        if self.then is not None:
            parse_integer("lanes.then", self.then, minimum=1, maximum=MAX_LANES)
            if not isinstance(self.at, int | float) or isinstance(self.at, bool) or not 0 <= self.at < 1e11:
                raise InvalidInput("lanes.at", f"must be epoch seconds, got {short_repr(self.at)}")


LanesLike = int | Lanes
ONE_LANE = Lanes()


def parse_lanes(given: Mapping[str, LanesLike]) -> dict[str, Lanes]:
    """Lanes by tenant, validated."""
    if not isinstance(given, Mapping):
        raise InvalidInput("lanes", f"must map tenants to numbers of lanes, got {short_repr(given)}")
    found: dict[str, Lanes] = {}
    for tenant, lanes in given.items():
        if not isinstance(tenant, str):
            raise InvalidInput("lanes", f"must map tenants to numbers of lanes, got the tenant {short_repr(tenant)}")
        if not isinstance(lanes, Lanes):
            lanes = Lanes(parse_integer(f"lanes.{tenant:.64}", lanes, minimum=1, maximum=MAX_LANES))  # noqa: PLW2901
        found[tenant] = lanes
    return found


class TenantKeys(msgspec.Struct, eq=False):
    """What the keys of one tenant start with: `wide` those of all its subjects together, `lanes` those of one."""

    tenant_prefix: str
    lane_prefixes: tuple[str, ...]
    resource_prefixes: tuple[str, ...]
    all_prefixes: tuple[str, ...]
    """What any key of the tenant starts with, however many lanes it has or had."""
    scheduled_change: tuple[int, "TenantKeys"] | None = None
    """When it moves (microseconds since the epoch), and to where."""
    is_logged: bool = False

    @classmethod
    def build(cls, prefix: str, tag: str, lanes: Lanes) -> "TenantKeys":
        home = cls._with_lane_count(prefix, tag, lanes.count)
        if lanes.then is not None and lanes.at is not None and lanes.then != lanes.count:
            home.scheduled_change = int(1e6 * lanes.at), cls._with_lane_count(prefix, tag, lanes.then)
        return home

    @classmethod
    def _with_lane_count(cls, prefix: str, tag: str, count: int) -> "TenantKeys":
        wide = f"{prefix}:{{{tag}}}:"
        starts = (wide, f"{prefix}:{{{tag}/")
        if count == 1:
            return cls(wide, (wide,), (wide,), starts)
        subjects, resources = (
            tuple(f"{prefix}:{{{tag}/{kind}{lane}}}:" for lane in range(count)) for kind in ("", "r")
        )
        return cls(wide, subjects, resources, starts)

    def current(self) -> "TenantKeys":
        """Itself, or where it has moved by now. Every node does so by its own clock."""
        if self.scheduled_change is None or SystemClock().now_us() < self.scheduled_change[0]:
            return self
        _, moved = self.scheduled_change
        if not moved.is_logged:
            moved.is_logged = True
            _log.warning(
                "%s has %d lanes from now on, not %d: its counters and overrides start afresh",
                self.tenant_prefix,
                len(moved.lane_prefixes),
                len(self.lane_prefixes),
            )
        return moved

    def subject_prefix(self, subject: str) -> str:
        return _pick_lane(self.lane_prefixes, subject)

    def resource_prefix(self, resource: str) -> str:
        return _pick_lane(self.resource_prefixes, resource)


def _pick_lane(lanes: tuple[str, ...], name: str) -> str:
    if len(lanes) == 1:
        return lanes[0]
    return lanes[zlib.crc32(name.encode("utf-8", "surrogateescape")) % len(lanes)]
