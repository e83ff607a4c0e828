"""Connections by URL: TLS, users and passwords, unix sockets, databases, client names. No password leaks."""

import re
from collections.abc import Iterator

import pytest

from limitforge import FixedWindow, StoreUnavailable, SyncLimiter
from tests.chaos.conftest import Connect
from tests.chaos.waiting import eventually, wait_until_store_decides
from tests.servers import AclRedisServer, RedisServer, TlsRedisServer, UnixRedisServer

FIVE = FixedWindow(name="five", limit=5, window_seconds=86_400, align="first_hit")
PATIENT = 10_000.0


@pytest.fixture(scope="module")
def tls() -> Iterator[TlsRedisServer]:
    with TlsRedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def acl() -> Iterator[AclRedisServer]:
    with AclRedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def unix() -> Iterator[UnixRedisServer]:
    with UnixRedisServer() as server:
        yield server


def works(limiter: SyncLimiter, server: RedisServer) -> None:
    server.flush()
    decisions = [limiter.check("r", "s", limits=FIVE) for _ in range(7)]
    assert {decision.degraded for decision in decisions} == {None}
    assert sum(decision.allowed for decision in decisions) == 5
    limiter.reset("r", "s", limits=FIVE)
    assert limiter.check("r", "s", limits=FIVE).allowed


def test_tls_works_with_an_authority_of_ones_own(opened: Connect, tls: TlsRedisServer) -> None:
    works(opened(tls.url, failure="raise", deadline_ms=PATIENT), tls)


def test_tls_without_a_check_of_the_name_works_by_another_name(opened: Connect, tls: TlsRedisServer) -> None:
    named = tls.url.replace("127.0.0.1", "localhost")
    with pytest.raises(StoreUnavailable):
        opened(named + "&ssl_check_hostname=true", failure="raise", deadline_ms=PATIENT).check("r", "s", limits=FIVE)
    works(opened(named + "&ssl_check_hostname=false", failure="raise", deadline_ms=PATIENT), tls)


def test_tls_with_an_authority_that_is_not_known_is_refused(opened: Connect, tls: TlsRedisServer) -> None:
    url = tls.url.split("?", maxsplit=1)[0]
    with pytest.raises(StoreUnavailable):
        opened(url, failure="raise", deadline_ms=PATIENT).check("r", "s", limits=FIVE)
    assert opened(url, failure="open", deadline_ms=PATIENT).check("r", "s", limits=FIVE).degraded == "open"


def test_plain_text_to_a_port_with_tls_is_unavailable(opened: Connect, tls: TlsRedisServer) -> None:
    limiter = opened(f"redis://127.0.0.1:{tls.port}/0", failure="closed", deadline_ms=1_000)
    assert limiter.check("r", "s", limits=FIVE).degraded == "closed"


def test_tls_to_a_port_without_it_is_unavailable(opened: Connect, redis_server: RedisServer) -> None:
    limiter = opened(f"rediss://127.0.0.1:{redis_server.port}/0?ssl_cert_reqs=none", failure="open", deadline_ms=300)
    assert limiter.check("r", "s", limits=FIVE).degraded == "open"


@pytest.mark.parametrize("kind", [TlsRedisServer, AclRedisServer, UnixRedisServer])
def test_each_kind_of_connection_is_reopened_after_a_restart(opened: Connect, kind: type[RedisServer]) -> None:
    with kind() as server:
        limiter = opened(server.url, failure="local", deadline_ms=PATIENT, breaker_seconds=0.05)
        assert limiter.check("r", "s", limits=FIVE).degraded is None
        server.kill()
        for _ in range(5):
            assert limiter.check("r", "s", limits=FIVE).degraded == "local"
        server.restart()
        wait_until_store_decides(limiter)
        works(limiter, server)


def test_a_password_may_have_any_characters(opened: Connect, acl: AclRedisServer) -> None:
    works(opened(acl.url, failure="raise", deadline_ms=PATIENT), acl)


def test_a_unix_socket_works(opened: Connect, unix: UnixRedisServer) -> None:
    limiter = opened(unix.url, failure="raise", deadline_ms=PATIENT)
    works(limiter, unix)
    assert str(unix.path).encode() in unix.command("CLIENT LIST")


@pytest.mark.parametrize("which", ["tcp", "unix"])
def test_the_database_is_the_one_of_the_url(
    opened: Connect, unix: UnixRedisServer, own_redis_server: RedisServer, which: str
) -> None:
    server: RedisServer = unix if which == "unix" else own_redis_server
    url = f"{unix.url}?db=3" if which == "unix" else f"redis://127.0.0.1:{server.port}/3"
    works(opened(url, failure="raise", deadline_ms=PATIENT), server)
    assert re.search(rb"db3:keys=1,", server.command("INFO keyspace"))
    assert b"db0:" not in server.command("INFO keyspace")


def test_a_unix_socket_takes_a_user_and_a_password(opened: Connect) -> None:
    class Both(UnixRedisServer, AclRedisServer):
        pass

    with Both() as server:
        user, password = server.USER, "p%2Fa%40s%3As%23w%25o%3Fr%26d"
        works(opened(f"unix://{user}:{password}@{server.path}?db=1", failure="raise", deadline_ms=PATIENT), server)


