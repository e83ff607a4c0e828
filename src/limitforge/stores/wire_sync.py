"""Connections to Redis for threads: a pool of sockets, each call with a deadline of its own.

Nothing is ever sent twice. A connection whose call failed in the middle is closed: an answer that comes late must not
be taken for that of the next call.
"""

import ipaddress
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import hiredis

from limitforge.errors import StoreError
from limitforge.stores.codec import Call, Reply
from limitforge.stores.resilience import NotAsked
from limitforge.stores.resp import (
    ASKING,
    Address,
    first_refusal,
    is_demoted,
    is_forgotten,
    pack,
    packed,
    packed_with_script,
    refusal,
    replicated,
    unreachable,
)

CHUNK = 65_536


class SyncWire:
    """One open connection. `due` is when to give up, by the monotonic clock."""

    def __init__(self, address: Address, due: float) -> None:
        """Connect and greet, or raise StoreUnavailable."""
        self._reader = hiredis.Reader()
        self._socket: socket.socket | None = None
        self._address = address
        try:
            self._socket = _connected(address, due)
            self._send(address.greeting, due)
            replies = [self._receive(due) for _ in range(address.greetings)]
        except (OSError, hiredis.ProtocolError) as error:
            self.close()
            raise unreachable(error) from error
        refused = first_refusal(replies)
        if refused is not None:
            self.close()
            raise refused

    def call(self, call: Call, due: float, *, asking: bool = False) -> Reply:
        """Ask the script, or raise what was wrong. A node that is only about to get a slot wants to hear that we know
        (`asking`).
        """
        (reply,) = self.call_all([call], due, asking=asking)
        if isinstance(reply, StoreError):
            raise reply
        return reply

    def call_all(self, calls: Sequence[Call], due: float, *, asking: bool = False) -> list[Reply | StoreError]:
        """Several calls in one write, each with its answer."""
        asked = ASKING if asking else b""
        replies = self._ask(b"".join([asked + packed(call) for call in calls]), len(calls) * (1 + asking), due)
        if asking:
            replies = replies[1::2]
        for at, call in enumerate(calls):
            if is_forgotten(replies[at]):
                replies[at] = self._ask(asked + packed_with_script(call), 1 + asking, due)[-1]
        if self._address.replicas:
            (replicas,) = self._ask(self._address.wait, 1, due)
            replies = [replicated(reply, replicas, self._address.replicas) for reply in replies]
        if any(is_demoted(reply) for reply in replies) and not self._address.redirects:
            self.close()
        return [refusal(reply) if isinstance(reply, hiredis.ReplyError) else reply for reply in replies]

    def ask(self, command: tuple[str | int | bytes, ...], due: float) -> Any:
        """Anything other than the script: whatever is said."""
        (reply,) = self._ask(pack(*command), 1, due)
        return reply

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def is_stale(self) -> bool:
        """Whether Redis has closed this idle connection, or said something that nobody asked for."""
        open_socket = self._opened()
        try:
            open_socket.settimeout(0)
            open_socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, data: bytes, answers: int, due: float) -> list[Any]:
        try:
            self._send(data, due)
            return [self._receive(due) for _ in range(answers)]
        except (OSError, hiredis.ProtocolError) as error:
            self.close()
            raise unreachable(error, maybe_counted=True) from error
        except BaseException:  # interrupted: its answer would be taken for that of the next call
            self.close()
            raise

    def _send(self, data: bytes, due: float) -> None:
        open_socket = self._opened()
        open_socket.settimeout(_left(due))
        open_socket.sendall(data)

    def _receive(self, due: float) -> Any:
        open_socket = self._opened()
        while (reply := self._reader.gets()) is False:
            # An answer that is there is taken, however late this thread came to it: with 0 nothing is waited for.
            open_socket.settimeout(max(due - time.monotonic(), 0))
            try:
                data = open_socket.recv(CHUNK)
            except (BlockingIOError, ssl.SSLWantReadError):
                raise TimeoutError("no answer in time") from None
            if not data:
                raise ConnectionError("the connection was closed")
            self._reader.feed(data)
        return reply

    def _opened(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("the connection is closed")
        return self._socket


class WirePool:
    """At most `size` connections, handed to one thread at a time; the one that was used last goes first."""

    def __init__(self, address: Address, size: int) -> None:
        self._address = address
        self._free: list[SyncWire] = []
        self._lock = threading.Lock()
        self._places = threading.Semaphore(size)
        self._is_closed = False

    def use(self, due: float, ask: Callable[[SyncWire], Any]) -> Any:
        """Ask on a connection that nobody else uses meanwhile."""
        if not self._places.acquire(timeout=max(due - time.monotonic(), 0)):
            raise NotAsked("every connection to Redis is in use")
        try:
            with self._lock:
                wire = self._free.pop() if self._free else None
            if wire is not None and wire.is_stale():
                wire.close()
                wire = None
            if wire is None:
                wire = SyncWire(self._address, due)
            try:
                return ask(wire)
            finally:
                if wire.is_open:
                    self._put_back(wire)
        finally:
            self._places.release()

    def close(self) -> None:
        """For good: what is in use is closed when it comes back."""
        with self._lock:
            self._is_closed = True
            self.abandon()

    def _put_back(self, wire: SyncWire) -> None:
        with self._lock:
            if self._is_closed:
                wire.close()
            else:
                self._free.append(wire)

    def abandon(self) -> None:
        """Close what is idle, without the lock: after a fork nobody may be left to open it."""
        wires, self._free = self._free, []
        for wire in wires:
            wire.close()


def _left(due: float) -> float:
    left = due - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _found(host: str, port: int, due: float) -> list[Any]:
    """The addresses of a host. The name server has no deadline, so a thread of its own waits for it."""
    answer: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            answer.put(error)

    if _is_numeric(host):
        ask()
    else:
        threading.Thread(target=ask, name="limitforge-resolver", daemon=True).start()
    try:
        found = answer.get(timeout=_left(due))
    except queue.Empty:
        raise TimeoutError(f"no address of {host} in time") from None
    if isinstance(found, OSError):
        raise found
    return found


def _is_numeric(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _dialled(address: Address, due: float) -> socket.socket:
    """The first of the host's addresses that answers. One deadline holds for all."""
    problem: OSError = ConnectionError(f"{address.host} has no address")
    for family, kind, protocol, _, place in _found(address.host, address.port, due):
        opened = socket.socket(family, kind, protocol)
        try:
            opened.settimeout(_left(due))
            opened.connect(place)
        except OSError as error:
            opened.close()
            problem = error
        except BaseException:
            opened.close()
            raise
        else:
            return opened
    raise problem


def _connected(address: Address, due: float) -> socket.socket:
    if address.path is not None:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            opened.settimeout(_left(due))
            opened.connect(address.path)
        except BaseException:
            opened.close()
            raise
        return opened
    opened = _dialled(address, due)
    try:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if address.tls is not None:
            opened.settimeout(_left(due))
            return address.tls.wrap_socket(opened, server_hostname=address.host)
    except BaseException:
        opened.close()
        raise
    return opened
