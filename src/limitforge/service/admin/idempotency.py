"""Creates that may be sent again: with an `Idempotency-Key`, the same is made once and answered alike for a day."""

import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Header, Request, Response

from limitforge.catalog.database import queries
from limitforge.catalog.database.catalog import Edit
from limitforge.catalog.model import Entity, to_public_dict
from limitforge.errors import InvalidInput
from limitforge.service.admin.fields import MAX_HEADER_LENGTH
from limitforge.service.admin.responses import format_etag, json_response, warning_fields
from limitforge.service.admin.session import AdminSession, WriteSession
from limitforge.service.problems import HttpError

REPLAY_RETENTION = timedelta(days=1)
REPLAYED_HEADER = "idempotency-replayed"

_KEY_PATTERN = re.compile(rf"[\x21-\x7e]{{1,{MAX_HEADER_LENGTH}}}")
_encode = msgspec.json.Encoder(order="deterministic").encode


class CreateResult(msgspec.Struct, frozen=True):
    """Something that was created, or put in the place of another. `secrets` are in the first answer, and kept
    nowhere.
    """

    entity: Entity
    status: int = 201
    secrets: dict[str, str] = {}
    warnings: list[str] = []


CreateFunction = Callable[[Edit], Awaitable[CreateResult]]


class _RepeatedRequest(Exception):
    """Ends an edit that has nothing to do."""

    def __init__(self, creation: queries.StoredResponse) -> None:
        super().__init__()
        self.creation = creation


class IdempotentCreate:
    """One call that creates."""

    def __init__(self, session: AdminSession, key: str | None, fingerprint: str) -> None:
        self._session = session
        self._key = key
        self._fingerprint = fingerprint

    async def run(self, create: CreateFunction) -> Response:
        """Make it, or answer as when it was made. Two that come at once wait for each other, as all edits do."""
        try:
            async with self._session.edit() as edit:
                await self._raise_if_repeated(edit)
                made = await create(edit)
                body = to_public_dict(made.entity) | warning_fields(made.warnings)
                if self._key is not None:
                    kept = body | _replayed_secrets(made)
                    creation = queries.StoredResponse(self._fingerprint, made.status, kept)
                    await queries.add_stored_response(
                        edit.connection, self._session.token.id, self._key, creation, edit.now
                    )
        except _RepeatedRequest as repeated:
            return self._replay_response(repeated.creation)
        return json_response(body | made.secrets, made.status, etag=format_etag(made.entity.version))

    async def _raise_if_repeated(self, edit: Edit) -> None:
        if self._key is not None:
            since = edit.now - REPLAY_RETENTION
            found = await queries.find_stored_response(edit.connection, self._session.token.id, self._key, since)
            if found is not None:
                raise _RepeatedRequest(found)

    def _replay_response(self, creation: queries.StoredResponse) -> Response:
        if creation.fingerprint != self._fingerprint:
            raise HttpError(422, "idempotency_key_reused", "idempotency-key: was sent with another request before")
        told = {"etag": format_etag(creation.answer["version"]), REPLAYED_HEADER.replace("-", "_"): "true"}
        return json_response(creation.answer, creation.status, **told)


def _replayed_secrets(made: CreateResult) -> dict[str, Any]:
    """What stands in the place of secrets when the answer is repeated."""
    if not made.secrets:
        return {}
    notice = f"the secret was in the first answer only; if it is lost, make another {made.entity.kind}"
    return {**dict.fromkeys(made.secrets), "notice": notice}


def _idempotent_create(
    request: Request,
    session: WriteSession,
    idempotency_key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            description="1 to 128 visible characters. The same request with the same key, within a day, creates "
            f"nothing more: it is answered as before, with `{REPLAYED_HEADER}: true`, and without any secret.",
            examples=["6f1c1c1e-order-4711"],
            json_schema_extra={"minLength": 1, "maxLength": MAX_HEADER_LENGTH, "pattern": "^[!-~]{1,128}$"},
        ),
    ] = None,
) -> IdempotentCreate:
    if idempotency_key is not None and not _KEY_PATTERN.fullmatch(idempotency_key):
        raise InvalidInput("idempotency-key", f"must be 1 to {MAX_HEADER_LENGTH} visible characters")
    return IdempotentCreate(session, idempotency_key, _request_fingerprint(request))


def _request_fingerprint(request: Request) -> str:
    """Of what is asked for, whatever order its fields have."""
    asked = [request.method, request.url.path, request.state.plain]
    return sha256(_encode(asked)).hexdigest()


Idempotency = Annotated[IdempotentCreate, Depends(_idempotent_create)]
