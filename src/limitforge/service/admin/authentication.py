"""Authentication of admin tokens. Guessed tokens rarely reach the database."""

import asyncio
from collections.abc import Iterable
from datetime import datetime

from limitforge.catalog.credentials import PREFIXES, Credential
from limitforge.catalog.credentials import fingerprint as compute_fingerprint
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.live.cache.bounded_reads import LOOKUP_SECONDS
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.cache.lookup_limiter import LookupLimiter
from limitforge.catalog.model import Token, to_datetime
from limitforge.core.check import Failure
from limitforge.core.plan import Limits
from limitforge.errors import Forbidden, UnknownKey
from limitforge.limiter import Limiter
from limitforge.service.problems import HttpError

ADMIN_TENANT = "%admin"
"""The tenant under which admin requests are counted. `%` is not allowed in the id of a real tenant."""
ADMIN_RESOURCE = "admin"
BURST_LIMIT = "burst=token:50/second"
SUSTAINED_LIMIT = "sustained=counter:1000/minute"
MAX_FINGERPRINTS = 10_000

_BEARER_PREFIX = "bearer "


class TokenAuthenticator:
    """Authenticates admin tokens, and limits the rate of requests with each of them."""

    def __init__(
        self,
        catalog: Catalog,
        catalog_cache: CatalogCache,
        limiter: Limiter,
        *,
        lookup_limiter: LookupLimiter | None = None,
    ) -> None:
        self._catalog = catalog
        self._catalog_cache = catalog_cache
        self._limiter = limiter
        self._lookup_limiter = lookup_limiter or LookupLimiter()
        self._rate_limits = Limits.parse(f"{BURST_LIMIT}; {SUSTAINED_LIMIT}")
        self._valid_fingerprints: dict[bytes, None] = {}
        """Fingerprints of tokens that were valid at their last lookup. A dict, because it keeps their order."""
        self._revoked_fingerprints: dict[bytes, None] = {}
        """Fingerprints of tokens that were issued here, and were unknown at their last lookup."""
        self._lookups_in_flight: dict[bytes, asyncio.Task[Token]] = {}
        self._last_used: dict[str, datetime] = {}

    async def authenticate(self, authorization: Iterable[str], client_address: str) -> Token:
        """Return the token of a request with these `Authorization` fields from `client_address`.

        Raises `UnknownKey`, `TooManyUnknownKeys`, `Forbidden` if the tenant of the token is suspended, and `HttpError`
        if the token exceeds its rate limit.
        """
        token = await self._find_token(_bearer_token(authorization), client_address)
        if token.tenant_id is not None:
            await self._refuse_suspended(token.tenant_id)
        self._last_used[token.id] = to_datetime(self._catalog.clock.now_us())
        await self._enforce_rate_limit(token)
        return token

    def take_last_used(self) -> dict[str, datetime]:
        """Return the ids of the tokens used since the last call, each with the time of its last use."""
        used, self._last_used = self._last_used, {}
        return used

    async def _find_token(self, text: str, client_address: str) -> Token:
        """Look the token up in the database, each time, so that a deleted token is refused at once.

        Concurrent requests with the same token share one lookup.
        """
        credential = self._catalog.parse_credential(text)
        if credential.prefix != PREFIXES["admin"]:
            raise UnknownKey("this is not an admin token")
        token_fingerprint = compute_fingerprint(text)
        lookup = self._lookups_in_flight.get(token_fingerprint)
        if lookup is None:
            lookup = asyncio.get_running_loop().create_task(
                self._look_up(credential, token_fingerprint, client_address)
            )
            self._lookups_in_flight[token_fingerprint] = lookup
            lookup.add_done_callback(lambda _: self._lookups_in_flight.pop(token_fingerprint))
        return await asyncio.shield(lookup)

    async def _look_up(self, credential: Credential, token_fingerprint: bytes, client_address: str) -> Token:
        """Look a token up, through the lookup limiter if the token may be made up or was revoked."""
        is_trusted = token_fingerprint in self._valid_fingerprints or (
            credential.has_keyed_checksum and token_fingerprint not in self._revoked_fingerprints
        )
        try:
            if is_trusted:
                token = await self._catalog.authenticate_token(credential.text)
            else:
                token = await self._lookup_limiter.run(
                    client_address, lambda: self._catalog.authenticate_token(credential.text), seconds=LOOKUP_SECONDS
                )
        except UnknownKey:
            self._valid_fingerprints.pop(token_fingerprint, None)
            if credential.has_keyed_checksum:
                _remember(self._revoked_fingerprints, token_fingerprint)
            raise
        self._revoked_fingerprints.pop(token_fingerprint, None)
        _remember(self._valid_fingerprints, token_fingerprint)
        return token

    async def _refuse_suspended(self, tenant_id: str) -> None:
        tenant = await self._catalog_cache.find_tenant(tenant_id)
        if tenant.snapshot.tenant.suspended:
            raise Forbidden("this tenant is suspended")

    async def _enforce_rate_limit(self, token: Token) -> None:
        """Refuse a token that exceeds its rate limit. Fail open: administrators are needed while the store is down."""
        decision = await self._limiter.check(
            ADMIN_RESOURCE, token.id, limits=self._rate_limits, tenant=ADMIN_TENANT, failure=Failure.OPEN
        )
        if not decision.allowed:
            seconds = max(-(-(decision.retry_after_ms or 0) // 1_000), 1)
            raise HttpError(
                429,
                "rate_limit_exceeded",
                f"{decision.binding}: too many requests with this token; retry in {seconds} s",
                **{"retry-after": str(seconds)},
            )


def _remember(fingerprints: dict[bytes, None], token_fingerprint: bytes) -> None:
    fingerprints[token_fingerprint] = None
    if len(fingerprints) > MAX_FINGERPRINTS:
        del fingerprints[next(iter(fingerprints))]


def _bearer_token(authorization: Iterable[str]) -> str:
    found = set(authorization)
    if len(found) > 1:
        raise HttpError(400, "malformed_request", "authorization: sent more than once, with different values")
    for text in found:
        if text[: len(_BEARER_PREFIX)].lower() == _BEARER_PREFIX:
            return text[len(_BEARER_PREFIX) :].strip()
    raise UnknownKey("send an admin token as `Authorization: Bearer lf_admin_…`")
