"""`limitforge serve` with its defaults, on Redis and an SQLite file.

A check recognises a key, finds a policy among ten, sends the default headers, and counts. One setting differs: a check
may wait for a second. On a fully loaded machine Redis may be late, and a check that is decided without it would be
cheap and not counted.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness import OURS
from bench.server import free_port
from bench.service.contestants import BenchEnvironment, Contestant, RunningContestant
from bench.service.process import running_server
from bench.service.seed import Seeded, seed
from bench.service.wrk import LINE_PLACEHOLDER, SUBJECT_PLACEHOLDER, RequestTemplate

ONE, TWO = f"{OURS}, one worker", f"{OURS}, two workers"

_PROGRAM = str(Path(sys.executable).with_name("limitforge"))
_prefixes = itertools.count()


def contestants() -> tuple[Contestant, ...]:
    return _with_workers(ONE, 1), _with_workers(TWO, 2)


def _with_workers(name: str, workers: int) -> Contestant:
    @contextmanager
    def open_(site: BenchEnvironment) -> Iterator[RunningContestant]:
        seeded = seed(site.folder / f"workers-{workers}.db")
        with running_service(site, seeded, workers) as (pid, url):
            yield RunningContestant(pid, request_factory(url, seeded))

    return Contestant(name, open_)


@contextmanager
def running_service(site: BenchEnvironment, seeded: Seeded, workers: int = 1) -> Iterator[tuple[int, str]]:
    """Run the service, and yield its process id and its address. Each one has its own key prefix in Redis."""
    port = free_port()
    environment = {
        "LIMITFORGE_STORE_URL": site.redis_url,
        "LIMITFORGE_DATABASE_URL": seeded.database_url,
        "LIMITFORGE_PEPPERS": seeded.peppers,
        "LIMITFORGE_KEY_PREFIX": f"lf{next(_prefixes)}",
        "LIMITFORGE_DEADLINE_MS": "1000",
    }
    command = [_PROGRAM, "serve", "--port", str(port), "--workers", str(workers)]
    with running_server(command, port, site.folder, environment) as pid:
        yield pid, f"http://127.0.0.1:{port}/v1/check"


def request_factory(url: str, seeded: Seeded) -> Callable[[str], RequestTemplate]:
    """Use the keys of all tenants in turn, for the resource of a plan."""

    def request_template(plan: str) -> RequestTemplate:
        return RequestTemplate(url, headers=_headers(LINE_PLACEHOLDER), body=_body(f"GET:/{plan}"), lines=seeded.keys)

    return request_template


def request_for_all_areas(url: str, seeded: Seeded) -> RequestTemplate:
    """Use the key of the first tenant, for resources of all its areas."""
    return RequestTemplate(
        url,
        headers=_headers(seeded.keys[0]),
        body=_body(f"GET:/{LINE_PLACEHOLDER}/{SUBJECT_PLACEHOLDER}"),
        lines=seeded.areas,
    )


def _headers(key: str) -> dict[str, str]:
    return {"x-api-key": key, "content-type": "application/json"}


def _body(resource: str) -> str:
    return json.dumps({"resource": resource, "subject": f"u{SUBJECT_PLACEHOLDER}"})
