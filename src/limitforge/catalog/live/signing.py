"""Message authentication codes for what nodes share in Redis: copies of the catalog, and messages about changes.

Anyone who can write to Redis could otherwise give a key another tenant. A MAC covers the name under which the content
is stored or sent, so it can't be moved to another name either. It is not encrypted.
"""

import hmac
import logging
import struct
from hashlib import sha256

from limitforge.catalog.credentials import Peppers
from limitforge.core.clock import LONG_AGO_US, Clock, MonotonicClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.core.keys import encode_key

WARN_SECONDS = 60.0  # at most one warning in this time: the sender decides how often something is rejected

_PURPOSE = b"limitforge copies and messages in Redis"
_KEY_ID_BYTES = 4
_MAC_BYTES = 32
_TRAILER_BYTES = _KEY_ID_BYTES + _MAC_BYTES

_log = logging.getLogger(__name__)


class Signer:
    """Adds a MAC to content, and rejects content without a valid one. The newest pepper seals, all of them verify."""

    def __init__(self, peppers: Peppers, clock: Clock | None = None) -> None:
        self._keys = {sha256(key).digest()[:_KEY_ID_BYTES]: key for key in peppers.derive_keys(_PURPOSE)}
        self._newest = next(iter(self._keys))
        self._clock = clock or MonotonicClock()
        self._rejected = 0  # since the last warning
        self._warned_us = LONG_AGO_US

    def sign(self, name: str, content: bytes) -> bytes:
        """Return the content with the id of the key and its MAC behind it."""
        return content + self._newest + _mac(self._keys[self._newest], name, content)

    def verify(self, name: str, signed: bytes) -> bytes | None:
        """Return the content, or None if it was not sealed under this name with a pepper of this node."""
        content, key_id, mac = signed[:-_TRAILER_BYTES], signed[-_TRAILER_BYTES:-_MAC_BYTES], signed[-_MAC_BYTES:]
        key = self._keys.get(key_id)
        if key is not None and hmac.compare_digest(mac, _mac(key, name, content)):
            return content
        self._warn(name, "unknown_pepper" if key is None else "wrong_mac")
        return None

    def _warn(self, name: str, reason: str) -> None:
        self._rejected += 1
        now_us = self._clock.now_us()
        if now_us - self._warned_us >= WARN_SECONDS * US_PER_SECOND:
            _log.warning(
                "catalog.rejected name=%s reason=%s count=%d: another program or a node with other peppers wrote to "
                "Redis; the database is asked instead",
                name,
                reason,
                self._rejected,
            )
            self._warned_us, self._rejected = now_us, 0


def _mac(key: bytes, name: str, content: bytes) -> bytes:
    """The length keeps a part of the name from being taken for content."""
    stored_as = encode_key(name)
    return hmac.digest(key, struct.pack(">I", len(stored_as)) + stored_as + content, "sha256")
