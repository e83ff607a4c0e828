"""Count the live processes: each one sends a heartbeat to Redis every second, and receives the count in reply.

Only a process that uses a limit with `consistency="local"` sends heartbeats. Until the first reply, and without Redis,
the count is the one of the settings.
"""

import os

from limitforge.core.clock import LONG_AGO_US, Clock
from limitforge.core.keys import Keys

HEARTBEAT_INTERVAL_US = 1_000_000
HEARTBEAT_TTL_US = 3 * HEARTBEAT_INTERVAL_US


class Heartbeat:
    """When to send the heartbeat of this process, and how many processes are alive. No I/O."""

    def __init__(self, keys: Keys, processes: int, clock: Clock) -> None:
        self._name, self._pid = b"", 0
        self.key = keys.heartbeat_key()
        self.is_needed = False
        """True once a check has asked for the count."""
        self._process_count = processes
        self._now_us = clock.now_us
        self._sent_us = LONG_AGO_US

    @property
    def name(self) -> bytes:
        """The name of this process. A forked process gets another one."""
        if self._pid != os.getpid():
            self._name, self._pid = os.urandom(8), os.getpid()
        return self._name

    def process_count(self) -> int:
        self.is_needed = True
        return self._process_count

    def claim_if_due(self) -> bool:
        """Return True if a heartbeat is due. The caller must then send it."""
        now_us = self._now_us()
        if not self.is_needed or now_us - self._sent_us < HEARTBEAT_INTERVAL_US:
            return False
        self._sent_us = now_us
        return True

    def set_process_count(self, count: int) -> None:
        self._process_count = max(count, 1)
