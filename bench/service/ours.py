"""`limitforge serve` as it comes, on Redis and an SQLite file: a key is recognised, a policy is found among ten, the
default headers are sent, counters count.

One setting differs: a check may wait for a second. On a machine that is full of load, Redis may be late; a check that
goes through without it would be cheap, and not counted.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.contest import OURS
from bench.server import free_port
from bench.service.contest import Contestant, Door, Site
from bench.service.process import running
from bench.service.seed import Seeded, seed
from bench.service.wrk import LINE, SUBJECT, Ask

ONE, TWO = f"{OURS}, one worker", f"{OURS}, two workers"

_PROGRAM = str(Path(sys.executable).with_name("limitforge"))
_prefixes = itertools.count()


def contestants() -> tuple[Contestant, ...]:
    return _with(ONE, 1), _with(TWO, 2)


def _with(name: str, workers: int) -> Contestant:
    @contextmanager
    def open_(site: Site) -> Iterator[Door]:
        seeded = seed(site.folder / f"workers-{workers}.db")
        with serving(site, seeded, workers) as (pid, url):
            yield Door(pid, asking(url, seeded))

    return Contestant(name, open_)


@contextmanager
def serving(site: Site, seeded: Seeded, workers: int = 1) -> Iterator[tuple[int, str]]:
    """Its process and its address. Each has keys of its own in Redis."""
    port = free_port()
    environment = {
        "LIMITFORGE_STORE_URL": site.redis_url,
        "LIMITFORGE_DATABASE_URL": seeded.database_url,
        "LIMITFORGE_PEPPERS": seeded.peppers,
        "LIMITFORGE_KEY_PREFIX": f"lf{next(_prefixes)}",
        "LIMITFORGE_DEADLINE_MS": "1000",
    }
    command = [_PROGRAM, "serve", "--port", str(port), "--workers", str(workers)]
    with running(command, port, site.folder, environment) as pid:
        yield pid, f"http://127.0.0.1:{port}/v1/check"


def asking(url: str, seeded: Seeded) -> Callable[[str], Ask]:
    """With the keys of all tenants in turn, for the resource of a plan."""

    def ask(plan: str) -> Ask:
        return Ask(url, headers=_headers(LINE), body=_body(f"GET:/{plan}"), lines=seeded.keys)

    return ask


def asking_all_areas(url: str, seeded: Seeded) -> Ask:
    """With the key of the first tenant, for resources of all its areas."""
    return Ask(url, headers=_headers(seeded.keys[0]), body=_body(f"GET:/{LINE}/{SUBJECT}"), lines=seeded.areas)


def _headers(key: str) -> dict[str, str]:
    return {"x-api-key": key, "content-type": "application/json"}


def _body(resource: str) -> str:
    return json.dumps({"resource": resource, "subject": f"u{SUBJECT}"})
