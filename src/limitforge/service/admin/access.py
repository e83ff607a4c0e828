"""Who may administer: a token becomes what is known of it, or a refusal. Wrong ones don't reach the database often."""

import asyncio
from collections.abc import Iterable
from datetime import datetime

from limitforge.catalog.cache import Snapshots
from limitforge.catalog.catalog import Catalog
from limitforge.catalog.credentials import PREFIXES, Credential, fingerprint
from limitforge.catalog.guard import Guard
from limitforge.catalog.lookups import LOOKUP_SECONDS
from limitforge.catalog.model import Token, at_time
from limitforge.core.check import Failure
from limitforge.core.plan import Limits
from limitforge.errors import Forbidden, UnknownKey
from limitforge.limiter import Limiter
from limitforge.service.problems import BadRequest

OWN_TENANT = "%admin"
"""In whose name admin calls are counted. No tenant has such an id."""
RESOURCE = "admin"
BURST = "burst=token:50/second"
SUSTAINED = "sustained=counter:1000/minute"
MAX_KNOWN = 10_000

_BEARER = "bearer "


class Access:
    """Recognises admin tokens, and limits how often each may call."""

    def __init__(self, catalog: Catalog, snapshots: Snapshots, limiter: Limiter, *, guard: Guard | None = None) -> None:
        self._catalog = catalog
        self._snapshots = snapshots
        self._limiter = limiter
        self._guard = guard or Guard()
        self._limits = Limits.parse(f"{BURST}; {SUSTAINED}")
        self._known: dict[bytes, None] = {}
        """Fingerprints of tokens that were right when they were last seen."""
        self._refused: dict[bytes, None] = {}
        """Fingerprints of tokens that were issued, and were refused when they were last seen."""
        self._flights: dict[bytes, asyncio.Task[Token]] = {}
        self._used: dict[str, datetime] = {}

    async def admit(self, authorization: Iterable[str], source: str) -> Token:
        """The token of a call with these `Authorization` fields from `source`, if it may call now.

        Raises `UnknownKey`, `TooManyUnknownKeys`, `Forbidden`, or a `BadRequest` that says how long to wait.
        """
        token = await self._token(_presented(authorization), source)
        if token.tenant_id is not None:
            await self._refuse_suspended(token.tenant_id)
        self._used[token.id] = at_time(self._catalog.clock.now_us())
        await self._limit(token)
        return token

    def used(self) -> dict[str, datetime]:
        """Which tokens were used since this was last asked, and when."""
        used, self._used = self._used, {}
        return used

    async def _token(self, text: str, source: str) -> Token:
        """Looked up each time, so that a token that was deleted is refused at once. Equal ones at once are one look."""
        credential = self._catalog.credential(text)
        if credential.prefix != PREFIXES["admin"]:
            raise UnknownKey("this is no admin token")
        seen = fingerprint(text)
        flight = self._flights.get(seen)
        if flight is None:
            flight = asyncio.get_running_loop().create_task(self._look_up(credential, seen, source))
            self._flights[seen] = flight
            flight.add_done_callback(lambda _: self._flights.pop(seen))
        return await asyncio.shield(flight)

    async def _look_up(self, credential: Credential, seen: bytes, source: str) -> Token:
        """Look a token up. One that may be made up, and one that was deleted, goes through the guard."""
        is_trusted = seen in self._known or (credential.is_keyed and seen not in self._refused)
        try:
            if is_trusted:
                token = await self._catalog.token(credential.text)
            else:
                token = await self._guard.look_up(
                    source, lambda: self._catalog.token(credential.text), seconds=LOOKUP_SECONDS
                )
        except UnknownKey:
            self._known.pop(seen, None)
            if credential.is_keyed:
                _remember(self._refused, seen)
            raise
        self._refused.pop(seen, None)
        _remember(self._known, seen)
        return token

    async def _refuse_suspended(self, tenant_id: str) -> None:
        tenant = await self._snapshots.tenant(tenant_id)
        if tenant.snapshot.tenant.suspended:
            raise Forbidden("this tenant is suspended")

    async def _limit(self, token: Token) -> None:
        """Whoever administers is let through while the store is away: that is when they are needed."""
        decision = await self._limiter.check(
            RESOURCE, token.id, limits=self._limits, tenant=OWN_TENANT, failure=Failure.OPEN
        )
        if not decision.allowed:
            seconds = max(-(-(decision.retry_after_ms or 0) // 1_000), 1)
            raise BadRequest(
                429,
                "rate_limit_exceeded",
                f"{decision.binding}: this token calls too often; come back in {seconds} s",
                **{"retry-after": str(seconds)},
            )


def _remember(marks: dict[bytes, None], mark: bytes) -> None:
    marks[mark] = None
    if len(marks) > MAX_KNOWN:
        del marks[next(iter(marks))]


def _presented(authorization: Iterable[str]) -> str:
    found = set(authorization)
    if len(found) > 1:
        raise BadRequest(400, "malformed_request", "authorization: two different ones")
    for text in found:
        if text[: len(_BEARER)].lower() == _BEARER:
            return text[len(_BEARER) :].strip()
    raise UnknownKey("send an admin token as `Authorization: Bearer lf_admin_…`")
