"""Run a redis-server for the benchmark, on 127.0.0.1, without persistence, in a temporary folder."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis

START_SECONDS = 20.0


class ServerUnavailable(Exception):
    """A server or program is missing, or did not start."""


@contextmanager
def redis_server() -> Iterator[str]:
    """Run the server for the duration of the block, and yield its URL."""
    program = shutil.which("redis-server")
    if program is None:
        raise ServerUnavailable(
            "this part needs redis-server on the PATH (apt install redis-server), or run `make bench`"
        )
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="limitforge-bench-", ignore_cleanup_errors=True) as folder:
        command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", folder]
        process = subprocess.Popen(
            [*command, "--save", "", "--appendonly", "no"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        try:
            _wait_for(process, port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.wait()


def server_version(url: str) -> str:
    """Return the version of the server, for the report."""
    redis: Any = Redis.from_url(url)
    return str(redis.info("server")["redis_version"])


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"INFO server\r\n")
                if f"process_id:{process.pid}\r\n".encode() in connection.recv(65_536):
                    return
        except OSError:
            pass
        time.sleep(0.02)
    raise ServerUnavailable(f"redis-server did not answer on port {port}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
