"""A process that spends a prepaid limit until it is denied for good.

What it has admitted stands in a file that outlives it, however it ends.
"""

import asyncio
import mmap
import struct
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

from limitforge import Limit, Limiter, SyncLimiter, limit_from_fields
from tests.contract.options import PATIENT

CONCURRENT_CALLERS = 4
DENIALS_TO_STOP = 50  # denials in a row


class FileCounter:
    """A counter in a file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)
        self._lock = Lock()
        self._count = 0

    def add(self, cost: int) -> None:
        with self._lock:
            self._count += cost
            self._map[:] = struct.pack("<Q", self._count)


def read(path: Path) -> int:
    count: int = struct.unpack("<Q", path.read_bytes())[0]
    return count


def spend(url: str, limit: Limit, tally: FileCounter) -> None:
    with SyncLimiter.connect(url, options=PATIENT) as limiter, ThreadPoolExecutor(CONCURRENT_CALLERS) as pool:

        def call(_: int) -> None:
            denied = 0
            while denied < DENIALS_TO_STOP:
                if limiter.check("r", "s", limits=limit).allowed:
                    tally.add(1)
                    denied = 0
                else:
                    denied += 1

        list(pool.map(call, range(CONCURRENT_CALLERS)))


async def spend_async(url: str, limit: Limit, tally: FileCounter) -> None:
    async with Limiter.connect(url, options=PATIENT) as limiter:

        async def call() -> None:
            denied = 0
            while denied < DENIALS_TO_STOP:
                if (await limiter.check("r", "s", limits=limit)).allowed:
                    tally.add(1)
                    denied = 0
                else:
                    denied += 1
                await asyncio.sleep(0)

        await asyncio.gather(*(call() for _ in range(CONCURRENT_CALLERS)))


def spend_all(_: Connection, url: str, fields: dict[str, Any], shell: str, path: Path) -> None:
    """Run one process until it is killed or denied for good."""
    spent, limit = FileCounter(path), limit_from_fields(fields)
    if shell == "sync":
        spend(url, limit, spent)
    else:
        asyncio.run(spend_async(url, limit, spent))
