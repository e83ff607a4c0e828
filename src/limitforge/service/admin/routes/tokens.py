"""`/v1/admin/tokens`: who may administer."""

from datetime import datetime
from typing import Annotated

from fastapi import Query, Response
from pydantic import ConfigDict

from limitforge.catalog.database.catalog import Edit
from limitforge.catalog.model import Token, TokenScope
from limitforge.errors import Forbidden
from limitforge.service.admin.fields import (
    Filter,
    Id,
    IfMatch,
    ListQuery,
    Name,
    PathId,
    RequestBody,
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

router = admin_router("/tokens", "tokens")


class TokenChanges(RequestBody):
    """What of a token changes."""

    name: Name = optional()
    scopes: Annotated[list[TokenScope], unique_list_of(TokenScope)] = optional()
    expires_at: Timestamp | None = optional()


class NewToken(TokenChanges):
    """A token that is to be: of one tenant, or of all if none is named. Without scopes it may read. Without an expiry
    it never ends, which only a token that never ends can grant.
    """

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "deploy", "scopes": ["read", "write"], "tenant_id": None}]}
    )

    name: Name
    tenant_id: Id | None = optional()


class TokenQuery(ListQuery):
    """Which tokens are wanted."""

    tenant_id: Filter | None = None
    name: Filter | None = None


@router.post(
    "", status_code=201, responses=describe_response("NewTokenAnswer", status=201, description="With its secret.")
)
async def create_token(body: NewToken, session: WriteSession, creating: Idempotency) -> Response:
    """Create a token. `token` in the answer is the secret, this once. It gets no scope that the calling token lacks,
    and ends no later: a token that expires has to state `expires_at`.
    """
    if body.tenant_id is None:
        session.require_all_tenants("tokens of all tenants")
    else:
        session.require_tenant(body.tenant_id)

    async def make(edit: Edit) -> CreateResult:
        token, credential = await edit.create_token(body.given_fields())
        _refuse_escalation(session.token, None, token)
        return CreateResult(token, secrets={"token": credential.text})

    return await creating.run(make)


@router.get("", responses=describe_page("Token"))
async def list_tokens(asked: Annotated[TokenQuery, Query()], session: ReadSession) -> Response:
    """List tokens by name."""
    return page_response(await session.page(Token, **asked.arguments()))


@router.get("/{token_id}", responses=describe_response("Token"))
async def get_token(token_id: PathId, session: ReadSession) -> Response:
    """Show what is known of a token. The token itself can't be shown again."""
    return entity_response(await session.get(Token, token_id))


@router.patch("/{token_id}", responses=describe_response("Token"))
async def change_token(token_id: PathId, body: TokenChanges, session: WriteSession, version: IfMatch) -> Response:
    """Change what is named of a token. Scopes that the calling token lacks can't be added, and nothing can be granted
    or extended beyond its own expiry.
    """
    async with session.edit() as edit:
        before = await session.find(edit, Token, token_id)
        token = await edit.update(Token, token_id, body.given_fields(), version=version)
        _refuse_escalation(session.token, before, token)
    return entity_response(token)


@router.delete("/{token_id}", status_code=204, responses=NO_CONTENT)
async def delete_token(token_id: PathId, session: WriteSession, version: IfMatch) -> Response:
    """Delete a token: it is refused from now on."""
    async with session.edit() as edit:
        await session.find(edit, Token, token_id)
        await edit.delete(Token, token_id, version=version)
    return no_content_response()


def _refuse_escalation(granter: Token, before: Token | None, after: Token) -> None:
    """Refuse a change by which a token gets a right that the granter lacks, or has for a shorter time. Raising rolls
    the edit back.
    """
    is_extended = before is not None and _expires_later(after.expires_at, before.expires_at)
    granted = set(after.scopes).difference(() if before is None or is_extended else before.scopes)
    for scope in sorted(granted.difference(granter.scopes)):
        raise Forbidden(f"scopes: this token lacks the scope {scope}, and can't grant or extend it")
    if granted and granter.expires_at is not None and _expires_later(after.expires_at, granter.expires_at):
        raise Forbidden(
            f"expires_at: this token expires at {granter.expires_at:%Y-%m-%dT%H:%M:%SZ}, and can't grant or extend "
            "anything beyond that; state that time or an earlier one"
        )


def _expires_later(at: datetime | None, than: datetime | None) -> bool:
    """Compare two expiries; None is never."""
    return than is not None and (at is None or at > than)
