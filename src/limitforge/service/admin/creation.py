"""Creates that may be sent again: with an `Idempotency-Key`, the same is made once and answered alike for a day."""

import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Header, Request, Response

from limitforge.catalog import queries
from limitforge.catalog.catalog import Edit
from limitforge.catalog.model import Entity, plain
from limitforge.errors import InvalidInput
from limitforge.service.admin.fields import MAX_HEADER
from limitforge.service.admin.replies import etag, reply, warned
from limitforge.service.admin.session import Session, Writing
from limitforge.service.problems import BadRequest

KEPT = timedelta(days=1)
REPLAYED = "idempotency-replayed"

_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_HEADER}}}")
_encode = msgspec.json.Encoder(order="deterministic").encode


class Made(msgspec.Struct, frozen=True):
    """Something that was created, or put in the place of another. `secrets` are in the first answer, and kept
    nowhere.
    """

    entity: Entity
    status: int = 201
    secrets: dict[str, str] = {}
    warnings: list[str] = []


Make = Callable[[Edit], Awaitable[Made]]


class _Repeated(Exception):
    """Ends an edit that has nothing to do."""

    def __init__(self, creation: queries.Creation) -> None:
        super().__init__()
        self.creation = creation


class Creation:
    """One call that creates."""

    def __init__(self, session: Session, key: str | None, fingerprint: str) -> None:
        self._session = session
        self._key = key
        self._fingerprint = fingerprint

    async def run(self, make: Make) -> Response:
        """Make it, or answer as when it was made. Two that come at once wait for each other, as all edits do."""
        try:
            async with self._session.edit() as edit:
                await self._refuse_again(edit)
                made = await make(edit)
                body = plain(made.entity) | warned(made.warnings)
                if self._key is not None:
                    kept = body | _forgotten(made)
                    creation = queries.Creation(self._fingerprint, made.status, kept)
                    await queries.add_creation(edit.connection, self._session.token.id, self._key, creation, edit.now)
        except _Repeated as repeated:
            return self._again(repeated.creation)
        return reply(body | made.secrets, made.status, etag=etag(made.entity.version))

    async def _refuse_again(self, edit: Edit) -> None:
        if self._key is not None:
            since = edit.now - KEPT
            found = await queries.find_creation(edit.connection, self._session.token.id, self._key, since)
            if found is not None:
                raise _Repeated(found)

    def _again(self, creation: queries.Creation) -> Response:
        if creation.fingerprint != self._fingerprint:
            raise BadRequest(422, "idempotency_key_reused", "idempotency-key: was sent with another request before")
        told = {"etag": etag(creation.answer["version"]), REPLAYED.replace("-", "_"): "true"}
        return reply(creation.answer, creation.status, **told)


def _forgotten(made: Made) -> dict[str, Any]:
    """What stands in the place of secrets when the answer is repeated."""
    if not made.secrets:
        return {}
    notice = f"the secret was in the first answer only; if it is lost, make another {made.entity.kind}"
    return {**dict.fromkeys(made.secrets), "notice": notice}


def _creation(
    request: Request,
    session: Writing,
    idempotency_key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            description="1 to 128 visible characters. The same request with the same key, within a day, creates "
            f"nothing more: it is answered as before, with `{REPLAYED}: true`, and without any secret.",
            examples=["6f1c1c1e-order-4711"],
            json_schema_extra={"minLength": 1, "maxLength": MAX_HEADER, "pattern": "^[!-~]{1,128}$"},
        ),
    ] = None,
) -> Creation:
    if idempotency_key is not None and not _KEY.fullmatch(idempotency_key):
        raise InvalidInput("idempotency-key", f"must be 1 to {MAX_HEADER} visible characters")
    return Creation(session, idempotency_key, _fingerprint(request))


def _fingerprint(request: Request) -> str:
    """Of what is asked for, whatever order its fields have."""
    asked = [request.method, request.url.path, request.state.plain]
    return sha256(_encode(asked)).hexdigest()


Creating = Annotated[Creation, Depends(_creation)]
