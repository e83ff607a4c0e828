"""Change the catalog. An edit is one transaction of changes, with their audit entries and their outbox rows."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, TypeVar, cast

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.credentials import PREFIXES, Credential, Peppers, new_id, require_peppers
from limitforge.catalog.database import outbox, queries, writes
from limitforge.catalog.database.catalog_revision import EditStamp
from limitforge.catalog.database.change_recorder import ChangeRecorder, changed_entity
from limitforge.catalog.database.entity_validation import validate_entity
from limitforge.catalog.database.outbox import OUTBOX_RETENTION
from limitforge.catalog.model import (
    KEY_ID_PATTERN,
    AnyEntity,
    Entity,
    Key,
    Override,
    Plan,
    Policy,
    Tenant,
    Token,
    build_entity,
    require_settable,
    with_changes,
)
from limitforge.catalog.patterns import PolicyMatcher
from limitforge.catalog.plan_limits import normalize_limits, parse_plan_limits
from limitforge.core.exact import US_PER_SECOND, parse_duration_us
from limitforge.core.overrides import MAX_PER_SUBJECT, copy_changes
from limitforge.errors import Conflict, InvalidInput, NotFound, VersionConflict

MAX_GRACE_SECONDS = 366 * 86_400
MaybeEntity = TypeVar("MaybeEntity", bound=Entity | None)


class Edit:
    """A transaction of changes by one actor. `Catalog.edit` begins it and commits it.

    `expected_version` is the version that the caller has read. A method raises `VersionConflict` if the entity has
    changed since then.
    """

    def __init__(
        self, connection: AsyncConnection, edit_stamp: EditStamp, *, actor: str, now: datetime, peppers: Peppers | None
    ) -> None:
        self.connection = connection
        self.revision = edit_stamp.stamp.revision
        self.now = now
        self._actor = actor
        self._peppers = peppers
        self._recorder = ChangeRecorder(edit_stamp, actor, now)
        self._tenants_with_changed_policies: set[str] = set()

    # --- Any entity --------------------------------------------------------------------------------------------------

    async def create(self, entity_type: type[AnyEntity], fields: Mapping[str, Any]) -> AnyEntity:
        """Create a tenant, plan or policy. Keys, tokens and overrides have methods of their own."""
        if entity_type not in (Tenant, Plan, Policy):
            raise TypeError(f"use the method that creates a {entity_type.kind}")
        plan = self._new_plan(fields) if entity_type is Plan else None
        entity = (
            self._build_new(entity_type, require_settable(entity_type, fields))
            if plan is None
            else cast("AnyEntity", plan)
        )
        await validate_entity(self.connection, entity, self.now)
        await writes.insert_entity(self.connection, entity)
        if isinstance(entity, Plan):
            await writes.add_plan_versions(self.connection, [entity], self._actor)
        await self._record_change("create", None, entity)
        return entity

    async def update(
        self,
        entity_type: type[AnyEntity],
        identity: str,
        field_values: Mapping[str, Any],
        *,
        expected_version: int | None = None,
    ) -> AnyEntity:
        """Change some fields of an entity. Nothing is written if they have these values already."""
        before = await self._get(entity_type, identity, expected_version)
        if isinstance(before, Plan) and "limits" in field_values:
            field_values = {**field_values, "limits": normalize_limits(field_values["limits"])}
        if isinstance(before, Override) and isinstance(field_values.get("limits"), Mapping):
            field_values = {**field_values, "limits": copy_changes(field_values["limits"])}
        after = with_changes(before, field_values)
        if isinstance(after, Override) and after != before:
            after = msgspec.structs.replace(after, set_by=self._actor)
        if after == before:
            return before
        return await self._replace_one(before, after)

    async def delete(
        self, entity_type: type[AnyEntity], identity: str, *, expected_version: int | None = None
    ) -> AnyEntity:
        """Delete an entity and everything that it owns. Raises `Conflict` for a plan that is in use."""
        before = await self._get(entity_type, identity, expected_version)
        if isinstance(before, Tenant) and before.is_operator:
            raise Conflict("the operator can't be deleted")
        if isinstance(before, Plan) and (users := await queries.describe_plan_users(self.connection, before)):
            raise Conflict(f"plan {before.name} is still in use by {', '.join(users)}: give them another plan first")
        await writes.delete_entities(self.connection, [before])
        await self._record_change("delete", before, None)
        return before

    # --- Plans -------------------------------------------------------------------------------------------------------

    async def roll_back_plan(
        self, plan_id: str, target_version: int | None = None, *, expected_version: int | None = None
    ) -> Plan:
        """Create a new version of a plan with the limits of an earlier one, by default of the version before."""
        plan = await self._get(Plan, plan_id, expected_version)
        wanted = plan.version - 1 if target_version is None else target_version
        for row in await queries.plan_versions(self.connection, plan_id):
            if row["version"] == wanted:
                after = with_changes(plan, {"limits": tuple(row["limits"])})
                return plan if after == plan else await self._replace_one(plan, after, action="rollback")
        raise NotFound(f"plan {plan.name} has no version {wanted}; it is at {plan.version}")

    # --- Keys and tokens ---------------------------------------------------------------------------------------------

    async def create_key(self, fields: Mapping[str, Any]) -> tuple[Key, Credential]:
        """Create a key, and return it with its secret, which is not stored."""
        key = self._build_new(Key, require_settable(Key, fields))
        return await self._insert_with_new_secret(key, PREFIXES[key.type])

    async def create_token(self, fields: Mapping[str, Any]) -> tuple[Token, Credential]:
        """Create an admin token, and return it with its secret, which is not stored."""
        return await self._insert_with_new_secret(
            self._build_new(Token, require_settable(Token, fields)), PREFIXES["admin"]
        )

    async def add_key(self, key: Key) -> Key:
        """Add a key that was generated elsewhere, with the hashes of its secrets."""
        if not KEY_ID_PATTERN.fullmatch(key.id):
            raise InvalidInput("id", "must be key_ and 16 letters or digits")
        if await queries.find(self.connection, Key, key.id) is not None:
            raise Conflict(f"a key {key.id} already exists")
        return await self._insert_with_secrets(self._with_version(None, key))

    async def rotate_key(
        self, key_id: str, grace_seconds: float = 0, *, expected_version: int | None = None
    ) -> tuple[Key, Credential]:
        """Add a new secret to a key. The old ones expire after the grace period, or earlier if they would anyway."""
        if type(grace_seconds) not in (int, float) or grace_seconds != 0:
            parse_duration_us("grace_seconds", grace_seconds, maximum_us=MAX_GRACE_SECONDS * US_PER_SECOND)
        before = await self._get(Key, key_id, expected_version)
        peppers = require_peppers(self._peppers)
        ends = self.now + timedelta(seconds=float(grace_seconds))
        credential = Credential.generate(PREFIXES[before.type], key_id.removeprefix("key_"), peppers)
        old = [
            msgspec.structs.replace(each, expires_at=ends if each.expires_at is None else min(each.expires_at, ends))
            for each in before.secrets
        ]
        valid = [each for each in old if each.expires_at is not None and each.expires_at > self.now]
        after = msgspec.structs.replace(before, secrets=(peppers.hash_credential(credential), *valid))
        return await self._replace_one(before, after, action="rotate"), credential

    async def set_secrets(self, key_id: str, secrets: Sequence[Any]) -> Key:
        """Replace the hashes of a key's secrets by those of secrets that were generated elsewhere."""
        before = await self._get(Key, key_id, None)
        return await self._replace_one(before, msgspec.structs.replace(before, secrets=tuple(secrets)), action="rotate")

    async def set_key_disabled(self, key_id: str, *, disabled: bool, expected_version: int | None = None) -> Key:
        """Disable a key, or enable it again."""
        before = await self._get(Key, key_id, expected_version)
        if before.disabled == disabled:
            return before
        after = msgspec.structs.replace(before, disabled=disabled)
        return await self._replace_one(before, after, action="disable" if disabled else "enable")

    # --- Overrides ---------------------------------------------------------------------------------------------------

    async def set_override(self, fields: Mapping[str, Any], *, expected_version: int | None = None) -> Override:
        """Set the override of a subject for a resource; it replaces an existing one.

        Its lifetime is given as `ttl_seconds` or as `expires_at`.
        """
        values = dict(fields)
        if "ttl_seconds" in values:
            if "expires_at" in values:
                raise InvalidInput("ttl_seconds", "can't be combined with expires_at")
            ttl_us = parse_duration_us("ttl_seconds", values.pop("ttl_seconds"))
            values["expires_at"] = self.now + timedelta(microseconds=ttl_us)
        elif "expires_at" not in values:
            raise InvalidInput("expires_at", "is required, unless ttl_seconds is given")
        if isinstance(values.get("limits"), Mapping):
            values["limits"] = copy_changes(values["limits"])
        override = msgspec.structs.replace(
            self._build_new(Override, require_settable(Override, values)), set_by=self._actor
        )
        await validate_entity(self.connection, override, self.now)
        same = {"tenant_id": override.tenant_id, "resource": override.resource, "subject": override.subject}
        for before in await queries.find_by(self.connection, Override, **same):
            self._require_version(before, expected_version)
            after = msgspec.structs.replace(override, id=before.id, created_at=before.created_at)
            return await self._replace_one(before, after)
        if expected_version is not None:
            raise NotFound("unknown override: there is none to replace")
        if await queries.count_overrides(self.connection, override, self.now) >= MAX_PER_SUBJECT:
            raise Conflict(f"one subject may have at most {MAX_PER_SUBJECT} overrides; delete one, or use '*'")
        await writes.insert_entity(self.connection, override)
        await self._record_change("create", None, override)
        return override

    # --- Many at once ------------------------------------------------------------------------------------------------

    async def write_changes(self, entity_pairs: Iterable[tuple[Entity | None, Entity | None]]) -> None:
        """Write changes in their order, each as the entity before and after.

        The caller must have validated them; the database's constraints still apply.
        """
        for (_, action), group in groupby(entity_pairs, key=_kind_and_action):
            pairs = [(before, self._with_version(before, after)) for before, after in group]
            if action == "create":
                created = [after for _, after in pairs if after is not None]
                await writes.insert_entities(self.connection, created, self._actor, self.now)
            elif action == "delete":
                await writes.delete_entities(self.connection, [before for before, _ in pairs if before is not None])
            else:
                await self._replace_all(
                    [(before, after) for before, after in pairs if before is not None and after is not None]
                )
            await writes.add_audit_entries(self.connection, [self._recorder.record(action, *pair) for pair in pairs])

    async def set_default_plans(self, tenants: Iterable[Tenant]) -> None:
        """Set the default plans of tenants that `write_changes` created before their plans."""
        await writes.set_default_plans(self.connection, tenants)

    # --- The end -----------------------------------------------------------------------------------------------------

    async def finish(self) -> list[Announcement]:
        """Validate changed policies, set the revisions of changed tenants, and append the announcements to the outbox.

        Return the announcements. `Catalog.edit` calls this before the commit.
        """
        announcements = self._recorder.announcements()
        for tenant_id in self._tenants_with_changed_policies:
            policies = await queries.list_for_tenant(self.connection, Policy, tenant_id)
            PolicyMatcher((policy.pattern, policy) for policy in policies)  # refuses patterns that overlap too much
        configured = [each.tenant_id for each in announcements if each.config]
        await writes.set_tenant_revisions(self.connection, configured, self.revision)
        await outbox.add_announcements(self.connection, announcements, self.now)
        await outbox.trim_outbox(self.connection, self.now - OUTBOX_RETENTION)
        return announcements

    # --- Helpers -----------------------------------------------------------------------------------------------------

    def _new_plan(self, fields: Mapping[str, Any]) -> Plan:
        """Build a plan from either shape. Errors in a plan of one limit name its fields without `limits[0]`."""
        if not isinstance(fields.get("name"), str):
            raise InvalidInput("name", "is required, and must be text")
        own = {field: fields[field] for field in ("tenant_id", "name") if field in fields}
        try:
            return self._build_new(Plan, {**own, "limits": parse_plan_limits(fields["name"], fields)})
        except InvalidInput as error:
            if "limits" in fields:
                raise
            raise InvalidInput(error.field.removeprefix("limits[0]."), error.problem) from None

    def _build_new(self, entity_type: type[AnyEntity], fields: Mapping[str, Any]) -> AnyEntity:
        own = {"id": new_id(entity_type.id_prefix), "created_at": self.now, "updated_at": self.now}
        return build_entity(entity_type, {**fields, **own})

    async def _get(self, entity_type: type[AnyEntity], identity: str, expected_version: int | None) -> AnyEntity:
        entity = await queries.get(self.connection, entity_type, identity)
        self._require_version(entity, expected_version)
        return entity

    @staticmethod
    def _require_version(entity: Entity, expected_version: int | None) -> None:
        if expected_version is not None and expected_version != entity.version:
            raise VersionConflict(
                f"{entity.kind} {entity.id} is at version {entity.version}, not {expected_version}: "
                "it has changed since it was read. Read it again, and retry"
            )

    async def _replace_one(self, before: AnyEntity, after: AnyEntity, action: str = "update") -> AnyEntity:
        after = self._with_version(before, after)
        await validate_entity(self.connection, after, self.now)
        await self._replace_all([(before, after)])
        await self._record_change(action, before, after)
        return after

    async def _replace_all(self, pairs: Sequence[tuple[Entity, Entity]]) -> None:
        """Replace entities of one type, each given as before and after."""
        if not await writes.replace_entities(self.connection, [after for _, after in pairs]):
            raise VersionConflict(f"this {pairs[0][0].kind} has changed in the meantime: read it again, and retry")
        plans = [after for _, after in pairs if isinstance(after, Plan)]
        if plans:
            await writes.add_plan_versions(self.connection, plans, self._actor)
        for before, after in pairs:
            if isinstance(before, Key | Token) and isinstance(after, Key | Token) and after.secrets != before.secrets:
                await writes.replace_secret_hashes(self.connection, after, self.now)

    def _with_version(self, before: Entity | None, after: MaybeEntity) -> MaybeEntity:
        """Return the entity after a change with its new version and times."""
        if after is None:
            return after
        # A deleted key may be added again with the same id. Cached copies of the old one must have a lower version.
        first = self.revision if isinstance(after, Key) else 1
        version, created_at = (first, self.now) if before is None else (before.version + 1, before.created_at)
        return msgspec.structs.replace(after, version=version, created_at=created_at, updated_at=self.now)

    async def _insert_with_new_secret(self, entity: AnyEntity, prefix: str) -> tuple[AnyEntity, Credential]:
        peppers = require_peppers(self._peppers)
        credential = Credential.generate(prefix, entity.id.partition("_")[2], peppers)
        entity = msgspec.structs.replace(entity, secrets=(peppers.hash_credential(credential),))
        return await self._insert_with_secrets(entity), credential

    async def _insert_with_secrets(self, entity: AnyEntity) -> AnyEntity:
        await validate_entity(self.connection, entity, self.now)
        await writes.insert_entity(self.connection, entity)
        if isinstance(entity, Key | Token):
            await writes.replace_secret_hashes(self.connection, entity, self.now)
        await self._record_change("create", None, entity)
        return entity

    async def _record_change(self, action: str, before: Entity | None, after: Entity | None) -> None:
        """Add a change to the audit log and to the announcements of this edit."""
        entity = changed_entity(before, after)
        if isinstance(entity, Policy):
            self._tenants_with_changed_policies.add(entity.tenant_id)
        await writes.add_audit_entries(self.connection, [self._recorder.record(action, before, after)])


def _kind_and_action(entity_pair: tuple[Entity | None, Entity | None]) -> tuple[str, str]:
    before, after = entity_pair
    return changed_entity(before, after).kind, "create" if before is None else "delete" if after is None else "update"
