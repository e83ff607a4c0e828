"""Run the Postgres back-up and restore commands of docs/operations.md."""

import asyncio
import os
import subprocess
from pathlib import Path

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import Tenant
from tests.docs.code_blocks import ROOT, find_blocks
from tests.postgres import PostgresServer, program_path


def test_the_documented_commands_back_up_and_restore_postgres(
    tmp_path: Path, postgres_url: str, postgres_server: PostgresServer
) -> None:
    (block,) = [each for each in find_blocks(ROOT / "docs/operations.md") if each.text.startswith("pg_dump")]
    dump, restore = block.text.splitlines()
    environment = os.environ | {
        "PGURL": postgres_url.replace("+asyncpg", ""),
        "PATH": f"{Path(program_path('pg_dump')).parent}{os.pathsep}{os.environ['PATH']}",
    }
    asyncio.run(create(postgres_url, "before"))
    subprocess.run(["bash", "-ec", dump], cwd=tmp_path, env=environment, check=True, timeout=60)
    asyncio.run(create(postgres_url, "after"))
    subprocess.run(["bash", "-ec", restore], cwd=tmp_path, env=environment, check=True, timeout=60)
    assert asyncio.run(create(postgres_url, "later")) == ["before", "later"]


async def create(url: str, name: str) -> list[str]:
    """Create a tenant, and return the names of all tenants."""
    database = Database(url)
    try:
        await database.upgrade()
        catalog = Catalog(database)
        async with catalog.edit("test") as edit:
            await edit.create(Tenant, {"name": name})
        return [tenant.name for tenant in (await catalog.list_page(Tenant)).items]
    finally:
        await database.close()
