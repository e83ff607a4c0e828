"""Connections to Redis: errors say whether a call may have been counted, and no connection is left open."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from limitforge import Limiter, StoreUnavailable
from limitforge.stores.redis.address import parse_address
from limitforge.stores.redis.aio import event_loop
from limitforge.stores.redis.aio.connection import Connection
from limitforge.stores.redis.sync.connection import ConnectionPool, SyncConnection
from tests.contract.conftest import PATIENT
from tests.servers import RedisServer

SECONDS = 30.0


async def answer_to_the_last_of(connection: Connection, *commands: tuple[str, ...], aborts: bool = False) -> Any:
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    for command in commands[:-1]:
        connection.send_command(command, lambda _: None)
    connection.send_command(commands[-1], answered.set_result)
    if aborts:
        connection.abort()
    async with asyncio.timeout(SECONDS):
        return await answered


@pytest.mark.parametrize("aborts", [False, True])
async def test_calls_on_a_lost_connection_may_have_been_counted(redis_url: str, *, aborts: bool) -> None:
    """Redis closes the connection after its answer to QUIT, or we do."""
    connection = await Connection.open(parse_address(redis_url), lambda *_: None, SECONDS)
    error = await answer_to_the_last_of(connection, ("QUIT",), ("PING",), aborts=aborts)
    assert isinstance(error, StoreUnavailable)
    assert error.maybe_counted
    error = await answer_to_the_last_of(connection, ("PING",))  # the connection is closed already
    assert isinstance(error, StoreUnavailable)
    assert not error.maybe_counted


def test_calls_of_threads_on_a_lost_connection_may_have_been_counted(redis_url: str) -> None:
    connection = SyncConnection(parse_address(redis_url), time.monotonic() + SECONDS)
    connection.send_command(("QUIT",), time.monotonic() + SECONDS)
    with pytest.raises(StoreUnavailable) as error:
        connection.send_command(("PING",), time.monotonic() + SECONDS)
    assert error.value.maybe_counted
    assert not connection.is_open


@pytest.mark.parametrize("is_connected", [True, False])
async def test_a_command_that_timed_out_may_have_been_executed_if_it_was_sent(
    own_redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, *, is_connected: bool
) -> None:
    monkeypatch.setattr(event_loop, "COMMAND_TIMEOUT_SECONDS", SECONDS)
    async with Limiter.connect(own_redis_server.url, options=replace(PATIENT, deadline_ms=1)) as limiter:
        if is_connected:
            await limiter.reset("r", "s", limits="9/minute")
        monkeypatch.setattr(event_loop, "COMMAND_TIMEOUT_SECONDS", 0.1)
        own_redis_server.pause()
        with pytest.raises(StoreUnavailable, match="no answer within 100 ms") as error:
            await limiter.reset("r", "s", limits="9/minute")
        own_redis_server.resume()
    assert error.value.maybe_counted is is_connected


@pytest.mark.parametrize("is_closed", [True, False])
async def test_calls_in_flight_on_an_aborted_connection_may_have_been_counted(
    redis_url: str, *, is_closed: bool
) -> None:
    """The limiter is closed, or another call fails and the breaker opens."""
    answers: list[Any] = []
    async with Limiter.connect(redis_url, options=replace(PATIENT, breaker_failures=1)) as limiter:
        await limiter.check("r", "s", limits="9/minute", cost=0)
        (client,) = limiter._store._clients.values()  # type: ignore[attr-defined]
        pipeline = client.only_pipeline
        pipeline.connection.current.send_command(("BLPOP", "nothing", "0"), answers.append)
        if is_closed:
            await limiter.close()
        else:
            pipeline.on_failure(StoreUnavailable("no server"), pipeline.server.resilience.now_us())
    assert [isinstance(error, StoreUnavailable) and error.maybe_counted for error in answers] == [True]


def test_a_connection_in_use_is_closed_when_it_returns_to_a_closed_pool(redis_url: str) -> None:
    pool = ConnectionPool(parse_address(redis_url), 1)
    used: list[SyncConnection] = []

    def ask(connection: SyncConnection) -> None:
        used.append(connection)
        assert connection.send_command(("PING",), time.monotonic() + SECONDS) == b"PONG"

    def close(connection: SyncConnection) -> None:
        used.append(connection)
        pool.close()

    for act in (ask, close):
        pool.use(time.monotonic() + SECONDS, act)
    assert used[0] is used[1]
    assert not used[0].is_open


def test_a_connection_that_redis_closed_while_it_was_idle_is_not_used_again(redis_url: str) -> None:
    pool = ConnectionPool(parse_address(redis_url), 1)
    used: list[SyncConnection] = []

    def ask(connection: SyncConnection, command: str) -> object:
        used.append(connection)
        return connection.send_command((command,), time.monotonic() + SECONDS)

    pool.use(time.monotonic() + SECONDS, lambda connection: ask(connection, "QUIT"))
    give_up_at = time.monotonic() + SECONDS
    while not used[0].is_stale():
        assert time.monotonic() < give_up_at
    assert pool.use(time.monotonic() + SECONDS, lambda connection: ask(connection, "PING")) == b"PONG"
    assert used[0] is not used[1]
    pool.close()
