"""Run the tests of a bug on a copy of the source with that bug."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from tests.mutants.bugs import Bug

TIMEOUT_S = 300.0
TERMINATE_TIMEOUT_S = 15.0
PYTEST = ("-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-n", "0", "-m", "not soak and not chaos")

_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - (.*))?$", re.MULTILINE)
PASSED, FAILED, INTERRUPTED = 0, 1, 2


class Outcome(msgspec.Struct, frozen=True):
    """The result for a bug: killed, survived, equivalent or broken (its line in the list is wrong)."""

    verdict: str
    detail: str = ""
    seconds: float = 0.0


class MutantRunner:
    """Runs the tests of bugs in the project at `root`. A context manager: it deletes the copies of the source at its
    end.
    """

    def __init__(self, root: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.root = root
        self.timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="limitforge-mutants-")
        self._original = Path(self._folder.name) / "pristine"
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def __enter__(self) -> Self:
        shutil.copytree(self.root / "src", self._original / "src")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def failure_on_original(self, tests: str) -> str:
        """Return the output of pytest if these tests fail on the original source, else an empty string.

        The compiled files that this creates are shared by the copies.
        """
        status, output = self._pytest(self._original, tests, timeout_s=None)
        return "" if status == PASSED else f"{output}\npytest {tests}: exit status {status}"

    def run_mutant(self, bug: Bug) -> Outcome:
        if bug.equivalent:
            return Outcome("equivalent", bug.equivalent)
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            copy = Path(folder)
            shutil.copytree(self._original / "src", copy / "src")
            try:
                bug.write_into(copy)
            except ValueError as error:
                return Outcome("broken", str(error))
            try:
                status, output = self._pytest(copy, bug.tests, self.timeout_s)
            except subprocess.TimeoutExpired:
                return Outcome("killed", f"hung: no end after {self.timeout_s:g} s", self.timeout_s)
        return _outcome_of(status, output, time.monotonic() - started)

    def stop(self) -> None:
        """Stop running tests, and start no more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _terminate(process)

    def _pytest(self, copy: Path, tests: str, timeout_s: float | None) -> tuple[int, str]:
        environment = os.environ | {
            "PYTHONPATH": str(copy / "src"),
            "LIMITFORGE_TEST_PROFILE": "mutants",
            "COLUMNS": "1000",  # pytest shortens its summary to fit, and the reason of a failure is at the end
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with tempfile.TemporaryFile("w+", dir=self._folder.name) as output:
            with self._lock:
                if self._stopped:
                    return INTERRUPTED, ""
                process = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *PYTEST, *shlex.split(tests)],
                    cwd=self.root,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C only reaches this program, which then stops them
                )
                self._running.add(process)
            try:
                status = process.wait(timeout_s)
            finally:
                _terminate(process)
                self._running.discard(process)
            output.seek(0)
            return status, output.read()


def _outcome_of(status: int, output: str, seconds: float) -> Outcome:
    if status == PASSED:
        return Outcome("survived", seconds=seconds)
    failure = _FAILURE.search(output)
    if status in (FAILED, INTERRUPTED) and failure:
        hung = "hung: " if "pytest-timeout" in (failure[2] or "") else ""
        return Outcome("killed", f"{hung}{failure[1]}", seconds)
    return Outcome("broken", f"pytest ended with status {status}: {output[-500:].strip()}", seconds)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, so that tests stop their servers (see tests/conftest.py), and SIGKILL to what remains."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
