"""Connections to Redis for threads: a pool of sockets, with a deadline for each call.

No call is ever sent twice. A connection is closed when a call on it fails midway, because a late reply would be taken
for the reply to the next call.
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
from limitforge.stores.errors import NotServerFault
from limitforge.stores.redis.address import Address
from limitforge.stores.redis.resp import (
    ASKING,
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
from limitforge.stores.redis.script_call import Reply, ScriptCall

RECEIVE_BYTES = 65_536


class SyncConnection:
    """One open connection. Every `deadline` is a time of the monotonic clock."""

    def __init__(self, address: Address, deadline: float) -> None:
        """Connect, and send the handshake. Raises StoreUnavailable if that fails."""
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
        """Call the script. Raises the error if there is one.

        `asking` sends ASKING first, which a server needs while it imports the slot.
        """
        (reply,) = self.call_many([call], deadline, asking=asking)
        if isinstance(reply, StoreError):
            raise reply
        return reply

    def call_many(
        self, calls: Sequence[ScriptCall], deadline: float, *, asking: bool = False
    ) -> list[Reply | StoreError]:
        """Send several calls in one write. Return the reply or the error of each."""
        prefix = ASKING if asking else b""
        replies = self._exchange(
            b"".join([prefix + encode_call(call) for call in calls]), len(calls) * (1 + asking), deadline
        )
        if asking:
            replies = replies[1::2]
        for index, call in enumerate(calls):
            if is_script_missing(replies[index]):
                replies[index] = self._exchange(prefix + encode_call_with_script(call), 1 + asking, deadline)[-1]
        if self._address.wait_replicas:
            (replicas,) = self._exchange(self._address.wait_command, 1, deadline)
            replies = [require_replicas(reply, replicas, self._address.wait_replicas) for reply in replies]
        if any(is_no_longer_master(reply) for reply in replies) and not self._address.is_cluster:
            self.close()
        return [translate_error(reply) if isinstance(reply, hiredis.ReplyError) else reply for reply in replies]

    def send_command(self, command: tuple[str | int | bytes, ...], deadline: float) -> Any:
        """Send a command other than the script. Return the raw reply."""
        (reply,) = self._exchange(encode_command(*command), 1, deadline)
        return reply

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def is_stale(self) -> bool:
        """Return True if Redis has closed this idle connection, or sent something that is not a reply to a call."""
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
        except BaseException:  # interrupted: its reply would be taken for the reply to the next call
            self.close()
            raise

    def _send(self, data: bytes, deadline: float) -> None:
        open_socket = self._open_socket()
        open_socket.settimeout(_seconds_left(deadline))
        open_socket.sendall(data)

    def _receive(self, deadline: float) -> Any:
        open_socket = self._open_socket()
        while (reply := self._reader.gets()) is False:
            # A reply that has arrived is read even after the deadline: a timeout of 0 does not block.
            open_socket.settimeout(max(deadline - time.monotonic(), 0))
            try:
                data = open_socket.recv(RECEIVE_BYTES)
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
    """At most `size` connections, each used by one thread at a time. The most recently used one is reused first."""

    def __init__(self, address: Address, size: int) -> None:
        self._address = address
        self._idle: list[SyncConnection] = []
        self._lock = threading.Lock()
        self._permits = threading.Semaphore(size)
        self._is_closed = False

    def use(self, deadline: float, operation: Callable[[SyncConnection], Any]) -> Any:
        """Run an operation on a connection that no other thread uses meanwhile."""
        if not self._permits.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise NotServerFault("every connection to Redis is in use")
        try:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is not None and connection.is_stale():
                connection.close()
                connection = None
            if connection is None:
                connection = SyncConnection(self._address, deadline)
            try:
                return operation(connection)
            finally:
                if connection.is_open:
                    self._put_back(connection)
        finally:
            self._permits.release()

    def close(self) -> None:
        """Close the pool for good. A connection that is in use is closed when its operation ends."""
        with self._lock:
            self._is_closed = True
            self.close_idle_unlocked()

    def _put_back(self, connection: SyncConnection) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
            else:
                self._idle.append(connection)

    def close_idle_unlocked(self) -> None:
        """Close idle connections without the lock: in a forked child, the thread that holds the lock does not exist."""
        connections, self._idle = self._idle, []
        for connection in connections:
            connection.close()


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _resolve(host: str, port: int, deadline: float) -> list[Any]:
    """Return the addresses of a host. The resolver has no timeout, so a thread waits for it."""
    answer: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            answer.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            answer.put(error)

    if _is_numeric(host):
        resolve()
    else:
        threading.Thread(target=resolve, name="limitforge-resolver", daemon=True).start()
    try:
        addresses = answer.get(timeout=_seconds_left(deadline))
    except queue.Empty:
        raise TimeoutError(f"the name {host} was not resolved in time") from None
    if isinstance(addresses, OSError):
        raise addresses
    return addresses


def _is_numeric(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _dial(address: Address, deadline: float) -> socket.socket:
    """Connect to the first address of the host that accepts. All attempts share one deadline."""
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
