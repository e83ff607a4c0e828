"""Logging of the service: one line per event on stderr. Keys, tokens and subjects are never logged."""

import logging
import sys
import time
from collections.abc import Callable

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


class LogRateLimit(logging.Filter):
    """Limits the lines of each kind per minute, so that clients can't fill the log.

    A kind is a logger, a level and the first line of the format string, which starts with the name of the event. The
    first line of the next minute says how many were suppressed.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._kinds: dict[tuple[str, int, str], list[float]] = {}
        """By kind: the end of the current window, and the number of lines in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._monotonic()
        kind = (record.name, record.levelno, str(record.msg).partition("\n")[0][:200])
        window = self._kinds.get(kind)
        if window is None or now >= window[0]:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            suppressed = 0 if window is None else int(window[1]) - MAX_LINES_PER_WINDOW
            self._kinds[kind] = window = [now + WINDOW_SECONDS, 0]
            if suppressed > 0:
                record.msg = f"{record.msg} ({suppressed} similar lines were suppressed)"
        window[1] += 1
        return window[1] <= MAX_LINES_PER_WINDOW
