"""Which copies count: those that are not older than what a node knows and was told of, and not of a lost timeline."""

from collections.abc import Hashable
from typing import Any

from limitforge.catalog.database.outbox import Announcement
from limitforge.catalog.history import RevisionHistory, Stamp
from limitforge.catalog.live.cache_entries import CachedKey, CachedTenant
from limitforge.catalog.live.sources import SharedCopy
from limitforge.catalog.model import Key, TenantConfig


class CopyValidator:
    """Judges copies. `floors` are the changes that were announced of keys and tenants: a copy from before does not
    count. `is_cut_off` says that the database is away, so that copies are all there is.
    """

    def __init__(self, history: RevisionHistory, max_floors: int) -> None:
        self.required_stamps: dict[Hashable, Stamp] = {}
        self.is_database_unreachable = False
        self._forgotten = Stamp()
        """The newest floor that there was no room for."""
        self._history = history
        self._max_floors = max_floors

    def required_stamp(self, name: Hashable) -> Stamp:
        return self.required_stamps.get(name, Stamp())

    def require(self, name: Hashable, stamp: Stamp) -> None:
        """From now on a copy of this counts only if it has this change."""
        self.required_stamps[name] = max(stamp, self.required_stamps.pop(name, stamp))
        if len(self.required_stamps) > self._max_floors:
            self._forgotten = max(self._forgotten, self.required_stamps.pop(next(iter(self.required_stamps))))

    def is_sufficient(
        self, copy: SharedCopy[Any], name: Hashable, known: CachedTenant | CachedKey | None, *, is_told: bool
    ) -> bool:
        """Return True if a copy can be taken without asking the database. Where that is away, any that is not older
        than what is known and announced can be. Otherwise it must be of a revision that the database is known to have,
        and where the truth is wanted (`is_told`) it must have a change that was announced and is not known yet.
        """
        floor = self.required_stamps.get(name, Stamp() if self.is_database_unreachable else self._forgotten)
        if not self.is_current(copy, floor, known):
            return False
        if self.is_database_unreachable:
            return True
        is_wanted = not is_told or (name in self.required_stamps and (known is None or not known.stamp.covers(floor)))
        return is_wanted and self._history.contains(copy.stamp)

    def is_current(self, copy: SharedCopy[Any], floor: Stamp, known: CachedTenant | CachedKey | None) -> bool:
        """Return True if a copy is not older than what is known and announced, and not of a lost timeline."""
        if self._history.contradicts(copy.stamp) or not copy.stamp.covers(floor):
            return False
        if known is None or copy.stamp.timeline > known.stamp.timeline:
            return True
        if copy.stamp.timeline < known.stamp.timeline:
            return False
        if copy.value is None:
            return copy.stamp.covers(known.stamp)
        return _number(copy.value) >= _number(known.key if isinstance(known, CachedKey) else known.snapshot.config)

    def stamp_for_read(self, name: Hashable) -> Stamp:
        """How new it is at least what the database says from now on."""
        return max(self._history.head or Stamp(), self.required_stamps.get(name, Stamp()))


def _number(value: Key | TenantConfig) -> int:
    """What grows with each change of a key or a tenant, within one timeline."""
    return value.version if isinstance(value, Key) else value.tenant.revision


def includes_change(entry: CachedTenant, told: Announcement) -> bool:
    """Return True if what is known of a tenant includes what is announced."""
    if entry.stamp.timeline != told.timeline:
        return entry.stamp.timeline > told.timeline
    return max(entry.stamp.revision, entry.snapshot.revision) >= told.revision
