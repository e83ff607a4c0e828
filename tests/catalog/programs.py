"""Processes of a test that share the second of CPU that it takes to import limitforge.

They are forked from a server that has imported it and nothing else: each is a process of its own, with its own
connections and event loop, which can be killed.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

PATIENCE_SECONDS = 50.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["pytest", "tests.catalog.second", "tests.catalog.test_edits", "tests.catalog.test_killed"]
)


class Program:
    """A process that runs `work(connection, *arguments)`; `connection` leads to the process that started it."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._connection, theirs = _context.Pipe()
        self._process: ForkServerProcess = _context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def connection(self) -> Connection:
        return self._connection

    def read(self) -> Any:
        """What the process sends next."""
        assert self._connection.poll(PATIENCE_SECONDS), "the process says nothing"
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join(PATIENCE_SECONDS)
            raise AssertionError(f"the process has ended with {self._process.exitcode}") from None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int | None:
        """Wait until it has ended; its exit code. It sees that its connection is closed."""
        self._connection.close()
        self._process.join(PATIENCE_SECONDS)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        self._process.close()
        assert code is not None, "the process did not end"
        return code


@contextmanager
def program(work: Callable[..., None], *arguments: Any) -> Iterator[Program]:
    """A process that is gone in the end."""
    started = Program(work, *arguments)
    try:
        yield started
    finally:
        started.kill()
        started.end()
