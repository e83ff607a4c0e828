"""The parent of the workers.

It holds the listening socket, restarts workers that die, and on SIGHUP replaces all of them without refusing a
connection.
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
from limitforge.observability.events import log_event

START_SECONDS = 30.0
MIN_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 10.0
STABLE_SECONDS = 10.0  # a worker that lived this long did not die of a startup error, so the backoff starts again
BACKLOG = 2_048

_log = logging.getLogger(__name__)


class WorkerStartFailed(LimitforgeError):
    """A worker ended, or took too long, before it was ready."""


class WorkerProcess:
    """A worker, from its start until the process has ended."""

    def __init__(
        self,
        server_socket: socket.socket,
        metrics_socket: socket.socket | None,
        counters_folder: str,
        environment: Mapping[str, str],
    ) -> None:
        ready_reader, ready_writer = os.pipe()
        fd = server_socket.fileno()
        metrics_fds = [] if metrics_socket is None else [metrics_socket.fileno()]
        self._ready_reader = ready_reader
        self.started = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "limitforge.service.processes.worker",
            str(fd),
            str(ready_writer),
            counters_folder,
        ]
        self.process = subprocess.Popen(  # noqa: S603 - this very program
            [*command, *map(str, metrics_fds)],
            pass_fds=(fd, ready_writer, *metrics_fds),
            env=dict(environment),
            stdin=subprocess.PIPE,  # closes when this process ends, which stops the worker
        )
        os.close(ready_writer)

    def wait_until_ready(self, is_stopping: Callable[[], bool]) -> bool:
        """Return True once the worker is ready, or False if it ends, takes too long, or the supervisor stops."""
        deadline = self.started + START_SECONDS
        try:
            while time.monotonic() < deadline and not is_stopping():
                if select.select([self._ready_reader], [], [], 0.1)[0]:
                    return os.read(self._ready_reader, 1) != b""
            return False
        finally:
            os.close(self._ready_reader)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)


class Supervisor:
    """Runs workers until SIGTERM or SIGINT, and replaces them on SIGHUP.

    The workers share a temporary folder for their counters. It exists while the supervisor runs, so that no counter
    decreases when a worker ends.
    """

    def __init__(
        self,
        server_socket: socket.socket,
        worker_count: int,
        environment: Mapping[str, str],
        *,
        shutdown_seconds: float,
        metrics_socket: socket.socket | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """`on_ready` is called once all workers are ready."""
        self._server_socket = server_socket
        self._metrics_socket = metrics_socket
        self._counters_folder = ""
        self._worker_count = worker_count
        self._environment = environment
        self._shutdown_seconds = shutdown_seconds
        self._on_ready = on_ready
        self._workers: list[WorkerProcess] = []
        self._stopping_workers: list[WorkerProcess] = []
        self._is_stopping = False
        self._is_reload_requested = False
        self._backoff = MIN_BACKOFF_SECONDS
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        for end in (self._wakeup_reader, self._wakeup_writer):
            os.set_blocking(end, False)

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="limitforge-run-") as self._counters_folder, self._signal_handlers():
            try:
                self._start()
                if self._on_ready is not None and not self._is_stopping:
                    self._on_ready()
                while not self._is_stopping:
                    self._supervise_once()
            finally:
                self._stop()

    def _start(self) -> None:
        self._workers = [self._spawn() for _ in range(self._worker_count)]
        for worker in self._workers:
            if not worker.wait_until_ready(lambda: self._is_stopping) and not self._is_stopping:
                raise WorkerStartFailed(
                    f"a worker ended or was not ready within {START_SECONDS:.0f} s; "
                    "if it reported an error, it is in the lines before this one"
                )

    def _supervise_once(self) -> None:
        """Wait for a signal, at most a second, then reload and restart workers as needed."""
        select.select([self._wakeup_reader], [], [], 1.0)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup_reader, 4_096)
        self._stopping_workers = [worker for worker in self._stopping_workers if worker.process.poll() is None]
        if self._is_reload_requested:
            self._is_reload_requested = False
            self._reload()
        for index, worker in enumerate(self._workers):
            if worker.process.poll() is not None and not self._is_stopping:
                self._workers[index] = self._restart(worker)

    def _restart(self, dead_worker: WorkerProcess) -> WorkerProcess:
        pid, status = dead_worker.process.pid, dead_worker.process.returncode
        message = "a worker died, starting another"
        log_event(_log, logging.WARNING, "service.worker_died", message, pid=pid, status=status)
        if time.monotonic() - dead_worker.started < STABLE_SECONDS:
            time.sleep(self._backoff)
            self._backoff = min(2 * self._backoff, MAX_BACKOFF_SECONDS)
        else:
            self._backoff = MIN_BACKOFF_SECONDS
        worker = self._spawn()
        worker.wait_until_ready(lambda: self._is_stopping)
        return worker

    def _reload(self) -> None:
        """Start new workers, and stop the old ones once all new ones are ready. If any fails, keep the old ones."""
        new_workers = [self._spawn() for _ in range(self._worker_count)]
        ready = [worker.wait_until_ready(lambda: self._is_stopping) for worker in new_workers]
        if all(ready):
            old_workers, self._workers = self._workers, new_workers
            log_event(_log, logging.INFO, "service.reloaded", "new workers have taken over", workers=len(new_workers))
        else:
            old_workers = new_workers  # they are stopped instead
            message = (
                "new workers ended or were not ready in time, the old ones continue; any error is in the lines before"
            )
            log_event(_log, logging.ERROR, "service.reload_failed", message)
        self._stopping_workers += old_workers
        for worker in old_workers:
            worker.stop()

    def _stop(self) -> None:
        workers = [*self._workers, *self._stopping_workers]
        for worker in workers:
            worker.stop()
        deadline = time.monotonic() + self._shutdown_seconds + 2
        for worker in workers:
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    def _spawn(self) -> WorkerProcess:
        return WorkerProcess(self._server_socket, self._metrics_socket, self._counters_folder, self._environment)

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        def stop(_signal: int, _frame: FrameType | None) -> None:
            self._is_stopping = True

        def reload(_signal: int, _frame: FrameType | None) -> None:
            self._is_reload_requested = True

        def wake_up(_signal: int, _frame: FrameType | None) -> None:
            pass  # having a handler is enough: the signal is written to the wake-up pipe

        handlers = {
            signal.SIGTERM: stop,
            signal.SIGINT: stop,
            signal.SIGHUP: reload,
            signal.SIGCHLD: wake_up,
        }
        old_handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        old_wakeup_fd = signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_wakeup_fd)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket that workers inherit."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # IPPROTO_TCP is explicit, because asyncio sets TCP_NODELAY only then.
    server_socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server_socket.bind((host, port))
    server_socket.listen(BACKLOG)
    return server_socket
