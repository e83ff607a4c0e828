"""What Cluster and Sentinel groups share: servers that start and stop together, and commands to them."""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import BinaryIO, Self, TypeAlias
from urllib.parse import quote

from tests.servers import RedisServer, ServerFailed

HOST = "127.0.0.1"
SLOT_COUNT = 16_384
WAIT_SECONDS = 60.0  # generous, as in `tests.servers`
POLL_SECONDS = 0.05

Reply: TypeAlias = "bytes | int | list[Reply] | None"


def query(server: RedisServer, *words: str | bytes | int) -> Reply:
    """Send one command, and return its whole reply. Raises `ServerFailed` for an error reply."""
    encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    request = b"".join([b"*%d\r\n" % len(words), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)])
    with server.connection() as connection, connection.makefile("rb") as stream:
        connection.sendall(request)
        try:
            return _read_reply(stream)
        except ServerFailed as error:
            raise ServerFailed(f"{server.port}: {b' '.join(encoded[:3]).decode(errors='replace')}: {error}") from None


def query_text(server: RedisServer, *words: str | bytes | int) -> str:
    """Send a command whose reply is text."""
    reply = query(server, *words)
    if not isinstance(reply, bytes):
        raise ServerFailed(f"{server.port}: {words[0]!r}: text expected, not {reply!r}")
    return reply.decode(errors="replace")


def query_fields(server: RedisServer, *words: str | bytes | int) -> dict[str, str]:
    """Send a command whose reply has `name:value` lines, such as INFO."""
    return dict(line.split(":", 1) for line in query_text(server, *words).splitlines() if ":" in line)


class GroupServer(RedisServer):
    """A server of a group. A master does not wait for its replicas when it is stopped."""

    def __init__(self, *options: str, password: str | None = None) -> None:
        login = () if password is None else ("--requirepass", password, "--masterauth", password)
        super().__init__("--repl-diskless-sync-delay", "0", "--shutdown-timeout", "0", *login, *options)
        self._credentials = () if password is None else (password,)
        self._paused = False

    @property
    def is_reachable(self) -> bool:
        """True if the server is neither dead nor paused."""
        return self.running and not self._paused

    def pause(self) -> None:
        super().pause()
        self._paused = True

    def resume(self) -> None:
        super().resume()
        self._paused = False

    def log(self) -> str:
        """Return the end of the log."""
        return self._log()

    def _launch(self, *options: str) -> bool:
        self._paused = False
        return super()._launch(*options)


class ServerGroup:
    """Servers that start and stop together. If one cannot start, the others are stopped."""

    def __init__(self, password: str | None) -> None:
        self._password = password
        self._servers: list[GroupServer] = []
        self._running = ExitStack()

    def start(self) -> Self:
        """Start all servers. Returns once the group is healthy."""
        try:
            self._start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        self._running.close()
        self._servers.clear()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _start_all(self) -> None:
        raise NotImplementedError

    def _start(self, server: GroupServer) -> None:
        self._servers.append(server)
        self._running.callback(server.stop)
        server.start()

    def _authority(self, servers: Iterable[GroupServer]) -> str:
        """Return the part of a URL with the login and the servers."""
        login = "" if self._password is None else f":{quote(self._password, safe='')}@"
        return login + ",".join(f"{HOST}:{server.port}" for server in servers)

    def _wait(self, what: str, missing: Callable[[], str], seconds: float = WAIT_SECONDS) -> None:
        """Poll until `missing` returns "". A server that cannot be reached counts as missing."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                lack = missing()
            except (OSError, ServerFailed) as error:
                lack = f"{type(error).__name__}: {error}"
            if not lack:
                return
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        logs = "\n".join(f"--- {server.port}\n{server.log()[-1_000:]}" for server in self._servers)
        raise ServerFailed(f"{what}: not within {seconds:.0f} s: {lack}\n{logs}")


def is_in_sync(replica: RedisServer) -> bool:
    return query_fields(replica, "INFO", "replication").get("master_link_status") == "up"


def _read_reply(stream: BinaryIO) -> Reply:
    """Read one RESP2 reply."""
    line = stream.readline()
    kind, rest = line[:1], line[1:].rstrip()
    match kind:
        case b"+":
            return rest
        case b":":
            return int(rest)
        case b"$":
            return None if rest == b"-1" else _read_bulk(stream, int(rest))
        case b"*":
            return None if rest == b"-1" else [_read_reply(stream) for _ in range(int(rest))]
    raise ServerFailed(rest.decode(errors="replace") if kind == b"-" else f"no reply: {line!r}")


def _read_bulk(stream: BinaryIO, size: int) -> bytes:
    bulk = stream.read(size + 2)
    if len(bulk) < size + 2:
        raise ServerFailed(f"the reply ended after {len(bulk)} of {size} bytes")
    return bulk[:-2]
