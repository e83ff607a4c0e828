"""Collect what an edit changes: entries of the audit log, and announcements for other processes."""

from datetime import datetime
from typing import Any

import msgspec

from limitforge.catalog.announcements import NO_TENANT, Announcement
from limitforge.catalog.database.catalog_revision import EditStamp
from limitforge.catalog.model import Entity, Key, Override, Tenant, Token, to_public_dict
from limitforge.errors import CatalogError


class ChangeRecorder:
    """The changes of one edit. Secrets never appear in it."""

    def __init__(self, edit_stamp: EditStamp, actor: str, now: datetime) -> None:
        self._edit_stamp = edit_stamp
        self._actor = actor
        self._now = now
        self._announcements: dict[str, Announcement] = {}

    def record(self, action: str, before: Entity | None, after: Entity | None) -> dict[str, Any]:
        """Add a change to the announcements, and return its row of the audit log."""
        entity = changed_entity(before, after)
        tenant_id: str | None = entity.id if isinstance(entity, Tenant) else getattr(entity, "tenant_id", None)
        if tenant_id is not None and not isinstance(entity, Token):
            self._announce(tenant_id, before, after)
        return {
            "at": self._now,
            "actor": self._actor,
            "action": f"{entity.kind}.{action}",
            "tenant_id": tenant_id,
            "entity_id": entity.id,
            "before": None if before is None else to_public_dict(before),
            "after": None if after is None else to_public_dict(after),
        }

    def announcements(self) -> list[Announcement]:
        """Return one announcement for each changed tenant.

        If there is none, return one without a tenant, so that each revision has an outbox row.
        """
        announcements = self._announcements.values() or [Announcement(self._edit_stamp.stamp.revision, NO_TENANT)]
        return [stamp_announcement(each, self._edit_stamp) for each in announcements]

    def _announce(self, tenant_id: str, before: Entity | None, after: Entity | None) -> None:
        known = self._announcements.get(tenant_id) or Announcement(self._edit_stamp.stamp.revision, tenant_id)
        entity = changed_entity(before, after)
        changes: dict[str, Any]
        if isinstance(entity, Key):
            field = "gone" if after is None else "keys"
            changes = {field: _with_id(getattr(known, field), entity.id)}
        elif isinstance(entity, Override):
            changes = {"overrides": True}
        else:
            changes = {"config": True}
        if _revokes_access(before, after):
            changes["revoked"] = _with_id(known.revoked, entity.id)
        self._announcements[tenant_id] = msgspec.structs.replace(known, **changes)


def changed_entity(before: Entity | None, after: Entity | None) -> Entity:
    """Return the entity that a change is about."""
    entity = after or before
    if entity is None:
        raise CatalogError("a change needs an entity before or after it")
    return entity


def stamp_announcement(announcement: Announcement, edit_stamp: EditStamp) -> Announcement:
    """Return the announcement with the point in history of its edit, and note whether it revokes anything."""
    stamp = edit_stamp.stamp
    return msgspec.structs.replace(
        announcement,
        revision=stamp.revision,
        timeline=stamp.timeline,
        change_id=stamp.change_id,
        previous_id=edit_stamp.previous_id,
        revokes=bool(announcement.revoked or announcement.gone),
    )


def _with_id(ids: tuple[str, ...], identity: str) -> tuple[str, ...]:
    return ids if identity in ids else (*ids, identity)


def _revokes_access(before: Entity | None, after: Entity | None) -> bool:
    """Return True if a change takes rights from a key or a tenant.

    Processes then stop using what they have cached of it, even if they can't read the database.
    """
    if isinstance(before, Tenant):
        return not isinstance(after, Tenant) or (after.suspended and not before.suspended)
    if not isinstance(before, Key) or not isinstance(after, Key):
        return False
    is_shorter = _ends_earlier(before.expires_at, after.expires_at)
    ends = {each.hash: each.expires_at for each in after.secrets}
    is_rotated = any(
        each.hash not in ends or _ends_earlier(each.expires_at, ends[each.hash]) for each in before.secrets
    )
    is_narrower = not set(before.scopes) <= set(after.scopes)
    return (after.disabled and not before.disabled) or is_shorter or is_rotated or is_narrower


def _ends_earlier(before: datetime | None, after: datetime | None) -> bool:
    return after is not None and (before is None or after < before)
