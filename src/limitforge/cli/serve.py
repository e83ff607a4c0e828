"""`limitforge serve` and `limitforge settings`: run the service, and show its settings."""

import contextlib
import dataclasses
import os
import socket
import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from limitforge.errors import InvalidInput
from limitforge.service.log_setup import configure_logging
from limitforge.service.processes.supervisor import Supervisor, listen
from limitforge.service.settings import ENV_PREFIX, FILE_VARIABLE, Settings, load_settings

_SETTINGS = {field.name: field for field in dataclasses.fields(Settings)}


def _setting_option(setting: str, *names: str, metavar: str) -> Any:
    """Return a Typer option for a setting, with its description and default as the help."""
    field = _SETTINGS[setting]
    default = f" Default: {field.default}." if field.default else ""
    return typer.Option(*names, metavar=metavar, help=f"{field.metadata['help']}{default}")


SettingsFile = Annotated[
    str | None, typer.Option("--settings", metavar="FILE", help=f"A TOML file with settings (or {FILE_VARIABLE}).")
]


def serve(
    host: Annotated[str | None, _setting_option("host", metavar="ADDRESS")] = None,
    port: Annotated[int | None, _setting_option("port", metavar="N")] = None,
    workers: Annotated[int | None, _setting_option("workers", metavar="N")] = None,
    store: Annotated[str | None, _setting_option("store_url", "--store", metavar="URL")] = None,
    database: Annotated[str | None, _setting_option("database_url", "--database", metavar="URL")] = None,
    config: Annotated[str | None, _setting_option("config", metavar="FILE")] = None,
    root_path: Annotated[str | None, _setting_option("root_path", metavar="PATH")] = None,
    tls_cert: Annotated[str | None, _setting_option("tls_cert", metavar="FILE")] = None,
    tls_key: Annotated[str | None, _setting_option("tls_key", metavar="FILE")] = None,
    settings_file: SettingsFile = None,
) -> None:
    """Run the service.

    Options take precedence over environment variables (LIMITFORGE_PORT, …),
    which take precedence over the file. `limitforge settings` shows all of them.

    SIGHUP replaces the workers without losing a request. They read the settings
    file again; a new host, port or number of workers needs a restart. SIGTERM
    finishes the requests in flight and stops.

    Examples:
      limitforge serve
      limitforge serve --port 9000 --store redis://localhost:6379/0 --workers 4

    """
    options = {
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
    loaded = load_settings(environment, **options)
    configure_logging(loaded)
    # Each worker loads the settings again, from its environment.
    environment |= {f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in options.items() if value is not None}
    with contextlib.ExitStack() as sockets:
        server_socket = sockets.enter_context(_bind_socket("port", loaded.host, loaded.port))
        metrics_socket = None
        if loaded.metrics_port:
            metrics_socket = _bind_socket("metrics_port", loaded.metrics_host, loaded.metrics_port)
            sockets.enter_context(metrics_socket)
        url = local_url(loaded, server_socket.getsockname()[1])
        Supervisor(
            server_socket,
            loaded.workers,
            environment,
            shutdown_seconds=loaded.shutdown_seconds,
            metrics_socket=metrics_socket,
            on_ready=lambda: print(f"limitforge is ready at {url}", file=sys.stderr, flush=True),
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
    """Show all settings with their values. Secrets are masked."""
    loaded = load_settings({**os.environ, **({FILE_VARIABLE: settings_file} if settings_file else {})})
    if as_json:
        print(msgspec.json.encode(loaded.masked()).decode())
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("setting", "value", "description"):
        table.add_column(heading, overflow="fold")
    for name, value, description in loaded.describe_rows():
        table.add_row(Text(f"{ENV_PREFIX}{name.upper()}"), Text(str(value)), Text(description))
    Console(highlight=False).print(table)


def local_url(settings: Settings, port: int) -> str:
    """Return the URL of the service for a client on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)  # noqa: S104 - not bound here
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{port}{settings.root_path}"
