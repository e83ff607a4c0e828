"""Run the `limitforge` command in a process of its own."""

import atexit
import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests import fork_server

SECONDS = 60.0  # generous, because the machine may be busy
INSTALLED_PROGRAM = str(Path(sys.executable).parent / "limitforge")

# Independent of the terminal that the tests run in.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")} | {
    "COLUMNS": "80",
    "LINES": "40",
    "TERM": "xterm-256color",
    "PYTHONUTF8": "1",
}


def run_cli(
    *arguments: str, stdin: bytes | None = None, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end in `folder`, with `environment` in addition to `ENVIRONMENT`.

    It is forked from a process that has imported all modules. `run_installed_cli` starts a new interpreter.
    """
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(stdin or b"")
        files[0].seek(0)
        process = RunningCommand(
            *arguments, files=tuple(file.fileno() for file in files), folder=folder, environment=environment
        )
        with process:
            status = process.wait(SECONDS)
        for file in files[1:]:
            file.seek(0)
        return _completed(arguments, status, files[1].read(), files[2].read())


def run_installed_cli(
    *arguments: str, stdin: bytes | None = None, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the installed program, which takes half a second longer."""
    done = subprocess.run(
        [INSTALLED_PROGRAM, *arguments],
        input=stdin or b"",
        capture_output=True,
        cwd=folder,
        env=ENVIRONMENT | environment,
        timeout=SECONDS,
        check=False,
    )
    return _completed(arguments, done.returncode, done.stdout, done.stderr)


def _completed(arguments: tuple[str, ...], status: int, out: bytes, err: bytes) -> subprocess.CompletedProcess[str]:
    assert b"Traceback" not in err, err.decode()
    return subprocess.CompletedProcess(list(arguments), status, out.decode(), err.decode())


class RunningCommand:
    """A running command, with the methods of `subprocess.Popen` that tests need."""

    def __init__(
        self,
        *arguments: str,
        files: tuple[int, ...],
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`files` are its stdin, stdout and stderr; `environment` is added to `ENVIRONMENT`."""
        self._status_socket = fork_server.start_command(
            forking_socket(), arguments, files, str(folder or Path.cwd()), ENVIRONMENT | dict(environment or {})
        )
        self.pid = int(self._status_socket.recv(16))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status_socket], [], [], 0)[0]:
            self.returncode = int(
                self._status_socket.recv(16) or -signal.SIGKILL
            )  # the whole process group was killed, for example by a time-out
        return self.returncode

    def wait(self, timeout: float = SECONDS) -> int:
        if self.returncode is None and not select.select([self._status_socket], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("limitforge", timeout)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the command if it is still running."""
        self.kill()
        self.wait()
        self._status_socket.close()


@functools.cache
def forking_socket() -> str:
    """Start the process that `tests/fork_server.py` describes: one for all tests of this worker."""
    folder = tempfile.TemporaryDirectory(prefix="limitforge-forking-")
    path = str(Path(folder.name) / "socket")
    process = subprocess.Popen(
        [sys.executable, "-P", fork_server.__file__, "serve", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    def end() -> None:
        process.communicate(timeout=SECONDS)
        folder.cleanup()

    atexit.register(end)
    return path
