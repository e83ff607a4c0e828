"""`/v1/admin/keys`: the API keys of callers. Only the response that creates a secret contains it."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import ConfigDict, Field, StrictFloat

from limitforge.catalog.credentials import Credential
from limitforge.catalog.database.edits import Edit
from limitforge.catalog.model import Key, KeyScope, KeyType
from limitforge.service.admin.fields import (
    EntityBody,
    Filter,
    Id,
    IfMatch,
    ListQuery,
    PathId,
    RequestBody,
    Timestamp,
    list_of,
    optional,
)
from limitforge.service.admin.idempotency import CreateResult, Idempotency
from limitforge.service.admin.responses import (
    NO_CONTENT,
    describe_page,
    describe_response,
    entity_response,
    no_content_response,
    page_response,
)
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import ReadSession, WriteSession

router = admin_router("/keys", "keys")


class KeyChanges(EntityBody):
    """The fields of a key to change. Absent fields stay as they are."""

    entity = Key

    name: str = optional()
    plan_id: Id | None = optional()
    scopes: Annotated[list[KeyScope], list_of(KeyScope)] = optional()
    expires_at: Timestamp | None = optional()
    metadata: dict[str, Any] = optional()


class NewKey(KeyChanges):
    """A key to create. All scopes are the default. Leave `plans` out for a key that is used outside your own servers:
    with it a caller can name a plan, and so choose its limits.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"tenant_id": "ten_1a2b3c4d5e6f7g8h", "name": "web", "metadata": {"team": "checkout"}}]
        }
    )

    tenant_id: Id
    name: str
    type: KeyType = optional()


class Rotation(RequestBody):
    """How long the old secret stays valid."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"grace_seconds": 86_400}]})

    grace_seconds: Annotated[
        StrictFloat, Field(description="How long the old secret stays valid, in seconds.", ge=0)
    ] = 0


class KeyQuery(ListQuery):
    """The filters of the list of keys."""

    tenant_id: Filter | None = None
    name: Filter | None = None
    plan_id: Filter | None = None
    type: KeyType | None = None
    disabled: bool | None = None


@router.post(
    "", status_code=201, responses=describe_response("KeyWithSecret", status=201, description="With its secret.")
)
async def create_key(body: NewKey, session: WriteSession, idempotency: Idempotency) -> Response:
    """Create a key. Only this response contains the secret, as `key`."""
    session.require_tenant(body.tenant_id)

    async def create(edit: Edit) -> CreateResult:
        key, credential = await edit.create_key(body.given_fields())
        return CreateResult(key, secrets=_secret_fields(key, credential))

    return await idempotency.run(create)


@router.get("", responses=describe_page("Key"))
async def list_keys(query: Annotated[KeyQuery, Query()], session: ReadSession) -> Response:
    """List keys by name."""
    return page_response(await session.list_page(Key, query))


@router.get("/{key_id}", responses=describe_response("Key"))
async def get_key(key_id: PathId, session: ReadSession) -> Response:
    """Return a key without its secret."""
    return entity_response(await session.get(Key, key_id))


@router.patch("/{key_id}", responses=describe_response("Key"))
async def change_key(key_id: PathId, body: KeyChanges, session: WriteSession, expected_version: IfMatch) -> Response:
    """Change the given fields of a key."""
    async with session.edit() as edit:
        await session.require_visible(edit, Key, key_id)
        key = await edit.update(Key, key_id, body.given_fields(), expected_version=expected_version)
    return entity_response(key)


@router.delete("/{key_id}", status_code=204, responses=NO_CONTENT)
async def delete_key(key_id: PathId, session: WriteSession, expected_version: IfMatch) -> Response:
    """Revoke a key. It is refused at once, and can't be restored."""
    async with session.edit() as edit:
        await session.require_visible(edit, Key, key_id)
        await edit.delete(Key, key_id, expected_version=expected_version)
    return no_content_response()


@router.post("/{key_id}/rotate", responses=describe_response("KeyWithSecret", description="With its new secret."))
async def rotate_key(
    key_id: PathId, session: WriteSession, expected_version: IfMatch, body: Rotation | None = None
) -> Response:
    """Create a new secret for a key. The old secret stays valid for `grace_seconds`, 0 by default."""
    async with session.edit() as edit:
        await session.require_visible(edit, Key, key_id)
        grace_seconds = 0 if body is None else body.grace_seconds
        key, credential = await edit.rotate_key(key_id, grace_seconds, expected_version=expected_version)
    return entity_response(key, **_secret_fields(key, credential))


@router.post("/{key_id}/disable", responses=describe_response("Key"))
async def disable_key(key_id: PathId, session: WriteSession, expected_version: IfMatch) -> Response:
    """Disable a key. It is refused until it is enabled again."""
    async with session.edit() as edit:
        await session.require_visible(edit, Key, key_id)
        key = await edit.set_key_disabled(key_id, disabled=True, expected_version=expected_version)
    return entity_response(key)


@router.post("/{key_id}/enable", responses=describe_response("Key"))
async def enable_key(key_id: PathId, session: WriteSession, expected_version: IfMatch) -> Response:
    """Enable a disabled key."""
    async with session.edit() as edit:
        await session.require_visible(edit, Key, key_id)
        key = await edit.set_key_disabled(key_id, disabled=False, expected_version=expected_version)
    return entity_response(key)


def _secret_fields(key: Key, credential: Credential) -> dict[str, str]:
    return {"key": credential.text, "key_hash": key.secrets[0].hash}
