"""`limitforge serve` and `limitforge settings`: the service, and what it is told."""

import contextlib
import os
import socket
import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from limitforge.errors import InvalidInput
from limitforge.service.log_setup import configure_logging
from limitforge.service.processes.supervisor import Supervisor, listen
from limitforge.service.settings import ENV_PREFIX, FILE_VARIABLE, Settings, load_settings

SettingsFile = Annotated[
    str | None, typer.Option("--settings", metavar="FILE", help=f"A TOML file with settings (or {FILE_VARIABLE}).")
]
StoreOption = Annotated[str | None, typer.Option("--store", metavar="URL", help="memory://, or the URL of a Redis.")]
DatabaseOption = Annotated[str | None, typer.Option("--database", metavar="URL", help="sqlite:///… or postgresql://…")]


def serve(
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Where to listen (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(metavar="N", help="On which port (8000).")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="How many processes (1).")] = None,
    store: StoreOption = None,
    database: DatabaseOption = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="Serve from this file, without database.")] = None,
    root_path: Annotated[str | None, typer.Option(metavar="PATH", help="What every path starts with.")] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Speak TLS with this certificate.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="And this key.")] = None,
    settings_file: SettingsFile = None,
) -> None:
    """Run the service.

    Every option is a setting too (LIMITFORGE_PORT, …), and there are more of them:
    `limitforge settings` shows all. SIGHUP replaces the workers without losing a request,
    SIGTERM answers what is in flight and ends.

    Examples:
      limitforge serve
      limitforge serve --port 9000 --store redis://localhost:6379/0 --workers 4

    """
    told = {
        "host": host,
        "port": port,
        "workers": workers,
        "store_url": store,
        "database_url": database,
        "config": config,
        "root_path": root_path,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
    }
    environment = dict(os.environ)
    if settings_file is not None:
        environment[FILE_VARIABLE] = settings_file
    settings = load_settings(environment, **told)
    configure_logging(settings)
    environment |= {f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in told.items() if value is not None}
    with contextlib.ExitStack() as sockets:
        listening = sockets.enter_context(_bind_socket("port", settings.host, settings.port))
        metrics = None
        if settings.metrics_port:
            metrics = sockets.enter_context(_bind_socket("metrics_port", settings.metrics_host, settings.metrics_port))
        where = local_url(settings, listening.getsockname()[1])
        Supervisor(
            listening,
            settings.workers,
            environment,
            shutdown_seconds=settings.shutdown_seconds,
            metrics=metrics,
            on_ready=lambda: print(f"limitforge answers at {where}", file=sys.stderr, flush=True),
        ).run()


def _bind_socket(setting: str, host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise InvalidInput(setting, f"can't listen on {host}:{port}: {error.strerror}") from None


def settings(
    settings_file: SettingsFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show every setting as the service would have it, with secrets masked."""
    found = load_settings({**os.environ, **({FILE_VARIABLE: settings_file} if settings_file else {})})
    if as_json:
        print(msgspec.json.encode(found.masked()).decode())
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("setting", "value", "what it says"):
        table.add_column(heading, overflow="fold")
    for name, value, says in found.rows():
        table.add_row(Text(f"{ENV_PREFIX}{name.upper()}"), Text(str(value)), Text(says))
    Console(highlight=False).print(table)


def local_url(settings: Settings, port: int) -> str:
    """Where a client on this machine finds the service."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)  # noqa: S104 - only looked at
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{port}{settings.root_path}"
