"""Logging of the service: one line per event on stderr. Keys, tokens and subjects are never logged."""

import logging
import sys
import time
from collections.abc import Callable

import msgspec

from limitforge.service.settings import Settings

MAX_LINES_PER_WINDOW = 20  # for each kind of line
WINDOW_SECONDS = 60.0
MAX_KINDS = 1_000


def configure_logging(settings: Settings) -> None:
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRateLimit())
    logging.getLogger("uvicorn.error").setLevel("WARNING")
    for name in ("aiosqlite", "asyncio", "alembic", "sqlalchemy"):
        logging.getLogger(name).setLevel("WARNING")  # below that level, their lines contain query parameters


class _Window(msgspec.Struct):
    """The lines of one kind until the time `end`."""

    end: float
    lines: int = 0


class LogRateLimit(logging.Filter):
    """Limits the lines of each kind per minute, so that clients can't fill the log.

    A kind is a logger, a level and the first line of the format string, which starts with the name of the event. The
    first line of the next minute says how many were suppressed.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._windows: dict[tuple[str, int, str], _Window] = {}
        """The current window of each kind."""

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._monotonic()
        kind = (record.name, record.levelno, str(record.msg).partition("\n")[0][:200])
        window = self._windows.get(kind)
        if window is None or now >= window.end:
            if len(self._windows) >= MAX_KINDS:
                self._windows.clear()
            suppressed = 0 if window is None else window.lines - MAX_LINES_PER_WINDOW
            self._windows[kind] = window = _Window(now + WINDOW_SECONDS)
            if suppressed > 0:
                record.msg = f"{record.msg} ({suppressed} similar lines were suppressed)"
        window.lines += 1
        return window.lines <= MAX_LINES_PER_WINDOW
