"""Connect to the catalog's database: transactions, schema upgrades, and translation of driver errors."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from sqlite3 import OperationalError
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, event, text
from sqlalchemy.engine import URL, ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from limitforge.core.exact import short_repr
from limitforge.errors import CatalogUnavailable, Conflict, InvalidInput

DEFAULT_URL = "sqlite:///limitforge.db"
TIMEOUT_SECONDS = 5.0  # for a statement, a connection or a lock
POOL_SIZE = 5
APPLICATION_NAME = "limitforge"
DRIVER_THREAD_SECONDS = 0.05  # time for the driver's thread to end: it logs an error if the event loop ends first
WAL_ATTEMPTS = 100
WAL_PAUSE_SECONDS = 0.05
UPGRADE_LOCK = 0x6C66_7570  # the key of an advisory lock: only one process upgrades at a time

_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+asyncpg",
    "postgresql": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
}


class Database:
    """A SQLite or Postgres database. It connects on first use, and every wait has a timeout."""

    def __init__(self, url: str = DEFAULT_URL) -> None:
        self.url = _parse_url(url)
        name = make_url(url).query.get("application_name", APPLICATION_NAME)
        self.is_sqlite = self.url.drivername.startswith("sqlite")
        self.description = _describe(self.url)
        self.statement_count = 0
        """The number of statements sent so far, for tests and measurements of cost."""
        self._engine = create_async_engine(self.url, **_engine_options(self.url, str(name)))
        events = self._engine.sync_engine
        if self.is_sqlite:
            event.listen(events, "connect", _configure_sqlite)
        event.listen(events, "begin", self._begin)
        event.listen(events, "before_cursor_execute", self._count_statement)
        event.listen(events, "handle_error", self._translate_driver_error)

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Begin a read-only transaction with a consistent view of the database."""
        async with self._connected() as connection, connection.begin():
            yield connection

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Begin a transaction that writes. It commits when the block ends, and rolls back on an error."""
        async with self._connected() as connection:
            await connection.execution_options(writes=True)
            async with connection.begin():
                yield connection

    async def upgrade(self, to: str = "head") -> None:
        """Upgrade the schema to a version, by default to the newest one."""
        await self._migrate(command.upgrade, to)

    async def downgrade(self, to: str) -> None:
        """Downgrade the schema to an earlier version."""
        await self._migrate(command.downgrade, to)

    async def schema_version(self) -> str | None:
        """Return the version of the schema, or None if there is no schema yet."""
        async with self.reading() as connection:
            return await connection.run_sync(lambda sync: MigrationContext.configure(sync).get_current_revision())

    async def ensure_schema(self) -> None:
        """Require the newest schema. SQLite is upgraded right away; for Postgres, which an operator must upgrade, raise
        `InvalidInput` with the command to run.
        """
        found, newest = await self.schema_version(), newest_schema_version()
        if found == newest:
            return
        if found is not None and found not in known_schema_versions():
            problem = f"the schema of {self.description} is {found}, from a later release; this release has {newest}"
            raise InvalidInput("database", f"{problem}: run that release, or restore an earlier database")
        if not self.is_sqlite:
            state = f"at {found}" if found else "missing"
            raise InvalidInput(
                "database",
                f"the schema of {self.description} is {state}, and {newest} is needed: run `limitforge db upgrade`",
            )
        await self.upgrade()

    async def notifications(self, channel: str) -> AsyncGenerator[None, None]:
        """Yield once when the connection listens, and then for each notification of Postgres.

        Raises `CatalogUnavailable` when the connection is lost.
        """
        notifications = asyncio.Queue[str]()
        async with self._connected() as connection:
            raw: Any = (await connection.get_raw_connection()).driver_connection
            raw.add_termination_listener(lambda _: notifications.put_nowait(""))
            await raw.add_listener(channel, lambda *arguments: notifications.put_nowait(arguments[-1]))
            try:
                yield
                while await notifications.get():
                    yield
            finally:
                await connection.invalidate()  # a listening connection must not go back into the pool
        raise CatalogUnavailable(f"the database {self.description} has closed the connection")

    async def close(self) -> None:
        await self._engine.dispose()

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        try:
            with self._translated(OSError, TimeoutError):
                connection = await self._engine.connect()
        except CatalogUnavailable:
            if self.is_sqlite:
                await asyncio.sleep(DRIVER_THREAD_SECONDS)
            raise
        try:
            with self._translated():
                yield connection
        finally:
            with contextlib.suppress(SQLAlchemyError, OSError, TimeoutError):
                await connection.close()

    @contextlib.contextmanager
    def _translated(self, *others: type[Exception]) -> Iterator[None]:
        """Translate the driver's errors, without SQL and parameters. Other errors of the caller pass unchanged."""
        try:
            yield
        except IntegrityError as error:
            raise Conflict(f"the database rejects the change: {_short_reason(error)}") from None
        except SQLAlchemyError as error:
            raise self._unavailable(error) from None
        except others as error:
            raise self._unavailable(error) from None

    def _unavailable(self, error: BaseException) -> CatalogUnavailable:
        reason = _short_reason(error)
        if "no such table" in reason or ("relation" in reason and "does not exist" in reason):
            reason += "; run `limitforge db upgrade`"
        return CatalogUnavailable(f"the database {self.description} is unavailable: {reason}")

    def _translate_driver_error(self, context: ExceptionContext) -> CatalogUnavailable | None:
        """Translate errors that SQLAlchemy does not wrap: a lost connection, or a statement that times out, for example
        because it waits for a lock.
        """
        error = context.original_exception
        return self._unavailable(error) if isinstance(error, OSError | TimeoutError) else None

    async def _migrate(self, run_command: Any, to: str) -> None:
        def run(connection: Connection) -> None:
            if not self.is_sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": UPGRADE_LOCK})
            config = _alembic()
            config.attributes["connection"] = connection
            try:
                run_command(config, to)
            except CommandError as error:
                raise InvalidInput("database", f"can't migrate to the schema {short_repr(to)}: {error}") from None

        async with self.writing() as connection:
            await connection.run_sync(run)

    def _begin(self, connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        if self.is_sqlite:
            connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
        elif not writes:
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def _count_statement(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith(("BEGIN", "SET TRANSACTION")):
            self.statement_count += 1


def newest_schema_version() -> str:
    """Return the newest schema version of this release."""
    return ScriptDirectory.from_config(_alembic()).get_current_head() or ""


def known_schema_versions() -> set[str]:
    """Return all schema versions that this release has migrations for."""
    return {script.revision for script in ScriptDirectory.from_config(_alembic()).walk_revisions()}


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    return config


def _parse_url(given: str) -> URL:
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        raise InvalidInput("database", "must be a URL such as sqlite:///limitforge.db or postgresql://…") from None
    if url.drivername not in _DRIVERS:
        raise InvalidInput("database", f"must be a sqlite:// or postgresql:// URL, got {short_repr(url.drivername)}")
    if url.drivername.startswith("sqlite") and url.database in (None, "", ":memory:"):
        raise InvalidInput(
            "database",
            "must name a file, such as sqlite:///limitforge.db: other processes can't read a database in memory",
        )
    url = url.set(drivername=_DRIVERS[url.drivername])
    return url if url.drivername.startswith("sqlite") else _validate_options(url)


def _validate_options(url: URL) -> URL:
    """Translate options of libpq to those of the driver. Refuses unknown ones."""
    unknown = url.query.keys() - {"sslmode", "ssl", "application_name"}
    if unknown:
        known = "sslmode and application_name"
        raise InvalidInput("database", f"has the unknown option {short_repr(min(unknown))}; supported are {known}")
    mode = url.query.get("sslmode") or url.query.get("ssl")
    return url.set(query={} if mode is None else {"ssl": mode})


def _describe(url: URL) -> str:
    """Name the database for messages, without its password."""
    if url.drivername.startswith("sqlite"):
        return f"file {url.database}"
    return f"{url.database or ''} at {url.host or 'localhost'}:{url.port or 5432}"


def _engine_options(url: URL, name: str) -> dict[str, Any]:
    if url.drivername.startswith("sqlite"):
        return {"pool_timeout": TIMEOUT_SECONDS, "connect_args": {"timeout": TIMEOUT_SECONDS}}
    return {
        "pool_size": POOL_SIZE,
        "pool_timeout": TIMEOUT_SECONDS,
        "pool_pre_ping": True,
        "connect_args": {
            "timeout": TIMEOUT_SECONDS,
            "command_timeout": TIMEOUT_SECONDS,
            "server_settings": {"application_name": name},
        },
    }


def _configure_sqlite(connection: Any, _record: Any) -> None:
    """Begin transactions explicitly, enforce foreign keys, and use WAL so that readers don't wait for a writer."""
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(TIMEOUT_SECONDS * 1_000)}")
    cursor.execute("PRAGMA foreign_keys = ON")
    for attempt in range(WAL_ATTEMPTS):
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            break
        except OperationalError:  # SQLite ignores its busy timeout for this statement
            if attempt == WAL_ATTEMPTS - 1:
                raise
            time.sleep(WAL_PAUSE_SECONDS)
    cursor.close()


def _short_reason(error: BaseException) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(cause).strip().splitlines()
    reason = lines[0] if lines else type(cause).__name__
    if isinstance(cause, TimeoutError) and not lines:
        reason = f"busy, no response within {TIMEOUT_SECONDS:g} s"
    return reason.rpartition(">: ")[2]  # asyncpg's errors begin with their class
