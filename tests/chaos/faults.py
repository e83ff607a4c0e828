"""Faults of a Redis server, each as a context manager that injects it and repairs it at the end."""

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
    """A fault. `needs_proxy`: the limiter must connect through the proxy. `loses_data`: the data does not survive.
    `may_go_unnoticed`: checks may be decided by the store all the time.
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
    """The server has crashed, and loads its data slowly: -LOADING."""
    server.command("EVAL \"for n = 1, 9999 do redis.call('SET', 'filler' .. n, 'x') end\" 0")
    server.command_ok("SAVE")
    server.kill()
    slow_loading = ("--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024")
    back = threading.Thread(target=server.restart, args=slow_loading)
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
    """A script of another client does not end: no answer at first, then -BUSY."""
    server.command_ok("CONFIG SET busy-reply-threshold 50")
    with server.connection() as other_client:
        other_client.sendall(b'EVAL "while true do end" 0\r\n')
        try:
            yield
        finally:
            _until_accepted(server, "SCRIPT KILL")
            assert b"killed" in other_client.recv(1_024).lower()


@contextmanager
def password_changed(server: RedisServer, _: Proxy) -> Iterator[None]:
    """The server needs a password that the limiter does not know: -NOAUTH."""
    server.require_password("changed-meanwhile")
    try:
        yield
    finally:
        server.remove_password()


def by_commands(inject: tuple[str, ...], repair: tuple[str, ...]) -> FaultContext:
    """A fault that commands inject and repair."""

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
    """A fault of the network."""

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
    """Repeat a command until it is accepted: a script can be killed only after it exceeded the busy threshold."""
    for _ in range(500):
        with suppress(OSError):
            if server.command(command).startswith(b"+OK"):
                return
        time.sleep(0.02)
    raise AssertionError(f"Redis never accepted {command}")


REPLICA, MASTER = "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"  # a replica of no server: its data is never replaced
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
