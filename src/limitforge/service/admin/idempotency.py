"""Idempotent creates: a request repeated with the same `Idempotency-Key` gets the stored response for a day."""

import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Header, Request, Response

from limitforge.catalog.database import service_records
from limitforge.catalog.database.edits import Edit
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
    """The entity that a request created or replaced. The first response shows `secrets`; they are never stored."""

    entity: Entity
    status: int = 201
    secrets: dict[str, str] = {}
    warnings: list[str] = []


CreateFunction = Callable[[Edit], Awaitable[CreateResult]]


class _RepeatedRequest(Exception):
    """Rolls back the edit of a request that was answered before."""

    def __init__(self, stored: service_records.StoredResponse) -> None:
        super().__init__()
        self.stored = stored


class IdempotentCreate:
    """A create request with its optional idempotency key."""

    def __init__(self, session: AdminSession, key: str | None, fingerprint: str) -> None:
        self._session = session
        self._key = key
        self._fingerprint = fingerprint

    async def run(self, create: CreateFunction) -> Response:
        """Create the entity, or repeat the stored response.

        Of two concurrent requests with one key, the second waits for the first: edits are serialised.
        """
        try:
            async with self._session.edit() as edit:
                await self._raise_if_repeated(edit)
                result = await create(edit)
                body = to_public_dict(result.entity) | warning_fields(result.warnings)
                if self._key is not None:
                    replayed_body = body | _replayed_secrets(result)
                    stored = service_records.StoredResponse(self._fingerprint, result.status, replayed_body)
                    await service_records.add_stored_response(
                        edit.connection, self._session.token.id, self._key, stored, edit.now
                    )
        except _RepeatedRequest as repeated:
            return self._replay_response(repeated.stored)
        return json_response(body | result.secrets, result.status, etag=format_etag(result.entity.version))

    async def _raise_if_repeated(self, edit: Edit) -> None:
        if self._key is not None:
            since = edit.now - REPLAY_RETENTION
            stored = await service_records.find_stored_response(
                edit.connection, self._session.token.id, self._key, since
            )
            if stored is not None:
                raise _RepeatedRequest(stored)

    def _replay_response(self, stored: service_records.StoredResponse) -> Response:
        if stored.fingerprint != self._fingerprint:
            raise HttpError(422, "idempotency_key_reused", "idempotency-key: was used for another request")
        etag = format_etag(stored.body["version"])
        return json_response(stored.body, stored.status, etag=etag, headers={REPLAYED_HEADER: "true"})


def _replayed_secrets(result: CreateResult) -> dict[str, Any]:
    """Return the fields that replace the secrets in a replayed response."""
    if not result.secrets:
        return {}
    notice = f"only the first response contains the secret; if it is lost, create another {result.entity.kind}"
    return {**dict.fromkeys(result.secrets), "notice": notice}


def _idempotent_create(
    request: Request,
    session: WriteSession,
    idempotency_key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            description="1 to 128 visible ASCII characters. Repeating a request with its key within a day creates "
            f"nothing: the first response is sent again, with `{REPLAYED_HEADER}: true` and without secrets.",
            examples=["6f1c1c1e-order-4711"],
            json_schema_extra={"minLength": 1, "maxLength": MAX_HEADER_LENGTH, "pattern": "^[!-~]{1,128}$"},
        ),
    ] = None,
) -> IdempotentCreate:
    if idempotency_key is not None and not _KEY_PATTERN.fullmatch(idempotency_key):
        raise InvalidInput("idempotency-key", f"must be 1 to {MAX_HEADER_LENGTH} visible ASCII characters")
    return IdempotentCreate(session, idempotency_key, _request_fingerprint(request))


def _request_fingerprint(request: Request) -> str:
    """Return a hash of method, path and body that does not depend on the order of the fields."""
    content = [request.method, request.url.path, request.state.decoded_body]
    return sha256(_encode(content)).hexdigest()


Idempotency = Annotated[IdempotentCreate, Depends(_idempotent_create)]
