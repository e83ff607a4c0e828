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
from limitforge.stores.redis.codec import Reply, ScriptCall
from limitforge.stores.redis.resp import (
    ASKING,
    Address,
    connection_error,
    encode_call,
    encode_call_with_script,
    encode_command,
    handshake_error,
    is_no_longer_master,
    is_script_missing,
    require_replicas,
    translate_error,
)
from limitforge.stores.resilience.failure import NotServerFault

CHUNK = 65_536


class SyncConnection:
    """One open connection. `due` is when to give up, by the monotonic clock."""

    def __init__(self, address: Address, deadline: float) -> None:
        """Connect and greet, or raise StoreUnavailable."""
        self._reader = hiredis.Reader()
        self._socket: socket.socket | None = None
        self._address = address
        try:
            self._socket = _connect(address, deadline)
            self._send(address.handshake, deadline)
            replies = [self._receive(deadline) for _ in range(address.handshake_replies)]
        except (OSError, hiredis.ProtocolError) as error:
            self.close()
            raise connection_error(error) from error
        refused = handshake_error(replies)
        if refused is not None:
            self.close()
            raise refused

    def call(self, call: ScriptCall, deadline: float, *, asking: bool = False) -> Reply:
        """Ask the script, or raise what was wrong. A node that is only about to get a slot wants to hear that we know
        (`asking`).
        """
        (reply,) = self.call_many([call], deadline, asking=asking)
        if isinstance(reply, StoreError):
            raise reply
        return reply

    def call_many(
        self, calls: Sequence[ScriptCall], deadline: float, *, asking: bool = False
    ) -> list[Reply | StoreError]:
        """Several calls in one write, each with its answer."""
        asked = ASKING if asking else b""
        replies = self._exchange(
            b"".join([asked + encode_call(call) for call in calls]), len(calls) * (1 + asking), deadline
        )
        if asking:
            replies = replies[1::2]
        for at, call in enumerate(calls):
            if is_script_missing(replies[at]):
                replies[at] = self._exchange(asked + encode_call_with_script(call), 1 + asking, deadline)[-1]
        if self._address.wait_replicas:
            (replicas,) = self._exchange(self._address.wait_command, 1, deadline)
            replies = [require_replicas(reply, replicas, self._address.wait_replicas) for reply in replies]
        if any(is_no_longer_master(reply) for reply in replies) and not self._address.is_cluster:
            self.close()
        return [translate_error(reply) if isinstance(reply, hiredis.ReplyError) else reply for reply in replies]

    def send_command(self, command: tuple[str | int | bytes, ...], deadline: float) -> Any:
        """Anything other than the script: whatever is said."""
        (reply,) = self._exchange(encode_command(*command), 1, deadline)
        return reply

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def is_stale(self) -> bool:
        """Whether Redis has closed this idle connection, or said something that nobody asked for."""
        open_socket = self._open_socket()
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

    def _exchange(self, data: bytes, replies: int, deadline: float) -> list[Any]:
        try:
            self._send(data, deadline)
            return [self._receive(deadline) for _ in range(replies)]
        except (OSError, hiredis.ProtocolError) as error:
            self.close()
            raise connection_error(error, maybe_counted=True) from error
        except BaseException:  # interrupted: its answer would be taken for that of the next call
            self.close()
            raise

    def _send(self, data: bytes, deadline: float) -> None:
        open_socket = self._open_socket()
        open_socket.settimeout(_seconds_left(deadline))
        open_socket.sendall(data)

    def _receive(self, deadline: float) -> Any:
        open_socket = self._open_socket()
        while (reply := self._reader.gets()) is False:
            # An answer that is there is taken, however late this thread came to it: with 0 nothing is waited for.
            open_socket.settimeout(max(deadline - time.monotonic(), 0))
            try:
                data = open_socket.recv(CHUNK)
            except (BlockingIOError, ssl.SSLWantReadError):
                raise TimeoutError("no answer in time") from None
            if not data:
                raise ConnectionError("the connection was closed")
            self._reader.feed(data)
        return reply

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("the connection is closed")
        return self._socket


class ConnectionPool:
    """At most `size` connections, handed to one thread at a time; the one that was used last goes first."""

    def __init__(self, address: Address, size: int) -> None:
        self._address = address
        self._idle: list[SyncConnection] = []
        self._lock = threading.Lock()
        self._permits = threading.Semaphore(size)
        self._is_closed = False

    def use(self, deadline: float, operation: Callable[[SyncConnection], Any]) -> Any:
        """Ask on a connection that nobody else uses meanwhile."""
        if not self._permits.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise NotServerFault("every connection to Redis is in use")
        try:
            with self._lock:
                wire = self._idle.pop() if self._idle else None
            if wire is not None and wire.is_stale():
                wire.close()
                wire = None
            if wire is None:
                wire = SyncConnection(self._address, deadline)
            try:
                return operation(wire)
            finally:
                if wire.is_open:
                    self._put_back(wire)
        finally:
            self._permits.release()

    def close(self) -> None:
        """For good: what is in use is closed when it comes back."""
        with self._lock:
            self._is_closed = True
            self.close_idle_unlocked()

    def _put_back(self, wire: SyncConnection) -> None:
        with self._lock:
            if self._is_closed:
                wire.close()
            else:
                self._idle.append(wire)

    def close_idle_unlocked(self) -> None:
        """Close what is idle, without the lock: after a fork nobody may be left to open it."""
        wires, self._idle = self._idle, []
        for wire in wires:
            wire.close()


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _resolve(host: str, port: int, deadline: float) -> list[Any]:
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
        found = answer.get(timeout=_seconds_left(deadline))
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


def _dial(address: Address, deadline: float) -> socket.socket:
    """The first of the host's addresses that answers. One deadline holds for all."""
    problem: OSError = ConnectionError(f"{address.host} has no address")
    for family, kind, protocol, _, place in _resolve(address.host, address.port, deadline):
        opened = socket.socket(family, kind, protocol)
        try:
            opened.settimeout(_seconds_left(deadline))
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


def _connect(address: Address, deadline: float) -> socket.socket:
    if address.path is not None:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            opened.settimeout(_seconds_left(deadline))
            opened.connect(address.path)
        except BaseException:
            opened.close()
            raise
        return opened
    opened = _dial(address, deadline)
    try:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if address.tls is not None:
            opened.settimeout(_seconds_left(deadline))
            return address.tls.wrap_socket(opened, server_hostname=address.host)
    except BaseException:
        opened.close()
        raise
    return opened
