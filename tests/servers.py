"""Real Redis servers for the tests, on 127.0.0.1, each in a temporary folder.

Nothing here uses redis-py, because waiting for a server must not depend on the client under test.
"""

import random
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

START_SECONDS = 30.0  # generous, for busy machines
STOP_SECONDS = 10.0
PORT_ATTEMPTS = 20

# Below the range of ephemeral ports. Inside it, a client that retries the port of a dead server can get that port as
# its own, connect to itself, and keep the server from restarting.
PORTS = range(20_000, 32_000)


class ServerFailed(Exception):
    """A server did not start or did not answer. The message ends with its log."""


class RedisServer:
    """One `redis-server` without persistence. A restart loses data and scripts, and keeps the URL.

    It is a context manager. `options` are those of redis-server, such as `"--cluster-enabled", "yes"`. Data that a
    `SAVE` wrote survives a restart.
    """

    def __init__(self, *options: str) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._credentials: tuple[str, ...] = ()  # for `command`: a password, or a user and a password
        self.port = 0

    @property
    def url(self) -> str:
        """The URL without a login."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start on a free port. Returns once the server answers."""
        if self.running:
            return self
        try:
            self._launch_on_a_free_port()
        except ServerFailed:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Shut down gracefully, and remove the folder."""
        self._end(signal.SIGTERM)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def kill(self) -> None:
        """Kill the server, as in a crash. `restart` starts it again under the same URL, without data."""
        self._end(signal.SIGKILL)

    def restart(self, *options: str) -> None:
        """Start again under the same URL, without data and scripts, even if the server was not running.

        `options` are for this run only.
        """
        if not self.port:
            raise ServerFailed("restart of a server that was never started")
        self._end(signal.SIGTERM)
        if not self._launch(*options):
            raise ServerFailed(f"port {self.port} was taken by another program during the restart\n{self._log()}")

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open and get no answers, as behind a broken network."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def flush(self) -> None:
        """Delete all keys; loaded scripts stay."""
        self.command_ok("FLUSHALL")

    def require_password(self, password: str) -> None:
        """Require a password from all clients, including connected ones. `command` logs in with it."""
        self.command_ok(f"CONFIG SET requirepass {password}")
        self._credentials = (password,)
        self.command("CLIENT KILL TYPE normal")

    def remove_password(self) -> None:
        self.command_ok('CONFIG SET requirepass ""')
        self._credentials = ()

    def command(self, line: str) -> bytes:
        """Send one inline command, and return the raw reply, or what one read returns of it."""
        with self.connection() as connection:
            connection.sendall(f"{line}\r\n".encode())
            return connection.recv(65_536)

    def command_ok(self, line: str) -> None:
        """Send one inline command, and raise unless the reply is OK."""
        reply = self.command(line)
        if not reply.startswith(b"+OK"):
            raise ServerFailed(f"{line.split(maxsplit=1)[0]}: {reply!r}")

    def connection(self) -> socket.socket:
        """Return a raw connection that has logged in."""
        connection = self._connect()
        if self._credentials:
            connection.sendall(f"AUTH {' '.join(self._credentials)}\r\n".encode())
            if (reply := connection.recv(1_024)) != b"+OK\r\n":
                connection.close()
                raise ServerFailed(f"AUTH: {reply!r}")
        return connection

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _launch_on_a_free_port(self) -> None:
        for _ in range(PORT_ATTEMPTS):
            self.port = find_free_port()
            if self._launch():
                return
        raise ServerFailed(f"no free port after {PORT_ATTEMPTS} attempts\n{self._log()}")

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=STOP_SECONDS)

    def _listen(self, folder: Path) -> list[str]:
        """The options for listening. `folder` is that of the server."""
        return ["--port", str(self.port)]

    def _arguments(self, folder: Path) -> list[str]:
        """The arguments of `redis-server`. `folder` is that of the server."""
        arguments = ["--bind", "127.0.0.1", *self._listen(folder), "--dir", str(folder)]
        return [*arguments, "--save", "", "--appendonly", "no", *self._options]

    def _launch(self, *options: str) -> bool:
        """Return True once the server answers on `self.port`, False if another program has that port."""
        program = shutil.which("redis-server")
        if program is None:
            raise ServerFailed("redis-server is not installed: `make test` installs it")
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="limitforge-redis-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        command = [program, *self._arguments(folder), *options]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                if "Address already in use" in self._log():
                    return False
                raise ServerFailed(f"redis-server ended at once\n{self._log()}")
            if self._answers(self._process.pid):
                return True
            time.sleep(0.01)
        self.kill()
        raise ServerFailed(f"redis-server did not answer within {START_SECONDS:.0f} s\n{self._log()}")

    def _answers(self, pid: int) -> bool:
        """Return True if this process answers. Another server on the port would answer a PING as well."""
        try:
            return self.command("PING") == b"+PONG\r\n" and f"process_id:{pid}\r\n".encode() in self.command(
                "INFO server"
            )
        except OSError:
            return False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None or self._process.poll() is not None:
            raise ServerFailed("redis-server is not running")
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        self._process.send_signal(signal.SIGCONT)  # a paused process would not see a SIGTERM
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _log(self) -> str:
        if self._folder is None:
            return ""
        return (Path(self._folder.name) / "log").read_text(errors="replace")[-2_000:]


class AclRedisServer(RedisServer):
    """A server with one user with a password. The default user is off, as Redis recommends."""

    USER = "forge"
    PASSWORD = "p/a@s:s#w%o?r&d"  # noqa: S105 - it has every character with a meaning in URLs

    def __init__(self, *options: str) -> None:
        users = ("--user", "default", "off", "--user", self.USER, "on", f">{self.PASSWORD}", "~*", "&*", "+@all")
        super().__init__(*users, *options)
        self._credentials = (self.USER, self.PASSWORD)

    @property
    def url(self) -> str:
        return self.url_with(self.PASSWORD)

    def url_with(self, password: str) -> str:
        return f"redis://{self.USER}:{quote(password, safe='')}@127.0.0.1:{self.port}/0"


class UnixRedisServer(RedisServer):
    """A server on a unix socket. It listens on its port as well, which `command` uses."""

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    @property
    def path(self) -> Path:
        if self._folder is None:
            raise ServerFailed("no socket: the server was not started")
        return Path(self._folder.name) / "redis.sock"

    def _listen(self, folder: Path) -> list[str]:
        return [*super()._listen(folder), "--unixsocket", str(folder / "redis.sock"), "--unixsocketperm", "700"]


class TlsRedisServer(RedisServer):
    """A server with TLS only. Its certificate is for 127.0.0.1, by an authority of its own."""

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}/0?ssl_ca_certs={self.authority}&ssl_cert_reqs=required"

    @property
    def authority(self) -> Path:
        """The file with the certificate of the authority."""
        if self._folder is None:
            raise ServerFailed("no certificate: the server was not started")
        return Path(self._folder.name) / "ca.crt"

    def _connect(self) -> socket.socket:
        return ssl.create_default_context(cafile=str(self.authority)).wrap_socket(
            super()._connect(), server_hostname="127.0.0.1"
        )

    def _listen(self, folder: Path) -> list[str]:
        if not (folder / "redis.crt").exists():
            _make_certificates(folder)
        options = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
        for option, file in (("cert-file", "redis.crt"), ("key-file", "redis.key"), ("ca-cert-file", "ca.crt")):
            options += [f"--tls-{option}", str(folder / file)]
        return options


# As strict as Python 3.13 requires. The openssl.cnf of the machine is not used.
_CERTIFICATES = """
[req]
distinguished_name = name
prompt = no
[name]
CN = limitforge tests
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = IP:127.0.0.1
"""


def _make_certificates(folder: Path) -> None:
    """Create an authority (ca.crt) and a certificate (redis.crt, redis.key), valid for two days."""
    program = shutil.which("openssl")
    if program is None:
        raise ServerFailed("openssl is not installed: a Redis with TLS needs it for its certificate")
    (folder / "openssl.cnf").write_text(_CERTIFICATES)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    request = [program, "req", "-config", "openssl.cnf", "-x509", "-days", "2", *key, "-extensions"]
    signed = ["-subj", "/CN=redis", "-CA", "ca.crt", "-CAkey", "ca.key"]
    for command in (
        [*request, "authority", "-keyout", "ca.key", "-out", "ca.crt"],
        [*request, "server", "-keyout", "redis.key", "-out", "redis.crt", *signed],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerFailed(f"openssl made no certificate\n{done.stderr}")


def find_free_port() -> int:
    """Return a port that is free now. Another program may take it a moment later, so callers try again."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
