"""Announcements: what an edit has changed, for the caches of all processes."""

import msgspec

from limitforge.catalog.history import Stamp

NO_TENANT = ""
"""The tenant of an announcement that only carries a revision."""


class Announcement(msgspec.Struct, frozen=True):
    """What one edit has changed of one tenant, for other processes."""

    revision: int
    tenant_id: str
    config: bool = False
    """True if the tenant, its plans or its policies have changed."""
    overrides: bool = False
    """True if its overrides have changed."""
    keys: tuple[str, ...] = ()
    """The ids of keys that were created or changed."""
    gone: tuple[str, ...] = ()
    """The ids of keys that were deleted."""
    revoked: tuple[str, ...] = ()
    """The ids of keys, or of the tenant, that have lost rights."""
    revokes: bool = False
    """True if `revoked` or `gone` has ids. Such announcements are published first."""
    timeline: int = 0
    change_id: int = 0
    previous_id: int = 0

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.timeline, self.revision, self.change_id)
