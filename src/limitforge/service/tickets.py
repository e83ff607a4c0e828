"""Lease and reservation ids as they leave the service: sealed, so that nobody can make one or use another tenant's."""

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode

from limitforge.catalog.credentials import Peppers
from limitforge.errors import NotFound

SEAL_BYTES = 16


class Tickets:
    """Puts a seal on ids, and takes it off again for the same tenant only."""

    def __init__(self, peppers: Peppers) -> None:
        self._keys = peppers.derived(b"limitforge tickets")

    def seal(self, tenant_id: str, ticket: str | None) -> str | None:
        if ticket is None:
            return None
        seal = urlsafe_b64encode(self._seal(self._keys[0], tenant_id, ticket)).rstrip(b"=").decode()
        return f"{ticket}.{seal}"

    def open(self, tenant_id: str, sealed: str, what: str) -> str:
        """The id inside; another tenant's, or one that nobody here has made, is not found."""
        ticket, _, seal = sealed.rpartition(".")
        try:
            found = urlsafe_b64decode(seal + "=" * (-len(seal) % 4))
        except ValueError:
            found = b""
        if not any(hmac.compare_digest(found, self._seal(key, tenant_id, ticket)) for key in self._keys):
            raise NotFound(f"{what}: this tenant has no such one")
        return ticket

    @staticmethod
    def _seal(key: bytes, tenant_id: str, ticket: str) -> bytes:
        message = f"{tenant_id}\0{ticket}".encode("utf-8", "surrogatepass")
        return hmac.digest(key, message, "sha256")[:SEAL_BYTES]
