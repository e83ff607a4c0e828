"""The log is rate limited for each kind of line."""

import logging
from collections.abc import Iterator

import pytest

from limitforge.service import log_setup
from limitforge.service.log_setup import MAX_LINES_PER_WINDOW, WINDOW_SECONDS, LogRateLimit


class RecordingHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def kept() -> RecordingHandler:
    return RecordingHandler()


@pytest.fixture
def logger(kept: RecordingHandler) -> Iterator[logging.Logger]:
    made = logging.getLogger(__name__)
    made.propagate = False
    made.addHandler(kept)
    yield made
    made.removeHandler(kept)


def test_lines_of_one_kind_are_limited_per_minute(logger: logging.Logger, kept: RecordingHandler) -> None:
    now = 1_000.0
    kept.addFilter(LogRateLimit(lambda: now))
    for number in range(MAX_LINES_PER_WINDOW + 5):
        logger.warning("client %d sent nonsense", number)
    assert kept.lines == [f"client {number} sent nonsense" for number in range(MAX_LINES_PER_WINDOW)]
    now += WINDOW_SECONDS
    logger.warning("client %d sent nonsense", 99)
    logger.warning("client %d sent nonsense", 100)
    assert kept.lines[MAX_LINES_PER_WINDOW:] == [
        "client 99 sent nonsense (5 similar lines were suppressed)",
        "client 100 sent nonsense",
    ]


def test_other_kinds_are_not_suppressed(logger: logging.Logger, kept: RecordingHandler) -> None:
    kept.addFilter(LogRateLimit())
    for _ in range(2 * MAX_LINES_PER_WINDOW):
        logger.warning("one kind")
    logger.error("one kind")
    logger.warning("another kind")
    assert kept.lines[MAX_LINES_PER_WINDOW:] == ["one kind", "another kind"]


def test_what_differs_only_below_the_first_line_is_one_kind(logger: logging.Logger, kept: RecordingHandler) -> None:
    kept.addFilter(LogRateLimit())
    for number in range(2 * MAX_LINES_PER_WINDOW):
        message = f"SSL error in data received\nprotocol: <{number}>"  # as asyncio logs it
        logger.error(message)
    assert len(kept.lines) == MAX_LINES_PER_WINDOW


def test_ever_new_kinds_take_bounded_memory(
    logger: logging.Logger, kept: RecordingHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_setup, "MAX_KINDS", 10)
    repeats = LogRateLimit()
    kept.addFilter(repeats)
    for number in range(1_000):
        message = f"number {number}"
        logger.error(message)
    assert len(repeats._windows) <= 10
