"""`limitforge demo`: the service with a tenant to try things with, on nothing but Python."""

import asyncio
import os
import socket
import sys
import tempfile
from typing import Annotated

import msgspec
import typer

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.cli.serve import local_url
from limitforge.errors import InvalidInput
from limitforge.service.app import Service
from limitforge.service.demo_tenant import TIERS, DemoTenant, create_demo_tenant
from limitforge.service.log_setup import configure_logging
from limitforge.service.processes.supervisor import listen
from limitforge.service.processes.worker import WorkerServer, run_server
from limitforge.service.settings import ENV_PREFIX, Settings, load_settings

DATA_DELETED = "The tenant and its plans are gone."
DATA_KEPT = "The tenant `demo`, its keys and the admin token `demo` stay in the database; the next demo replaces them."


def demo(
    port: Annotated[int, typer.Option(metavar="N", help="The port to listen on; 0 for any that is free.")] = 8000,
    store: Annotated[str, typer.Option(metavar="URL", help="Where to count: memory://, or a Redis.")] = "memory://",
    database: Annotated[
        str | None, typer.Option(metavar="URL", help="Where tenants live (a file that goes with the demo).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON once it is ready.")] = False,
) -> None:
    """Run the service with a tenant, plans and keys to try. It needs no Redis, no Postgres, no Docker.

    In a database of your own, a tenant and a token that are called `demo` are replaced, and stay behind.

    Examples:
      limitforge demo
      limitforge demo --port 9000 --store redis://localhost:6379/0 --json

    """
    with tempfile.TemporaryDirectory(prefix="limitforge-demo-") as folder:
        own = {name: value for name, value in os.environ.items() if name == f"{ENV_PREFIX}PEPPERS"}
        settings = load_settings(
            own,
            peppers=own.get(f"{ENV_PREFIX}PEPPERS") or Peppers.generate(),
            store_url=store,
            database_url=database or f"sqlite:///{folder}/demo.db",
            port=port,
            log_level="warning",
        )
        try:
            listening = listen(settings.host, settings.port)
        except OSError as error:
            raise InvalidInput("--port", f"{port} can't be listened on: {error.strerror}. Try --port 0") from None
        with listening:
            made = asyncio.run(_seed_database(settings, local_url(settings, listening.getsockname()[1])))
            _serve(settings, listening, made, as_json=as_json)
        if not as_json:
            print(f"\nStopped. {DATA_KEPT if database else DATA_DELETED}", file=sys.stderr)


async def _seed_database(settings: Settings, base_url: str) -> DemoTenant:
    database = Database(settings.database_url)
    try:
        await database.upgrade()
        return await create_demo_tenant(Catalog(database, peppers=Peppers.parse(settings.peppers)), base_url)
    finally:
        await database.close()


def _serve(settings: Settings, listening: socket.socket, made: DemoTenant, *, as_json: bool) -> None:
    configure_logging(settings)

    def ready() -> None:
        text = msgspec.json.encode(made).decode() if as_json else welcome_text(made)
        print(text, flush=True)

    run_server(WorkerServer(Service(settings), settings, ready), [listening])


def welcome_text(made: DemoTenant) -> str:
    """What to try, ready to paste."""
    keys = "\n".join(f"  {name:<11} {made.keys[name]}" for name in TIERS)
    return f"""limitforge answers at {made.base_url}

Try it, more than ten times in a row:

  curl -i {made.base_url}/v1/check -H 'x-api-key: {made.api_key}' \\
    -H 'content-type: application/json' -d '{{"resource": "GET:/orders", "subject": "user:42"}}'

Keys of the tiers (100, 1,000 and 10,000 a minute):
{keys}

Admin token: {made.admin_token}
API reference: {made.base_url}/docs
Ctrl-C ends it."""
