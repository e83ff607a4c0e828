"""How many processes are alive: each says so in Redis every second, and is told how many others did.

Only who has a limit of `consistency: local` needs to know. Until the first answer, and where there is no Redis, the
number of the settings counts.
"""

import os

from limitforge.core.clock import LONG_AGO_US, Clock
from limitforge.core.keys import Keys

HEARTBEAT_INTERVAL_US = 1_000_000
HEARTBEAT_TTL_US = 3 * HEARTBEAT_INTERVAL_US


class Heartbeat:
    """This process among the others."""

    def __init__(self, keys: Keys, processes: int, clock: Clock) -> None:
        self._name, self._pid = b"", 0
        self.key = keys.heartbeats()
        self.is_needed = False
        """Whether anybody has asked how many there are."""
        self._process_count = processes
        self._now_us = clock.now_us
        self._sent_us = LONG_AGO_US

    @property
    def name(self) -> bytes:
        """Its own in each process: a forked one is another."""
        if self._pid != os.getpid():
            self._name, self._pid = os.urandom(8), os.getpid()
        return self._name

    def process_count(self) -> int:
        self.is_needed = True
        return self._process_count

    def claim_if_due(self) -> bool:
        """Whether to say now that this process is alive; whoever is told so must."""
        now_us = self._now_us()
        if not self.is_needed or now_us - self._sent_us < HEARTBEAT_INTERVAL_US:
            return False
        self._sent_us = now_us
        return True

    def set_process_count(self, count: int) -> None:
        self._process_count = max(count, 1)
