"""The servers that tests lean on do what their names say."""

import socket

import pytest

from tests.servers import RedisServer, ServerFailed, _free_port


def test_a_restarted_redis_keeps_its_url_and_forgets_everything(own_redis_server: RedisServer) -> None:
    url = own_redis_server.url
    assert own_redis_server.command("SET key value") == b"+OK\r\n"
    own_redis_server.restart()
    assert own_redis_server.url == url
    assert own_redis_server.command("DBSIZE") == b":0\r\n"


def test_a_killed_redis_refuses_connections_until_it_is_restarted(own_redis_server: RedisServer) -> None:
    own_redis_server.kill()
    assert not own_redis_server.running
    with pytest.raises(ConnectionRefusedError):
        own_redis_server.command("PING")
    own_redis_server.restart()
    assert own_redis_server.command("PING") == b"+PONG\r\n"


def test_a_paused_redis_accepts_and_answers_only_once_resumed(own_redis_server: RedisServer) -> None:
    own_redis_server.pause()
    with socket.create_connection(("127.0.0.1", own_redis_server.port), timeout=0.05) as connection:
        connection.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(16)
        own_redis_server.resume()
        connection.settimeout(10)
        assert connection.recv(16) == b"+PONG\r\n"


def test_a_paused_redis_can_be_stopped(own_redis_server: RedisServer) -> None:
    own_redis_server.pause()
    own_redis_server.stop()
    assert not own_redis_server.running


def test_a_taken_port_is_no_obstacle(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    offers = iter([redis_server.port, redis_server.port, _free_port()])
    monkeypatch.setattr("tests.servers._free_port", lambda: next(offers))
    with RedisServer() as other:
        assert other.port not in {0, redis_server.port}
        assert other.command("PING") == b"+PONG\r\n"


def test_a_redis_that_cannot_start_says_why() -> None:
    with pytest.raises(ServerFailed, match="no-such-option"):
        RedisServer("--no-such-option", "yes").start()


def test_a_missing_redis_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServerFailed, match="make test"):
        RedisServer().start()


def test_the_url_fixture_starts_empty(redis_server: RedisServer, request: pytest.FixtureRequest) -> None:
    redis_server.command("SET left-by another-test")
    assert request.getfixturevalue("redis_url") == redis_server.url
    assert redis_server.command("DBSIZE") == b":0\r\n"
