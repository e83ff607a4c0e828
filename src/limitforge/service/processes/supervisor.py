"""The parent of the workers: holds the listening socket, keeps as many of them alive as it was told, and replaces them
one for one when it is asked to reload, so that no connection is ever refused.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

from limitforge.errors import LimitforgeError

START_SECONDS = 30.0
MIN_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 10.0
STABLE_SECONDS = 10.0  # a worker that lived so long did not die of how it was started
BACKLOG = 2_048

_log = logging.getLogger(__name__)


class WorkerStartFailed(LimitforgeError):
    """A worker ended before it was ready; it said why."""


class WorkerProcess:
    """One process, until it has ended."""

    def __init__(
        self, listening: socket.socket, metrics: socket.socket | None, folder: str, environment: Mapping[str, str]
    ) -> None:
        read, write = os.pipe()
        fd = listening.fileno()
        beside = [] if metrics is None else [metrics.fileno()]
        self._ready = read
        self.started = time.monotonic()
        self.process = subprocess.Popen(  # noqa: S603 - this very program
            [
                sys.executable,
                "-m",
                "limitforge.service.processes.worker",
                str(fd),
                str(write),
                folder,
                *map(str, beside),
            ],
            pass_fds=(fd, write, *beside),
            env=dict(environment),
            stdin=subprocess.PIPE,  # which ends with this process: so that no worker outlives it
        )
        os.close(write)

    def wait_until_ready(self, is_ending: Callable[[], bool]) -> bool:
        """False if it ended instead, or took too long."""
        deadline = self.started + START_SECONDS
        try:
            while time.monotonic() < deadline and not is_ending():
                if select.select([self._ready], [], [], 0.1)[0]:
                    return os.read(self._ready, 1) != b""
            return False
        finally:
            os.close(self._ready)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)


class Supervisor:
    """Runs until SIGTERM or SIGINT; SIGHUP reloads. What the workers have counted together stands in a folder that
    lasts as long as it runs, so that no counter falls when one of them ends.
    """

    def __init__(
        self,
        listening: socket.socket,
        count: int,
        environment: Mapping[str, str],
        *,
        shutdown_seconds: float,
        metrics: socket.socket | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self._listening = listening
        self._metrics = metrics
        self._folder = ""
        self._count = count
        self._environment = environment
        self._shutdown_seconds = shutdown_seconds
        self._on_ready = on_ready
        self._workers: list[WorkerProcess] = []
        self._retiring: list[WorkerProcess] = []
        self._is_stopping = False
        self._is_reload_requested = False
        self._backoff = MIN_BACKOFF_SECONDS
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        for end in (self._wakeup_reader, self._wakeup_writer):
            os.set_blocking(end, False)

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="limitforge-run-") as self._folder, self._signals():
            try:
                self._start()
                if self._on_ready is not None and not self._is_stopping:
                    self._on_ready()
                while not self._is_stopping:
                    self._supervise_once()
            finally:
                self._stop()

    def _start(self) -> None:
        self._workers = [self._spawn() for _ in range(self._count)]
        for worker in self._workers:
            if not worker.wait_until_ready(lambda: self._is_stopping) and not self._is_stopping:
                raise WorkerStartFailed("a worker did not start; what it said stands above")

    def _supervise_once(self) -> None:
        """Once something happens, or a second later."""
        select.select([self._wakeup_reader], [], [], 1.0)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup_reader, 4_096)
        self._retiring = [worker for worker in self._retiring if worker.process.poll() is None]
        if self._is_reload_requested:
            self._is_reload_requested = False
            self._reload()
        for at, worker in enumerate(self._workers):
            if worker.process.poll() is not None and not self._is_stopping:
                self._workers[at] = self._restart(worker)

    def _restart(self, dead: WorkerProcess) -> WorkerProcess:
        _log.warning("worker %d ended with %d: starting another", dead.process.pid, dead.process.returncode)
        if time.monotonic() - dead.started < STABLE_SECONDS:
            time.sleep(self._backoff)
            self._backoff = min(2 * self._backoff, MAX_BACKOFF_SECONDS)
        else:
            self._backoff = MIN_BACKOFF_SECONDS
        worker = self._spawn()
        worker.wait_until_ready(lambda: self._is_stopping)
        return worker

    def _reload(self) -> None:
        """New ones first; the old ones go once their successors answer. If those can't start, nothing changes."""
        fresh = [self._spawn() for _ in range(self._count)]
        ready = [worker.wait_until_ready(lambda: self._is_stopping) for worker in fresh]
        if all(ready):
            old, self._workers = self._workers, fresh
            self._retiring += old
            _log.info("reloaded: %d new workers answer", len(fresh))
        else:
            old = fresh
            self._retiring += fresh
            _log.error("reloading failed, and the old workers go on: what was wrong stands above")
        for worker in old:
            worker.stop()

    def _stop(self) -> None:
        everybody = [*self._workers, *self._retiring]
        for worker in everybody:
            worker.stop()
        deadline = time.monotonic() + self._shutdown_seconds + 2
        for worker in everybody:
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    def _spawn(self) -> WorkerProcess:
        return WorkerProcess(self._listening, self._metrics, self._folder, self._environment)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def end(_signal: int, _frame: FrameType | None) -> None:
            self._is_stopping = True

        def reload(_signal: int, _frame: FrameType | None) -> None:
            self._is_reload_requested = True

        def nothing(_signal: int, _frame: FrameType | None) -> None:
            pass

        handlers = {
            signal.SIGTERM: end,
            signal.SIGINT: end,
            signal.SIGHUP: reload,
            signal.SIGCHLD: nothing,
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        woken = signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that workers inherit."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio asks before it sets NODELAY
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    listening.listen(BACKLOG)
    return listening
