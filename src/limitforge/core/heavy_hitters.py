"""Find the most frequent names of each group in bounded memory, with a fair share of it for each group."""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class HitCount:
    """A lower bound of how often a name was counted, and the time of its last hit.

    `digest` belongs to the caller, who may cache a hash of the name here.
    """

    __slots__ = ("count", "digest", "last_us")

    def __init__(self) -> None:
        self.count = 0
        self.last_us = 0
        self.digest: bytes | None = None


class HeavyHitters(Generic[Name]):
    """A sketch of at most `capacity` names over all groups, such as tenants. When it is full, it drops half of them.

    A group with no more names than its fair share of the rest (half of `capacity`, divided by the number of groups)
    loses none. A larger group keeps its most frequent names. If there are more groups than half of `capacity`, each
    keeps at most one name, and the groups whose most frequent name has the lowest count lose theirs.

    Counts are never too high. The counts of a group that lost names are too low: as in the Misra-Gries sketch, the kept
    names are reduced by the count of the first dropped one, so that early names do not keep later ones out forever.

    Threads may share a sketch without a lock: when two of them add at the same time, some counts may be lost.
    """

    def __init__(self, capacity: int) -> None:
        self.groups: dict[str, dict[Name, HitCount]] = {}
        self._capacity = capacity
        self._size = 0

    def add(self, group: str, name: Name, count: int, now_us: int) -> None:
        """Count a name `count` times."""
        names = self.groups.get(group)
        hits = None if names is None else names.get(name)
        if hits is None:
            hits = self._insert(group, name)
        hits.count += count
        if now_us > hits.last_us:  # noqa: PLR1730 - a call of max() takes as long as everything else here
            hits.last_us = now_us

    def top(self, count: int) -> list[tuple[str, Name, HitCount]]:
        """Return at most `count` names as (group, name, hits), most frequent first. Groups share the list fairly."""
        groups = self.groups.copy()
        splits = _split_large_groups(groups, count)
        found = [
            (group, name, hits)
            for group, names in groups.items()
            for name, hits in (splits[group][0] if group in splits else list(names.items()))
        ]
        return sorted(found, key=lambda entry: (-entry[2].count, -entry[2].last_us, entry[0]))

    def _insert(self, group: str, name: Name) -> HitCount:
        if self._size >= self._capacity:
            self._prune()
        self._size += 1
        hits = self.groups.setdefault(group, {})[name] = HitCount()
        return hits

    def _prune(self) -> None:
        for group, (kept, dropped) in _split_large_groups(self.groups.copy(), self._capacity // 2).items():
            floor = dropped[0][1].count
            for _, hits in kept:
                hits.count = max(hits.count - floor, 1)
            if kept:
                self.groups[group] = dict(kept)
            else:
                self.groups.pop(group, None)
        self._size = sum(map(len, self.groups.values()))  # counted anew: two threads may have pruned at once


Ranked = list[tuple[Name, HitCount]]


def _split_large_groups(
    groups: Mapping[str, Mapping[Name, HitCount]], capacity: int
) -> dict[str, tuple[Ranked[Name], Ranked[Name]]]:
    """Return the groups with more names than their fair share of `capacity`, as (names to keep, names to drop).

    The shares are max-min fair: large groups divide what small groups leave unused. The remainder of that division goes
    to the most frequent names.
    """
    share = _fair_share([len(names) for names in groups.values()], capacity)
    ranked = {group: _rank(names) for group, names in groups.items() if len(names) > share}
    remainder = (
        capacity - share * len(ranked) - sum(len(names) for group, names in groups.items() if group not in ranked)
    )
    by_next_count = sorted(ranked, key=lambda group: ranked[group][share][1].count, reverse=True)
    with_one_more = set(by_next_count[:remainder])
    splits = {}
    for group, names in ranked.items():
        keep = share + (group in with_one_more)
        if keep < len(names):
            splits[group] = (names[:keep], names[keep:])
    return splits


def _fair_share(sizes: list[int], capacity: int) -> int:
    """Return the largest integer `share` for which the sum of `min(size, share)` is at most `capacity`."""
    sizes.sort()
    for index, size in enumerate(sizes):
        share = capacity // (len(sizes) - index)
        if size > share:
            return share
        capacity -= size
    return max(sizes, default=0)


def _rank(names: Mapping[Name, HitCount]) -> Ranked[Name]:
    """Sort by count, most frequent first. Of names with equal counts, the newest comes first."""
    ranked = list(names.items())
    if len(ranked) > 1:
        ranked.sort(key=lambda entry: entry[1].count)
        ranked.reverse()
    return ranked
