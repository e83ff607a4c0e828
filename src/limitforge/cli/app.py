"""The `limitforge` command: its subcommands, its help, and its exit status after an error."""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from limitforge.cli.burst.command import burst
from limitforge.cli.replay.command import replay
from limitforge.cli.terminal.help import TYPER_SETTINGS
from limitforge.errors import CatalogUnavailable, LimitforgeError, StoreError

EXIT_WRONG_INPUT = 2
EXIT_UNAVAILABLE = 3

HELP = """A rate limiter for Python and HTTP: allowed or denied, what is left, and when to retry.

Examples:

  limitforge burst "100/minute" --requests 150 --rate 50/s
  limitforge replay limits.json --store redis://localhost:6379/0
  limitforge tenants create acme
  limitforge apply plans.yaml --dry-run

Use --help with a command for its options.
"""

# The modules of the commands below are imported when the command is run: SQLAlchemy and FastAPI take half a second.
SERVICE_COMMANDS = {
    "demo": "Run the service with a demo tenant.",
    "serve": "Run the service.",
    "settings": "Show the settings of the service.",
}
"""The commands that need the extra `service`."""
CATALOG_GROUPS = {
    "tenants": "Accounts whose traffic is limited.",
    "plans": "Named sets of limits, and their versions.",
    "policies": "The plans that apply to resources.",
    "keys": "The API keys of callers.",
    "overrides": "Different limits for one subject, until they expire.",
    "operator": "The plan and the mode that apply to all tenants.",
    "tokens": "The tokens for the admin API.",
    "audit": "All changes of the catalog.",
    "db": "The schema of the catalog's database.",
}
"""The groups of commands that need the extra `catalog`."""
FILE_COMMANDS = {
    "apply": "Change the catalog to match a file.",
    "diff": "Print the changes that apply would make.",
    "export": "Print the catalog as a file for apply.",
    "schema": "Print the JSON Schema of such files.",
}
"""The commands for configuration as code, which need the extra `catalog`."""
COMMAND_MODULES = {"demo": "demo", "serve": "serve", "settings": "serve"} | dict.fromkeys(FILE_COMMANDS, "config_files")
EXTRA_PACKAGES = {
    "catalog": ("sqlalchemy", "alembic", "aiosqlite", "asyncpg", "greenlet", "yaml"),
    "service": ("uvicorn", "httptools", "fastapi", "starlette", "pydantic", "fastapi_swagger"),
}


def run() -> None:
    """Run the command. An error of limitforge is printed as one message, without a traceback."""
    try:
        build_app()(prog_name="limitforge")
    except LimitforgeError as error:
        print(f"Error: {error}", file=sys.stderr)
        is_unavailable = isinstance(error, StoreError | CatalogUnavailable)
        raise SystemExit(EXIT_UNAVAILABLE if is_unavailable else EXIT_WRONG_INPUT) from None
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        extra = next((extra for extra, packages in EXTRA_PACKAGES.items() if package in packages), None)
        if extra is None:
            raise
        print(f"This command needs more packages: pip install 'limitforge[{extra}]'", file=sys.stderr)
        raise SystemExit(EXIT_WRONG_INPUT) from None


def build_app() -> typer.Typer:
    app = typer.Typer(cls=_LazyCommands, help=HELP, no_args_is_help=True, **TYPER_SETTINGS)
    app.callback()(_global_options)
    app.command(rich_help_panel="Limits")(burst)
    app.command(rich_help_panel="Limits")(replay)
    return app


class _LazyCommands(TyperGroup):
    """All commands.

    Those of the catalog and the service are placeholders. `resolve_command` replaces one when it is run.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        panels = {"Service": SERVICE_COMMANDS, "Catalog": CATALOG_GROUPS, "Configuration as a file": FILE_COMMANDS}
        for panel, commands in panels.items():
            for name, summary in commands.items():
                self.add_command(TyperCommand(name=name, help=summary, callback=None, rich_help_panel=panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in CATALOG_GROUPS:
            self.add_command(get_command(import_module(f"limitforge.cli.{name}").app), name)
        elif name in COMMAND_MODULES:
            single = typer.Typer(**TYPER_SETTINGS)
            single.command(name)(getattr(import_module(f"limitforge.cli.{COMMAND_MODULES[name]}"), name))
            self.add_command(get_command(single), name)
        return super().resolve_command(ctx, args)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        print(f"limitforge {version('limitforge')}")
        raise typer.Exit


def _global_options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
