"""Import the command once, then become one command after the other, each in a fork.

Importing takes a second of CPU time, and the tests run hundreds of commands. Each order is a message on the socket
that is file descriptor 0, with three open files for the command and a pipe for its process id and exit status.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MAX_ORDER = 1_048_576


class ForkedWorker:
    """Start a worker of the service as `subprocess.Popen` does, but in a fork."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], stdin: int) -> None:
        from limitforge.service.worker import main

        self.returncode: int | None = None
        ours, theirs = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.set_wakeup_fd(-1)
            os.dup2(ours, 0)
            keep = {0, 1, 2, *pass_fds}
            for name in list(Path("/proc/self/fd").iterdir()):
                if int(name.name) not in keep:
                    with contextlib.suppress(OSError):  # the folder itself was open
                        os.close(int(name.name))
            become(command[2:], env, main)
        os.close(ours)
        self.stdin = os.fdopen(theirs, "wb")

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout or 0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def become(arguments: Sequence[str], environment: Mapping[str, str], main: Callable[[], None]) -> None:
    """Run `main` as the program would, and end this process with its exit status."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(arguments)
    status: Any = 0
    try:
        main()
    except SystemExit as end:
        status = end.code or 0
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        status = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # a pipe that its reader closed
        status = status or 120
    os._exit(status)


def run(order: dict[str, Any], files: Sequence[int], report: int) -> None:
    """Run the command and report on it; this process is its parent and waits for it."""
    from limitforge.cli import main

    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number, fd in enumerate(files):
            os.dup2(fd, number)
        for fd in (*files, report):
            os.close(fd)
        os.chdir(order["folder"])
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
        become(["limitforge", *order["arguments"]], order["environment"], main)
    for fd in files:
        os.close(fd)
    os.write(report, f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def serve() -> None:
    import aiosqlite  # noqa: F401 - what all of them need in the end
    import rich.table  # noqa: F401
    import sqlalchemy.dialects.postgresql.asyncpg
    import sqlalchemy.dialects.sqlite.aiosqlite  # noqa: F401

    import limitforge.cli.app
    import limitforge.cli.config
    import limitforge.cli.demo
    import limitforge.cli.keys
    import limitforge.cli.plans
    import limitforge.service.supervisor

    workers = SimpleNamespace(Popen=ForkedWorker, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    limitforge.service.supervisor.subprocess = workers  # type: ignore[assignment, attr-defined]
    for number in (signal.SIGINT, signal.SIGTERM):  # which are for the tests: they end this process when they end
        signal.signal(number, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    orders = socket.socket(fileno=os.dup(0))
    os.set_inheritable(orders.fileno(), False)
    waiting: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(orders, MAX_ORDER, 4)
        waiting -= {pid for pid in waiting if os.waitpid(pid, os.WNOHANG)[0]}
        if not message:
            break
        if pid := os.fork():
            waiting.add(pid)
            for fd in fds:
                os.close(fd)
        else:
            orders.close()
            run(json.loads(message), fds[:3], fds[3])
            os._exit(0)
    for pid in waiting:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    serve()
