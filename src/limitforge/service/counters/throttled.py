"""The subjects that were denied most in the last one to two minutes, summed over the workers of a service.

Each worker counts its own denials in windows of a minute. Once a second it writes the windows that have changed to the
folder that the workers share. The worker that answers adds what the others have written to its own counts. Subjects
leave the process as hashes only.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from datetime import datetime
from hashlib import blake2b
from pathlib import Path

import msgspec

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.model import to_datetime
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.core.heavy_hitters import HeavyHitters
from limitforge.service.counters.window_files import HASH_BYTES, Rows, WindowFiles

WINDOW_US = 60 * US_PER_SECOND
MAX_SUBJECTS = 2_048
"""How many subjects of all tenants a worker remembers in a window."""
MAX_MERGED = 16_384
"""How many subjects of all workers an answer is chosen from."""
MAX_NAME = 64
"""A longer subject is remembered by a digest, so that none takes much memory."""
WRITE_SECONDS = 1.0
"""How often a worker writes what has changed."""
HASHES_PER_SLICE = 128
"""How many subjects are hashed before other work has its turn: about 0.3 ms."""

Name = str | bytes
"""A subject, or the digest of a long one."""

_log = logging.getLogger(__name__)


class ThrottledSubject(msgspec.Struct, frozen=True):
    """A subject that was denied lately, at least so often."""

    tenant_id: str
    subject_hash: str
    denied: int
    last_denied_at: datetime


class Window(HeavyHitters[Name]):
    """The denials of one minute; `number` counts minutes since 1970."""

    def __init__(self, number: int) -> None:
        super().__init__(MAX_SUBJECTS)
        self.number = number
        self.is_changed = False


class ThrottledTracker:
    """Counts denials and lists the subjects that have most. Without a folder there is only this process."""

    def __init__(self, peppers: Peppers, folder: Path | None = None, clock: Clock | None = None) -> None:
        self._secret = peppers.derive_keys(b"limitforge throttled subjects")[0]
        self._files = None if folder is None else WindowFiles(folder, WINDOW_US)
        self._clock = clock or SystemClock()
        self._current = Window(0)
        self._previous = Window(-1)
        self._oldest = 0
        self._write_task: asyncio.Task[None] | None = None

    def record_denial(self, tenant_id: str, subject: str, now_us: int) -> None:
        """Count a denial. It computes no HMAC: only subjects that are kept are hashed, once."""
        window = self._current
        if now_us // WINDOW_US != window.number:
            window = self._rotate(now_us)
        window.is_changed = True
        window.add(tenant_id, subject if len(subject) <= MAX_NAME else _bounded_name(subject), 1, now_us)

    def subject_hash(self, tenant_id: str, subject: str) -> str:
        """Return what a subject is called in lists.

        The hash is an HMAC under the newest pepper, so it can't be reversed by guessing. It depends on the tenant, so
        no tenant can see that another one has the same subject.
        """
        return self._hash(tenant_id, _bounded_name(subject)).hex()

    async def top(
        self, count: int, now_us: int, tenant_id: str | None = None, subject: str | None = None
    ) -> list[ThrottledSubject]:
        """Return at most `count` subjects, the one denied most first; of one tenant or subject, if these are given.

        Each tenant has a fair share of the list.
        """
        found: HeavyHitters[bytes] = HeavyHitters(MAX_MERGED)
        async for part in self._read_counts(now_us, tenant_id):
            for owner, rows in part.items():
                wanted = None if subject is None else self._hash(owner, _bounded_name(subject))
                for digest, denied, last_us in rows:
                    if wanted is None or digest == wanted:
                        found.add(owner, digest, denied, last_us)
        return [
            ThrottledSubject(owner, digest.hex(), seen.count, to_datetime(seen.last_us))
            for owner, digest, seen in found.top(count)
        ]

    async def start(self) -> None:
        """Write what has changed from now on, about once a second."""
        if self._files is not None:
            self._write_task = asyncio.get_running_loop().create_task(self._write_regularly(self._files))

    async def close(self) -> None:
        """Write the last changes. Call it once nothing more is counted."""
        if self._write_task is None or self._files is None:
            return
        self._write_task.cancel()
        await asyncio.gather(self._write_task, return_exceptions=True)
        try:
            await self._write(self._files)
        except OSError as error:
            _log.warning("throttled.write_failed error=%s", error)

    def _rotate(self, now_us: int) -> Window:
        """Begin the window of this time. The one before it is kept, earlier ones are dropped."""
        number = now_us // WINDOW_US
        if number == self._previous.number:  # the clock was set back a little
            return self._previous
        if number != self._current.number:
            self._previous = self._current if self._current.number == number - 1 else Window(number - 1)
            self._current = Window(number)
        return self._current

    def _hash(self, tenant_id: str, name: Name) -> bytes:
        encoded = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else b"\0" + name
        return hmac.digest(self._secret, tenant_id.encode() + b"\0" + encoded, "sha256")[:HASH_BYTES]

    async def _read_counts(self, now_us: int, tenant_id: str | None) -> AsyncIterator[Rows]:
        """Yield the counts of each worker and window. Between two of them other work has its turn."""
        number = self._rotate(now_us).number
        for window in (self._current, self._previous):
            yield await self._hashed_counts(window, tenant_id)
            await asyncio.sleep(0)
        if self._files is not None:
            for rows in self._files.read((number, number - 1), tenant_id):
                yield rows
                await asyncio.sleep(0)

    async def _hashed_counts(self, window: Window, tenant_id: str | None = None) -> Rows:
        """Return a window's counts, by hashes. Subjects that are new are hashed in slices."""
        rows: Rows = {}
        hashed = 0
        wanted = window.groups if tenant_id is None else (tenant_id,)
        for owner in list(wanted):
            names = list(window.groups.get(owner, {}).items())
            found = rows[owner] = []
            for name, seen in names:
                if seen.digest is None:
                    seen.digest = self._hash(owner, name)
                    hashed += 1
                    if hashed % HASHES_PER_SLICE == 0:
                        await asyncio.sleep(0)
                found.append((seen.digest, seen.count, seen.last_us))
        return rows

    async def _write_regularly(self, files: WindowFiles) -> None:
        is_failing = False
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            try:
                await self._write(files)
                is_failing = False
            except OSError as error:
                if not is_failing:
                    _log.warning("throttled.write_failed error=%s", error)
                is_failing = True

    async def _write(self, files: WindowFiles) -> None:
        """Write the windows that have changed, and remove files that are too old to count."""
        for window in (self._previous, self._current):
            if window.is_changed:
                window.is_changed = False
                try:
                    files.write(window.number, await self._hashed_counts(window))
                except BaseException:
                    window.is_changed = True
                    raise
        oldest = self._clock.now_us() // WINDOW_US - 1
        if oldest != self._oldest:
            files.remove_before(oldest)
            self._oldest = oldest


def _bounded_name(subject: str) -> Name:
    if len(subject) <= MAX_NAME:
        return subject
    return blake2b(subject.encode("utf-8", "surrogatepass")).digest()
