"""What the service logs, and where: on stderr, a line each. Keys, tokens and subjects are in none of them."""

import logging
import sys
import time
from collections.abc import Callable

from limitforge.service.settings import Settings

MAX_LINES_PER_WINDOW = 20  # of one kind in a minute
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
        logging.getLogger(name).setLevel("WARNING")  # what they say at other levels holds parameters, or nothing new


class LogRateLimit(logging.Filter):
    """Limits how often lines of one kind are written, so that no client can fill the log. A kind is a logger with the
    first line of a message, before its arguments are filled in. The first one of the next minute says how many were
    left out.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._kinds: dict[tuple[str, int, str], list[float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._monotonic()
        kind = (record.name, record.levelno, str(record.msg).partition("\n")[0][:200])
        window = self._kinds.get(kind)
        if window is None or now >= window[0]:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            left_out = 0 if window is None else int(window[1]) - MAX_LINES_PER_WINDOW
            self._kinds[kind] = window = [now + WINDOW_SECONDS, 0]
            if left_out > 0:
                record.msg = f"{record.msg} ({left_out} more like this were left out)"
        window[1] += 1
        return window[1] <= MAX_LINES_PER_WINDOW
