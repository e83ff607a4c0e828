"""Which tenants have overrides, as far as this process has heard.

Most have none, and then it is enough to see that their index of overrides is not there: one key in a call in place of
one for each subject. The script says so if it is there after all, and the check is asked once more with the overrides
of its subject; from then on they are sent along at once, for a while.
"""

from limitforge.core.clock import Clock

BELIEVED_US = 60_000_000
MAX_BELIEVED = 16_384


class Overridden:
    """Indices that were there lately. Several threads may use it."""

    def __init__(self, clock: Clock) -> None:
        self._now_us = clock.now_us
        self._until_us: dict[str, int] = {}

    def __contains__(self, index: str) -> bool:
        until_us = self._until_us.get(index)
        return until_us is not None and self._now_us() < until_us

    def add(self, index: str) -> None:
        if len(self._until_us) >= MAX_BELIEVED:
            self._until_us = {}
        self._until_us[index] = self._now_us() + BELIEVED_US
