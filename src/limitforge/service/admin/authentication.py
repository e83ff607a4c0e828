"""Who may administer: a token becomes what is known of it, or a refusal. Wrong ones don't reach the database often."""

import asyncio
from collections.abc import Iterable
from datetime import datetime

from limitforge.catalog.credentials import PREFIXES, Credential, fingerprint
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.live.bounded_reads import LOOKUP_SECONDS
from limitforge.catalog.live.cache import CatalogCache
from limitforge.catalog.live.lookup_limiter import LookupLimiter
from limitforge.catalog.model import Token, to_datetime
from limitforge.core.check import Failure
from limitforge.core.plan import Limits
from limitforge.errors import Forbidden, UnknownKey
from limitforge.limiter import Limiter
from limitforge.service.problems import HttpError

ADMIN_TENANT = "%admin"
"""In whose name admin calls are counted. No tenant has such an id."""
ADMIN_RESOURCE = "admin"
BURST = "burst=token:50/second"
SUSTAINED = "sustained=counter:1000/minute"
MAX_FINGERPRINTS = 10_000

_BEARER_PREFIX = "bearer "


class TokenAuthenticator:
    """Recognises admin tokens, and limits how often each may call."""

    def __init__(
        self,
        catalog: Catalog,
        snapshots: CatalogCache,
        limiter: Limiter,
        *,
        lookup_limiter: LookupLimiter | None = None,
    ) -> None:
        self._catalog = catalog
        self._snapshots = snapshots
        self._limiter = limiter
        self._lookup_limiter = lookup_limiter or LookupLimiter()
        self._rate_limits = Limits.parse(f"{BURST}; {SUSTAINED}")
        self._valid_fingerprints: dict[bytes, None] = {}
        """Fingerprints of tokens that were right when they were last seen."""
        self._revoked_fingerprints: dict[bytes, None] = {}
        """Fingerprints of tokens that were issued, and were refused when they were last seen."""
        self._lookups_in_flight: dict[bytes, asyncio.Task[Token]] = {}
        self._last_used: dict[str, datetime] = {}

    async def authenticate(self, authorization: Iterable[str], source: str) -> Token:
        """The token of a call with these `Authorization` fields from `source`, if it may call now.

        Raises `UnknownKey`, `TooManyUnknownKeys`, `Forbidden`, or a `BadRequest` that says how long to wait.
        """
        token = await self._find_token(_bearer_token(authorization), source)
        if token.tenant_id is not None:
            await self._refuse_suspended(token.tenant_id)
        self._last_used[token.id] = to_datetime(self._catalog.clock.now_us())
        await self._enforce_rate_limit(token)
        return token

    def take_last_used(self) -> dict[str, datetime]:
        """Which tokens were used since this was last asked, and when."""
        used, self._last_used = self._last_used, {}
        return used

    async def _find_token(self, text: str, source: str) -> Token:
        """Looked up each time, so that a token that was deleted is refused at once. Equal ones at once are one look."""
        credential = self._catalog.parse_credential(text)
        if credential.prefix != PREFIXES["admin"]:
            raise UnknownKey("this is no admin token")
        seen = fingerprint(text)
        flight = self._lookups_in_flight.get(seen)
        if flight is None:
            flight = asyncio.get_running_loop().create_task(self._look_up(credential, seen, source))
            self._lookups_in_flight[seen] = flight
            flight.add_done_callback(lambda _: self._lookups_in_flight.pop(seen))
        return await asyncio.shield(flight)

    async def _look_up(self, credential: Credential, seen: bytes, source: str) -> Token:
        """Look a token up. One that may be made up, and one that was deleted, goes through the guard."""
        is_trusted = seen in self._valid_fingerprints or (
            credential.has_keyed_checksum and seen not in self._revoked_fingerprints
        )
        try:
            if is_trusted:
                token = await self._catalog.authenticate_token(credential.text)
            else:
                token = await self._lookup_limiter.run(
                    source, lambda: self._catalog.authenticate_token(credential.text), seconds=LOOKUP_SECONDS
                )
        except UnknownKey:
            self._valid_fingerprints.pop(seen, None)
            if credential.has_keyed_checksum:
                _remember(self._revoked_fingerprints, seen)
            raise
        self._revoked_fingerprints.pop(seen, None)
        _remember(self._valid_fingerprints, seen)
        return token

    async def _refuse_suspended(self, tenant_id: str) -> None:
        tenant = await self._snapshots.find_tenant(tenant_id)
        if tenant.snapshot.tenant.suspended:
            raise Forbidden("this tenant is suspended")

    async def _enforce_rate_limit(self, token: Token) -> None:
        """Whoever administers is let through while the store is away: that is when they are needed."""
        decision = await self._limiter.check(
            ADMIN_RESOURCE, token.id, limits=self._rate_limits, tenant=ADMIN_TENANT, failure=Failure.OPEN
        )
        if not decision.allowed:
            seconds = max(-(-(decision.retry_after_ms or 0) // 1_000), 1)
            raise HttpError(
                429,
                "rate_limit_exceeded",
                f"{decision.binding}: this token calls too often; come back in {seconds} s",
                **{"retry-after": str(seconds)},
            )


def _remember(fingerprints: dict[bytes, None], fingerprint: bytes) -> None:
    fingerprints[fingerprint] = None
    if len(fingerprints) > MAX_FINGERPRINTS:
        del fingerprints[next(iter(fingerprints))]


def _bearer_token(authorization: Iterable[str]) -> str:
    found = set(authorization)
    if len(found) > 1:
        raise HttpError(400, "malformed_request", "authorization: two different ones")
    for text in found:
        if text[: len(_BEARER_PREFIX)].lower() == _BEARER_PREFIX:
            return text[len(_BEARER_PREFIX) :].strip()
    raise UnknownKey("send an admin token as `Authorization: Bearer lf_admin_…`")
