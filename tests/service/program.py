"""The real program in its own process, and raw HTTP requests to it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cli.command import ENVIRONMENT, INSTALLED_PROGRAM, RunningCommand

START_SECONDS = 60.0  # generous, because the machine may be busy
ANSWER_SECONDS = 30.0


@dataclass
class HttpResponse:
    """One HTTP response as it was received."""

    status: int
    headers: dict[str, str]
    body: bytes
    head: bytes = field(repr=False)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class RunningService:
    """A service that is ready. `demo` is the output of `limitforge demo --json`."""

    process: subprocess.Popen[bytes] | RunningCommand
    demo: dict[str, Any]
    port: int

    @property
    def key(self) -> str:
        key: str = self.demo["api_key"]
        return key

    def check(self, key: str | None = None, **body: Any) -> HttpResponse:
        fields = {"resource": "GET:/orders", "subject": "user:42"} | body
        return self.post("/v1/check", fields, key=key or self.key)

    def post(self, path: str, body: Any, key: str | None = None) -> HttpResponse:
        return self.request("POST", path, json.dumps(body).encode(), {"x-api-key": key or self.key})

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Send one request on a new connection."""
        sent = {"host": "test", "connection": "close"} | dict(headers or {})
        if body is not None:
            sent = {"content-type": "application/json", "content-length": str(len(body))} | sent
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        return self.raw(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + (body or b""))

    def raw(self, request: bytes) -> HttpResponse:
        """Send any bytes on a new connection, and return the answer."""
        with self.connection() as connection:
            connection.sendall(request)
            return read_response(connection)

    def connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_SECONDS)

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_SECONDS)


@contextlib.contextmanager
def run_demo(
    *options: str, environment: Mapping[str, str] | None = None, is_installed: bool = False
) -> Iterator[RunningService]:
    """Run `limitforge demo` on a free port. `is_installed` is that of `run_service`."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as output:
        try:
            arguments = ("demo", "--port", "0", "--json", *options)
            process = _start(arguments, environment, write, is_installed=is_installed)
        finally:
            os.close(write)
        with process, _stopped_at_end(process):
            made = json.loads(output.readline() or b"{}")
            yield RunningService(process, made, int(made["base_url"].rpartition(":")[2].partition("/")[0]))


@contextlib.contextmanager
def run_service(
    port: int,
    *options: str,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    is_installed: bool = False,
) -> Iterator[RunningService]:
    """Run `limitforge serve` on this port, and yield once it answers. `log` receives its stderr.

    `is_installed` starts the installed program instead of a fork, which takes three more seconds of CPU time.
    """
    with contextlib.nullcontext() if log is None else log.open("wb") as errors:
        errors_fd = 2 if errors is None else errors.fileno()
        process = _start(("serve", "--port", str(port), *options), environment, 1, errors_fd, is_installed=is_installed)
    with process, _stopped_at_end(process):
        running = RunningService(process, {}, port)
        health = f"{(environment or {}).get('LIMITFORGE_ROOT_PATH', '')}/v1/health"
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if running.request("GET", health).status == 200:
                    break
            except OSError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the service does not answer; it ended with {process.poll()}")
            time.sleep(0.05)
        yield running


def read_response(connection: socket.socket, buffered: bytearray | None = None) -> HttpResponse:
    """Read the next response of a connection. `buffered` keeps the bytes that follow it."""
    data = bytearray() if buffered is None else buffered
    while b"\r\n\r\n" not in data:
        _receive(connection, data)
    head, _, _ = bytes(data).partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    status = int(lines[0].split()[1])
    if status == 100:
        del data[: len(head) + 4]
        return read_response(connection, data)
    length = int(headers.get("content-length", "0"))
    while len(data) < len(head) + 4 + length:
        _receive(connection, data)
    body = bytes(data[len(head) + 4 : len(head) + 4 + length])
    del data[: len(head) + 4 + length]
    return HttpResponse(status, headers, body, head)


def _receive(connection: socket.socket, data: bytearray) -> None:
    chunk = connection.recv(65_536)
    if not chunk:
        raise ConnectionError(f"the service closed the connection after {bytes(data)!r}")
    data += chunk


def _start(
    arguments: tuple[str, ...],
    environment: Mapping[str, str] | None,
    output: int,
    errors: int = 2,
    *,
    is_installed: bool = False,
) -> subprocess.Popen[bytes] | RunningCommand:
    if is_installed:
        whole = {**ENVIRONMENT, **(environment or {})}
        return subprocess.Popen(
            [INSTALLED_PROGRAM, *arguments], env=whole, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )
    with Path(os.devnull).open("rb") as nothing:
        return RunningCommand(*arguments, files=(nothing.fileno(), output, errors), environment=environment)


@contextlib.contextmanager
def _stopped_at_end(process: subprocess.Popen[bytes] | RunningCommand) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
