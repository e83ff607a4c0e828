"""`/v1/admin/keys`: what callers show. A secret is in the answer that made it, and nowhere else."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import ConfigDict, Field

from limitforge.catalog.credentials import Credential
from limitforge.catalog.database.catalog import Edit
from limitforge.catalog.model import Key, KeyScope, KeyType
from limitforge.service.admin.fields import (
    Filter,
    Id,
    IfMatch,
    ListQuery,
    Name,
    PathId,
    RequestBody,
    StrictFloat,
    Timestamp,
    optional,
    unique_list_of,
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


class KeyChanges(RequestBody):
    """What of a key changes."""

    name: Name = optional()
    plan_id: Id | None = optional()
    scopes: Annotated[list[KeyScope], unique_list_of(KeyScope)] = optional()
    expires_at: Timestamp | None = optional()
    metadata: dict[str, Any] = optional()


class NewKey(KeyChanges):
    """A key that is to be. Without scopes it has all of them. Leave `plans` out for a key that leaves your own servers:
    it lets a caller name a plan, and with that choose its limits.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"tenant_id": "ten_1a2b3c4d5e6f7g8h", "name": "web", "metadata": {"team": "checkout"}}]
        }
    )

    tenant_id: Id
    name: Name
    type: KeyType = optional()


class Rotation(RequestBody):
    """How long the old secret goes on."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"grace_seconds": 86_400}]})

    grace_seconds: Annotated[StrictFloat, Field(ge=0)] = 0


class KeyQuery(ListQuery):
    """Which keys are wanted."""

    tenant_id: Filter | None = None
    name: Filter | None = None
    plan_id: Filter | None = None
    type: KeyType | None = None
    disabled: bool | None = None


@router.post(
    "", status_code=201, responses=describe_response("NewKeyAnswer", status=201, description="With its secret.")
)
async def create_key(body: NewKey, session: WriteSession, creating: Idempotency) -> Response:
    """Create a key. `key` in the answer is the secret, this once."""
    session.require_tenant(body.tenant_id)

    async def make(edit: Edit) -> CreateResult:
        key, credential = await edit.create_key(body.given_fields())
        return CreateResult(key, secrets=_secret_fields(key, credential))

    return await creating.run(make)


@router.get("", responses=describe_page("Key"))
async def list_keys(asked: Annotated[KeyQuery, Query()], session: ReadSession) -> Response:
    """List keys by name."""
    return page_response(await session.page(Key, **asked.arguments()))


@router.get("/{key_id}", responses=describe_response("Key"))
async def get_key(key_id: PathId, session: ReadSession) -> Response:
    """Show what is known of a key. Its secret can't be shown again."""
    return entity_response(await session.get(Key, key_id))


@router.patch("/{key_id}", responses=describe_response("Key"))
async def change_key(key_id: PathId, body: KeyChanges, session: WriteSession, version: IfMatch) -> Response:
    """Change what is named of a key."""
    async with session.edit() as edit:
        await session.find(edit, Key, key_id)
        key = await edit.update(Key, key_id, body.given_fields(), version=version)
    return entity_response(key)


@router.delete("/{key_id}", status_code=204, responses=NO_CONTENT)
async def delete_key(key_id: PathId, session: WriteSession, version: IfMatch) -> Response:
    """Revoke a key: it is refused from now on, and can't be brought back."""
    async with session.edit() as edit:
        await session.find(edit, Key, key_id)
        await edit.delete(Key, key_id, version=version)
    return no_content_response()


@router.post("/{key_id}/rotate", responses=describe_response("NewKeyAnswer", description="With its new secret."))
async def rotate_key(key_id: PathId, session: WriteSession, version: IfMatch, body: Rotation | None = None) -> Response:
    """Give a key a new secret, good at once. The old one is good until its grace ends: at once, if none is given."""
    async with session.edit() as edit:
        await session.find(edit, Key, key_id)
        grace_seconds = 0 if body is None else body.grace_seconds
        key, credential = await edit.rotate_key(key_id, grace_seconds, version=version)
    return entity_response(key, **_secret_fields(key, credential))


@router.post("/{key_id}/disable", responses=describe_response("Key"))
async def disable_key(key_id: PathId, session: WriteSession, version: IfMatch) -> Response:
    """Refuse a key until it is enabled again."""
    async with session.edit() as edit:
        await session.find(edit, Key, key_id)
        key = await edit.disable_key(key_id, version=version)
    return entity_response(key)


@router.post("/{key_id}/enable", responses=describe_response("Key"))
async def enable_key(key_id: PathId, session: WriteSession, version: IfMatch) -> Response:
    """Accept a key again."""
    async with session.edit() as edit:
        await session.find(edit, Key, key_id)
        key = await edit.disable_key(key_id, disabled=False, version=version)
    return entity_response(key)


def _secret_fields(key: Key, credential: Credential) -> dict[str, str]:
    return {"key": credential.text, "key_hash": key.secrets[0].hash}
