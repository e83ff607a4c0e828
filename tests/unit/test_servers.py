"""The servers of the tests do what their names say."""

import shutil
import socket
import ssl
from contextlib import suppress

import pytest

from tests.servers import AclRedisServer, RedisServer, ServerFailed, TlsRedisServer, UnixRedisServer, find_free_port


def test_a_restarted_redis_keeps_its_url_and_loses_its_data(own_redis_server: RedisServer) -> None:
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
    offers = iter([redis_server.port, redis_server.port, find_free_port()])
    monkeypatch.setattr("tests.servers.find_free_port", lambda: next(offers))
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


def test_a_saved_redis_has_its_data_after_a_crash(own_redis_server: RedisServer) -> None:
    own_redis_server.command_ok("SET key value")
    own_redis_server.command_ok("SAVE")
    own_redis_server.kill()
    own_redis_server.restart()
    assert own_redis_server.command("GET key") == b"$5\r\nvalue\r\n"


def test_a_redis_that_requires_a_password_answers_no_other_client(own_redis_server: RedisServer) -> None:
    with own_redis_server.connection() as early:
        own_redis_server.require_password("secret")
        assert early.recv(16) == b""
    with socket.create_connection(("127.0.0.1", own_redis_server.port)) as stranger:
        stranger.sendall(b"PING\r\n")
        assert stranger.recv(64).startswith(b"-NOAUTH")
        assert own_redis_server.command("PING") == b"+PONG\r\n"
        own_redis_server.remove_password()
    assert own_redis_server.command("PING") == b"+PONG\r\n"


def test_a_command_that_must_work_and_does_not_says_which(own_redis_server: RedisServer) -> None:
    with pytest.raises(ServerFailed, match=r"CONFIG: .*ERR"):
        own_redis_server.command_ok("CONFIG SET no-such-setting 1")


def test_a_redis_with_users_knows_its_own_only() -> None:
    with AclRedisServer() as server:
        assert b"forge" in server.command("ACL WHOAMI")
        assert "p%2Fa%40s%3As%23w%25o%3Fr%26d@" in server.url
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(b"PING\r\n")
            assert stranger.recv(64).startswith(b"-NOAUTH")


def test_a_redis_on_a_unix_socket_answers_there() -> None:
    with UnixRedisServer() as server, socket.socket(socket.AF_UNIX) as connection:
        assert server.url == f"unix://{server.path}"
        connection.connect(str(server.path))
        connection.sendall(b"PING\r\n")
        assert connection.recv(16) == b"+PONG\r\n"


def test_a_redis_with_tls_speaks_nothing_else_and_keeps_its_certificate() -> None:
    with TlsRedisServer() as server:
        certificate = server.authority.read_text()
        assert server.command("PING") == b"+PONG\r\n"
        server.restart()
        assert server.authority.read_text() == certificate
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            plain.sendall(b"PING\r\n")
            with suppress(ConnectionResetError):
                assert b"PONG" not in plain.recv(64)
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            distrust = ssl.create_default_context()
            with pytest.raises(ssl.SSLCertVerificationError):
                distrust.wrap_socket(plain, server_hostname="127.0.0.1")


@pytest.mark.parametrize("kind", [UnixRedisServer, TlsRedisServer])
def test_a_server_that_was_not_started_has_no_files(kind: type[RedisServer]) -> None:
    with pytest.raises(ServerFailed, match="not started"):
        _ = kind().url


def test_a_missing_openssl_is_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shutil.which
    monkeypatch.setattr("tests.servers.shutil.which", lambda name: None if name == "openssl" else found(name))
    with pytest.raises(ServerFailed, match="openssl is not installed"):
        TlsRedisServer().start()