def test_redis_knows_a_client_by_its_name(opened: Connect, redis_server: RedisServer) -> None:
    limiter = opened(f"{redis_server.url}?client_name=orders-api", failure="raise", deadline_ms=PATIENT)
    works(limiter, redis_server)
    named = [line for line in redis_server.command("CLIENT LIST").splitlines() if b"name=orders-api" in line]
    assert named


@pytest.mark.parametrize("wrong", ["wrong-hunter2", ""])
def test_a_wrong_password_is_unavailable_and_does_not_leak(
    opened: Connect, acl: AclRedisServer, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    caplog.set_level("DEBUG")
    url = acl.url_with(wrong) if wrong else f"redis://127.0.0.1:{acl.port}/0"
    with pytest.raises(StoreUnavailable) as raised:
        opened(url, failure="raise", deadline_ms=PATIENT).check("r", "s", limits=FIVE)
    texts = [str(raised.value), repr(raised.value), repr(raised.value.__cause__), repr(raised.value.__context__)]
    for kind in ("open", "closed", "local"):
        limiter = opened(url, failure=kind, deadline_ms=PATIENT)
        assert [limiter.check("r", "s", limits=FIVE).degraded for _ in range(4)] == [kind] * 4
        texts += [repr(limiter), str(limiter.status())]
    assert "hunter2" not in " ".join([*texts, caplog.text])
    assert "password" in str(raised.value)  # the message says what to do


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
def test_after_many_wrong_passwords_no_connection_is_left_and_the_right_one_works(
    opened: Connect, acl: AclRedisServer, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """No refused caller leaks a connection or a permit of the pool."""
    monkeypatch.setattr("limitforge.stores.redis.sync.servers.MAX_CONNECTIONS", 4)
    limiter = eager(opened, acl.url_with("not-yet").replace("redis", scheme))
    assert [limiter.check("r", "s", limits=FIVE).degraded for _ in range(20)] == ["open"] * 20
    eventually(lambda: clients(acl) == 1)  # the connection that asks
    acl.command_ok(f"ACL SETUSER {acl.USER} >not-yet")
    if scheme == "redis":
        works(limiter, acl)
    acl.command_ok(f"ACL SETUSER {acl.USER} <not-yet")


def test_after_many_refusals_to_a_user_without_rights_no_connection_is_left(
    opened: Connect, acl: AclRedisServer
) -> None:
    """Redis closes connections that did not log in. These did, so the limiter must close them."""
    limiter = eager(opened, acl.url)
    acl.command_ok(f"ACL SETUSER {acl.USER} -@scripting")
    assert [limiter.check("r", "s", limits=FIVE).degraded for _ in range(20)] == ["open"] * 20
    eventually(lambda: clients(acl) == 1)
    acl.command_ok(f"ACL SETUSER {acl.USER} +@scripting")
    works(limiter, acl)


def eager(opened: Connect, url: str) -> SyncLimiter:
    """A limiter that calls Redis again after every failure."""
    return opened(url, failure="open", deadline_ms=PATIENT, breaker_failures=1_000, denial_cache_ms=0)


def clients(server: RedisServer) -> int:
    return server.command("CLIENT LIST").count(b"id=")


def test_the_right_password_does_not_leak(
    opened: Connect, caplog: pytest.LogCaptureFixture, own_redis_server: RedisServer
) -> None:
    caplog.set_level("DEBUG")
    own_redis_server.require_password("hunter2")
    url = f"redis://:hunter2@127.0.0.1:{own_redis_server.port}/0"
    limiter = opened(url, failure="open", deadline_ms=PATIENT, breaker_seconds=0.05)
    works(limiter, own_redis_server)
    own_redis_server.kill()
    for _ in range(5):
        assert limiter.check("r", "s", limits=FIVE).degraded == "open"
    with pytest.raises(StoreUnavailable) as raised:
        limiter.check("r", "s", limits=FIVE, failure="raise")
    assert "hunter2" not in f"{raised.value!r} {raised.value.__cause__!r} {limiter.status()} {caplog.text}"


def test_a_user_that_may_not_run_scripts_is_unavailable(opened: Connect, own_redis_server: RedisServer) -> None:
    own_redis_server.command_ok("ACL SETUSER default -@scripting")
    assert opened(own_redis_server.url, failure="open", deadline_ms=PATIENT).check("r", "s", limits=FIVE).degraded == (
        "open"
    )


def test_a_redis_that_takes_no_more_clients_is_unavailable(opened: Connect, own_redis_server: RedisServer) -> None:
    with own_redis_server.connection() as keeper:
        keeper.sendall(b"CONFIG SET maxclients 1\r\n")
        assert keeper.recv(64) == b"+OK\r\n"
        limiter = opened(own_redis_server.url, failure="open", deadline_ms=PATIENT, breaker_seconds=0.05)
        assert [limiter.check("r", "s", limits=FIVE).degraded for _ in range(4)] == ["open"] * 4
        keeper.sendall(b"CONFIG SET maxclients 100\r\n")
        assert keeper.recv(64) == b"+OK\r\n"
        wait_until_store_decides(limiter)
