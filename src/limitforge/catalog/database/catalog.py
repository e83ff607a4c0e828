"""The catalog: reading it, and changing it. A change is an edit: one transaction with its audit entries and its outbox
rows, which other nodes hear of.

    async with catalog.edit("cli:ann") as edit:
        tenant = await edit.create(Tenant, {"name": "acme"})
        await edit.create(Plan, {"tenant_id": tenant.id, "name": "free", "limits": "100/minute"})
"""

import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, TypeVar, cast

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.credentials import PREFIXES, Credential, Peppers, new_id
from limitforge.catalog.database import catalog_revision, outbox, queries, writes
from limitforge.catalog.database.catalog_revision import Revision
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.outbox import Announcement
from limitforge.catalog.database.pages import Page
from limitforge.catalog.history import timeline_after
from limitforge.catalog.model import (
    MAX_PLANS_PER_TENANT,
    MAX_POLICIES_PER_TENANT,
    OPERATOR,
    Entity,
    Key,
    Override,
    Plan,
    Policy,
    Tenant,
    TenantConfig,
    Token,
    build_entity,
    require_settable,
    to_datetime,
    to_public_dict,
    with_changes,
)
from limitforge.catalog.patterns import PolicyMatcher
from limitforge.catalog.plan_limits import normalize_limits, parse_plan_limits
from limitforge.catalog.snapshot import limits_for_override
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.exact import TEN_YEARS_US, parse_duration_us, short_repr
from limitforge.core.overrides import MAX_PER_SUBJECT, compile_override, copy_changes
from limitforge.errors import CatalogError, Conflict, InvalidInput, NotFound, VersionConflict

NOTIFY_CHANNEL = "limitforge"
NO_TENANT = ""
MAX_ACTOR_LENGTH = 128
OUTBOX_RETENTION = timedelta(days=1)
MAX_GRACE_SECONDS = 366 * 86_400
MAX_OVERRIDE_DURATION = timedelta(microseconds=TEN_YEARS_US)
KEY_ID_PATTERN = re.compile(r"key_[0-9A-Za-z]{16}")

AnyEntity = TypeVar("AnyEntity", bound=Entity)
MaybeEntity = TypeVar("MaybeEntity", bound=Entity | None)
CommitListener = Callable[[Sequence[Announcement]], Awaitable[None]]

_ID_PREFIX = {Tenant: "ten", Plan: "pla", Policy: "pol", Key: "key", Override: "ovr", Token: "tok"}


