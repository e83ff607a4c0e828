"""A real PostgreSQL for the tests, like `tests.servers`: on 127.0.0.1, in a temporary folder.

Readiness is read from its own files, and SQL runs through psql: neither depends on the client under test.
"""

import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from tests.servers import PORT_ATTEMPTS, START_SECONDS, STOP_SECONDS, ServerFailed, find_free_port

USER = "limitforge"
ACCOUNTS = ("postgres", "nobody")  # accounts to use for root, because initdb and postgres refuse to run as root
DEBIAN_PROGRAMS = Path("/usr/lib/postgresql")  # Debian keeps the server's programs off the PATH, one folder per version

# A server has a thousand small files, a database three hundred: in memory they are ten times as fast.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
MIN_FREE_BYTES = 2 << 30  # with less room, such as Docker's 64 MB, use the system's temporary folder

# Data must survive a crash of the server, not of the machine: no fsync. Shared memory is in files of the data folder,
# because Postgres leaves its files in /dev/shm behind after a SIGKILL.
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "100",
    "dynamic_shared_memory_type": "mmap",
}


class PostgresServer:
    """A `postgres` server that trusts all local users. A restart keeps the URL and, unlike Redis, the data.

    Usable as a context manager. `options` are those of `postgres`, such as `"-c", "max_connections=5"`. `data` is a
    folder from `postgres_data`: copying it is faster than initialising a new one. `kill`, `pause` and `resume` need
    Linux's /proc.
    """

    def __init__(self, *options: str, data: Path | None = None) -> None:
        self._options = options
        self._template = data
        self._process: subprocess.Popen[bytes] | None = None
        self._paused_children: tuple[int, ...] = ()  # the children of a paused server
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """The URL of the empty default database."""
        return self._url("postgres")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start on a free port, and return once the server answers."""
        if self.running:
            return self
        try:
            if self._folder is None:
                self._folder = _temporary_folder()
                _make_data(self._data, self._template)
            self._launch_on_a_free_port()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Shut down, close all connections, and remove the folder."""
        self._shut_down()
        if self._folder is None:
            return
        try:
            self._free_shared_memory()
        finally:
            self._folder.cleanup()
            self._folder = None

    def kill(self) -> None:
        """Kill all of its processes with SIGKILL, as in a crash. `restart` recovers all committed data."""
        if self._process is None:
            return
        if self.running:
            # A stopped parent reaps no child, so no process id can have been reused meanwhile.
            self.pause()
            for child in self._paused_children:
                os.kill(child, signal.SIGKILL)
            _wait_for(self._paused_children, "ZX")
        self._process.kill()
        self._process.wait()
        self._process, self._paused_children = None, ()

    def restart(self, *options: str) -> None:
        """Start again with the same URL and data, whether it was running or not.

        `options` apply to this run only.
        """
        if self._folder is None:
            raise ServerFailed("restart of a server that was never started, or was stopped")
        self._shut_down()
        if not self._launch(*options):
            raise ServerFailed(f"port {self.port} was taken by another program during the restart\n{self._log()}")

    def pause(self) -> None:
        """Freeze it (SIGSTOP): connections stay open and get no reply, as behind a broken network.

        Each child has its own process group, so they are stopped one by one. The parent is first, so that it starts no
        new ones.
        """
        postmaster = self._postmaster()
        postmaster.send_signal(signal.SIGSTOP)
        _wait_for([postmaster.pid], "TZX")
        self._paused_children = tuple(_children(postmaster.pid))
        for child in self._paused_children:
            os.kill(child, signal.SIGSTOP)
        _wait_for(self._paused_children, "TZX")

    def resume(self) -> None:
        self._resume_processes(self._postmaster())

    def create_database(self, name: str, template: str = "template0") -> str:
        """Create a database, empty or from a template without connections, and return its URL."""
        self.sql(f"CREATE DATABASE {_identifier(name)} TEMPLATE {_identifier(template)}")
        return self._url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, and close its connections."""
        self.sql(f"DROP DATABASE IF EXISTS {_identifier(name)} WITH (FORCE)")

    def sql(self, statement: str, database: str = "postgres") -> str:
        """Return the output of psql: a line per row, with `|` between columns."""
        address = self._url(database, "postgresql")
        return _run(
            program_path("psql"), "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", address, "-c", statement
        ).removesuffix("\n")

    def dump(self, name: str) -> str:
        """Return the database as SQL. The same schema and rows give the same text."""
        lines = _run(program_path("pg_dump"), "-d", self._url(name, "postgresql")).splitlines(keepends=True)
        # Newer versions add a random key to these two lines, which stops psql from running injected commands.
        return "".join(line for line in lines if not line.startswith(("\\restrict ", "\\unrestrict ")))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def _data(self) -> Path:
        if self._folder is None:
            raise ServerFailed("no data: the server was not started")
        return Path(self._folder.name) / "data"

    def _url(self, database: str, scheme: str = "postgresql+asyncpg") -> str:
        return f"{scheme}://{USER}@127.0.0.1:{self.port}/{quote(database, safe='')}"

    def _postmaster(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise ServerFailed("postgres is not running")
        return self._process

    def _resume_processes(self, postmaster: subprocess.Popen[bytes]) -> None:
        """Resume the parent last: until then it reaps no child, so their ids are valid."""
        for child in self._paused_children:
            os.kill(child, signal.SIGCONT)
        self._paused_children = ()
        postmaster.send_signal(signal.SIGCONT)

    def _launch_on_a_free_port(self) -> None:
        for _ in range(PORT_ATTEMPTS):
            self.port = find_free_port()
            if self._launch():
                return
        raise ServerFailed(f"no free port after {PORT_ATTEMPTS} attempts\n{self._log()}")

    def _arguments(self) -> list[str]:
        settings = {**SETTINGS, "port": str(self.port)}
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return ["-D", str(self._data), *arguments, *self._options]

    def _launch(self, *options: str) -> bool:
        """Return True once the server answers on `self.port`, False if the port is taken."""
        command = [program_path("postgres"), *self._arguments(), *options]
        with (self._data.parent / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=_environment(), **_run_as()
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                if "Address already in use" in self._log():
                    return False
                raise ServerFailed(f"postgres ended at once\n{self._log()}")
            if self._is_ready(self._process.pid):
                return True
            time.sleep(0.01)
        self.kill()
        raise ServerFailed(f"postgres was not ready within {START_SECONDS:.0f} s\n{self._log()}")

    def _is_ready(self, pid: int) -> bool:
        """Read the state like pg_ctl: a file of the server has its process id, and its state in the eighth line."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _shut_down(self) -> None:
        """Run a "fast" shutdown: close all connections, and keep committed data."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        self._resume_processes(self._process)  # a paused process would not receive the signal
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process, self._paused_children = None, ()

    def _free_shared_memory(self) -> None:
        """Remove the shared memory of a killed server; only the next server on its data, or its account, may do so."""
        if (self._data / "postmaster.pid").exists():
            _run(program_path("postgres"), "--single", *self._arguments(), "postgres", **_run_as())

    def _log(self) -> str:
        if self._folder is None:
            return ""
        return (Path(self._folder.name) / "log").read_text(errors="replace")[-2_000:]


@contextmanager
def postgres_data() -> Iterator[Path]:
    """Yield a data folder of initdb, for `PostgresServer(data=...)`."""
    with _temporary_folder() as folder:
        data = Path(folder) / "data"
        _make_data(data, None)
        yield data


def _make_data(data: Path, template: Path | None) -> None:
    if template is not None:
        _run("cp", "-a", str(template), str(data), **_run_as())
        return
    trust = ["-U", USER, "-A", "trust"]
    plain = ["-E", "UTF8", "--locale=C", "--no-sync", "--wal-segsize=1"]  # megabytes: less to copy
    _run(program_path("initdb"), "-D", str(data), *trust, *plain, **_run_as())


def _temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    """Create a folder that the account of Postgres owns, where that account has access."""
    account = _run_as()
    places = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]  # noqa: S108
    if has_free_space(SHARED_MEMORY):
        places.insert(0, SHARED_MEMORY)
    place = next((place for place in places if not account or _is_world_accessible(place)), places[0])
    folder = tempfile.TemporaryDirectory(prefix="limitforge-postgres-", dir=place, ignore_cleanup_errors=True)
    if account:
        os.chown(folder.name, account["user"], account["group"])
    return folder


def has_free_space(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= MIN_FREE_BYTES


def _is_world_accessible(folder: Path) -> bool:
    folder = folder.resolve()
    return folder.is_dir() and all(part.stat().st_mode & stat.S_IXOTH for part in (folder, *folder.parents))


def _run_as() -> dict[str, Any]:
    """Return the arguments of `subprocess` that select the account of Postgres: none, unless we are root."""
    if os.geteuid() != 0:
        return {}
    for name in ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": ()}
    raise ServerFailed(f"postgres does not run as root, and there is no user called {' or '.join(ACCOUNTS)}")


def program_path(name: str) -> str:
    """Return the program beside `postgres`. Debian's programs on the PATH are wrappers that search for clusters."""
    server: str | Path | None = shutil.which("postgres")
    if server is None:
        server = max(DEBIAN_PROGRAMS.glob("[0-9]*/bin/postgres"), key=lambda path: float(path.parts[-3]), default=None)
    beside = Path(server).resolve().with_name(name) if server else None
    program = str(beside) if beside and beside.exists() else shutil.which(name)
    if program is None:
        raise ServerFailed(f"{name} is not installed: `make test` installs it")
    return program


