"""Find the caller behind an API key: in the process's cache, or else in the catalog."""

from limitforge.catalog.live.cache.callers import CallerCache
from limitforge.catalog.live.cache.entries import Caller
from limitforge.catalog.model import KeyScope
from limitforge.errors import UnknownKey
from limitforge.service.checks.request_credentials import Credentials

NO_KEY_DETAIL = "send your key as `x-api-key`, or as `Authorization: Bearer`"


class Authenticator:
    """Maps credentials to callers."""

    def __init__(self, callers: CallerCache) -> None:
        self._callers = callers
        self.find_cached = callers.get_by_fingerprint
        """Return the caller of a key fingerprint if this process has cached it, else None."""

    def is_known(self, credentials: Credentials) -> bool:
        """Return whether this process has cached the key, so that no look-up is needed."""
        return self.find_cached(credentials.fingerprint) is not None

    def early_rejection(self, credentials: Credentials) -> UnknownKey | None:
        """Return an error if the key is missing or was certainly never issued, which takes no look-up.

        The body of such a request need not be received.
        """
        if credentials.key is None:
            return UnknownKey(NO_KEY_DETAIL)
        return UnknownKey("unknown key") if self._callers.is_invalid_key(credentials.key) else None

    async def authenticate(self, credentials: Credentials, scope: KeyScope) -> Caller:
        """Return the caller of a key. Raises UnknownKey, or Forbidden if the key does not have the scope."""
        if credentials.key is None:
            raise UnknownKey(NO_KEY_DETAIL)
        caller = self.find_cached(credentials.fingerprint) or await self._callers.find(
            credentials.key, credentials.source
        )
        caller.require(scope)
        return caller
