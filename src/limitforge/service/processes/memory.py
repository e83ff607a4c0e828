"""Return memory to the system after a flood of requests.

A check leaves no reference cycles, so the garbage collector need not run often: a full collection would delay every
check by up to 60 ms. Other requests do leave cycles. Therefore a timer watches the memory of this process, and runs a
full collection only if the memory has grown.
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

from limitforge.observability.events import log_event

COLLECT_AFTER = 20_000  # new objects; Python's default is 700
CHECK_SECONDS = 5.0
RECHECK_SECONDS = 30.0  # after a collection, because the flood may have ended since
GROWTH_BYTES = 8 * 1_048_576
MANY_GARBAGE_OBJECTS = 1_000
LARGE_BLOCK_BYTES = 131_072

_STATM = Path("/proc/self/statm")
_M_MMAP_THRESHOLD = -3
_log = logging.getLogger(__name__)


class MemoryWatch:
    """Collects garbage when this process has grown. Without /proc (not Linux), Python's defaults stay in place."""

    def __init__(self) -> None:
        self._baseline = 0
        """The lowest resident memory since the last collection."""
        self._recheck_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._trim = _malloc_trim()

    def start(self) -> None:
        """Start the timer. Call it when the process is ready: objects that exist by then are never scanned again."""
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
        is_recheck = self._recheck_at is not None and loop.time() >= self._recheck_at
        if resident < self._baseline + GROWTH_BYTES and not is_recheck:
            return
        found = gc.collect()
        self._trim()
        self._baseline = resident_bytes()
        self._recheck_at = loop.time() + RECHECK_SECONDS if not is_recheck or found > MANY_GARBAGE_OBJECTS else None
        freed = resident - self._baseline
        message = "collected garbage"
        log_event(_log, logging.DEBUG, "service.memory_collected", message, objects=found, freed_bytes=freed)


def resident_bytes() -> int:
    return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _return_large_blocks() -> None:
    """Make glibc return every block of 128 KiB or more as soon as it is freed.

    By default glibc raises that threshold to the size of freed blocks, up to 32 MiB, and large bodies leave holes.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def _malloc_trim() -> Callable[[], object]:
    """Return a function that gives free memory back to the system, which glibc otherwise keeps."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return lambda: None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return partial(trim, 0)
