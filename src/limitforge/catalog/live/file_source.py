"""A configuration file as a source. Ids are derived from names, so all processes that read a file use the same ones."""

from collections.abc import Iterable
from datetime import datetime
from hashlib import sha256
from typing import Any

import msgspec

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.config.diagnostics import Diagnostics
from limitforge.catalog.config.document import parse_document
from limitforge.catalog.config.specs import (
    ConfigDocument,
    OperatorSpec,
    TenantSpec,
    build_tenant_config,
    entity_fields,
    operator_as_tenant,
)
from limitforge.catalog.config.validation import validate
from limitforge.catalog.credentials import ALPHABET, ID_LENGTH
from limitforge.catalog.live.overrides.override_sync import MAX_DELETED
from limitforge.catalog.model import OPERATOR, Key, Override, TenantConfig, build_entity
from limitforge.catalog.override_rows import DeletedOverride, OverrideRow


class FileContents(msgspec.Struct, frozen=True):
    """The compiled contents of a file: `configs` and `overrides` by tenant id, `keys` by key id."""

    configs: dict[str, TenantConfig]
    keys: dict[str, Key]
    overrides: dict[str, dict[tuple[str, str], Override]]


def parse_contents(content: bytes, name: str, now: datetime) -> FileContents:
    """Parse, validate and compile a file. A section that is absent is empty, since there is no database to keep it in.

    Raises `InvalidInput` with all problems of the file.
    """
    document, source = parse_document(content, name, now)
    problems = Diagnostics(source)
    validate(document, ConfigDocument(operator=OperatorSpec(), tenants=()), now, problems)
    for tenant_index, tenant in enumerate(document.tenants or ()):
        for key_index, key in enumerate(tenant.keys or ()):
            if key.secrets is None:
                path = f"tenants[{tenant_index}].keys[{key_index}].secrets"
                problems.add(path, "is required, since there is no database that has them")
    problems.raise_if_any()
    return compile_contents(document)


def compile_contents(document: ConfigDocument) -> FileContents:
    """Compile a validated document."""
    operator = operator_as_tenant(document.operator or OperatorSpec())
    contents = FileContents({OPERATOR: build_tenant_config(operator, id_from_names)}, {}, {})
    for tenant in document.tenants or ():
        config = build_tenant_config(tenant, id_from_names)
        tenant_id = config.tenant.id
        contents.configs[tenant_id] = config
        contents.keys.update({key.id: key for key in _keys(tenant, tenant_id)})
        overrides = {(each.resource, each.subject): each for each in _overrides(tenant, tenant_id)}
        if overrides:
            contents.overrides[tenant_id] = overrides
    return contents


def id_from_names(kind: str, *names: str) -> str:
    """Return the id of the entity with these names: always the same one."""
    number = int.from_bytes(sha256("\0".join((kind, *names)).encode()).digest(), "big")
    digits = []
    for _ in range(ID_LENGTH):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return f"{kind}_{''.join(digits)}"


def _keys(tenant: TenantSpec, tenant_id: str) -> Iterable[Key]:
    for key in tenant.keys or ():
        fields = entity_fields(key, lambda name: id_from_names("pla", tenant.name, name))
        yield build_entity(Key, {"tenant_id": tenant_id, **fields})


def _overrides(tenant: TenantSpec, tenant_id: str) -> Iterable[Override]:
    for override in tenant.overrides or ():
        identity = id_from_names("ovr", tenant.name, override.resource, override.subject)
        fields = {"id": identity, "tenant_id": tenant_id, "set_by": "file"}
        yield build_entity(Override, {**fields, **entity_fields(override, str)})


