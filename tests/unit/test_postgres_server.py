"""Test the PostgreSQL server of the tests.

Tests with their own server are in `make soak`. After a change of `tests/postgres.py`, run `make soak ARGS=tests/unit`.
"""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from tests.postgres import SHARED_MEMORY, PostgresServer, _children, _process, program_path
from tests.servers import ServerFailed, find_free_port

IS_TLS_SPOKEN = struct.pack("!ii", 8, 80_877_103)  # a request for TLS: the reply is one letter


async def test_it_answers_under_its_url(postgres_server: PostgresServer) -> None:
    async with _connected(postgres_server.url) as connection:
        assert await connection.scalar(text("SELECT current_user")) == "limitforge"


async def test_the_url_fixture_is_an_empty_database(postgres_server: PostgresServer, postgres_url: str) -> None:
    async with _connected(postgres_url) as connection:
        tables = text("SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace")
        assert await connection.scalar(tables) == 0
        name = await connection.scalar(text("SELECT current_database()"))
    assert postgres_url.endswith(f"/{name}")
    assert not postgres_server.url.endswith(f"/{name}")


async def test_a_database_with_open_connections_can_be_dropped(postgres_server: PostgresServer) -> None:
    async with _connected(postgres_server.create_database('so "called"')) as connection:
        await connection.execute(text("SELECT 1"))
        postgres_server.drop_database('so "called"')
        with pytest.raises(DBAPIError):
            await connection.execute(text("SELECT 1"))
    assert "called" not in postgres_server.sql("SELECT datname FROM pg_database")


def test_equal_databases_have_equal_dumps(postgres_server: PostgresServer) -> None:
    for name in ("left", "right"):
        postgres_server.create_database(name)
        postgres_server.sql("CREATE TABLE note (line text); INSERT INTO note VALUES ('kept')", name)
    dump = postgres_server.dump("left")
    assert "CREATE TABLE public.note" in dump
    assert "kept" in dump
    assert dump == postgres_server.dump("right")
    for name in ("left", "right"):
        postgres_server.drop_database(name)


@pytest.mark.soak
async def test_a_killed_postgres_is_gone_at_once_and_back_with_what_was_committed(
    own_postgres_server: PostgresServer,
) -> None:
    server, url = own_postgres_server, own_postgres_server.url
    server.sql("CREATE TABLE note (line text)")
    async with _connected(url) as connection:
        await connection.execute(text("INSERT INTO note VALUES ('lost')"))
        busy = asyncio.create_task(connection.execute(text("SELECT count(*) FROM generate_series(1, 1000000000000)")))
        server.sql("INSERT INTO note VALUES ('kept')")
        assert not (await asyncio.wait({busy}, timeout=0.1))[0]
        server.kill()
        assert not server.running
        with pytest.raises(DBAPIError):
            await busy
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))

    server.restart()
    assert server.url == url
    assert server.sql("SELECT line FROM note") == "kept"


@pytest.mark.soak
def test_a_restarted_postgres_keeps_its_data_and_forgets_the_options(own_postgres_server: PostgresServer) -> None:
    own_postgres_server.sql("CREATE TABLE note (line text); INSERT INTO note VALUES ('kept')")
    own_postgres_server.restart("-c", "max_connections=7")
    assert own_postgres_server.sql("SELECT line, current_setting('max_connections') FROM note") == "kept|7"
    own_postgres_server.restart()
    assert own_postgres_server.sql("SELECT line, current_setting('max_connections') FROM note") == "kept|100"


@pytest.mark.soak
async def test_a_paused_postgres_answers_only_after_it_is_resumed(own_postgres_server: PostgresServer) -> None:
    async with _connected(own_postgres_server.url) as connection:
        await connection.execute(text("SELECT 1"))
        own_postgres_server.pause()
        query = asyncio.create_task(connection.scalar(text("SELECT 2")))
        assert not (await asyncio.wait({query}, timeout=0.1))[0]
        with socket.create_connection(("127.0.0.1", own_postgres_server.port), timeout=0.1) as newcomer:
            newcomer.sendall(IS_TLS_SPOKEN)
            with pytest.raises(TimeoutError):
                newcomer.recv(1)
            own_postgres_server.resume()
            newcomer.settimeout(10)
            assert newcomer.recv(1) == b"N"
        assert await query == 2


@pytest.mark.soak
def test_a_paused_postgres_can_be_killed_and_restarted(own_postgres_server: PostgresServer) -> None:
    own_postgres_server.pause()
    own_postgres_server.kill()
    own_postgres_server.restart()
    assert own_postgres_server.sql("SELECT 1") == "1"


