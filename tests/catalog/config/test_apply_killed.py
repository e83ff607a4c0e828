"""A process that is killed while it applies a file leaves each tenant as it was or as the file says, never a mix."""

import asyncio
import os
import signal
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from limitforge.catalog.config import apply as applying
from limitforge.catalog.config import document
from limitforge.catalog.config.export import export_document
from limitforge.catalog.config.specs import ConfigDocument
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.model import to_datetime
from limitforge.core.clock import SystemClock
from tests.catalog.factories import open_database
from tests.child_processes import ChildProcess, child_process

NEXT_YEAR = (datetime.now(UTC) + timedelta(days=365)).isoformat()
ROUNDS = 4


def work(connection: Connection, url: str, file: str, dies_at: int | None) -> None:
    """Apply a file, and send the number of statements. A process that dies at one of them is killed before that
    statement is sent, so where it stops does not depend on the speed of the machine.
    """
    content = Path(file).read_bytes()
    applying.MAX_CHANGES = 60  # several transactions for a file that is quick to apply

    async def main() -> None:
        async with open_database(url) as database:
            await database.schema_version()
            began = database.statement_count

            def die(*_: Any) -> None:
                if dies_at is not None and database.statement_count - began >= dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)

            event.listen(database._engine.sync_engine, "before_cursor_execute", die)
            wanted, source = document.parse_document(content, file, to_datetime(SystemClock().now_us()))
            await applying.apply_document(Catalog(database), wanted, "test", prune=True, source=source)
            connection.send(database.statement_count - began)

    asyncio.run(main())


def big(limit: int, tenants: range) -> str:
    """Return a file with fifteen entries for each tenant. Another `limit` changes every plan and policy."""
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


def apply_in_a_process(url: str, file: Path) -> int:
    """Apply a file, and return the number of statements."""
    with child_process(work, url, str(file), None) as process:
        return int(process.receive())


def die_in_a_process(url: str, file: Path, at: int) -> None:
    """Begin to apply a file, in a process that is killed at a statement."""
    process = ChildProcess(work, url, str(file), at)
    assert process.close_and_wait() == -signal.SIGKILL


def exported(url: str) -> ConfigDocument:
    async def read() -> ConfigDocument:
        async with open_database(url) as database:
            return await export_document(Catalog(database))

    return asyncio.run(read())


@pytest.mark.slow
def test_kill_9_while_a_file_is_applied_leaves_whole_tenants_and_the_next_apply_finishes(
    database_url: str, tmp_path: Path
) -> None:
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    files[0].write_text(big(10, range(20)))
    files[1].write_text(big(20, range(5, 25)))

    async def prepare() -> None:
        async with open_database(database_url) as database:
            await database.upgrade()

    asyncio.run(prepare())
    states, statements = [], 0
    for file in files:
        statements = apply_in_a_process(database_url, file)
        states.append(exported(database_url))
    assert states[0] != states[1]
    now = to_datetime(SystemClock().now_us())
    assert document.parse_document(files[0].read_bytes(), "one.yaml", now)[0].operator == states[0].operator

    by_name = [{each.name: each for each in state.tenants or ()} for state in states]
    current, stopped = 1, 0
    for number in range(ROUNDS):
        die_in_a_process(database_url, files[1 - current], int(statements * (number + 0.5) / ROUNDS))
        found = exported(database_url)
        assert found.operator in (states[0].operator, states[1].operator)
        for tenant in found.tenants or ():
            assert tenant in (by_name[0].get(tenant.name), by_name[1].get(tenant.name)), tenant.name
        stopped += found not in states
        apply_in_a_process(database_url, files[1 - current])  # again, to its end
        assert exported(database_url) == states[1 - current]
        current = 1 - current
    assert stopped, "none was killed in the middle"