def _environment() -> dict[str, str]:
    """Return our environment without settings for another Postgres. initdb writes TZ into the configuration."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**ours, "LC_ALL": "C", "TZ": "UTC", "PGSSLMODE": "disable"}


def _run(program: str, *arguments: str, **account: Any) -> str:
    name = Path(program).name
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd="/",  # our folder may be closed to the account
            env=_environment(),
            timeout=START_SECONDS,
            check=False,
            **account,
        )
    except subprocess.TimeoutExpired as error:
        raise ServerFailed(f"{name} was not done within {START_SECONDS:.0f} s") from error
    if done.returncode:
        raise ServerFailed(f"{name} failed\n{done.stderr}")
    return done.stdout


def _identifier(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def _children(pid: int) -> list[int]:
    processes = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [process for process in processes if _process(process)[1] == pid]


def _wait_for(pids: Collection[int], states: str) -> None:
    """Wait until each process is in one of these states: T is stopped, Z and X are dead."""
    deadline = time.monotonic() + START_SECONDS
    while waiting := [pid for pid in pids if _process(pid)[0] not in states]:
        if time.monotonic() > deadline:
            raise ServerFailed(f"processes {waiting} were not in state {states} within {START_SECONDS:.0f} s")
        time.sleep(0.001)


def _process(pid: int) -> tuple[str, int]:
    """Return the state and the parent of a process; X and 0 if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    state, parent = text.rpartition(")")[2].split()[:2]  # the text before it is a name with any characters
    return state, int(parent)