@pytest.mark.soak
def test_two_servers_are_independent(postgres_server: PostgresServer, own_postgres_server: PostgresServer) -> None:
    postgres_server.create_database("twin")
    own_postgres_server.create_database("twin")
    own_postgres_server.sql("CREATE TABLE note (line text)", "twin")
    own_postgres_server.kill()
    assert postgres_server.sql("SELECT count(*) FROM pg_tables WHERE tablename = 'note'", "twin") == "0"
    postgres_server.drop_database("twin")
    own_postgres_server.restart()
    assert own_postgres_server.sql("SELECT count(*) FROM note", "twin") == "0"


@pytest.mark.parametrize(
    "how", ["killed", *(pytest.param(how, marks=pytest.mark.soak) for how in ("stopped", "paused", "failed"))]
)
def test_nothing_is_left_behind(how: str, empty_postgres: Path) -> None:
    server = PostgresServer(data=empty_postgres)
    with pytest.raises(ZeroDivisionError) if how == "failed" else nullcontext(), server:
        assert server._process is not None
        folder, processes = server._data.parent, [server._process.pid, *_children(server._process.pid)]
        memory = (server._data / "postmaster.pid").read_text().splitlines()[6].split()[1]
        assert len(processes) > 3
        assert memory in _shared_memory()
        assert f"{SHARED_MEMORY}/PostgreSQL" not in Path(f"/proc/{processes[0]}/maps").read_text()
        if how == "paused":
            server.pause()
        elif how == "killed":
            server.kill()
        elif how == "failed":
            _ = 1 / 0
    assert not server.running
    assert not folder.exists()
    assert {_process(pid)[0] for pid in processes} <= {"X", "Z"}
    assert memory not in _shared_memory()


@pytest.mark.soak
def test_it_also_starts_without_a_template() -> None:
    with PostgresServer() as server:
        assert server.sql("SHOW server_encoding") == "UTF8"


@pytest.mark.soak
def test_a_taken_port_is_not_an_obstacle(
    postgres_server: PostgresServer, empty_postgres: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = iter([postgres_server.port, postgres_server.port, find_free_port()])
    monkeypatch.setattr("tests.postgres.find_free_port", lambda: next(offers))
    with PostgresServer(data=empty_postgres) as other:
        assert other.port not in {0, postgres_server.port}
        assert other.sql("SHOW port") == str(other.port)


@pytest.mark.soak
def test_settings_for_another_postgres_are_ignored(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PGPORT": "1", "PGOPTIONS": "-c no_such=1", "PGSERVICE": "none", "PGDATA": "/nowhere"}.items():
        monkeypatch.setenv(name, value)
    assert postgres_server.sql("SELECT 1") == "1"
    postgres_server.dump("postgres")


@pytest.mark.soak
def test_a_private_temporary_folder_is_not_an_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tests.postgres.MIN_FREE_BYTES", 1 << 60)
    with PostgresServer() as server:
        assert server.running
        assert (server._data.parent.parent == tmp_path) == (os.geteuid() != 0)
        assert not server._data.is_relative_to(SHARED_MEMORY)


@pytest.mark.soak
def test_a_postgres_that_cannot_start_says_why(empty_postgres: Path) -> None:
    server = PostgresServer("-c", "no_such_setting=1", data=empty_postgres)
    with pytest.raises(ServerFailed, match="no_such_setting"):
        server.start()
    assert server._folder is None


def test_sql_that_does_not_work_says_why(postgres_server: PostgresServer) -> None:
    with pytest.raises(ServerFailed, match="no_such_table"):
        postgres_server.sql("SELECT 1 FROM no_such_table")


@pytest.mark.soak
def test_a_stopped_postgres_has_nothing_to_come_back_to(empty_postgres: Path) -> None:
    server = PostgresServer(data=empty_postgres).start()
    server.stop()
    with pytest.raises(ServerFailed, match="restart"):
        server.restart()
    with pytest.raises(ServerFailed, match="not running"):
        server.pause()


def test_a_missing_postgres_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("tests.postgres.DEBIAN_PROGRAMS", tmp_path)
    with pytest.raises(ServerFailed, match="make test"):
        PostgresServer().start()


def test_the_newest_of_several_versions_off_the_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("9.6", "17", "13"):
        for name in ("postgres", "psql"):
            program = tmp_path / version / "bin" / name
            program.parent.mkdir(parents=True, exist_ok=True)
            program.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("tests.postgres.DEBIAN_PROGRAMS", tmp_path)
    assert program_path("psql") == str(tmp_path / "17" / "bin" / "psql")


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[AsyncConnection]:
    """Yield a connection that may be broken when it is closed."""
    engine = create_async_engine(url, poolclass=NullPool)
    try:
        async with engine.connect() as connection:
            yield connection
    finally:
        await engine.dispose()


def _shared_memory() -> set[str]:
    """Return the ids of all System V shared memory segments."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {line.split()[1] for line in lines}
