"""Files in which the workers of a service share their counts of short time windows.

Each worker has one file for each window and replaces it as a whole. The file name contains the window, so the files of
workers that have ended still count until their window is over, and are removed then.
"""

import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from limitforge.observability.events import log_event

HASH_BYTES = 8
MAX_FILE_BYTES = 262_144
"""A full window of 2,048 tenants with one subject each takes about 90,000 bytes."""
MAX_FILES = 1_024
"""How many files are read for one list: four for each of 256 workers."""
PREFIX = "throttled"
TEMPORARY_SUFFIX = ".new"

Row = tuple[
    Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)],
    Annotated[int, msgspec.Meta(ge=1)],
    Annotated[int, msgspec.Meta(ge=0)],
]
"""The hash of a subject, its number of denials, and the time of the last one (microseconds)."""
Rows = dict[str, list[Row]]
"""Rows by tenant id."""

_encode = msgspec.msgpack.Encoder().encode
_decode_tenants = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_decode_rows = msgspec.msgpack.Decoder(list[Row]).decode
_log = logging.getLogger(__name__)


class WindowFiles:
    """Writes the files of this worker and reads those of all others."""

    def __init__(self, folder: Path, window_us: int) -> None:
        self._folder = folder
        self._window_us = window_us
        self._writer_id = secrets.token_hex(8)
        self._warned_window = -1

    def write(self, window: int, rows: Rows) -> None:
        """Replace this worker's file of a window. The complete file is renamed, so no reader sees a part of it."""
        file = self._folder / f"{PREFIX}-{window}-{self._writer_id}"
        temporary = file.with_name(f"{file.name}{TEMPORARY_SUFFIX}")
        with open(temporary, "wb", opener=_open_private) as opened:
            opened.write(_encode(rows))
        temporary.replace(file)

    def read(self, windows: tuple[int, ...], tenant_id: str | None = None) -> Iterator[Rows]:
        """Yield what each other worker has written for these windows, restricted to one tenant if it is given.

        A file that is unreadable, too large or invalid is skipped, and logged once per window.
        """
        found = [(number, file) for number, file in self._files() if number in windows]
        for number, file in found[:MAX_FILES]:
            if file.name.endswith((self._writer_id, TEMPORARY_SUFFIX)):
                continue
            try:
                yield self._read_file(number, file, tenant_id)
            except FileNotFoundError:
                continue  # its window is over, and another worker has removed it
            except (OSError, ValueError) as error:
                if self._warned_window < max(windows):
                    self._warned_window = max(windows)
                    message = "skipped an invalid file of another worker"
                    log_event(_log, logging.WARNING, "throttled.file_ignored", message, file=file.name, error=error)

    def remove_before(self, window: int) -> None:
        """Remove the files of earlier windows, of all workers."""
        for number, file in self._files():
            if number < window:
                file.unlink(missing_ok=True)

    def _files(self) -> list[tuple[int, Path]]:
        """Return all files with their windows, the latest window first."""
        found = []
        for file in self._folder.glob(f"{PREFIX}-*"):
            number = file.name.split("-")[1]
            found.append((int(number) if number.isascii() and number.isdecimal() else -1, file))
        return sorted(found, reverse=True)

    def _read_file(self, window: int, file: Path, tenant_id: str | None) -> Rows:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        tenants = _decode_tenants(content)
        if tenant_id is not None:
            tenants = {tenant_id: tenants[tenant_id]} if tenant_id in tenants else {}
        rows = {tenant: _decode_rows(raw) for tenant, raw in tenants.items()}
        for _, _, last_us in (row for tenant_rows in rows.values() for row in tenant_rows):
            if last_us // self._window_us != window:
                raise ValueError("a time outside its window")
        return rows


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