class FileSource:
    """The current contents of a file. Each version has a higher revision, as have the entities that it changes."""

    def __init__(self) -> None:
        self.revision = 0
        self._contents = FileContents({}, {}, {})
        self._deleted: dict[str, list[DeletedOverride]] = {}

    def set_contents(self, contents: FileContents) -> list[Announcement]:
        """Use new contents, and return an announcement for each tenant that has changed."""
        self.revision += 1
        before, self._contents = self._contents, self._with_revisions(contents)
        after = self._contents
        announcements: dict[str, Announcement] = {}

        def announce(tenant_id: str, **changes: Any) -> None:
            known = announcements.get(tenant_id) or Announcement(self.revision, tenant_id)
            announcements[tenant_id] = msgspec.structs.replace(known, **changes)

        for tenant_id in before.configs.keys() | after.configs.keys():
            if before.configs.get(tenant_id) is not after.configs.get(tenant_id):
                announce(tenant_id, config=True)
            if before.overrides.get(tenant_id) != after.overrides.get(tenant_id):
                announce(tenant_id, overrides=True)
                deleted = before.overrides.get(tenant_id, {}).keys() - after.overrides.get(tenant_id, {}).keys()
                rows = [*self._deleted.get(tenant_id, []), *(DeletedOverride(self.revision, *key) for key in deleted)]
                self._deleted[tenant_id] = rows[-MAX_DELETED:]
        changed_keys: dict[tuple[str, str], list[str]] = {}
        for key_id in before.keys.keys() | after.keys.keys():
            old, new = before.keys.get(key_id), after.keys.get(key_id)
            key = new or old
            if old is not new and key is not None:
                changed_keys.setdefault((key.tenant_id, "gone" if new is None else "keys"), []).append(key_id)
        for (tenant_id, field), ids in changed_keys.items():
            announce(tenant_id, **{field: tuple(ids)})
        return list(announcements.values())

    def tenants(self) -> list[str]:
        return [tenant_id for tenant_id in self._contents.configs if tenant_id != OPERATOR]

    async def config(self, tenant_id: str) -> TenantConfig | None:
        return self._contents.configs.get(tenant_id)

    async def key(self, key_id: str) -> Key | None:
        return self._contents.keys.get(key_id)

    async def overrides(self, tenant_id: str) -> list[Override]:
        return list(self._contents.overrides.get(tenant_id, {}).values())

    async def override(self, tenant_id: str, resource: str, subject: str) -> Override | None:
        return self._contents.overrides.get(tenant_id, {}).get((resource, subject))

    async def tenants_with_overrides(self) -> list[str]:
        return list(self._contents.overrides)

    async def configs(self, tenant_ids: Iterable[str]) -> dict[str, TenantConfig]:
        return {each: self._contents.configs[each] for each in tenant_ids if each in self._contents.configs}

    async def revisions(self, tenant_ids: Iterable[str]) -> dict[str, int]:
        return {each: config.tenant.revision for each, config in (await self.configs(tenant_ids)).items()}

    async def overrides_by_id(self, ids: Iterable[str]) -> list[Override]:
        wanted = set(ids)
        return [each for theirs in self._contents.overrides.values() for each in theirs.values() if each.id in wanted]

    async def override_rows(self, after: OverrideRow | None, expires_after: datetime, limit: int) -> list[OverrideRow]:
        def order(one: Override | OverrideRow) -> tuple[str, str, str]:
            return one.tenant_id, one.subject, one.resource

        live = [
            each
            for theirs in self._contents.overrides.values()
            for each in theirs.values()
            if each.expires_at > expires_after and (after is None or order(each) > order(after))
        ]
        lanes = {tenant_id: config.tenant.lanes for tenant_id, config in self._contents.configs.items()}
        return [
            OverrideRow(each.id, each.version, each.tenant_id, each.resource, each.subject, lanes[each.tenant_id])
            for each in sorted(live, key=order)[:limit]
        ]

    async def deleted_overrides(self, tenant_id: str, after: int, since: datetime, limit: int) -> list[DeletedOverride]:
        return [each for each in self._deleted.get(tenant_id, ()) if each.deletion_number > after][-limit:]

    async def tenants_with_unpublished_changes(self, tenant_ids: Iterable[str], since: datetime) -> set[str]:
        return set()  # the overrides of a new version are written before anything else reads it

    def _with_revisions(self, contents: FileContents) -> FileContents:
        """Give changed entities this revision. Unchanged ones remain the same objects as before."""
        before = self._contents
        configs = {}
        for tenant_id, config in contents.configs.items():
            known = before.configs.get(tenant_id)
            if known is not None and _with_revision(config, known.tenant.revision) == known:
                configs[tenant_id] = known
            else:
                configs[tenant_id] = _with_revision(config, self.revision)
        keys = {}
        for key_id, key in contents.keys.items():
            known_key = before.keys.get(key_id)
            if known_key is not None and msgspec.structs.replace(key, version=known_key.version) == known_key:
                keys[key_id] = known_key
            else:
                keys[key_id] = msgspec.structs.replace(key, version=self.revision)
        return FileContents(configs, keys, contents.overrides)


def _with_revision(config: TenantConfig, revision: int) -> TenantConfig:
    tenant = msgspec.structs.replace(config.tenant, revision=revision)
    return msgspec.structs.replace(config, tenant=tenant)
