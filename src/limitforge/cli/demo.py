"""`limitforge demo`: the service with a demo tenant, without any other server."""

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

DATA_DELETED = "The tenant and its plans were deleted."
DATA_KEPT = "The tenant `demo`, its keys and the admin token `demo` stay in the database. The next demo replaces them."


def demo(
    port: Annotated[int, typer.Option(metavar="N", help="The port to listen on; 0 for any free port.")] = 8000,
    store: Annotated[
        str, typer.Option(metavar="URL", help="The store: memory://, or the URL of a Redis server.")
    ] = "memory://",
    database: Annotated[
        str | None, typer.Option(metavar="URL", help="The database. The default is a file that is deleted at the end.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when it is ready.")] = False,
) -> None:
    """Run the service with a demo tenant, plans and keys. It needs no Redis, Postgres or Docker.

    With --database, the demo replaces the tenant and the token called `demo`, and keeps them afterwards.

    Examples:
      limitforge demo
      limitforge demo --port 9000 --store redis://localhost:6379/0 --json

    """
    with tempfile.TemporaryDirectory(prefix="limitforge-demo-") as folder:
        settings = load_settings(
            {},
            peppers=os.environ.get(f"{ENV_PREFIX}PEPPERS") or Peppers.generate_text(),
            store_url=store,
            database_url=database or f"sqlite:///{folder}/demo.db",
            port=port,
            log_level="warning",
        )
        try:
            server_socket = listen(settings.host, settings.port)
        except OSError as error:
            raise InvalidInput("--port", f"can't listen on port {port}: {error.strerror}. Try --port 0") from None
        with server_socket:
            demo_tenant = asyncio.run(_seed_database(settings, local_url(settings, server_socket.getsockname()[1])))
            _serve(settings, server_socket, demo_tenant, as_json=as_json)
        if not as_json:
            print(f"\nStopped. {DATA_KEPT if database else DATA_DELETED}", file=sys.stderr)


async def _seed_database(settings: Settings, base_url: str) -> DemoTenant:
    database = Database(settings.database_url)
    try:
        await database.upgrade()
        return await create_demo_tenant(Catalog(database, peppers=Peppers.parse(settings.peppers)), base_url)
    finally:
        await database.close()


def _serve(settings: Settings, server_socket: socket.socket, demo_tenant: DemoTenant, *, as_json: bool) -> None:
    configure_logging(settings)

    def on_ready() -> None:
        text = msgspec.json.encode(demo_tenant).decode() if as_json else welcome_text(demo_tenant)
        print(text, flush=True)

    run_server(WorkerServer(Service(settings), settings, on_ready), [server_socket])


def welcome_text(demo_tenant: DemoTenant) -> str:
    """Return the first text of the demo, with a request to paste into a shell."""
    keys = "\n".join(f"  {name:<11} {demo_tenant.keys[name]}" for name in TIERS)
    return f"""limitforge is ready at {demo_tenant.base_url}

Send this request more than ten times within a few seconds:

  curl -i {demo_tenant.base_url}/v1/check -H 'x-api-key: {demo_tenant.api_key}' \\
    -H 'content-type: application/json' -d '{{"resource": "GET:/orders", "subject": "user:42"}}'

Keys of the tiers (100, 1,000 and 10,000 requests per minute):
{keys}

Admin token: {demo_tenant.admin_token}
API reference: {demo_tenant.base_url}/docs
Press Ctrl-C to stop."""
