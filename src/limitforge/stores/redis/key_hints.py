"""Keys that a reply of the script named lately, so that the next call is prepared for them.

Most tenants have no overrides, and begin few buckets. So a call does not carry the keys that only the others need: the
script says when it misses them, and the check is asked once more with them. From then on they are sent along at once,
for a while.
"""

from limitforge.core.clock import Clock

HINT_TTL_US = 60_000_000
MAX_HINTS = 16_384


class KeyHints:
    """Keys that were named in the last minute. Several threads may use it."""

    def __init__(self, clock: Clock) -> None:
        self._now_us = clock.now_us
        self._expires_us: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        until_us = self._expires_us.get(key)
        return until_us is not None and self._now_us() < until_us

    def add(self, key: str) -> None:
        if len(self._expires_us) >= MAX_HINTS:
            self._expires_us = {}
        self._expires_us[key] = self._now_us() + HINT_TTL_US
