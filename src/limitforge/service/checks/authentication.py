"""Find the caller behind an API key: in the process's cache, or else in the catalog."""

from limitforge.catalog.live.cache.caller_cache import CallerCache
from limitforge.catalog.live.cache.entries import Caller
from limitforge.catalog.model import KeyScope
from limitforge.errors import UnknownKey
from limitforge.service.checks.request_credentials import Credentials


class Authenticator:
    """Maps credentials to callers."""

    def __init__(self, callers: CallerCache) -> None:
        self._callers = callers
        self.find_cached = callers.get_by_fingerprint
        """Return the caller of a key fingerprint if this process has cached it, else None.

        This records that the key was used, and starts to read its entries again if they are due.
        """

    def reject_unknown_key(self, credentials: Credentials) -> None:
        """Raise UnknownKey if the key is missing, or is certainly not one that was issued. This takes no look-up.

        Call it before a body is received, so that clients without a valid key can't make the service receive it.
        """
        if self.find_cached(credentials.fingerprint) is None and self._callers.is_invalid_key(
            _require_key(credentials)
        ):
            raise UnknownKey("unknown key")

    async def authenticate(self, credentials: Credentials, scope: KeyScope) -> Caller:
        """Return the caller of a key. Raises UnknownKey, or Forbidden if the key does not have the scope."""
        key = _require_key(credentials)
        caller = self.find_cached(credentials.fingerprint) or await self._callers.find(key, credentials.client_ip)
        caller.require(scope)
        return caller


def _require_key(credentials: Credentials) -> str:
    if credentials.key is None:
        raise UnknownKey("send your key as `x-api-key`, or as `Authorization: Bearer`")
    return credentials.key
