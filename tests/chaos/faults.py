"""The ways in which a Redis fails, each a `with` block: broken inside, mended at its end."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

from tests import report
from tests.proxy import Cut, Delay, Drip, DropReplies, DropRequests, Garbage, Mode, Proxy, Refuse
from tests.servers import RedisServer

Broken = Callable[[RedisServer, Proxy], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """`proxied`: it is in the proxy, so the limiter must go through it. `forgets`: the data does not survive it.
    `passes`: checks may go on undegraded while it lasts.
    """

    name: str
    breaks: Broken
    proxied: bool = False
    forgets: bool = False
    passes: bool = False

    def broken(self, server: RedisServer, proxy: Proxy) -> AbstractContextManager[None]:
        report.fault(self.name)
        return self.breaks(server, proxy)


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
    server.must("SAVE")
    server.kill()
    slowly = ("--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024")
    back = threading.Thread(target=server.restart, args=slowly)
    back.start()
    try:
        yield
    finally:
        _patiently(server, "CONFIG SET key-load-delay 0")
        back.join()


@contextmanager
def clients_killed(server: RedisServer, _: Proxy) -> Iterator[None]:
    with _again_and_again(server, "CLIENT KILL TYPE normal"):
        yield


@contextmanager
def scripts_flushed(server: RedisServer, _: Proxy) -> Iterator[None]:
    with _again_and_again(server, "SCRIPT FLUSH"):
        yield


@contextmanager
def busy(server: RedisServer, _: Proxy) -> Iterator[None]:
    """Somebody's script runs and runs: nothing at first, then -BUSY."""
    server.must("CONFIG SET busy-reply-threshold 50")
    with server.connection() as somebody:
        somebody.sendall(b'EVAL "while true do end" 0\r\n')
        try:
            yield
        finally:
            _patiently(server, "SCRIPT KILL")
            assert b"killed" in somebody.recv(1_024).lower()


@contextmanager
def locked(server: RedisServer, _: Proxy) -> Iterator[None]:
    """A password that the limiter does not know: -NOAUTH."""
    server.lock("changed-meanwhile")
    try:
        yield
    finally:
        server.unlock()


def told(broken: tuple[str, ...], mended: tuple[str, ...]) -> Broken:
    """Redis is told commands to break it, and others to mend it."""

    @contextmanager
    def fault(server: RedisServer, _: Proxy) -> Iterator[None]:
        for command in broken:
            server.must(command)
        try:
            yield
        finally:
            for command in mended:
                server.must(command)

    return fault


def spoilt(mode: Mode) -> Broken:
    """The way to Redis is what fails."""

    def fault(_: RedisServer, proxy: Proxy) -> AbstractContextManager[None]:
        return proxy.doing(mode)

    return fault


@contextmanager
def _again_and_again(server: RedisServer, command: str) -> Iterator[None]:
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


def _patiently(server: RedisServer, command: str) -> None:
    """Until it is accepted: a script is killable only once it is known to be slow."""
    for _ in range(500):
        with suppress(OSError):
            if server.command(command).startswith(b"+OK"):
                return
        time.sleep(0.02)
    raise AssertionError(f"Redis never accepted {command}")


REPLICA, MASTER = "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"  # of nobody: no data is ever replaced
STALE = "CONFIG SET replica-serve-stale-data"

OF_THE_SERVER = (
    Fault("killed", killed, forgets=True),
    Fault("frozen", frozen),
    Fault("loading", loading, forgets=True),
    Fault("clients-killed", clients_killed, passes=True),
    Fault("scripts-flushed", scripts_flushed, passes=True),
    Fault("clients-paused", told(("CLIENT PAUSE 600000 WRITE",), ("CLIENT UNPAUSE",))),
    Fault("full", told(("CONFIG SET maxmemory 1",), ("CONFIG SET maxmemory 0",))),
    Fault("read-only", told((REPLICA,), (MASTER,))),
    Fault("master-down", told((f"{STALE} no", REPLICA), (MASTER, f"{STALE} yes"))),
    Fault("busy", busy),
    Fault("locked", locked),
)
OF_THE_WAY = (
    Fault("requests-lost", spoilt(DropRequests()), proxied=True),
    Fault("replies-lost", spoilt(DropReplies()), proxied=True),
    Fault("slow", spoilt(Delay(0.01)), proxied=True, passes=True),
    Fault("too-slow", spoilt(Delay(1.0)), proxied=True),
    Fault("cut-at-once", spoilt(Cut(1)), proxied=True),
    Fault("cut-in-the-middle", spoilt(Cut(30)), proxied=True, passes=True),
    Fault("dripping", spoilt(Drip(0.02)), proxied=True),
    Fault("refusing", spoilt(Refuse()), proxied=True),
    Fault("http", spoilt(Garbage()), proxied=True),
    Fault("noise", spoilt(Garbage(bytes(range(256)))), proxied=True),
    Fault("silence-of-lines", spoilt(Garbage(b"\r\n\r\n")), proxied=True),
)
FAULTS = OF_THE_SERVER + OF_THE_WAY
