"""Track the subjects that were denied most often in the last one to two minutes, over all workers of a service.

Each worker counts its own denials in windows of a minute. Once a second it writes the windows that have changed to a
folder that the workers share. The worker that answers a request adds the files of the others to its own counts.
Subjects leave the process only as hashes.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from datetime import datetime
from functools import partial
from hashlib import blake2b
from pathlib import Path

import msgspec

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.model import to_datetime
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.core.heavy_hitters import HeavyHitters
from limitforge.observability.events import log_event
from limitforge.service.counters.periodic import repeat
from limitforge.service.counters.window_files import HASH_BYTES, Rows, WindowFiles

WINDOW_US = 60 * US_PER_SECOND
MAX_SUBJECTS = 2_048
"""How many subjects of all tenants a worker keeps per window."""
MAX_MERGED = 16_384
"""How many subjects of all workers a response is chosen from."""
MAX_SUBJECT_LENGTH = 64
"""A longer subject is kept as a digest, to bound the memory."""
WRITE_SECONDS = 1.0
HASHES_PER_SLICE = 128
"""How many subjects are hashed before other work gets its turn: about 0.3 ms."""

SubjectOrDigest = str | bytes
"""A subject, or the digest of a long one."""

_log = logging.getLogger(__name__)


class ThrottledSubject(msgspec.Struct, frozen=True):
    """A subject that was denied recently, and at least how many times."""

    tenant_id: str
    subject_hash: str
    denied: int
    last_denied_at: datetime


class Window(HeavyHitters[SubjectOrDigest]):
    """The denials of one minute by tenant. `number` is the minute since 1970."""

    def __init__(self, number: int) -> None:
        super().__init__(MAX_SUBJECTS)
        self.number = number
        self.is_changed = False


class ThrottledTracker:
    """Counts denials and lists the subjects with most of them. Without a folder, the list is that of this process."""

    def __init__(self, peppers: Peppers, folder: Path | None = None, clock: Clock | None = None) -> None:
        self._secret = peppers.derive_keys(b"limitforge throttled subjects")[0]
        self._files = None if folder is None else WindowFiles(folder, WINDOW_US)
        self._clock = clock or SystemClock()
        self._current = Window(0)
        self._previous = Window(-1)
        self._oldest_file = 0
        self._write_task: asyncio.Task[None] | None = None

    def record_denial(self, tenant_id: str, subject: str, now_us: int) -> None:
        """Count a denial. Hashing is left to `top`: only subjects that are kept are hashed, once each."""
        window = self._current
        if now_us // WINDOW_US != window.number:
            window = self._rotate(now_us)
        window.is_changed = True
        window.add(tenant_id, subject if len(subject) <= MAX_SUBJECT_LENGTH else _bounded_subject(subject), 1, now_us)

    def subject_hash(self, tenant_id: str, subject: str) -> str:
        """Return the hash that stands for a subject in lists.

        It is an HMAC under the newest pepper, so it can't be reversed by guessing. It depends on the tenant, so no
        tenant can see that another one has the same subject.
        """
        return self._hash(tenant_id, _bounded_subject(subject)).hex()

    async def top(
        self, count: int, now_us: int, tenant_id: str | None = None, subject: str | None = None
    ) -> list[ThrottledSubject]:
        """Return at most `count` subjects, the most frequently denied first. Tenants share the list fairly.

        `tenant_id` and `subject` restrict the list to one tenant or subject.
        """
        merged: HeavyHitters[bytes] = HeavyHitters(MAX_MERGED)
        async for counts in self._read_counts(now_us, tenant_id):
            for tenant, rows in counts.items():
                wanted = None if subject is None else self._hash(tenant, _bounded_subject(subject))
                for digest, denied, last_us in rows:
                    if wanted is None or digest == wanted:
                        merged.add(tenant, digest, denied, last_us)
        return [
            ThrottledSubject(tenant, digest.hex(), hits.count, to_datetime(hits.last_us))
            for tenant, digest, hits in merged.top(count)
        ]

    async def start(self) -> None:
        """Write changed windows to the folder about once a second."""
        if self._files is not None:
            writing = repeat(partial(self._write, self._files), WRITE_SECONDS, (OSError,), _log_write_failure)
            self._write_task = asyncio.get_running_loop().create_task(writing)

    async def close(self) -> None:
        """Write the last changes. Call it when nothing more is counted."""
        if self._write_task is None or self._files is None:
            return
        self._write_task.cancel()
        await asyncio.gather(self._write_task, return_exceptions=True)
        try:
            await self._write(self._files)
        except OSError as error:
            _log_write_failure(error)

    def _rotate(self, now_us: int) -> Window:
        """Start the window of this time. Keep the one before it and drop earlier ones."""
        number = now_us // WINDOW_US
        if number == self._previous.number:  # the clock was set back by less than a window
            return self._previous
        if number != self._current.number:
            self._previous = self._current if self._current.number == number - 1 else Window(number - 1)
            self._current = Window(number)
        return self._current

    def _hash(self, tenant_id: str, subject: SubjectOrDigest) -> bytes:
        encoded = subject.encode("utf-8", "surrogatepass") if isinstance(subject, str) else b"\0" + subject
        return hmac.digest(self._secret, tenant_id.encode() + b"\0" + encoded, "sha256")[:HASH_BYTES]

    async def _read_counts(self, now_us: int, tenant_id: str | None) -> AsyncIterator[Rows]:
        """Yield the counts of each worker and window, with a pause for other work after each."""
        number = self._rotate(now_us).number
        for window in (self._current, self._previous):
            yield await self._hashed_counts(window, tenant_id)
            await asyncio.sleep(0)
        if self._files is not None:
            for rows in self._files.read((number, number - 1), tenant_id):
                yield rows
                await asyncio.sleep(0)

    async def _hashed_counts(self, window: Window, tenant_id: str | None = None) -> Rows:
        """Return the counts of a window by hash. New subjects are hashed in slices."""
        counts: Rows = {}
        hashed = 0
        tenants = window.groups if tenant_id is None else (tenant_id,)
        for tenant in list(tenants):
            subjects = list(window.groups.get(tenant, {}).items())
            rows = counts[tenant] = []
            for subject, hits in subjects:
                if hits.digest is None:
                    hits.digest = self._hash(tenant, subject)
                    hashed += 1
                    if hashed % HASHES_PER_SLICE == 0:
                        await asyncio.sleep(0)
                rows.append((hits.digest, hits.count, hits.last_us))
        return counts

    async def _write(self, files: WindowFiles) -> None:
        """Write the windows that have changed, and remove the files of windows that no longer count."""
        for window in (self._previous, self._current):
            if window.is_changed:
                window.is_changed = False
                try:
                    files.write(window.number, await self._hashed_counts(window))
                except BaseException:
                    window.is_changed = True
                    raise
        oldest = self._clock.now_us() // WINDOW_US - 1
        if oldest != self._oldest_file:
            files.remove_before(oldest)
            self._oldest_file = oldest


def _log_write_failure(error: Exception) -> None:
    message = "could not write the throttled subjects for the other workers"
    log_event(_log, logging.WARNING, "throttled.write_failed", message, error=error)


def _bounded_subject(subject: str) -> SubjectOrDigest:
    if len(subject) <= MAX_SUBJECT_LENGTH:
        return subject
    return blake2b(subject.encode("utf-8", "surrogatepass")).digest()
