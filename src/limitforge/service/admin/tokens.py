"""`/v1/admin/tokens`: who may administer."""

from collections.abc import Iterable
from typing import Annotated

from fastapi import Query, Response
from pydantic import ConfigDict

from limitforge.catalog.catalog import Edit
from limitforge.catalog.model import Token, TokenScope
from limitforge.errors import Forbidden
from limitforge.service.admin.creation import Creating, Made
from limitforge.service.admin.fields import Body, Id, Listing, Moment, Name, PathId, Version, Wanted, absent, some_of
from limitforge.service.admin.replies import GONE, answers, answers_list, gone, listed, shown
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import Reading, Session, Writing

router = admin_router("/tokens", "tokens")


class TokenChanges(Body):
    """What of a token changes."""

    name: Name = absent()
    scopes: Annotated[list[TokenScope], some_of(TokenScope)] = absent()
    expires_at: Moment | None = absent()


class NewToken(TokenChanges):
    """A token that is to be: of one tenant, or of all if none is named. Without scopes it may read."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "deploy", "scopes": ["read", "write"], "tenant_id": None}]}
    )

    name: Name
    tenant_id: Id | None = absent()


class TokenListing(Listing):
    """Which tokens are wanted."""

    tenant_id: Wanted | None = None
    name: Wanted | None = None


@router.post("", status_code=201, responses=answers("NewTokenAnswer", status=201, description="With its secret."))
async def create_token(body: NewToken, session: Writing, creating: Creating) -> Response:
    """Create a token. `token` in the answer is the secret, this once. Nobody can give more than they have."""
    if body.tenant_id is None:
        session.require_fleet("tokens of all tenants")
    else:
        session.require_tenant(body.tenant_id)
    _refuse_more(session, body.scopes or ())

    async def make(edit: Edit) -> Made:
        token, credential = await edit.create_token(body.given())
        return Made(token, secrets={"token": credential.text})

    return await creating.run(make)


@router.get("", responses=answers_list("Token"))
async def list_tokens(asked: Annotated[TokenListing, Query()], session: Reading) -> Response:
    """List tokens by name."""
    return listed(await session.page(Token, **asked.asked()))


@router.get("/{token_id}", responses=answers("Token"))
async def get_token(token_id: PathId, session: Reading) -> Response:
    """Show what is known of a token. The token itself can't be shown again."""
    return shown(await session.get(Token, token_id))


@router.patch("/{token_id}", responses=answers("Token"))
async def change_token(token_id: PathId, body: TokenChanges, session: Writing, version: Version) -> Response:
    """Change what is named of a token."""
    async with session.edit() as edit:
        before = await session.find(edit, Token, token_id)
        _refuse_more(session, set(body.scopes or ()) - set(before.scopes))
        token = await edit.update(Token, token_id, body.given(), version=version)
    return shown(token)


@router.delete("/{token_id}", status_code=204, responses=GONE)
async def delete_token(token_id: PathId, session: Writing, version: Version) -> Response:
    """Delete a token: it is refused from now on."""
    async with session.edit() as edit:
        await session.find(edit, Token, token_id)
        await edit.delete(Token, token_id, version=version)
    return gone()


def _refuse_more(session: Session, scopes: Iterable[TokenScope]) -> None:
    for scope in scopes:
        if scope not in session.token.scopes:
            raise Forbidden(f"scopes: this token lacks the scope {scope}, and can't give it to another")
