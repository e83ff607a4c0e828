"""The most frequent names of each tenant, counted in bounded memory, with a fair share for each tenant."""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class HitCount:
    """How often a name was counted at least, and when last. `digest` is for the caller to remember a hash of it."""

    __slots__ = ("count", "digest", "last_us")

    def __init__(self) -> None:
        self.count = 0
        self.last_us = 0
        self.digest: bytes | None = None


class HeavyHitters(Generic[Name]):
    """At most `room` names of all tenants. When it is full, half of the names are dropped.

    A tenant that has no more than its fair share of the rest (half of `room`, divided by the number of tenants) loses
    nothing. One that has more keeps its most frequent names. With more tenants than half of `room`, each keeps one name
    at most, and the tenants whose most frequent name has the lowest counts lose theirs.

    Counts are never too high. A tenant that lost names has counts that are too low: as in the sketch of Misra and
    Gries, the kept names lose what the first dropped one had, so that early names don't keep later ones out for ever.
    """

    def __init__(self, room: int) -> None:
        self.tenants: dict[str, dict[Name, HitCount]] = {}
        self._capacity = room
        self._size = 0

    def add(self, tenant_id: str, name: Name, count: int, at_us: int) -> None:
        names = self.tenants.get(tenant_id)
        seen = None if names is None else names.get(name)
        if seen is None:
            seen = self._insert(tenant_id, name)
        seen.count += count
        if at_us > seen.last_us:  # noqa: PLR1730 - calling max takes as long as the rest
            seen.last_us = at_us

    def _insert(self, tenant_id: str, name: Name) -> HitCount:
        if self._size >= self._capacity:
            self._prune()
        self._size += 1
        seen = self.tenants.setdefault(tenant_id, {})[name] = HitCount()
        return seen

    def top(self, count: int) -> list[tuple[str, Name, HitCount]]:
        """Return at most `count` names, the most frequent first. Each tenant has a fair share of the list."""
        greedy = _over_fair_share(self.tenants, count)
        found = [
            (tenant_id, name, seen)
            for tenant_id, names in self.tenants.items()
            for name, seen in (greedy[tenant_id][0] if tenant_id in greedy else names.items())
        ]
        return sorted(found, key=lambda each: (-each[2].count, -each[2].last_us, each[0]))

    def _prune(self) -> None:
        for tenant_id, (kept, dropped) in _over_fair_share(self.tenants, self._capacity // 2).items():
            floor = dropped[0][1].count
            for _, seen in kept:
                seen.count = max(seen.count - floor, 1)
            self._size -= len(dropped)
            if kept:
                self.tenants[tenant_id] = dict(kept)
            else:
                del self.tenants[tenant_id]


Pairs = list[tuple[Name, HitCount]]


def _over_fair_share(
    tenants: Mapping[str, Mapping[Name, HitCount]], room: int
) -> dict[str, tuple[Pairs[Name], Pairs[Name]]]:
    """Return the tenants that have more than a fair share of `room`: what each may keep, and the rest.

    What tenants with few names leave is for the others (max-min fairness). What can't be divided is for the most
    frequent names.
    """
    share = _fair_share([len(names) for names in tenants.values()], room)
    ranked = {tenant_id: _ranked(names) for tenant_id, names in tenants.items() if len(names) > share}
    spare = room - share * len(ranked) - sum(len(names) for each, names in tenants.items() if each not in ranked)
    first = sorted(ranked, key=lambda tenant_id: ranked[tenant_id][share][1].count, reverse=True)
    more = set(first[:spare])
    greedy = {}
    for tenant_id, names in ranked.items():
        keep = share + (tenant_id in more)
        if keep < len(names):
            greedy[tenant_id] = (names[:keep], names[keep:])
    return greedy


def _fair_share(sizes: list[int], room: int) -> int:
    """Return the largest whole number that leaves room for `min(size, number)` of each."""
    sizes.sort()
    for at, size in enumerate(sizes):
        share = room // (len(sizes) - at)
        if size > share:
            return share
        room -= size
    return max(sizes, default=0)


def _ranked(names: Mapping[Name, HitCount]) -> Pairs[Name]:
    """Sort by count, the most frequent first, and of equals the one that came last."""
    pairs = list(names.items())
    if len(pairs) > 1:
        pairs.sort(key=lambda each: each[1].count)
        pairs.reverse()
    return pairs
