"""How many processes are alive: each says so in Redis every second, and is told how many others did.

Only who has a limit of `consistency: local` needs to know. Until the first answer, and where there is no Redis, the
number of the settings counts.
"""

import os

from limitforge.core.clock import LONG_AGO_US, Clock
from limitforge.core.keys import Keys

BEAT_US = 1_000_000
ALIVE_US = 3 * BEAT_US


class Membership:
    """This process among the others."""

    def __init__(self, keys: Keys, nodes: int, clock: Clock) -> None:
        self._name, self._pid = b"", 0
        self.key = keys.members()
        self.is_wanted = False
        """Whether anybody has asked how many there are."""
        self._nodes = nodes
        self._now_us = clock.now_us
        self._asked_us = LONG_AGO_US

    @property
    def name(self) -> bytes:
        """Its own in each process: a forked one is another."""
        if self._pid != os.getpid():
            self._name, self._pid = os.urandom(8), os.getpid()
        return self._name

    def nodes(self) -> int:
        self.is_wanted = True
        return self._nodes

    def is_due(self) -> bool:
        """Whether to say now that this process is alive; whoever is told so must."""
        now_us = self._now_us()
        if not self.is_wanted or now_us - self._asked_us < BEAT_US:
            return False
        self._asked_us = now_us
        return True

    def heard(self, count: int) -> None:
        self._nodes = max(count, 1)
