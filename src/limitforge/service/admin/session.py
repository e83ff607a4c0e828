"""One admin request: its token, and access to the part of the catalog that the token may read and change."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from limitforge.catalog.database import queries
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.edits import Edit
from limitforge.catalog.database.pages import Page
from limitforge.catalog.model import OPERATOR, Entity, Tenant, Token, TokenScope
from limitforge.core.exact import short_repr
from limitforge.errors import Forbidden, NotFound, UnknownKey
from limitforge.service.admin.fields import ListQuery

AnyEntity = TypeVar("AnyEntity", bound=Entity)


class AdminSession:
    """The catalog as one token sees it.

    For a token of one tenant, the entities of other tenants do not exist: they are not found, and not listed.
    """

    def __init__(self, token: Token, catalog: Catalog) -> None:
        self.token = token
        self.catalog = catalog
        self.actor = f"token:{token.id}"

    @property
    def tenant_id(self) -> str | None:
        """The only tenant that the token has access to; None for all tenants."""
        return self.token.tenant_id

    def require_scope(self, scope: TokenScope) -> None:
        if scope not in self.token.scopes:
            raise Forbidden(f"this token lacks the scope {scope}")

    def require_all_tenants(self, what: str) -> None:
        """Refuse a token of one tenant. `what` is the field or operation that the error names."""
        if self.tenant_id is not None:
            raise Forbidden(f"{what}: requires a token for all tenants, and this one is for one tenant")

    def require_tenant(self, tenant_id: str) -> None:
        """Refuse a token of another tenant."""
        if self.tenant_id is not None and tenant_id != self.tenant_id:
            raise NotFound(f"tenant_id: unknown tenant {short_repr(tenant_id)}")

    def can_see(self, entity: Entity) -> bool:
        tenant_id = entity.id if isinstance(entity, Tenant) else getattr(entity, "tenant_id", None)
        return self.tenant_id is None or tenant_id == self.tenant_id

    # --- Reading -----------------------------------------------------------------------------------------------------

    async def get(self, entity_type: type[AnyEntity], entity_id: str) -> AnyEntity:
        return self._require_entity(entity_type, entity_id, await self.catalog.get(entity_type, entity_id))

    async def list_page(self, entity_type: type[Entity], query: ListQuery) -> Page:
        """Return a page of the visible entities. Filters of `query` that are None are ignored."""
        filters = query.model_dump(exclude={"cursor", "limit"})
        visible = self.restrict_filters(filters, "id" if entity_type is Tenant else "tenant_id")
        if visible is None:
            return Page([], None)
        return await self.catalog.list_page(entity_type, cursor=query.cursor, size=query.limit, **visible)

    def restrict_filters(self, filters: Mapping[str, Any], tenant_field: str = "tenant_id") -> dict[str, Any] | None:
        """Return the filters, limited to the tenant of the token. None means that nothing can match.

        `tenant_field` is the field that holds the id of the tenant.
        """
        if self.tenant_id is None:
            return dict(filters)
        if filters.get(tenant_field) not in (None, self.tenant_id):
            return None
        return {**filters, tenant_field: self.tenant_id}

    # --- Changing ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def edit(self) -> AsyncIterator[Edit]:
        """Open a transaction.

        Read the token again inside it: edits are serialised, and an earlier one may have deleted or restricted the
        token after this request was authenticated.
        """
        async with self.catalog.edit(self.actor) as edit:
            token = await queries.find(edit.connection, Token, self.token.id)
            if token is None or (token.expires_at is not None and token.expires_at <= edit.now):
                raise UnknownKey("this token was deleted or has expired")
            self.token = token
            self.require_scope(TokenScope.WRITE)
            yield edit

    async def require_visible(self, edit: Edit, entity_type: type[AnyEntity], entity_id: str) -> AnyEntity:
        """Return the entity as the transaction sees it. Raises `NotFound` if the token may not see it."""
        return self._require_entity(entity_type, entity_id, await queries.find(edit.connection, entity_type, entity_id))

    def _require_entity(self, entity_type: type[AnyEntity], entity_id: str, entity: AnyEntity | None) -> AnyEntity:
        """Return `entity` if it exists and the token may see it. The operator has routes of its own."""
        is_operator = entity_type is Tenant and entity_id == OPERATOR
        if entity is None or is_operator or not self.can_see(entity):
            raise NotFound(f"unknown {entity_type.kind} {short_repr(entity_id)}")
        return entity


def _session(request: Request) -> AdminSession:
    session: AdminSession = request.state.session
    return session


def _read_session(session: Annotated[AdminSession, Depends(_session)]) -> AdminSession:
    session.require_scope(TokenScope.READ)
    return session


ReadSession = Annotated[AdminSession, Depends(_read_session)]
WriteSession = Annotated[AdminSession, Depends(_session)]
"""The session of a call that is not a GET. `AdminRoute` has required the scope `write` before it read the body."""
