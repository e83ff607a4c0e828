"""Remember which optional keys the script asked for lately, so that the next call sends them along.

Most tenants have no overrides and create few buckets, so a call does not carry the keys for these. The script names the
key that it lacks, and the call is repeated with it. A hint then saves the second call for a minute.
"""

from limitforge.core.clock import Clock

HINT_TTL_US = 60_000_000
MAX_HINTS = 16_384


class KeyHints:
    """Keys that the script asked for in the last minute. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._now_us = clock.now_us
        self._expires_us: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        expires_us = self._expires_us.get(key)
        return expires_us is not None and self._now_us() < expires_us

    def add(self, key: str) -> None:
        if len(self._expires_us) >= MAX_HINTS:
            self._expires_us = {}
        self._expires_us[key] = self._now_us() + HINT_TTL_US
