"""Child processes for tests, which share the second of CPU time for importing limitforge.

They are forked from a server that has imported limitforge and the modules below, and has opened nothing. Each process
has its own connections and event loop, and can be killed.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

REPLY_TIMEOUT_SECONDS = 50.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "limitforge.stores.redis.aio.store",
        "limitforge.stores.redis.sync.store",
        "pytest",
        "tests.catalog.second_process",
        "tests.catalog.database.test_edits",
        "tests.catalog.config.test_apply_killed",
        "tests.chaos.concurrent_callers",
        "tests.contract.hammer",
        "tests.contract.prepaid_spender",
    ]
)


class ChildProcess:
    """A process that runs `work(connection, *arguments)`; `connection` leads to the parent."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._connection, theirs = _context.Pipe()
        self._process: ForkServerProcess = _context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def receive(self, patience_seconds: float = REPLY_TIMEOUT_SECONDS) -> Any:
        """Return the next message of the process."""
        assert self._connection.poll(patience_seconds), "the process says nothing"
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join(REPLY_TIMEOUT_SECONDS)
            raise AssertionError(f"the process has ended with {self._process.exitcode}") from None

    def wait(self) -> None:
        """Wait until it has exited or was killed."""
        self._process.join(REPLY_TIMEOUT_SECONDS)
        assert not self.is_running, "the process did not end"

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def close_and_wait(self) -> int | None:
        """Close the connection, wait until the process exits, and return its exit code."""
        self._connection.close()
        self._process.join(REPLY_TIMEOUT_SECONDS)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        self._process.close()
        assert code is not None, "the process did not end"
        return code


@contextmanager
def child_process(work: Callable[..., None], *arguments: Any) -> Iterator[ChildProcess]:
    """Start a process, and kill it at the end of the block."""
    started = ChildProcess(work, *arguments)
    try:
        yield started
    finally:
        started.kill()
        started.close_and_wait()
