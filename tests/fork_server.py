"""Import limitforge once, then run each command of the tests in a fork.

Importing takes a second of CPU time, and the tests run hundreds of commands.

    python -P fork_server.py serve <socket>           the process that forks, until its stdin closes
    python -SE fork_server.py run <socket> <command>  one command, with its caller's streams, folder and environment

Each connection to the socket starts one command: JSON, with the three open files of the command. The replies are the
process id and, at the end, the exit status.
"""

import contextlib
import gc
import importlib
import json
import os
import select
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

MAX_COMMAND_BYTES = 1_048_576
PRELOADED_MODULES = [  # modules that the commands import when they run
    "aiosqlite",
    "limitforge.cli.app",
    "limitforge.cli.config_files",
    "limitforge.cli.demo",
    "limitforge.cli.keys",
    "limitforge.cli.plans",
    "limitforge.service.processes.supervisor",
    "rich.table",
    "sqlalchemy.dialects.postgresql.asyncpg",
    "sqlalchemy.dialects.sqlite.aiosqlite",
]


class ForkedWorker:
    """Start a worker of the service like `subprocess.Popen`, but in a fork."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], stdin: int) -> None:
        from limitforge.service.processes.worker import main

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
            run_as_program(command[2:], env, main)
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


def run_as_program(arguments: Sequence[str], environment: Mapping[str, str], main: Callable[[], None]) -> None:
    """Run `main` like a program, and exit with its status."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(arguments)
    status: Any = 0
    try:
        main()
    except SystemExit as end:
        status = end.code or 0
    except BaseException:  # noqa: BLE001 - like the interpreter
        traceback.print_exc()
        status = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # a pipe whose reader closed it
        status = status or 120
    os._exit(status)


def run_command(connection: socket.socket) -> None:
    """Run the command as a child, wait for it, and report its exit status."""
    from limitforge.cli import main

    message, files, _, _ = socket.recv_fds(connection, MAX_COMMAND_BYTES, 3)
    order = json.loads(message)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        connection.close()
        for number, fd in enumerate(files):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(order["folder"])
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
        run_as_program(["limitforge", *order["arguments"]], order["environment"], main)
    for fd in files:
        os.close(fd)
    connection.send(str(child).encode())
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):  # the caller was killed
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def serve(path: str) -> None:
    for name in PRELOADED_MODULES:
        importlib.import_module(name)
    workers = SimpleNamespace(Popen=ForkedWorker, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    sys.modules["limitforge.service.processes.supervisor"].subprocess = workers  # type: ignore[attr-defined]
    for number in (signal.SIGINT, signal.SIGTERM):  # signals are for the tests, which end this process when they end
        signal.signal(number, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    waiting: set[int] = set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)  # noqa: T201
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            waiting -= {pid for pid in waiting if os.waitpid(pid, os.WNOHANG)[0]}
            with connection:
                if pid := os.fork():
                    waiting.add(pid)
                    continue
                listener.close()
                run_command(connection)
                os._exit(0)
    for pid in waiting:
        os.waitpid(pid, 0)


def start_command(
    path: str, arguments: Sequence[str], files: Sequence[int], folder: str, environment: Any
) -> socket.socket:
    """Start a command, and return the connection that its replies arrive on."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    message = json.dumps({"arguments": arguments, "folder": folder, "environment": dict(environment)})
    socket.send_fds(connection, [message.encode()], files)
    return connection


if __name__ == "__main__":
    _, what, path, *arguments = sys.argv
    if what == "serve":
        serve(path)
    else:
        with start_command(path, arguments, [0, 1, 2], os.getcwd(), os.environ) as connection:  # noqa: PTH109
            connection.recv(16)
            sys.exit(int(connection.recv(16) or 70))