class Catalog:
    """Tenants and all that is theirs, in a database.

    `changed` is awaited after a change was committed and before the caller hears of it: this node acts on it first.
    """

    def __init__(
        self,
        database: Database,
        *,
        peppers: Peppers | None = None,
        clock: Clock | None = None,
        on_commit: CommitListener | None = None,
    ) -> None:
        self.database = database
        self.peppers = peppers
        self.clock = clock or SystemClock()
        self.on_commit = on_commit

    @contextlib.asynccontextmanager
    async def edit(self, actor: str) -> AsyncIterator["Edit"]:
        """One transaction of changes by `actor`: all of them, or none if anything is refused."""
        if not actor or len(actor) > MAX_ACTOR_LENGTH or not actor.isprintable():
            raise InvalidInput(
                "actor", f"must be 1 to {MAX_ACTOR_LENGTH} printable characters, got {short_repr(actor)}"
            )
        async with self.database.writing() as connection:
            edit = Edit(
                connection,
                self,
                actor,
                to_datetime(self.clock.now_us()),
                await catalog_revision.next_revision(connection),
            )
            yield edit
            announcements = await edit.finish()
            if not self.database.is_sqlite:
                await outbox.notify_postgres(connection, NOTIFY_CHANNEL, edit.revision)
        if self.on_commit is not None:
            await self.on_commit(announcements)

    async def begin_timeline(self, lost: int) -> None:
        """Start a new timeline after one that was lost in a restore, unless another node already has. Every node then
        discards what it knows, and copies of the lost timeline are no longer accepted.
        """
        async with self.database.writing() as connection:
            if (await catalog_revision.read_last_stamp(connection, lock=True)).timeline > lost:
                return
            await catalog_revision.set_timeline(connection, timeline_after(lost))
            revision = await catalog_revision.next_revision(connection)
            now = to_datetime(self.clock.now_us())
            await outbox.add_announcements(connection, _with_stamp([Announcement(0, NO_TENANT)], revision), now)
            if not self.database.is_sqlite:
                await outbox.notify_postgres(connection, NOTIFY_CHANNEL, revision.stamp.revision)

    async def get(self, kind: type[AnyEntity], identity: str) -> AnyEntity:
        async with self.database.reading() as connection:
            return _require(kind, identity, await queries.find(connection, kind, identity))

    async def get_by_name_or_id(self, kind: type[AnyEntity], name: str, **values: Any) -> AnyEntity:
        """By id, or by a name that only one of them has."""
        async with self.database.reading() as connection:
            return await get_by_name_or_id(connection, kind, name, **values)

    async def list_page(self, kind: type[Entity], *, cursor: str | None = None, size: int = 100, **values: Any) -> Page:
        """A page of a list, by name; `values` such as `tenant_id` narrow it."""
        async with self.database.reading() as connection:
            return await queries.list_page(connection, kind, cursor, size, **values)

    async def list_for_tenant(self, kind: type[AnyEntity], tenant_id: str) -> list[AnyEntity]:
        async with self.database.reading() as connection:
            return await queries.list_for_tenant(connection, kind, tenant_id)

    async def tenant_config(self, tenant_id: str) -> TenantConfig:
        async with self.database.reading() as connection:
            return _require(Tenant, tenant_id, await queries.tenant_config(connection, tenant_id))

    async def plan_versions(self, plan_id: str) -> list[dict[str, Any]]:
        """The versions of a plan, the newest first: version, limits, created_at, created_by."""
        async with self.database.reading() as connection:
            return [dict(row) for row in await queries.plan_versions(connection, plan_id)]

    async def audit_page(
        self,
        *,
        cursor: str | None = None,
        size: int = 100,
        tenant_id: str | None = None,
        entity_id: str | None = None,
    ) -> Page:
        async with self.database.reading() as connection:
            return await queries.audit_page(connection, cursor, size, tenant_id, entity_id)

    def parse_credential(self, text: str) -> Credential:
        """Parse a key or token. Raises `UnknownKey` if it was never issued, as far as its text shows that."""
        return Credential.parse(text, self._require_peppers())

    async def authenticate_token(self, text: str) -> Token:
        """Whose admin token this is; refused if it is nobody's, or no longer good."""
        credential = self.parse_credential(text)
        async with self.database.reading() as connection:
            token = await queries.find(connection, Token, f"tok_{credential.id}")
        return self._require_peppers().authenticate(credential, token, to_datetime(self.clock.now_us()))

    def _require_peppers(self) -> Peppers:
        if self.peppers is None:
            raise InvalidInput(
                "peppers",
                "are needed for keys and tokens: set LIMITFORGE_PEPPERS, such as '1:' and 32 random characters",
            )
        return self.peppers


