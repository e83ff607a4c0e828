"""The history of a database: revisions, and the timelines that begin with each restore.

Each revision has a random id and names the id of the one before it, so revisions form a chain. A restored database has
other ids under the same numbers. It gets a new timeline with a higher number: data that carries an earlier timeline is
outdated, regardless of its revision.
"""

import secrets
from collections.abc import Iterable

import msgspec

MAX_REVISIONS = 20_000  # whose ids are remembered, about 2 MB
_RANDOM_BITS = 32


class Stamp(msgspec.Struct, frozen=True, order=True):
    """A point in the history of a database. Data with this stamp includes all changes up to it."""

    timeline: int = 0
    revision: int = 0
    change_id: int = 0

    def includes(self, other: "Stamp") -> bool:
        """Return True if data with this stamp includes the change of the other one."""
        return (self.timeline, self.revision) >= (other.timeline, other.revision)


def new_change_id() -> int:
    """Return a random id for a revision; never 0, which stands for an unknown one."""
    return secrets.randbits(62) | 1


def timeline_after(lost_timeline: int) -> int:
    """Return a new timeline: the next number, and random bits, since two databases may be restored from one backup."""
    return ((lost_timeline >> _RANDOM_BITS) + 1) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


def timeline_number(timeline: int) -> int:
    return timeline >> _RANDOM_BITS


class RevisionHistory:
    """The part of the history that one process has seen."""

    def __init__(self) -> None:
        self.head: Stamp | None = None
        """The last revision that this process has processed, or None before the first."""
        self.newest_timeline = 0
        """The newest timeline that this process has seen anywhere. Copies of earlier ones are not accepted."""
        self._newest_seen = Stamp()  # unlike the head, it never moves back within a timeline
        self._ids: dict[int, int] = {}

    def reset(self, head: Stamp, recent: Iterable[Stamp] = ()) -> None:
        """Start from the current state of the database; `recent` are earlier revisions of it."""
        self._ids = {each.revision: each.change_id for each in sorted(recent, key=lambda each: each.revision)}
        self._newest_seen = self.head = head
        self._ids[head.revision] = head.change_id
        self.newest_timeline = max(self.newest_timeline, head.timeline)

    def move_head_back(self, revision: int, change_id: int) -> None:
        """Process everything after this revision again."""
        if self.head is not None:
            self.head = msgspec.structs.replace(self.head, revision=revision, change_id=change_id)

    def reject_timeline(self, timeline: int) -> None:
        """Reject all data of this timeline from now on: the database has lost a part of it."""
        self.newest_timeline = max(self.newest_timeline, timeline + 1)

    def is_next(self, stamp: Stamp, previous_id: int) -> bool:
        """Return True if this revision follows the head directly, in the same history."""
        head = self.head
        if head is None or stamp.timeline != head.timeline:
            return False
        return stamp.revision == head.revision + 1 and previous_id == head.change_id

    def advance(self, stamp: Stamp) -> None:
        """Move the head to a later revision of the same history."""
        self._ids[stamp.revision] = stamp.change_id
        if self.head is None or stamp.revision > self.head.revision:
            self.head = stamp
        self._newest_seen = max(self._newest_seen, stamp)
        while len(self._ids) > MAX_REVISIONS:
            del self._ids[next(iter(self._ids))]

    def contains(self, stamp: Stamp) -> bool:
        """Return True if the database is known to have this revision.

        Before the first read of the database, any revision of the newest timeline counts as known.
        """
        if self.head is None:
            return stamp.timeline >= self.newest_timeline
        return stamp.timeline == self.head.timeline and self._ids.get(stamp.revision) == stamp.change_id

    def is_from_other_history(self, stamp: Stamp) -> bool:
        """Return True if this revision is from another history: same number but another id, or an older timeline."""
        if stamp.timeline < self.newest_timeline:
            return True
        known = self._ids.get(stamp.revision)
        is_same_timeline = self.head is not None and stamp.timeline == self.head.timeline
        return is_same_timeline and known is not None and known != stamp.change_id

    def has_lost(self, stamp: Stamp) -> bool:
        """Return True if the database does not have this revision, which means that it was restored since.

        The database must have had the revision before this process last read the history.
        """
        if self.head is None or stamp.timeline < self.head.timeline:
            return False
        return (
            stamp.timeline > self.head.timeline
            or stamp.revision > self._newest_seen.revision
            or self.is_from_other_history(stamp)
        )
