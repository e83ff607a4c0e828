"""Real servers for the tests: started on 127.0.0.1, each in a folder of its own, gone when the test is.

Nothing here uses redis-py: what waits for a server must not depend on the client under test.
"""

import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

START_SECONDS = 30.0  # generous: a busy machine is no reason to fail
STOP_SECONDS = 10.0
PORT_ATTEMPTS = 20

# Below the range from which the kernel hands out ports. Inside it, a client that retries a dead server's port can be
# given that very port as its own, connect to itself, and keep the server from coming back.
PORTS = range(20_000, 32_000)


class ServerFailed(Exception):
    """A server did not start, or did not answer; the message ends with its log."""


class RedisServer:
    """One `redis-server` without persistence: a restart forgets the data and the scripts, and keeps the URL.

    Usable as a context manager. `options` are redis-server's own, such as `"--cluster-enabled", "yes"`.
    """

    def __init__(self, *options: str) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start on a free port; returns once the server answers."""
        if self.running:
            return self
        try:
            self._launch_on_a_free_port()
        except ServerFailed:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Shut down in an orderly way and remove the folder."""
        self._end(signal.SIGTERM)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def kill(self) -> None:
        """SIGKILL, as in a crash. `restart` brings it back, empty, under the same URL."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Come back under the same URL, with neither data nor scripts, whether it was running or not."""
        if not self.port:
            raise ServerFailed("restart of a server that was never started")
        self._end(signal.SIGTERM)
        if not self._launch():
            raise ServerFailed(f"port {self.port} was taken by another program during the restart\n{self._log()}")

    def pause(self) -> None:
        """Freeze (SIGSTOP): connections stay open and nothing answers, as behind a broken network."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def flush(self) -> None:
        """Delete all keys; loaded scripts stay."""
        reply = self.command("FLUSHALL")
        if not reply.startswith(b"+OK"):
            raise ServerFailed(f"FLUSHALL: {reply!r}")

    def command(self, line: str) -> bytes:
        """Send one inline command and return the raw reply, or as much of it as one read holds."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=STOP_SECONDS) as connection:
            connection.sendall(f"{line}\r\n".encode())
            return connection.recv(65_536)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _launch_on_a_free_port(self) -> None:
        for _ in range(PORT_ATTEMPTS):
            self.port = _free_port()
            if self._launch():
                return
        raise ServerFailed(f"no free port after {PORT_ATTEMPTS} attempts\n{self._log()}")

    def _launch(self) -> bool:
        """True once the server answers on `self.port`; False if somebody else has that port."""
        program = shutil.which("redis-server")
        if program is None:
            raise ServerFailed("redis-server is not installed: `make test` installs it")
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="limitforge-redis-", ignore_cleanup_errors=True)
        folder = self._folder.name
        command = [program, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", folder]
        command += ["--save", "", "--appendonly", "no", *self._options]
        with (Path(folder) / "log").open("wb") as log:
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
        """Whether our own process answers: somebody else's server on this port would answer a PING as well."""
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


def _free_port() -> int:
    """A port that is free now. It may be gone a moment later, so the caller tries again."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
