"""The proxy of the chaos tests does what its modes say."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.proxy import (
    CloseConnections,
    Delay,
    DropReplies,
    DropRequests,
    Forward,
    Garbage,
    Mode,
    OneByteAtATime,
    Proxy,
    Truncate,
    unreachable_url,
)
from tests.servers import RedisServer

# Tests of test helpers are not needed while you work. Run this file with `-m ""` when the proxy changes.
pytestmark = pytest.mark.slow
only_in_soak = pytest.mark.soak

SHORT = 0.05  # long enough to see that nothing arrives


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    redis_server.flush()
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
        yield client


def ask(client: socket.socket, command: str = "PING") -> bytes:
    client.sendall(f"{command}\r\n".encode())
    return client.recv(1_024)


def ask_in_vain(client: socket.socket, command: str = "PING") -> None:
    client.settimeout(SHORT)
    with pytest.raises(TimeoutError):
        ask(client, command)
    client.settimeout(10)


def test_it_passes_both_ways_and_counts_who_is_connected(proxy: Proxy, client: socket.socket) -> None:
    assert ask(client) == b"+PONG\r\n"
    assert (proxy.connections, proxy.accepted) == (1, 1)
    client.close()
    for _ in range(1_000):
        if not proxy.connections:
            break
        time.sleep(0.01)
    assert (proxy.connections, proxy.accepted) == (0, 1)


def test_dropped_requests_have_no_effect_and_no_answer(
    proxy: Proxy, client: socket.socket, redis_server: RedisServer
) -> None:
    with proxy.in_mode(DropRequests()):
        ask_in_vain(client, "INCR n")
    assert ask(client, "GET n") == b"$-1\r\n"


def test_dropped_replies_are_of_requests_that_had_their_effect(proxy: Proxy, client: socket.socket) -> None:
    with proxy.in_mode(DropReplies()):
        ask_in_vain(client, "INCR n")
    assert ask(client, "GET n") == b"$1\r\n1\r\n"


@only_in_soak
def test_delayed_replies_come_later(proxy: Proxy, client: socket.socket) -> None:
    proxy.mode = Delay(0.2)
    started = time.monotonic()
    assert ask(client) == b"+PONG\r\n"
    assert time.monotonic() - started >= 0.2


@only_in_soak
def test_a_cut_reply_ends_in_its_middle_and_a_shorter_one_does_not(proxy: Proxy, client: socket.socket) -> None:
    proxy.mode = Truncate(after=8)
    assert ask(client) == b"+PONG\r\n"
    assert ask(client, "ECHO longer-than-that") == b"$16\r\nlon"
    assert client.recv(16) == b""


@only_in_soak
def test_a_dripping_reply_comes_byte_by_byte_until_it_may_pass(proxy: Proxy, client: socket.socket) -> None:
    with proxy.in_mode(OneByteAtATime(0.02)):
        assert ask(client) == b"+"
        assert client.recv(16) == b"P"
    rest = client.recv(16)
    while not rest.endswith(b"\r\n"):
        rest += client.recv(16)
    assert b"+P" + rest == b"+PONG\r\n"


def test_refused_connections_are_closed_at_once_also_those_that_were_open(proxy: Proxy, client: socket.socket) -> None:
    assert ask(client) == b"+PONG\r\n"
    with proxy.in_mode(CloseConnections()):
        assert client.recv(16) == b""
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as other:
            assert other.recv(16) == b""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as other:
        assert ask(other) == b"+PONG\r\n"


@only_in_soak
def test_garbage_replaces_a_reply(proxy: Proxy, client: socket.socket) -> None:
    proxy.mode = Garbage(b"?\x00\xff\r\n")
    assert ask(client) == b"?\x00\xff\r\n"


@only_in_soak
def test_a_server_that_is_not_there_ends_the_connection(own_redis_server: RedisServer) -> None:
    own_redis_server.kill()
    with (
        Proxy(own_redis_server.port) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client,
    ):
        assert client.recv(16) == b""


@only_in_soak
@pytest.mark.parametrize(
    "mode", [Forward(), DropReplies(), Delay(60), OneByteAtATime(60), CloseConnections()], ids=repr
)
def test_it_closes_cleanly_in_every_mode(redis_server: RedisServer, mode: Mode) -> None:
    proxy = Proxy(redis_server.port)
    proxy.mode = mode
    clients = [socket.create_connection(("127.0.0.1", proxy.port), timeout=10) for _ in range(5)]
    for client in clients:
        client.sendall(b"PING\r\n")
    proxy.close()
    proxy.close()
    assert "proxy" not in {thread.name for thread in threading.enumerate()}
    for client in clients:
        client.close()


@only_in_soak
def test_threads_may_switch_it_under_load(proxy: Proxy) -> None:
    def switch() -> None:
        for mode in (Forward(), Delay(0.001), OneByteAtATime(0), Forward()):
            proxy.mode = mode

    switching = [threading.Thread(target=switch) for _ in range(4)]
    for thread in switching:
        thread.start()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
        for _ in range(20):
            reply = ask(client)
            while not reply.endswith(b"\r\n"):
                reply += client.recv(16)
            assert reply == b"+PONG\r\n"
    for thread in switching:
        thread.join()


@only_in_soak
def test_what_is_unreachable_neither_connects_nor_refuses() -> None:
    with unreachable_url() as url, socket.socket() as client:
        client.settimeout(SHORT)
        with pytest.raises(TimeoutError):
            client.connect(("127.0.0.1", int(url.split(":")[2].split("/")[0])))
