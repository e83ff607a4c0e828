"""A real PostgreSQL for the tests, in the manner of `tests.servers`: on 127.0.0.1, in its own folder, gone afterwards.

Whether it is up is read from its own files, and SQL goes through psql: neither depends on the client under test.
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
ACCOUNTS = ("postgres", "nobody")  # as whom it runs when the tests run as root, whom initdb and postgres refuse
DEBIAN_PROGRAMS = Path("/usr/lib/postgresql")  # Debian keeps the server's programs off the PATH, one folder per version

# A server is a thousand small files and a database three hundred: in memory they come and go ten times as fast.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
MIN_FREE_BYTES = 2 << 30  # where it is small, as in Docker with its 64 MB, the system's temporary folder has to do

# What outlives a crash of the server need not outlive one of the machine: no fsync. Shared memory is made of files in
# the data folder, because what Postgres itself puts into /dev/shm would stay there after a SIGKILL.
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
    """One `postgres`, which trusts whoever is on this machine: a restart keeps the URL and, unlike Redis, the data.

    Usable as a context manager. `options` are those of `postgres`, such as `"-c", "max_connections=5"`. `data` is what
    `postgres_data` made: to start from a copy of it is quicker than to start from nothing. `kill`, `pause` and `resume`
    need Linux's /proc.
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
        """Of the database that is there from the start, and empty."""
        return self._url("postgres")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start on a free port; returns once the server answers."""
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
        """Shut down in an orderly way, cutting off who is connected, and remove the folder."""
        self._shut_down()
        if self._folder is None:
            return
        try:
            self._free_shared_memory()
        finally:
            self._folder.cleanup()
            self._folder = None

    def kill(self) -> None:
        """SIGKILL for all of its processes, as in a crash. `restart` brings it back with all that was committed."""
        if self._process is None:
            return
        if self.running:
            # While its parent is stopped nobody reaps a child: no id can have become another process's meanwhile.
            self.pause()
            for child in self._paused_children:
                os.kill(child, signal.SIGKILL)
            _wait_for(self._paused_children, "ZX")
        self._process.kill()
        self._process.wait()
        self._process, self._paused_children = None, ()

    def restart(self, *options: str) -> None:
        """Come back under the same URL with the same data, whether it was running or not.

        `options` are for this run only.
        """
        if self._folder is None:
            raise ServerFailed("restart of a server that was never started, or was stopped")
        self._shut_down()
        if not self._launch(*options):
            raise ServerFailed(f"port {self.port} was taken by another program during the restart\n{self._log()}")

    def pause(self) -> None:
        """Freeze (SIGSTOP): connections stay open and nothing answers, as behind a broken network.

        Each child leads a process group of its own, so they are stopped one by one; the parent first, so that there
        are no new ones.
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
        """Create a database, empty or as a template is that nobody is connected to, and return its URL."""
        self.sql(f"CREATE DATABASE {_identifier(name)} TEMPLATE {_identifier(template)}")
        return self._url(name)

    def drop_database(self, name: str) -> None:
        """Remove a database if it is there, also from under those who are connected to it."""
        self.sql(f"DROP DATABASE IF EXISTS {_identifier(name)} WITH (FORCE)")

    def sql(self, statement: str, database: str = "postgres") -> str:
        """What psql prints: a line per row, `|` between its columns."""
        address = self._url(database, "postgresql")
        return _run(
            program_path("psql"), "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", address, "-c", statement
        ).removesuffix("\n")

    def dump(self, name: str) -> str:
        """The database as SQL. The same schema and rows give the same text."""
        lines = _run(program_path("pg_dump"), "-d", self._url(name, "postgresql")).splitlines(keepends=True)
        # Newer versions put a random key into these two, which keeps psql from running what rows smuggle in.
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
        """The parent last: until then it reaps no child, and their ids are theirs."""
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
        """True once the server answers on `self.port`; False if somebody else has that port."""
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
        """As pg_ctl finds out: a file of the server's says who wrote it, and in its eighth line how far it got."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _shut_down(self) -> None:
        """A "fast" shutdown: nobody is waited for, and what was committed is kept."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        self._resume_processes(self._process)  # a paused one would not see the signal
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process, self._paused_children = None, ()

    def _free_shared_memory(self) -> None:
        """A killed server leaves a piece that only the next one on its data, or the account it ran as, can remove."""
        if (self._data / "postmaster.pid").exists():
            _run(program_path("postgres"), "--single", *self._arguments(), "postgres", **_run_as())

    def _log(self) -> str:
        if self._folder is None:
            return ""
        return (Path(self._folder.name) / "log").read_text(errors="replace")[-2_000:]


@contextmanager
def postgres_data() -> Iterator[Path]:
    """A data folder as initdb makes it, for `PostgresServer(data=...)`."""
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
    """A folder that belongs to whom Postgres runs as, where that account can get to it."""
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
    """What tells `subprocess` to run something as whom Postgres runs as: nothing, unless we are root."""
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
    """The one beside `postgres`: Debian's programs of the same name on the PATH are wrappers that look for clusters."""
    server: str | Path | None = shutil.which("postgres")
    if server is None:
        server = max(DEBIAN_PROGRAMS.glob("[0-9]*/bin/postgres"), key=lambda path: float(path.parts[-3]), default=None)
    beside = Path(server).resolve().with_name(name) if server else None
    program = str(beside) if beside and beside.exists() else shutil.which(name)
    if program is None:
        raise ServerFailed(f"{name} is not installed: `make test` installs it")
    return program


def _environment() -> dict[str, str]:
    """Ours without what somebody set for a Postgres of their own; initdb writes TZ into the configuration."""
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
            cwd="/",  # ours may be closed to the account
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
    """Until each of them is in one of these states: T is stopped, Z and X are dead."""
    deadline = time.monotonic() + START_SECONDS
    while waiting := [pid for pid in pids if _process(pid)[0] not in states]:
        if time.monotonic() > deadline:
            raise ServerFailed(f"processes {waiting} were not in state {states} within {START_SECONDS:.0f} s")
        time.sleep(0.001)


def _process(pid: int) -> tuple[str, int]:
    """The state and the parent of a process; X and 0 if it is no more."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    state, parent = text.rpartition(")")[2].split()[:2]  # what precedes it is a name with anything in it
    return state, int(parent)
