"""Clients without a key can't fill the log."""

import contextlib
import os
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import RunningCommand
from tests.hostile.attack import AttackTarget, connect
from tests.servers import find_free_port
from tests.service.seeded_service import SETTINGS

MAX_LINES = 100


def lines(target: AttackTarget) -> int:
    return len(target.log.read_bytes().splitlines())


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"POST /v1/check HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://[::: HTTP/1.1\r\nHost: a\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /v1/check%2f%ff HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/check HTTP/1.1\r\nHost: a\r\nX-Api-Key: \xff\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/admin/tenants HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
@pytest.mark.parametrize("port", ["service", "metrics"])
def test_malformed_requests_do_not_fill_the_log(target: AttackTarget, request_: bytes, port: str) -> None:
    before = lines(target)
    for _ in range(2 * MAX_LINES):
        with connect(target.port if port == "service" else target.metrics_port) as client:
            client.settimeout(30)
            client.sendall(request_)
            assert client.recv(65_536).startswith(b"HTTP/1.1 ")
    assert lines(target) - before < MAX_LINES
    assert b"Traceback" not in target.log.read_bytes(), target.log.read_text()


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The port of a service with TLS, and its log."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert, log = folder / "key.pem", folder / "cert.pem", folder / "log"
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2")
    subprocess.run([*made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    port = find_free_port()
    settings = {"LIMITFORGE_TLS_CERT": str(cert), "LIMITFORGE_TLS_KEY": str(key), **SETTINGS}
    arguments = ("serve", "--port", str(port), "--database", f"sqlite:///{folder}/a.db")
    with log.open("wb") as errors, Path(os.devnull).open("rb") as nothing:
        files = (nothing.fileno(), 1, errors.fileno())
        process = RunningCommand(*arguments, files=files, environment=settings)
    with process:
        try:
            wait_for_tls(port)
            yield port, log
        finally:
            process.terminate()
            process.wait(60)


def wait_for_tls(port: int) -> None:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    deadline = time.monotonic() + 60
    while True:
        try:
            with connect(port) as plain:
                plain.settimeout(30)
                with trusting.wrap_socket(plain) as client:
                    client.sendall(b"GET /v1/health HTTP/1.1\r\nHost: a\r\n\r\n")
                    assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")
                    return
        except OSError:
            assert time.monotonic() < deadline, "the service does not answer"
            time.sleep(0.1)


def test_failed_handshakes_do_not_fill_the_log(encrypted: tuple[int, Path]) -> None:
    port, log = encrypted
    for _ in range(2 * MAX_LINES):
        with connect(port) as client:
            client.settimeout(30)
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                client.recv(65_536)
    assert len(log.read_bytes().splitlines()) < MAX_LINES, log.read_text()[:2_000]
