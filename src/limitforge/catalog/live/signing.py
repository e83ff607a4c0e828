"""Message authentication codes for the data that processes share in Redis: copies of the catalog, and announcements.

Anyone who can write to Redis could otherwise give a key another tenant. A MAC also covers the name under which the
content is stored or sent, so signed content is not valid under another name. The content is not encrypted.
"""

import hmac
import logging
import struct
from hashlib import sha256

from limitforge.catalog.credentials import Peppers
from limitforge.core.clock import LONG_AGO_US, Clock, MonotonicClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.core.keys import encode_key
from limitforge.observability.events import log_event

WARN_SECONDS = 60.0  # at most one warning in this time: the sender decides how often something is rejected

_PURPOSE = b"limitforge copies and messages in Redis"
_KEY_ID_BYTES = 4
_MAC_BYTES = 32
_TRAILER_BYTES = _KEY_ID_BYTES + _MAC_BYTES

_log = logging.getLogger(__name__)


class Signer:
    """Signs content, and rejects content without a valid MAC. The newest pepper signs, and all peppers verify."""

    def __init__(self, peppers: Peppers, clock: Clock | None = None) -> None:
        self._keys = {sha256(key).digest()[:_KEY_ID_BYTES]: key for key in peppers.derive_keys(_PURPOSE)}
        self._signing_key_id = next(iter(self._keys))
        self._clock = clock or MonotonicClock()
        self._rejected = 0  # since the last warning
        self._warned_us = LONG_AGO_US

    def sign(self, name: str, content: bytes) -> bytes:
        """Return the content, followed by the id of the signing key and the MAC."""
        return content + self._signing_key_id + _mac(self._keys[self._signing_key_id], name, content)

    def verify(self, name: str, signed: bytes) -> bytes | None:
        """Return the content, or None if it was not signed under this name with a pepper of this process."""
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
            log_event(
                _log,
                logging.WARNING,
                "catalog.rejected",
                "another program, or a process with other peppers, wrote to Redis; asking the database instead",
                name=name,
                reason=reason,
                count=self._rejected,
            )
            self._warned_us, self._rejected = now_us, 0


def _mac(key: bytes, name: str, content: bytes) -> bytes:
    """Return the MAC of a name and content. The length prefix keeps bytes from moving between the two."""
    encoded_name = encode_key(name)
    return hmac.digest(key, struct.pack(">I", len(encoded_name)) + encoded_name + content, "sha256")
