"""Run a server as a separate process, and read its CPU time."""

import contextlib
import http.client
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.server import ServerUnavailable

START_SECONDS = 60.0
STOP_SECONDS = 15.0
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def running_server(command: Sequence[str], port: int, folder: Path, environment: Mapping[str, str]) -> Iterator[int]:
    """Run a server from its first answer until the block ends, and yield its process id.

    It runs in the root of this repository, so that Python finds the apps of this package. Its output is in a file in
    the folder.
    """
    log = folder / f"{port}.log"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LIMITFORGE_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**inherited, **environment},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        _wait_for(process, port, log)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_us(pid: int) -> float:
    """Return the CPU time of a process and its children."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has exited
            continue
        if pid in (int(stat.parent.name), int(fields[1])):
            ticks += int(fields[11]) + int(fields[12])
    return 1e6 * ticks / os.sysconf("SC_CLK_TCK")


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until the server answers HTTP with any status."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/")
            connection.getresponse()
            return
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
        finally:
            connection.close()
    words = log.read_text(errors="replace")[-2_000:]
    raise ServerUnavailable(f"{Path(str(process.args[0])).name} did not answer on port {port}. Its output:\n{words}")  # type: ignore[index]
