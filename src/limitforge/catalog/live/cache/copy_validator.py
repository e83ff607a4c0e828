"""Decides which copies in Redis may be used instead of the database."""

from collections.abc import Hashable
from typing import Any

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.history import RevisionHistory, Stamp
from limitforge.catalog.live.cache.entries import CachedKey, CachedTenant
from limitforge.catalog.live.cache.freshness import DatabaseHealth
from limitforge.catalog.live.shared_copies import SharedCopy
from limitforge.catalog.model import Key, TenantConfig


class CopyValidator:
    """Compares copies with the cached entry, with the announced changes and with the history of the database."""

    def __init__(self, history: RevisionHistory, health: DatabaseHealth, max_stamps: int) -> None:
        self.required_stamps: dict[Hashable, Stamp] = {}
        """The last announced change of each key and tenant. A copy from before that change is out of date."""
        self.clear_count = 0
        """Incremented by `clear`."""
        self._newest_dropped = Stamp()  # the newest required stamp that was dropped for lack of room
        self._history = history
        self._health = health
        self._max_stamps = max_stamps

    def required_stamp(self, name: Hashable) -> Stamp:
        return self.required_stamps.get(name, Stamp())

    def require(self, name: Hashable, stamp: Stamp) -> None:
        """From now on, accept a copy of this entity only if it includes this change."""
        self.required_stamps[name] = max(stamp, self.required_stamps.pop(name, stamp))
        if len(self.required_stamps) > self._max_stamps:
            oldest = self.required_stamps.pop(next(iter(self.required_stamps)))
            self._newest_dropped = max(self._newest_dropped, oldest)

    def clear(self) -> None:
        """Drop all requirements. Anything that is being read now must be read again."""
        self.clear_count += 1
        self.required_stamps.clear()

    def may_replace_database_read(
        self, copy: SharedCopy[Any], name: Hashable, known: CachedTenant | CachedKey | None, *, must_be_newer: bool
    ) -> bool:
        """Return True if a copy makes a read of the database unnecessary.

        - It must not be older than the cached entry and the announced changes. While the database is unreachable, that
          is enough.
        - Otherwise its revision must be one that the database is known to have.
        - If it `must_be_newer`, it must also include an announced change that the cached entry lacks.
        """
        is_unreachable = self._health.is_unreachable
        required = self.required_stamps.get(name, Stamp() if is_unreachable else self._newest_dropped)
        if not self.is_current(copy, required, known):
            return False
        if is_unreachable:
            return True
        has_change = name in self.required_stamps and (known is None or not known.stamp.includes(required))
        return (has_change or not must_be_newer) and self._history.contains(copy.stamp)

    def is_current(self, copy: SharedCopy[Any], required: Stamp, known: CachedTenant | CachedKey | None) -> bool:
        """Return True if a copy is not older than the cached entry and `required`, and not of a lost timeline."""
        if self._history.is_from_other_history(copy.stamp) or not copy.stamp.includes(required):
            return False
        if known is None or copy.stamp.timeline > known.stamp.timeline:
            return True
        if copy.stamp.timeline < known.stamp.timeline:
            return False
        if copy.value is None:
            return copy.stamp.includes(known.stamp)
        return _version(copy.value) >= _version(known.key if isinstance(known, CachedKey) else known.snapshot.config)

    def is_read_valid(self, clear_count: int, name: Hashable, stamp: Stamp) -> bool:
        """Return False if a read must be repeated: a change was announced meanwhile, or `clear` was called."""
        return clear_count == self.clear_count and stamp.includes(self.required_stamp(name))

    def stamp_for_read(self, name: Hashable) -> Stamp:
        """Return a stamp that a read of the database which starts now is sure to include."""
        return max(self._history.head or Stamp(), self.required_stamp(name))


def _version(value: Key | TenantConfig) -> int:
    """Return a number that grows with each change of a key or a tenant within one timeline."""
    return value.version if isinstance(value, Key) else value.tenant.revision


def includes_change(entry: CachedTenant, announcement: Announcement) -> bool:
    """Return True if the cached tenant includes the announced change."""
    if entry.stamp.timeline != announcement.timeline:
        return entry.stamp.timeline > announcement.timeline
    return max(entry.stamp.revision, entry.snapshot.revision) >= announcement.revision
