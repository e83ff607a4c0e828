"""limits and slowapi on FastAPI: uvicorn with uvloop and httptools, one process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bench.server import free_port
from bench.service.apps import CALLER, REDIS_URL
from bench.service.contestants import BenchEnvironment, Contestant, RunningContestant
from bench.service.process import running_server
from bench.service.wrk import SUBJECT_PLACEHOLDER, RequestTemplate

LIMITS, SLOWAPI = "limits on FastAPI", "slowapi on FastAPI"

_OPTIONS = ("--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning")


def contestants() -> tuple[Contestant, ...]:
    return _on_uvicorn(LIMITS, "with_limits"), _on_uvicorn(SLOWAPI, "with_slowapi")


def _on_uvicorn(name: str, app: str) -> Contestant:
    @contextmanager
    def open_(site: BenchEnvironment) -> Iterator[RunningContestant]:
        port = free_port()
        command = [sys.executable, "-m", "uvicorn", "--factory", f"bench.service.apps:{app}", *_OPTIONS]
        where = ["--host", "127.0.0.1", "--port", str(port)]
        with running_server([*command, *where], port, site.folder, {REDIS_URL: site.redis_url}) as pid:
            yield RunningContestant(
                pid,
                lambda plan: RequestTemplate(
                    f"http://127.0.0.1:{port}/{plan}", "GET", {CALLER: f"u{SUBJECT_PLACEHOLDER}"}
                ),
            )

    return Contestant(name, open_)
