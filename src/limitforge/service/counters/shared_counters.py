"""The sum of the counters of all processes of a service, including processes that have ended.

The sum is in a file of a folder that the supervisor creates. Each process adds its own new counts about once a second,
and before it reports the sum. So no process ever reports a lower sum than one reported before.
"""

import asyncio
import fcntl
import logging
import operator
import os
from functools import partial
from pathlib import Path

import msgspec

from limitforge.errors import LimitforgeError
from limitforge.observability.events import log_event
from limitforge.service.counters.periodic import repeat
from limitforge.service.counters.process_counters import ZEROS, ProcessCounters, add_row

ADD_SECONDS = 1.0
"""How often a process adds its counts. A SIGKILL loses the counts since the last time."""
LOCK_ATTEMPTS = 400
LOCK_RETRY_SECONDS = 0.005

_log = logging.getLogger(__name__)


class Totals(msgspec.Struct):
    """Counts since the start: decisions by tenant (rows of `ProcessCounters`), responses, and restored overrides."""

    tenants: dict[str, list[int]] = {}
    requests: dict[tuple[str, int], int] = {}
    overrides_restored: int = 0

    def __post_init__(self) -> None:
        for row in self.tenants.values():
            row.extend(ZEROS[len(row) :])  # an earlier release may have written the file, with shorter rows

    def add(self, other: "Totals") -> None:
        for name, row in other.tenants.items():
            add_row(self.tenants, name, row)
        for request, number in other.requests.items():
            self.requests[request] = self.requests.get(request, 0) + number
        self.overrides_restored += other.overrides_restored

    def minus(self, before: "Totals") -> "Totals":
        """Return the difference to earlier totals, without anything that has not changed."""
        tenants = {
            name: list(map(operator.sub, row, before.tenants.get(name, ZEROS)))
            for name, row in self.tenants.items()
            if row != before.tenants.get(name)
        }
        requests = {
            request: number - before.requests.get(request, 0)
            for request, number in self.requests.items()
            if number != before.requests.get(request)
        }
        return Totals(tenants, requests, self.overrides_restored - before.overrides_restored)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Totals).decode


class SharedCounters:
    """Adds the counters of this process to the shared sum. Without a folder, the sum is that of this process alone."""

    def __init__(self, counters: ProcessCounters, folder: Path | None) -> None:
        self._counters = counters
        self._folder = folder
        self._added = Totals()
        """The counts of this process that are in the file already."""
        self._add_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._folder is not None:
            add = partial(self._add_to_shared_totals, self._folder)
            adding = repeat(add, ADD_SECONDS, (OSError, LimitforgeError), _log_add_failure)
            self._add_task = asyncio.get_running_loop().create_task(adding)

    async def close(self) -> None:
        """Add the last counts. Call it when nothing more is counted."""
        if self._add_task is None or self._folder is None:
            return
        self._add_task.cancel()
        await asyncio.gather(self._add_task, return_exceptions=True)
        try:
            await self._add_to_shared_totals(self._folder)
        except (OSError, LimitforgeError) as error:
            message = "could not add the last counts of this process to the shared counters, they are lost"
            log_event(_log, logging.WARNING, "metrics.counts_lost", message, error=error)

    async def totals(self) -> Totals:
        """Return the sum: the counts of this process up to now, those of others up to a second ago."""
        if self._folder is None:
            return self._local_totals()
        try:
            return await self._add_to_shared_totals(self._folder)
        except OSError as error:
            message = "could not read the shared counters of all processes"
            log_event(_log, logging.WARNING, "metrics.read_failed", message, error=error)
            raise LimitforgeError("the shared counters can't be read") from None

    def _local_totals(self) -> Totals:
        return Totals(self._counters.totals(), self._counters.requests(), self._counters.overrides_restored)

    async def _add_to_shared_totals(self, folder: Path) -> Totals:
        """Add this process's new counts under the lock of the folder, and return the sum.

        Any holder releases the lock within a few milliseconds. Retrying without blocking keeps checks running.
        """
        lock = os.open(folder, os.O_RDONLY)
        try:
            for _ in range(LOCK_ATTEMPTS):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    await asyncio.sleep(LOCK_RETRY_SECONDS)
                else:
                    return self._add_locked(folder)
        finally:
            os.close(lock)
        raise LimitforgeError("another process has held the lock of the shared counters for too long")

    def _add_locked(self, folder: Path) -> Totals:
        """Write a new file and rename it, so that a process that is killed leaves the old file intact."""
        file, new_file = folder / "totals", folder / "totals.new"
        totals = _decode(file.read_bytes()) if file.exists() else Totals()
        local = self._local_totals()
        added = local.minus(self._added)
        if added != Totals():
            totals.add(added)
            new_file.write_bytes(_encode(totals))
            new_file.replace(file)
            self._added = local
        return totals


def _log_add_failure(error: Exception) -> None:
    message = "could not add to the shared counters, metrics lag until the next success"
    log_event(_log, logging.WARNING, "metrics.publish_failed", message, error=error)
