"""One admin call: whose token it came with, and how much of the catalog that token may see and change."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from limitforge.catalog.database import queries
from limitforge.catalog.database.catalog import Catalog, Edit
from limitforge.catalog.database.queries import Page
from limitforge.catalog.model import OPERATOR, Entity, Tenant, Token, TokenScope
from limitforge.core.exact import short_repr
from limitforge.errors import Forbidden, NotFound, UnknownKey

AnyEntity = TypeVar("AnyEntity", bound=Entity)


class AdminSession:
    """What a token of one tenant may not see is not there for it: it is not found, and left out of lists."""

    def __init__(self, token: Token, catalog: Catalog) -> None:
        self.token = token
        self.catalog = catalog
        self.actor = f"token:{token.id}"

    @property
    def tenant_id(self) -> str | None:
        """The only tenant that it may see; None for all of them."""
        return self.token.tenant_id

    def require_scope(self, scope: TokenScope) -> None:
        if scope not in self.token.scopes:
            raise Forbidden(f"this token lacks the scope {scope}")

    def require_all_tenants(self, what: str) -> None:
        """For what concerns more than one tenant, or is not a tenant's own to decide."""
        if self.tenant_id is not None:
            raise Forbidden(f"{what}: this takes a token of all tenants, and this one is of one")

    def require_tenant(self, tenant_id: str) -> None:
        """For what is said to be of this tenant."""
        if self.tenant_id is not None and tenant_id != self.tenant_id:
            raise NotFound(f"tenant_id: there is no tenant {short_repr(tenant_id)}")

    def can_see(self, entity: Entity) -> bool:
        owner = entity.id if isinstance(entity, Tenant) else getattr(entity, "tenant_id", None)
        return self.tenant_id is None or owner == self.tenant_id

    # --- Reading -----------------------------------------------------------------------------------------------------

    async def get(self, kind: type[AnyEntity], identity: str) -> AnyEntity:
        return self._require_visible(kind, identity, await self.catalog.get(kind, identity))

    async def page(self, kind: type[Entity], *, cursor: str | None, limit: int, **values: Any) -> Page:
        """A page of what it may see, narrowed by what `values` are not None."""
        mine = self.restrict_filters(values, "id" if kind is Tenant else "tenant_id")
        return Page([], None) if mine is None else await self.catalog.list_page(kind, cursor=cursor, size=limit, **mine)

    def restrict_filters(self, values: Mapping[str, Any], owner: str = "tenant_id") -> dict[str, Any] | None:
        """The values that a list is asked for, of those that it may see; None if that is nothing."""
        if self.tenant_id is None:
            return dict(values)
        if values.get(owner) not in (None, self.tenant_id):
            return None
        return {**values, owner: self.tenant_id}

    # --- Changing ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def edit(self) -> AsyncIterator[Edit]:
        """One transaction of changes. The token is read again inside it: it may have been deleted or narrowed since the
        call was admitted, and edits happen one after the other.
        """
        async with self.catalog.edit(self.actor) as edit:
            token = await queries.find(edit.connection, Token, self.token.id)
            if token is None or (token.expires_at is not None and token.expires_at <= edit.now):
                raise UnknownKey("no such token, or it is no longer good")
            self.token = token
            self.require_scope(TokenScope.WRITE)
            yield edit

    async def find(self, edit: Edit, kind: type[AnyEntity], identity: str) -> AnyEntity:
        """What is to be changed, as it is inside the edit."""
        return self._require_visible(kind, identity, await queries.find(edit.connection, kind, identity))

    def _require_visible(self, kind: type[AnyEntity], identity: str, entity: AnyEntity | None) -> AnyEntity:
        """The operator is no tenant, and has calls of its own."""
        is_operator = kind is Tenant and identity == OPERATOR
        if entity is None or is_operator or not self.can_see(entity):
            raise NotFound(f"there is no {kind.kind} {short_repr(identity)}")
        return entity


def _session(request: Request) -> AdminSession:
    session: AdminSession = request.state.session
    return session


def _read_session(session: Annotated[AdminSession, Depends(_session)]) -> AdminSession:
    session.require_scope(TokenScope.READ)
    return session


def _write_session(session: Annotated[AdminSession, Depends(_session)]) -> AdminSession:
    session.require_scope(TokenScope.WRITE)
    return session


ReadSession = Annotated[AdminSession, Depends(_read_session)]
WriteSession = Annotated[AdminSession, Depends(_write_session)]
