"""Which copies count: those that are not older than what a node knows and was told of, and not of a lost timeline."""

from collections.abc import Hashable
from typing import Any

from limitforge.catalog.entries import KeyEntry, TenantEntry
from limitforge.catalog.history import History, Stamp
from limitforge.catalog.model import Key, TenantConfig
from limitforge.catalog.queries import Announcement
from limitforge.catalog.sources import Copy


class Acceptance:
    """Judges copies. `floors` are the changes that were announced of keys and tenants: a copy from before does not
    count. `is_cut_off` says that the database is away, so that copies are all there is.
    """

    def __init__(self, history: History, max_floors: int) -> None:
        self.floors: dict[Hashable, Stamp] = {}
        self.is_cut_off = False
        self._forgotten = Stamp()
        """The newest floor that there was no room for."""
        self._history = history
        self._max_floors = max_floors

    def floor(self, name: Hashable) -> Stamp:
        return self.floors.get(name, Stamp())

    def expect(self, name: Hashable, stamp: Stamp) -> None:
        """From now on a copy of this counts only if it has this change."""
        self.floors[name] = max(stamp, self.floors.pop(name, stamp))
        if len(self.floors) > self._max_floors:
            self._forgotten = max(self._forgotten, self.floors.pop(next(iter(self.floors))))

    def is_good(self, copy: Copy[Any], name: Hashable, known: TenantEntry | KeyEntry | None, *, is_told: bool) -> bool:
        """Return True if a copy can be taken without asking the database. Where that is away, any that is not older
        than what is known and announced can be. Otherwise it must be of a revision that the database is known to have,
        and where the truth is wanted (`is_told`) it must have a change that was announced and is not known yet.
        """
        floor = self.floors.get(name, Stamp() if self.is_cut_off else self._forgotten)
        if not self.is_acceptable(copy, floor, known):
            return False
        if self.is_cut_off:
            return True
        is_wanted = not is_told or (name in self.floors and (known is None or not known.stamp.covers(floor)))
        return is_wanted and self._history.has(copy.stamp)

    def is_acceptable(self, copy: Copy[Any], floor: Stamp, known: TenantEntry | KeyEntry | None) -> bool:
        """Return True if a copy is not older than what is known and announced, and not of a lost timeline."""
        if self._history.denies(copy.stamp) or not copy.stamp.covers(floor):
            return False
        if known is None or copy.stamp.timeline > known.stamp.timeline:
            return True
        if copy.stamp.timeline < known.stamp.timeline:
            return False
        if copy.value is None:
            return copy.stamp.covers(known.stamp)
        return _number(copy.value) >= _number(known.key if isinstance(known, KeyEntry) else known.snapshot.config)

    def stamp(self, name: Hashable) -> Stamp:
        """How new it is at least what the database says from now on."""
        return max(self._history.head or Stamp(), self.floors.get(name, Stamp()))


def _number(value: Key | TenantConfig) -> int:
    """What grows with each change of a key or a tenant, within one timeline."""
    return value.version if isinstance(value, Key) else value.tenant.revision


def has_change(entry: TenantEntry, told: Announcement) -> bool:
    """Return True if what is known of a tenant includes what is announced."""
    if entry.stamp.timeline != told.timeline:
        return entry.stamp.timeline > told.timeline
    return max(entry.stamp.revision, entry.snapshot.revision) >= told.revision
