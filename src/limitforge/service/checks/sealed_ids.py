"""Lease and reservation ids as they leave the service: sealed, so that nobody can read one, make one, or use another
tenant's. What is inside names keys of the store, and with them subjects.
"""

import os
from base64 import urlsafe_b64decode, urlsafe_b64encode

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from limitforge.catalog.credentials import Peppers
from limitforge.errors import NotFound

NONCE_BYTES = 12
MAX_LENGTH = 65_536


class IdSealer:
    """Puts a seal on ids, and takes it off again for the same tenant only."""

    def __init__(self, peppers: Peppers) -> None:
        self._ciphers = [AESGCM(key) for key in peppers.derive_keys(b"limitforge tickets")]

    def seal(self, tenant_id: str, ticket: str | None) -> str | None:
        if ticket is None:
            return None
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._ciphers[0].encrypt(nonce, ticket.encode(), tenant_id.encode())
        return _encode_base64(nonce + sealed)

    def open(self, tenant_id: str, sealed: str, what: str) -> str:
        """The id inside; another tenant's, or one that nobody here has made, is not found."""
        try:
            raw = urlsafe_b64decode(sealed[:MAX_LENGTH] + "=" * (-len(sealed) % 4))
        except ValueError:
            raw = b""
        if _encode_base64(raw) != sealed:  # Base64 has several forms of the same bytes, and an id has one
            raw = b""
        for cipher in self._ciphers if len(raw) > NONCE_BYTES else ():
            try:
                return cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], tenant_id.encode()).decode()
            except InvalidTag:
                continue
        raise NotFound(f"{what}: this tenant has no such one")


def _encode_base64(raw: bytes) -> str:
    return urlsafe_b64encode(raw).rstrip(b"=").decode()