class Edit:
    """Changes inside one transaction. Each writes its audit entry; what others must hear is gathered until the end."""

    def __init__(
        self, connection: AsyncConnection, catalog: Catalog, actor: str, now: datetime, written: Revision
    ) -> None:
        self.connection = connection
        self.revision = written.stamp.revision
        self.now = now
        self._written = written
        self._catalog = catalog
        self._actor = actor
        self._announcements: dict[str, Announcement] = {}
        self._tenants_with_changed_policies: set[str] = set()

    # --- Any entity --------------------------------------------------------------------------------------------------

    async def create(self, kind: type[AnyEntity], fields: Mapping[str, Any]) -> AnyEntity:
        """A new tenant, plan or policy. Keys, tokens and overrides have methods of their own."""
        if kind not in (Tenant, Plan, Policy):
            raise TypeError(f"use the method of its own for a {kind.kind}")
        plan = self._new_plan(fields) if kind is Plan else None
        entity = self._new(kind, require_settable(kind, fields)) if plan is None else cast("AnyEntity", plan)
        await self._check(entity)
        await writes.add(self.connection, entity)
        if isinstance(entity, Plan):
            await writes.add_plan_versions(self.connection, [entity], self._actor)
        await self._add_audit_entry("create", None, entity)
        return entity

    async def update(
        self, kind: type[AnyEntity], identity: str, changes: Mapping[str, Any], *, version: int | None = None
    ) -> AnyEntity:
        """`version` is the one that the caller has read: if it is no longer the newest, `Outdated` says so."""
        before = await self._get(kind, identity, version)
        if isinstance(before, Plan) and "limits" in changes:
            changes = {**changes, "limits": normalize_limits(changes["limits"])}
        if isinstance(before, Override) and isinstance(changes.get("limits"), Mapping):
            changes = {**changes, "limits": copy_changes(changes["limits"])}
        after = with_changes(before, changes)
        if isinstance(after, Override) and after != before:
            after = msgspec.structs.replace(after, set_by=self._actor)
        if after == before:
            return before
        return await self._replace_one(before, after)

    async def delete(self, kind: type[AnyEntity], identity: str, *, version: int | None = None) -> AnyEntity:
        """It and all that is its own. A plan that is in use stays, and says by whom."""
        before = await self._get(kind, identity, version)
        if isinstance(before, Tenant) and before.is_operator:
            raise Conflict("the operator can't be deleted")
        if isinstance(before, Plan) and (users := await queries.describe_plan_users(self.connection, before)):
            raise Conflict(f"plan {before.name} is still in use by {', '.join(users)}: give them another plan first")
        await writes.remove(self.connection, [before])
        await self._add_audit_entry("delete", before, None)
        return before

    # --- Plans -------------------------------------------------------------------------------------------------------

    async def roll_back_plan(self, plan_id: str, to: int | None = None, *, version: int | None = None) -> Plan:
        """The limits of an earlier version (the one before, if none is named) as a new version."""
        plan = await self._get(Plan, plan_id, version)
        wanted = plan.version - 1 if to is None else to
        for row in await queries.plan_versions(self.connection, plan_id):
            if row["version"] == wanted:
                after = with_changes(plan, {"limits": tuple(row["limits"])})
                return plan if after == plan else await self._replace_one(plan, after, action="rollback")
        raise NotFound(f"plan {plan.name} has no version {wanted}; it is at {plan.version}")

    # --- Keys and tokens ---------------------------------------------------------------------------------------------

    async def create_key(self, fields: Mapping[str, Any]) -> tuple[Key, Credential]:
        """The key, and its secret, which nobody will see again."""
        key = self._new(Key, require_settable(Key, fields))
        return await self._create_secret(key, PREFIXES[key.type])

    async def create_token(self, fields: Mapping[str, Any]) -> tuple[Token, Credential]:
        return await self._create_secret(self._new(Token, require_settable(Token, fields)), PREFIXES["admin"])

    async def add_key(self, key: Key) -> Key:
        """A key that was made elsewhere, with what is kept of its secrets."""
        if not KEY_ID_PATTERN.fullmatch(key.id):
            raise InvalidInput("id", "of a key must be `key_` and 16 letters or digits")
        if await queries.find(self.connection, Key, key.id) is not None:
            raise Conflict(f"there is a key {key.id} already")
        key = self._with_version(None, key)
        return await self._add_with_secrets(key)

    async def rotate_key(
        self, key_id: str, grace_seconds: float = 0, *, version: int | None = None
    ) -> tuple[Key, Credential]:
        """A new secret, good at once; the old ones go on for the grace period, and never longer than they would."""
        if type(grace_seconds) not in (int, float) or grace_seconds != 0:
            parse_duration_us("grace_seconds", grace_seconds, maximum_us=MAX_GRACE_SECONDS * 1_000_000)
        before = await self._get(Key, key_id, version)
        ends = self.now + timedelta(seconds=float(grace_seconds))
        credential = Credential.generate(PREFIXES[before.type], key_id.removeprefix("key_"), self._require_peppers)
        old = [
            msgspec.structs.replace(each, expires_at=ends if each.expires_at is None else min(each.expires_at, ends))
            for each in before.secrets
        ]
        kept = [each for each in old if each.expires_at is not None and each.expires_at > self.now]
        after = msgspec.structs.replace(before, secrets=(self._require_peppers.hash_credential(credential), *kept))
        return await self._replace_one(before, after, action="rotate"), credential

    async def set_secrets(self, key_id: str, secrets: Sequence[Any]) -> Key:
        """Exactly these: what a file says of a key that was made elsewhere."""
        before = await self._get(Key, key_id, None)
        return await self._replace_one(before, msgspec.structs.replace(before, secrets=tuple(secrets)), action="rotate")

    async def disable_key(self, key_id: str, *, disabled: bool = True, version: int | None = None) -> Key:
        before = await self._get(Key, key_id, version)
        if before.disabled == disabled:
            return before
        after = msgspec.structs.replace(before, disabled=disabled)
        return await self._replace_one(before, after, action="disable" if disabled else "enable")

    # --- Overrides ---------------------------------------------------------------------------------------------------

    async def set_override(self, fields: Mapping[str, Any], *, version: int | None = None) -> Override:
        """In place of any that this subject has for this resource. Give `ttl_seconds`, or the moment `expires_at`."""
        values = dict(fields)
        if "ttl_seconds" in values:
            if "expires_at" in values:
                raise InvalidInput("ttl_seconds", "and expires_at say the same: give one of them")
            seconds = parse_duration_us("ttl_seconds", values.pop("ttl_seconds"))
            values["expires_at"] = self.now + timedelta(microseconds=seconds)
        elif "expires_at" not in values:
            raise InvalidInput("expires_at", "or ttl_seconds is required: an override ends by itself")
        if isinstance(values.get("limits"), Mapping):
            values["limits"] = copy_changes(values["limits"])
        override = msgspec.structs.replace(self._new(Override, require_settable(Override, values)), set_by=self._actor)
        await self._check(override)
        same = {"tenant_id": override.tenant_id, "resource": override.resource, "subject": override.subject}
        for before in await queries.find_by(self.connection, Override, **same):
            self._check_version(before, version)
            after = msgspec.structs.replace(override, id=before.id, created_at=before.created_at)
            return await self._replace_one(before, after)
        if version is not None:
            raise NotFound("no such override to replace")
        if await queries.count_overrides(self.connection, override, self.now) >= MAX_PER_SUBJECT:
            raise Conflict(f"one subject may have at most {MAX_PER_SUBJECT} overrides; delete one, or use '*'")
        await writes.add(self.connection, override)
        await self._add_audit_entry("create", None, override)
        return override

    # --- Many at once ------------------------------------------------------------------------------------------------

    async def write_changes(self, changes: Iterable[tuple[Entity | None, Entity | None]]) -> None:
        """Changes in their order, each as what was and what is to be. The caller has checked them against all that is
        there; the database's own constraints stand behind that.
        """
        for (_, action), group in groupby(changes, key=_kind_and_action):
            pairs = [(before, self._with_version(before, after)) for before, after in group]
            if action == "create":
                created = [after for _, after in pairs if after is not None]
                await writes.add_all(self.connection, created, self._actor, self.now)
            elif action == "delete":
                await writes.remove(self.connection, [before for before, _ in pairs if before is not None])
            else:
                await self._replace_all(
                    [(before, after) for before, after in pairs if before is not None and after is not None]
                )
            await writes.add_audit(self.connection, [self._audit_row(action, *pair) for pair in pairs])

    async def set_default_plans(self, tenants: Iterable[Tenant]) -> None:
        """Of tenants that were written before their plans were."""
        await writes.set_default_plans(self.connection, tenants)

    # --- The end -----------------------------------------------------------------------------------------------------

    async def finish(self) -> list[Announcement]:
        """Write down what others must hear, and number what has changed."""
        heard = list(self._announcements.values()) or [Announcement(self.revision, NO_TENANT)]  # no number is left out
        announcements = _with_stamp(heard, self._written)
        for tenant_id in self._tenants_with_changed_policies:
            policies = await queries.list_for_tenant(self.connection, Policy, tenant_id)
            PolicyMatcher((policy.pattern, policy) for policy in policies)  # refuses what could not be searched quickly
        configured = [each.tenant_id for each in announcements if each.config]
        await writes.set_tenant_revisions(self.connection, configured, self.revision)
        await outbox.add_announcements(self.connection, announcements, self.now)
        await outbox.trim_outbox(self.connection, self.now - OUTBOX_RETENTION)
        return announcements

    # --- Underneath --------------------------------------------------------------------------------------------------

    @property
    def _require_peppers(self) -> Peppers:
        return self._catalog._require_peppers()  # noqa: SLF001 - an edit is a part of its catalog

    def _new_plan(self, fields: Mapping[str, Any]) -> Plan:
        """Of any shape; what is wrong with a flat one is told in its own words."""
        if not isinstance(fields.get("name"), str):
            raise InvalidInput("name", "is required, and must be text")
        try:
            return self._new(Plan, _normalize_plan_fields(fields))
        except InvalidInput as error:
            if "limits" in fields:
                raise
            raise InvalidInput(error.field.removeprefix("limits[0]."), error.problem) from None

    def _new(self, kind: type[AnyEntity], fields: Mapping[str, Any]) -> AnyEntity:
        own = {"id": new_id(_ID_PREFIX[kind]), "created_at": self.now, "updated_at": self.now}
        return build_entity(kind, {**fields, **own})

    async def _get(self, kind: type[AnyEntity], identity: str, version: int | None) -> AnyEntity:
        entity = _require(kind, identity, await queries.find(self.connection, kind, identity))
        self._check_version(entity, version)
        return entity

    @staticmethod
    def _check_version(entity: Entity, version: int | None) -> None:
        if version is not None and version != entity.version:
            raise VersionConflict(
                f"{entity.kind} {entity.id} is at version {entity.version}, not {version}: somebody else has changed "
                "it since it was read. Read it again, and decide anew"
            )

    async def _replace_one(self, before: AnyEntity, after: AnyEntity, action: str = "update") -> AnyEntity:
        after = self._with_version(before, after)
        await self._check(after)
        await self._replace_all([(before, after)])
        await self._add_audit_entry(action, before, after)
        return after

    async def _replace_all(self, pairs: Sequence[tuple[Entity, Entity]]) -> None:
        """Replace some of one kind."""
        if not await writes.replace_all(self.connection, [after for _, after in pairs]):
            raise VersionConflict(f"a {pairs[0][0].kind} was changed by somebody else just now: read it again")
        plans = [after for _, after in pairs if isinstance(after, Plan)]
        if plans:
            await writes.add_plan_versions(self.connection, plans, self._actor)
        for before, after in pairs:
            if isinstance(before, Key | Token) and isinstance(after, Key | Token) and after.secrets != before.secrets:
                await writes.set_secrets(self.connection, after, self.now)

    def _with_version(self, before: Entity | None, after: MaybeEntity) -> MaybeEntity:
        """What is to be, with its version and its times."""
        if after is None:
            return after
        # A key may have been here before under the same id: copies of that one must be older.
        first = self.revision if isinstance(after, Key) else 1
        own = (first, self.now) if before is None else (before.version + 1, before.created_at)
        return msgspec.structs.replace(after, version=own[0], created_at=own[1], updated_at=self.now)

    async def _create_secret(self, entity: AnyEntity, prefix: str) -> tuple[AnyEntity, Credential]:
        credential = Credential.generate(prefix, entity.id.partition("_")[2], self._require_peppers)
        sealed = msgspec.structs.replace(entity, secrets=(self._require_peppers.hash_credential(credential),))
        return await self._add_with_secrets(sealed), credential

    async def _add_with_secrets(self, entity: AnyEntity) -> AnyEntity:
        await self._check(entity)
        await writes.add(self.connection, entity)
        if isinstance(entity, Key | Token):
            await writes.set_secrets(self.connection, entity, self.now)
        await self._add_audit_entry("create", None, entity)
        return entity

    async def _check(self, entity: Entity) -> None:
        """What only the rest of the catalog can tell. The database's own constraints stand behind it."""
        if isinstance(entity, Tenant):
            await self._check_tenant(entity)
        elif isinstance(entity, Plan):
            await self._check_owner(entity.tenant_id, of_operator=True)
            await self._check_unique(entity, f"plan called {entity.name}", tenant_id=entity.tenant_id, name=entity.name)
            await self._check_capacity(Plan, entity, MAX_PLANS_PER_TENANT)
        elif isinstance(entity, Policy):
            await self._check_owner(entity.tenant_id)
            for field in ("plan_id", "shadow_plan_id"):
                await self._check_plan(field, getattr(entity, field), entity.tenant_id)
            pattern = entity.pattern.canonical
            await self._check_unique(
                entity, f"policy for {entity.resource}", tenant_id=entity.tenant_id, pattern=pattern
            )
            await self._check_capacity(Policy, entity, MAX_POLICIES_PER_TENANT)
        elif isinstance(entity, Key):
            await self._check_owner(entity.tenant_id)
            await self._check_plan("plan_id", entity.plan_id, entity.tenant_id)
        elif isinstance(entity, Token):
            if entity.tenant_id is not None:
                await self._check_owner(entity.tenant_id)
            await self._check_unique(entity, f"token called {entity.name}", name=entity.name)
        elif isinstance(entity, Override):
            if not self.now < entity.expires_at <= self.now + MAX_OVERRIDE_DURATION:
                raise InvalidInput("expires_at", "must lie in the future, and at most ten years from now")
            await self._check_owner(entity.tenant_id)
            config = await queries.tenant_config(self.connection, entity.tenant_id)
            if config is not None:
                limits = limits_for_override(config, entity.resource, entity.limits)
                compile_override(entity.limits, limits, entity.resource)

    async def _check_tenant(self, tenant: Tenant) -> None:
        if tenant.is_operator:
            own = {"name": OPERATOR, "suspended": False, "lanes": 1, "failure": None, "priority": None}
            for field, value in own.items():
                if getattr(tenant, field) != value:
                    raise InvalidInput(field, "of the operator can't be set: it has a mode, a time zone and a plan")
        await self._check_unique(tenant, f"tenant called {tenant.name}", name=tenant.name)
        await self._check_plan("default_plan_id", tenant.default_plan_id, tenant.id)

    async def _check_owner(self, tenant_id: str, *, of_operator: bool = False) -> None:
        if await queries.find(self.connection, Tenant, tenant_id) is None:
            raise NotFound(f"tenant_id: there is no tenant {short_repr(tenant_id)}")
        if tenant_id == OPERATOR and not of_operator:
            raise InvalidInput("tenant_id", "the operator has plans, and no policies, keys or overrides")

    async def _check_plan(self, field: str, plan_id: str | None, tenant_id: str) -> None:
        if plan_id is None:
            return
        plan = await queries.find(self.connection, Plan, plan_id)
        if plan is None or plan.tenant_id != tenant_id:
            raise NotFound(f"{field}: this tenant has no plan {short_repr(plan_id)}")

    async def _check_unique(self, entity: Entity, what: str, **values: Any) -> None:
        for other in await queries.find_by(self.connection, type(entity), **values):
            if other.id != entity.id:
                raise Conflict(f"there is a {what} already")

    async def _check_capacity(self, kind: type[Entity], entity: Any, maximum: int) -> None:
        if entity.version == 1 and await queries.count(self.connection, kind, tenant_id=entity.tenant_id) >= maximum:
            raise Conflict(f"a tenant may have at most {maximum} {kind.kind} entries")

    async def _add_audit_entry(self, action: str, before: Entity | None, after: Entity | None) -> None:
        entity = after or before
        if isinstance(entity, Policy):
            self._tenants_with_changed_policies.add(entity.tenant_id)
        await writes.add_audit(self.connection, [self._audit_row(action, before, after)])

    def _audit_row(self, action: str, before: Entity | None, after: Entity | None) -> dict[str, Any]:
        """The audit entry of a change, which others will hear of."""
        entity = after or before
        if entity is None:
            raise CatalogError("nothing was changed")
        tenant_id: str | None = entity.id if isinstance(entity, Tenant) else getattr(entity, "tenant_id", None)
        if tenant_id is not None and not isinstance(entity, Token):
            self._announce(tenant_id, before, after)
        return {
            "at": self.now,
            "actor": self._actor,
            "action": f"{entity.kind}.{action}",
            "tenant_id": tenant_id,
            "entity_id": entity.id,
            "before": None if before is None else to_public_dict(before),
            "after": None if after is None else to_public_dict(after),
        }

    def _announce(self, tenant_id: str, before: Entity | None, after: Entity | None) -> None:
        told = self._announcements.get(tenant_id) or Announcement(self.revision, tenant_id)
        entity = after or before
        if isinstance(entity, Key):
            field = "gone" if after is None else "keys"
            ids = dict.fromkeys((*getattr(told, field), entity.id))
            told = msgspec.structs.replace(told, **{field: tuple(ids)})
        elif isinstance(entity, Override):
            told = msgspec.structs.replace(told, overrides=True)
        else:
            told = msgspec.structs.replace(told, config=True)
        if entity is not None and _revokes_access(before, after):
            told = msgspec.structs.replace(told, revoked=tuple(dict.fromkeys((*told.revoked, entity.id))))
        self._announcements[tenant_id] = told


