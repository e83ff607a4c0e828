"""What all processes of a service have counted together, also those that have ended.

It stands in one file of a folder that the supervisor made. Each process adds what it has counted since it last did,
about once a second, and before it tells the sum: so nobody is ever told a sum that is lower than one told before.
"""

import asyncio
import fcntl
import logging
import operator
import os
from pathlib import Path

import msgspec

from limitforge.errors import LimitforgeError
from limitforge.service.counters.process_counters import ZEROS, ProcessCounters, add_row

PUBLISH_SECONDS = 1.0
"""How often a process adds what it has counted: what a SIGKILL may lose."""
LOCK_ATTEMPTS = 400
LOCK_RETRY_SECONDS = 0.005

_log = logging.getLogger(__name__)


class Totals(msgspec.Struct):
    """What was counted since the start: by tenant, as `Counters` has it, by call and status, and overrides that the
    store had lost.
    """

    tenants: dict[str, list[int]] = {}
    requests: dict[tuple[str, int], int] = {}
    overrides_restored: int = 0

    def __post_init__(self) -> None:
        for row in self.tenants.values():
            row.extend(ZEROS[len(row) :])  # an earlier release, which may have written the file, counted fewer things

    def add(self, other: "Totals") -> None:
        for name, row in other.tenants.items():
            add_row(self.tenants, name, row)
        for request, number in other.requests.items():
            self.requests[request] = self.requests.get(request, 0) + number
        self.overrides_restored += other.overrides_restored

    def since(self, before: "Totals") -> "Totals":
        """What has come since, and nothing that has not changed."""
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
    """Without a folder there is only this process, and nothing is written."""

    def __init__(self, counters: ProcessCounters, folder: Path | None) -> None:
        self._counters = counters
        self._folder = folder
        self._published = Totals()
        """What of our own is in the file already."""
        self._publish_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._folder is not None:
            self._publish_task = asyncio.get_running_loop().create_task(self._publish_regularly(self._folder))

    async def close(self) -> None:
        """Call it once nothing more is counted."""
        if self._publish_task is None or self._folder is None:
            return
        self._publish_task.cancel()
        await asyncio.gather(self._publish_task, return_exceptions=True)
        try:
            await self._publish(self._folder)
        except (OSError, LimitforgeError) as error:
            _log.warning("what was counted last is lost to metrics: %s", error)

    async def totals(self) -> Totals:
        """Of all processes: our own to this moment, the others' as they were a second ago at most."""
        if self._folder is None:
            return self._local_totals()
        try:
            return await self._publish(self._folder)
        except OSError as error:
            _log.warning("the sum of all processes can't be read: %s", error)
            raise LimitforgeError("the sum of all processes can't be read") from None

    async def _publish_regularly(self, folder: Path) -> None:
        is_failing = False
        while True:
            await asyncio.sleep(PUBLISH_SECONDS)
            try:
                await self._publish(folder)
                is_failing = False
            except (OSError, LimitforgeError) as error:
                if not is_failing:
                    _log.warning("metrics lag behind until this is better: %s", error)
                is_failing = True

    def _local_totals(self) -> Totals:
        return Totals(self._counters.totals(), self._counters.requests(), self._counters.overrides_restored)

    async def _publish(self, folder: Path) -> Totals:
        """Whoever holds the lock is done within a millisecond or two; checks need not wait for it here."""
        held = os.open(folder, os.O_RDONLY)
        try:
            for _ in range(LOCK_ATTEMPTS):
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    await asyncio.sleep(LOCK_RETRY_SECONDS)
                else:
                    return self._publish_locked(folder)
        finally:
            os.close(held)
        raise LimitforgeError("another process holds the sum for too long")

    def _publish_locked(self, folder: Path) -> Totals:
        """Written beside the file and renamed: whoever is killed in between leaves the file as it was."""
        file, fresh = folder / "totals", folder / "totals.new"
        whole = _decode(file.read_bytes()) if file.exists() else Totals()
        own = self._local_totals()
        more = own.since(self._published)
        if more != Totals():
            whole.add(more)
            fresh.write_bytes(_encode(whole))
            fresh.replace(file)
            self._published = own
        return whole
