"""The progress of a long command, on stderr: a bar on a terminal, otherwise a line every few seconds."""

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_SECONDS = 5.0
REDRAWS_PER_SECOND = 5


class ProgressReporter:
    """Shows how many items are done, such as "Applied 5 of 9 tenants". Both counts are 0 before the first update."""

    def __init__(self, verb: str, items: str) -> None:
        self.done = 0
        self.total = 0
        self._verb = verb
        self._items = items
        self._bar: tuple[Progress, TaskID] | None = None
        self._last_line_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar[0].stop()

    def update(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        if sys.stderr.isatty():
            self._draw()
        elif time.monotonic() - self._last_line_at >= LINE_SECONDS and done < total:
            self._last_line_at = time.monotonic()
            print(f"{self._verb} {done:,} of {total:,} {self._items}", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        if self._bar is None:
            columns = (TextColumn(self._verb), BarColumn(), MofNCompleteColumn(), TextColumn(self._items))
            bar = Progress(
                *columns,
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                refresh_per_second=REDRAWS_PER_SECOND,
            )
            self._bar = bar, bar.add_task(self._verb, total=self.total)
            bar.start()
        bar, task = self._bar
        bar.update(task, completed=self.done)
