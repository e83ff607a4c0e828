"""A process that is killed while it applies a file leaves each tenant as it was or as the file says, never a mix."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from limitforge.catalog import document
from limitforge.catalog.catalog import Catalog
from limitforge.catalog.export import export
from limitforge.catalog.model import at_time
from limitforge.catalog.specs import Document
from limitforge.core.clock import SystemClock
from tests.catalog.making import opened

SECONDS = 60.0
NEXT_YEAR = (datetime.now(UTC) + timedelta(days=365)).isoformat()
ROUNDS = 6

APPLY = """
import asyncio, sys
from limitforge.catalog.apply import apply
from limitforge.catalog.catalog import Catalog
from limitforge.catalog.database import Database
from limitforge.catalog.document import read
from limitforge.catalog.model import at_time
from limitforge.core.clock import SystemClock

url, file = sys.argv[1:]

async def main():
    database = Database(url)
    await database.schema_version()
    document, source = read(open(file, "rb").read(), file, at_time(SystemClock().now_us()))
    print("ready", flush=True)
    await apply(Catalog(database), document, "test", prune=True, source=source)
    print("done", flush=True)
    await database.close()

asyncio.run(main())
"""


def big(limit: int, tenants: range) -> str:
    """A thousand things; another `limit` changes every plan, and replaces every policy."""
    lines = [f"operator: {{plan: fleet, plans: [{{name: fleet, limits: all={limit}/second}}]}}", "tenants:"]
    for number in tenants:
        lines += [f"  - name: t{number}", f"    default_plan: p{limit}", "    plans:"]
        lines += [f"      - {{name: {name}, limits: x={limit}/second}}" for name in ("a", "b", f"p{limit}")]
        lines += ["    policies:"]
        lines += [f"      - {{resource: 'GET:/{limit}/{at}', plan: {'ab'[at % 2]}}}" for at in range(6)]
        lines += ["    overrides:"]
        over = f"limits: {{x: {{limit: {limit}}}}}, expires_at: {NEXT_YEAR}"
        lines += [f"      - {{subject: 'user:{at}', {over}}}" for at in range(4)]
    return "\n".join(lines)


def start(url: str, file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", APPLY, url, str(file)], stdout=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


def exported(url: str) -> Document:
    async def read() -> Document:
        async with opened(url) as database:
            return await export(Catalog(database))

    return asyncio.run(read())


@pytest.mark.slow
def test_kill_9_while_a_file_is_applied_leaves_whole_tenants_and_the_next_apply_finishes(
    database_url: str, tmp_path: Path
) -> None:
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    files[0].write_text(big(10, range(80)))
    files[1].write_text(big(20, range(10, 90)))

    async def prepare() -> None:
        async with opened(database_url) as database:
            await database.upgrade()

    asyncio.run(prepare())
    states, took = [], 0.0
    for file in (*files, files[0]):
        with start(database_url, file) as process:
            wait_for(process, "ready")
            began = time.monotonic()
            wait_for(process, "done")
            took = time.monotonic() - began
        states.append(exported(database_url))
    assert states[0] == states[2] != states[1]
    now = at_time(SystemClock().now_us())
    assert document.read(files[0].read_bytes(), "one.yaml", now)[0].operator == states[0].operator

    by_name = [{each.name: each for each in state.tenants or ()} for state in states[:2]]
    current, stopped = 0, 0
    for number in range(ROUNDS):
        with start(database_url, files[1 - current]) as process:
            wait_for(process, "ready")
            time.sleep(took * (number + 0.5) / ROUNDS)
            os.kill(process.pid, signal.SIGKILL)
            process.wait(SECONDS)
        found = exported(database_url)
        assert found.operator in (states[0].operator, states[1].operator)
        for tenant in found.tenants or ():
            assert tenant in (by_name[0].get(tenant.name), by_name[1].get(tenant.name)), tenant.name
        stopped += found not in states
        with start(database_url, files[1 - current]) as process:  # again, to its end
            wait_for(process, "ready")
            wait_for(process, "done")
        assert exported(database_url) == states[1 - current]
        current = 1 - current
    assert stopped, "none was killed in the middle"
