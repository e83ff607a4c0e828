"""`/v1/admin/keys`: what callers show. A secret is in the answer that made it, and nowhere else."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import ConfigDict, Field

from limitforge.catalog.catalog import Edit
from limitforge.catalog.credentials import Credential
from limitforge.catalog.model import Key, KeyKind, KeyScope
from limitforge.service.admin.creation import Creating, Made
from limitforge.service.admin.fields import (
    Body,
    Id,
    Listing,
    Moment,
    Name,
    PathId,
    Seconds,
    Version,
    Wanted,
    absent,
    some_of,
)
from limitforge.service.admin.replies import GONE, answers, answers_list, gone, listed, shown
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import Reading, Writing

router = admin_router("/keys", "keys")


class KeyChanges(Body):
    """What of a key changes."""

    name: Name = absent()
    plan_id: Id | None = absent()
    scopes: Annotated[list[KeyScope], some_of(KeyScope)] = absent()
    expires_at: Moment | None = absent()
    metadata: dict[str, Any] = absent()


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
    type: KeyKind = absent()


class Rotation(Body):
    """How long the old secret goes on."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"grace_seconds": 86_400}]})

    grace_seconds: Annotated[Seconds, Field(ge=0)] = 0


class KeyListing(Listing):
    """Which keys are wanted."""

    tenant_id: Wanted | None = None
    name: Wanted | None = None
    plan_id: Wanted | None = None
    type: KeyKind | None = None
    disabled: bool | None = None


@router.post("", status_code=201, responses=answers("NewKeyAnswer", status=201, description="With its secret."))
async def create_key(body: NewKey, session: Writing, creating: Creating) -> Response:
    """Create a key. `key` in the answer is the secret, this once."""
    session.require_tenant(body.tenant_id)

    async def make(edit: Edit) -> Made:
        key, credential = await edit.create_key(body.given())
        return Made(key, secrets=_secrets(key, credential))

    return await creating.run(make)


@router.get("", responses=answers_list("Key"))
async def list_keys(asked: Annotated[KeyListing, Query()], session: Reading) -> Response:
    """List keys by name."""
    return listed(await session.page(Key, **asked.asked()))


@router.get("/{key_id}", responses=answers("Key"))
async def get_key(key_id: PathId, session: Reading) -> Response:
    """Show what is known of a key. Its secret can't be shown again."""
    return shown(await session.get(Key, key_id))


@router.patch("/{key_id}", responses=answers("Key"))
async def change_key(key_id: PathId, body: KeyChanges, session: Writing, version: Version) -> Response:
    """Change what is named of a key."""
    async with session.edit() as edit:
        await session.find(edit, Key, key_id)
        key = await edit.update(Key, key_id, body.given(), version=version)
    return shown(key)


@router.delete("/{key_id}", status_code=204, responses=GONE)
async def delete_key(key_id: PathId, session: Writing, version: Version) -> Response:
    """Revoke a key: it is refused from now on, and can't be brought back."""
    async with session.edit() as edit:
        await session.find(edit, Key, key_id)
        await edit.delete(Key, key_id, version=version)
    return gone()


@router.post("/{key_id}/rotate", responses=answers("NewKeyAnswer", description="With its new secret."))
async def rotate_key(key_id: PathId, session: Writing, version: Version, body: Rotation | None = None) -> Response:
    """Give a key a new secret, good at once. The old one is good until its grace ends: at once, if none is given."""
    async with session.edit() as edit:
        await session.find(edit, Key, key_id)
        grace_seconds = 0 if body is None else body.grace_seconds
        key, credential = await edit.rotate_key(key_id, grace_seconds, version=version)
    return shown(key, **_secrets(key, credential))


@router.post("/{key_id}/disable", responses=answers("Key"))
async def disable_key(key_id: PathId, session: Writing, version: Version) -> Response:
    """Refuse a key until it is enabled again."""
    async with session.edit() as edit:
        await session.find(edit, Key, key_id)
        key = await edit.disable_key(key_id, version=version)
    return shown(key)


@router.post("/{key_id}/enable", responses=answers("Key"))
async def enable_key(key_id: PathId, session: Writing, version: Version) -> Response:
    """Accept a key again."""
    async with session.edit() as edit:
        await session.find(edit, Key, key_id)
        key = await edit.disable_key(key_id, disabled=False, version=version)
    return shown(key)


def _secrets(key: Key, credential: Credential) -> dict[str, str]:
    return {"key": credential.text, "key_hash": key.secrets[0].hash}
