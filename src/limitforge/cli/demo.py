"""`limitforge demo`: the service with a tenant to try things with, on nothing but Python."""

import asyncio
import os
import socket
import sys
import tempfile
from typing import Annotated

import msgspec
import typer

from limitforge.catalog.catalog import Catalog
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database import Database
from limitforge.cli.serve import address
from limitforge.errors import InvalidInput
from limitforge.service.app import Service
from limitforge.service.demo import TIERS, Demo, seed
from limitforge.service.logs import set_up_logging
from limitforge.service.settings import PREFIX, Settings, load
from limitforge.service.supervisor import listen
from limitforge.service.worker import Server, run

GOES = "The tenant and its plans are gone."
STAYS = "The tenant `demo`, its keys and the admin token `demo` stay in the database; the next demo replaces them."


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
        own = {name: value for name, value in os.environ.items() if name == f"{PREFIX}PEPPERS"}
        settings = load(
            own,
            peppers=own.get(f"{PREFIX}PEPPERS") or Peppers.generate(),
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
            made = asyncio.run(_seeded(settings, address(settings, listening.getsockname()[1])))
            _serve(settings, listening, made, as_json=as_json)
        if not as_json:
            print(f"\nStopped. {STAYS if database else GOES}", file=sys.stderr)


async def _seeded(settings: Settings, base_url: str) -> Demo:
    database = Database(settings.database_url)
    try:
        await database.upgrade()
        return await seed(Catalog(database, peppers=Peppers.parse(settings.peppers)), base_url)
    finally:
        await database.close()


def _serve(settings: Settings, listening: socket.socket, made: Demo, *, as_json: bool) -> None:
    set_up_logging(settings)

    def ready() -> None:
        text = msgspec.json.encode(made).decode() if as_json else welcome(made)
        print(text, flush=True)

    run(Server(Service(settings), settings, ready), [listening])


def welcome(made: Demo) -> str:
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
