"""Give memory back after a flood of requests.

A check leaves no reference cycles behind, so the garbage collector may look rarely: a look at everything would hold up
every check for as long as 60 ms. Other requests do leave cycles. So a timer looks at the memory of this process, and
collects everything only if that has grown.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

COLLECT_AFTER = 20_000  # new objects, instead of 700
CHECK_SECONDS = 5.0
RECHECK_SECONDS = 30.0  # after a collection: the flood may have ended since
GROWTH_BYTES = 8 * 1_048_576
MANY_OBJECTS = 1_000
LARGE_BLOCK = 131_072

_STATM = Path("/proc/self/statm")
_M_MMAP_THRESHOLD = -3
_log = logging.getLogger(__name__)


class MemoryWatch:
    """Collects garbage for one process. Without /proc (not Linux) the collector stays as Python has it."""

    def __init__(self) -> None:
        self._baseline = 0
        self._recheck_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._trim = _malloc_trim()

    def start(self) -> None:
        """Call it once the process is ready: what exists by then stays, and is never looked through again."""
        gc.collect()
        gc.freeze()
        _return_large_blocks()
        if _STATM.exists():
            gc.set_threshold(COLLECT_AFTER, 20, 20)
            self._baseline = resident_bytes()
            self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check_memory)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_memory(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(CHECK_SECONDS, self._check_memory)
        resident = resident_bytes()
        self._baseline = min(self._baseline, resident)
        is_due = self._recheck_at is not None and loop.time() >= self._recheck_at
        if resident < self._baseline + GROWTH_BYTES and not is_due:
            return
        found = gc.collect()
        self._trim()
        self._baseline = resident_bytes()
        self._recheck_at = loop.time() + RECHECK_SECONDS if not is_due or found > MANY_OBJECTS else None
        _log.debug("memory.collected objects=%d bytes=%d", found, resident - self._baseline)


def resident_bytes() -> int:
    return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _return_large_blocks() -> None:
    """Have glibc return every block of 128 KiB or more when it is freed. By default it raises that bound to the size of
    blocks that come and go, up to 32 MiB: large bodies would leave holes.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)


def _malloc_trim() -> Callable[[], object]:
    """What returns free memory to the system: glibc keeps it otherwise."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return lambda: None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return partial(trim, 0)
