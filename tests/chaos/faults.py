"""The ways in which a Redis fails, each a `with` block: broken inside, mended at its end."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

from tests import run_report
from tests.proxy import (
    CloseConnections,
    Delay,
    DropReplies,
    DropRequests,
    Garbage,
    Mode,
    OneByteAtATime,
    Proxy,
    Truncate,
)
from tests.servers import RedisServer

FaultContext = Callable[[RedisServer, Proxy], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """`proxied`: it is in the proxy, so the limiter must go through it. `forgets`: the data does not survive it.
    `passes`: checks may go on undegraded while it lasts.
    """

    name: str
    inject: FaultContext
    needs_proxy: bool = False
    loses_data: bool = False
    may_go_unnoticed: bool = False

    def injected(self, server: RedisServer, proxy: Proxy) -> AbstractContextManager[None]:
        run_report.record_fault(self.name)
        return self.inject(server, proxy)


@contextmanager
def killed(server: RedisServer, _: Proxy) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.restart()


@contextmanager
def frozen(server: RedisServer, _: Proxy) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextmanager
def loading(server: RedisServer, _: Proxy) -> Iterator[None]:
    """It has crashed, and takes its time to read what it had saved: -LOADING."""
    server.command("EVAL \"for n = 1, 9999 do redis.call('SET', 'filler' .. n, 'x') end\" 0")
    server.command_ok("SAVE")
    server.kill()
    slowly = ("--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024")
    back = threading.Thread(target=server.restart, args=slowly)
    back.start()
    try:
        yield
    finally:
        _until_accepted(server, "CONFIG SET key-load-delay 0")
        back.join()


@contextmanager
def clients_killed(server: RedisServer, _: Proxy) -> Iterator[None]:
    with _repeating(server, "CLIENT KILL TYPE normal"):
        yield


@contextmanager
def scripts_flushed(server: RedisServer, _: Proxy) -> Iterator[None]:
    with _repeating(server, "SCRIPT FLUSH"):
        yield


@contextmanager
def busy(server: RedisServer, _: Proxy) -> Iterator[None]:
    """Somebody's script runs and runs: nothing at first, then -BUSY."""
    server.command_ok("CONFIG SET busy-reply-threshold 50")
    with server.connection() as somebody:
        somebody.sendall(b'EVAL "while true do end" 0\r\n')
        try:
            yield
        finally:
            _until_accepted(server, "SCRIPT KILL")
            assert b"killed" in somebody.recv(1_024).lower()


@contextmanager
def password_changed(server: RedisServer, _: Proxy) -> Iterator[None]:
    """A password that the limiter does not know: -NOAUTH."""
    server.require_password("changed-meanwhile")
    try:
        yield
    finally:
        server.remove_password()


def by_commands(inject: tuple[str, ...], repair: tuple[str, ...]) -> FaultContext:
    """Redis is told commands to break it, and others to mend it."""

    @contextmanager
    def fault(server: RedisServer, _: Proxy) -> Iterator[None]:
        for command in inject:
            server.command_ok(command)
        try:
            yield
        finally:
            for command in repair:
                server.command_ok(command)

    return fault


def by_proxy(mode: Mode) -> FaultContext:
    """The way to Redis is what fails."""

    def fault(_: RedisServer, proxy: Proxy) -> AbstractContextManager[None]:
        return proxy.in_mode(mode)

    return fault


@contextmanager
def _repeating(server: RedisServer, command: str) -> Iterator[None]:
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(0.03):
            server.command(command)

    repeating = threading.Thread(target=repeat)
    repeating.start()
    try:
        yield
    finally:
        over.set()
        repeating.join()


def _until_accepted(server: RedisServer, command: str) -> None:
    """Until it is accepted: a script is killable only once it is known to be slow."""
    for _ in range(500):
        with suppress(OSError):
            if server.command(command).startswith(b"+OK"):
                return
        time.sleep(0.02)
    raise AssertionError(f"Redis never accepted {command}")


REPLICA, MASTER = "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"  # of nobody: no data is ever replaced
STALE = "CONFIG SET replica-serve-stale-data"

SERVER_FAULTS = (
    Fault("killed", killed, loses_data=True),
    Fault("frozen", frozen),
    Fault("loading", loading, loses_data=True),
    Fault("clients-killed", clients_killed, may_go_unnoticed=True),
    Fault("scripts-flushed", scripts_flushed, may_go_unnoticed=True),
    Fault("clients-paused", by_commands(("CLIENT PAUSE 600000 WRITE",), ("CLIENT UNPAUSE",))),
    Fault("full", by_commands(("CONFIG SET maxmemory 1",), ("CONFIG SET maxmemory 0",))),
    Fault("read-only", by_commands((REPLICA,), (MASTER,))),
    Fault("master-down", by_commands((f"{STALE} no", REPLICA), (MASTER, f"{STALE} yes"))),
    Fault("busy", busy),
    Fault("locked", password_changed),
)
NETWORK_FAULTS = (
    Fault("requests-lost", by_proxy(DropRequests()), needs_proxy=True),
    Fault("replies-lost", by_proxy(DropReplies()), needs_proxy=True),
    Fault("slow", by_proxy(Delay(0.01)), needs_proxy=True, may_go_unnoticed=True),
    Fault("too-slow", by_proxy(Delay(1.0)), needs_proxy=True),
    Fault("cut-at-once", by_proxy(Truncate(1)), needs_proxy=True),
    Fault("cut-in-the-middle", by_proxy(Truncate(30)), needs_proxy=True, may_go_unnoticed=True),
    Fault("dripping", by_proxy(OneByteAtATime(0.02)), needs_proxy=True),
    Fault("refusing", by_proxy(CloseConnections()), needs_proxy=True),
    Fault("http", by_proxy(Garbage()), needs_proxy=True),
    Fault("noise", by_proxy(Garbage(bytes(range(256)))), needs_proxy=True),
    Fault("silence-of-lines", by_proxy(Garbage(b"\r\n\r\n")), needs_proxy=True),
)
FAULTS = SERVER_FAULTS + NETWORK_FAULTS