async def get_by_name_or_id(connection: AsyncConnection, kind: type[AnyEntity], name: str, **values: Any) -> AnyEntity:
    """By id, or by a name that only one of them has."""
    entity = await queries.find(connection, kind, name)
    if entity is not None and all(getattr(entity, field) == value for field, value in values.items()):
        return entity
    column = "resource" if kind is Policy else "name"
    found = [] if kind is Override else await queries.find_by(connection, kind, **{column: name}, **values)
    if len(found) > 1:
        raise Conflict(f"{len(found)} {kind.kind} entries are called {name}: say which by its id")
    return _require(kind, name, found[0] if found else None)


def _revokes_access(before: Entity | None, after: Entity | None) -> bool:
    """Return True if a key or a tenant may do less after a change. Nodes then stop serving what they knew, even while
    they can't read the rest.
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


def _with_stamp(announcements: Iterable[Announcement], written: Revision) -> list[Announcement]:
    """Announcements with their point in history."""
    stamp = written.stamp
    own = {"timeline": stamp.timeline, "change_id": stamp.change_id, "previous_id": written.previous_id}
    return [
        msgspec.structs.replace(each, revision=stamp.revision, revokes=bool(each.revoked or each.gone), **own)
        for each in announcements
    ]


def _kind_and_action(change: tuple[Entity | None, Entity | None]) -> tuple[str, str]:
    before, after = change
    entity = after or before
    if entity is None:
        raise CatalogError("nothing was changed")
    return entity.kind, "create" if before is None else "delete" if after is None else "update"


Found = TypeVar("Found")


def _require(kind: type[Entity], identity: str, found: Found | None) -> Found:
    if found is None:
        raise NotFound(f"there is no {kind.kind} {short_repr(identity)}")
    return found


def _normalize_plan_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Both shapes of a plan become the one with `limits`."""
    own = {field: fields[field] for field in ("tenant_id", "name") if field in fields}
    return {**own, "limits": parse_plan_limits(fields["name"], fields)}
