"""Encrypt the lease and reservation ids that leave the service.

An id contains keys of the store, and with them subjects. A sealed id hides these, can't be forged, and opens only for
the tenant that received it.
"""

import os
from base64 import urlsafe_b64decode, urlsafe_b64encode

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from limitforge.catalog.credentials import Peppers
from limitforge.errors import NotFound

NONCE_BYTES = 12
MAX_SEALED_CHARS = 65_536


class IdSealer:
    """Seals ids with AES-GCM, with the tenant id as associated data."""

    def __init__(self, peppers: Peppers) -> None:
        # This label is part of the key derivation: with another one, ids that clients hold would no longer open.
        self._ciphers = [AESGCM(key) for key in peppers.derive_keys(b"limitforge tickets")]

    def seal(self, tenant_id: str, store_id: str | None) -> str | None:
        if store_id is None:
            return None
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._ciphers[0].encrypt(nonce, store_id.encode(), tenant_id.encode())
        return _encode_base64(nonce + sealed)

    def open(self, tenant_id: str, sealed_id: str, field: str) -> str:
        """Return the id inside. Raises NotFound, which names `field`, if this tenant has no such id."""
        try:
            raw = urlsafe_b64decode(sealed_id[:MAX_SEALED_CHARS] + "=" * (-len(sealed_id) % 4))
        except ValueError:
            raw = b""
        if _encode_base64(raw) != sealed_id:  # Base64 has several forms of the same bytes; only one is accepted
            raw = b""
        for cipher in self._ciphers if len(raw) > NONCE_BYTES else ():
            try:
                return cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], tenant_id.encode()).decode()
            except InvalidTag:
                continue
        raise NotFound(f"{field}: unknown {field.removesuffix('_id')} id")


def _encode_base64(raw: bytes) -> str:
    return urlsafe_b64encode(raw).rstrip(b"=").decode()
