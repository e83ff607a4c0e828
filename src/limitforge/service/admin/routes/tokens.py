"""`/v1/admin/tokens`: the tokens for the admin API."""

from datetime import datetime
from typing import Annotated

from fastapi import Query, Response
from pydantic import ConfigDict

from limitforge.catalog.database.edits import Edit
from limitforge.catalog.model import Token, TokenScope
from limitforge.errors import Forbidden
from limitforge.service.admin.fields import (
    EntityBody,
    Filter,
    Id,
    IfMatch,
    ListQuery,
    PathId,
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

router = admin_router("/tokens", "tokens")


class TokenChanges(EntityBody):
    """The fields of a token to change. Absent fields stay as they are."""

    entity = Token

    name: str = optional()
    scopes: Annotated[list[TokenScope], list_of(TokenScope)] = optional()
    expires_at: Timestamp | None = optional()


class NewToken(TokenChanges):
    """A token to create. Without a `tenant_id` it is for all tenants. Without scopes it may only read. Without
    `expires_at` it never expires; only a token that never expires can create such a token.
    """

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "deploy", "scopes": ["read", "write"], "tenant_id": None}]}
    )

    name: str
    tenant_id: Id | None = optional()


class TokenQuery(ListQuery):
    """The filters of the list of tokens."""

    tenant_id: Filter | None = None
    name: Filter | None = None


@router.post(
    "", status_code=201, responses=describe_response("TokenWithSecret", status=201, description="With its secret.")
)
async def create_token(body: NewToken, session: WriteSession, idempotency: Idempotency) -> Response:
    """Create a token. Only this response contains the secret, as `token`. The new token can't have a scope that the
    calling token lacks, and can't expire later: a caller whose token expires must send `expires_at`.
    """
    if body.tenant_id is None:
        session.require_all_tenants("tokens for all tenants")
    else:
        session.require_tenant(body.tenant_id)

    async def create(edit: Edit) -> CreateResult:
        token, credential = await edit.create_token(body.given_fields())
        _refuse_escalation(session.token, None, token)
        return CreateResult(token, secrets={"token": credential.text})

    return await idempotency.run(create)


@router.get("", responses=describe_page("Token"))
async def list_tokens(query: Annotated[TokenQuery, Query()], session: ReadSession) -> Response:
    """List tokens by name."""
    return page_response(await session.list_page(Token, query))


@router.get("/{token_id}", responses=describe_response("Token"))
async def get_token(token_id: PathId, session: ReadSession) -> Response:
    """Return a token without its secret."""
    return entity_response(await session.get(Token, token_id))


@router.patch("/{token_id}", responses=describe_response("Token"))
async def change_token(
    token_id: PathId, body: TokenChanges, session: WriteSession, expected_version: IfMatch
) -> Response:
    """Change the given fields of a token. A caller can't add scopes that its own token lacks, nor grant or extend
    anything beyond the expiry of its own token.
    """
    async with session.edit() as edit:
        before = await session.require_visible(edit, Token, token_id)
        token = await edit.update(Token, token_id, body.given_fields(), expected_version=expected_version)
        _refuse_escalation(session.token, before, token)
    return entity_response(token)


@router.delete("/{token_id}", status_code=204, responses=NO_CONTENT)
async def delete_token(token_id: PathId, session: WriteSession, expected_version: IfMatch) -> Response:
    """Delete a token. It is refused at once."""
    async with session.edit() as edit:
        await session.require_visible(edit, Token, token_id)
        await edit.delete(Token, token_id, expected_version=expected_version)
    return no_content_response()


def _refuse_escalation(granter: Token, before: Token | None, after: Token) -> None:
    """Refuse a change that gives a token a scope that the granter lacks, or that outlives the granter.

    `before` is None for a new token. The exception rolls the edit back.
    """
    is_extended = before is not None and _outlives(after.expires_at, before.expires_at)
    granted = set(after.scopes).difference(() if before is None or is_extended else before.scopes)
    for scope in sorted(granted.difference(granter.scopes)):
        raise Forbidden(f"scopes: this token lacks the scope {scope}, so it can't grant or extend it")
    if granted and granter.expires_at is not None and _outlives(after.expires_at, granter.expires_at):
        raise Forbidden(
            f"expires_at: this token expires at {granter.expires_at:%Y-%m-%dT%H:%M:%SZ}, so it can't grant or "
            "extend anything beyond that; use that time or an earlier one"
        )


def _outlives(expiry: datetime | None, other: datetime | None) -> bool:
    """Return True if the first time of expiry is later than the other. None means never."""
    return other is not None and (expiry is None or expiry > other)
