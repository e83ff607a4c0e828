"""A real nginx for the tests, on 127.0.0.1 and in a temporary folder.

It uses `deploy/compose/nginx.conf`, with only the addresses, paths and log files of the container replaced.
"""

import os
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from tests.servers import PORT_ATTEMPTS, START_SECONDS, STOP_SECONDS, ServerFailed, _make_certificates, find_free_port

CONFIGURATION = Path(__file__).parents[1] / "deploy" / "compose" / "nginx.conf"
DEBIAN = "/usr/sbin"  # not on the PATH of other users
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


class Nginx:
    """An nginx with TLS in front of `upstream`, a port of this machine. A context manager."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._folder = tempfile.TemporaryDirectory(prefix="limitforge-nginx-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """A client context that trusts this nginx's certificate and no other."""
        return ssl.create_default_context(cafile=str(self.folder / "ca.crt"))

    @property
    def access_log(self) -> str:
        return (self.folder / "access.log").read_text()

    @property
    def error_log(self) -> str:
        return (self.folder / "error.log").read_text()

    def __enter__(self) -> Self:
        make_certificate(self.folder)
        for _ in range(PORT_ATTEMPTS):
            self.port = find_free_port()
            if self._launch():
                return self
        raise ServerFailed(f"no free port after {PORT_ATTEMPTS} attempts\n{self.error_log}")

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def check_configuration(self) -> str:
        """Return the output of `nginx -t`. Raises ServerFailed if nginx rejects the configuration."""
        self._write()
        done = subprocess.run([*self._command(), "-t"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerFailed(done.stderr)
        return done.stderr

    def _launch(self) -> bool:
        self._write()
        self._process = subprocess.Popen([*self._command(), "-g", "daemon off;"], stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                if "Address already in use" in self.error_log:
                    return False
                raise ServerFailed(f"nginx ended at once\n{self.error_log}")
            if self._answers():
                return True
            time.sleep(0.01)
        raise ServerFailed(f"nginx did not answer within {START_SECONDS:.0f} s\n{self.error_log}")

    def _answers(self) -> bool:
        """Return whether this nginx answers on the port, and not another server: only it has the certificate."""
        try:
            with (
                socket.create_connection(("127.0.0.1", self.port), timeout=STOP_SECONDS) as connection,
                self.ssl_context.wrap_socket(connection, server_hostname="127.0.0.1"),
            ):
                return True
        except OSError:
            return False

    def _command(self) -> list[str]:
        program = shutil.which("nginx", path=f"{os.environ['PATH']}{os.pathsep}{DEBIAN}")
        if program is None:
            raise ServerFailed("nginx is not installed: `make test` installs it")
        folder = str(self.folder)
        return [program, "-p", folder, "-c", f"{folder}/nginx.conf", "-e", f"{folder}/error.log"]

    def _write(self) -> None:
        temporary = "".join(f"    {name}_temp_path {self.folder}/{name};\n" for name in TEMPORARY)
        text = CONFIGURATION.read_text()
        for deployed, here in (
            ("worker_processes auto;", "worker_processes 1;"),
            ("worker_rlimit_nofile 65536;\n", "user root;\n" if os.geteuid() == 0 else ""),
            ("worker_connections 8192;", "worker_connections 512;"),
            ("error_log /dev/stderr warn;", f"error_log {self.folder}/error.log info;"),
            ("pid /run/nginx.pid;", f"pid {self.folder}/nginx.pid;"),
            ("/dev/stdout plain buffer=64k flush=1s;", f"{self.folder}/access.log plain;"),
            ("http {\n", f"http {{\n{temporary}"),
            ("server service:8000;", f"server 127.0.0.1:{self._upstream};"),
            ("listen 8443 ssl;", f"listen 127.0.0.1:{self.port} ssl;"),
            ("/etc/nginx/certs/tls.crt;", f"{self.folder}/tls.crt;"),
            ("/etc/nginx/certs/tls.key;", f"{self.folder}/tls.key;"),
        ):
            if text.count(deployed) != 1:
                raise ServerFailed(f"nginx.conf should say {deployed!r} once")
            text = text.replace(deployed, here)
        if left := re.findall(r"[ =](?:/etc|/run|/dev|/var)/\S+", text):
            raise ServerFailed(f"nginx.conf names more of its container than the tests know: {left}")
        (self.folder / "nginx.conf").write_text(text)


def make_certificate(folder: Path) -> None:
    """Write a certificate for 127.0.0.1 (tls.crt, tls.key) and that of its authority (ca.crt)."""
    _make_certificates(folder)
    (folder / "redis.crt").rename(folder / "tls.crt")
    (folder / "redis.key").rename(folder / "tls.key")
