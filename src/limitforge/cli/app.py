"""The command line as a whole: its commands, its help, and how an error ends it."""

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

HELP = """Rate limiting as a contract: what a caller may do now, what is left, and when to come back.

Examples:

  limitforge burst "100/minute" --requests 150 --rate 50/s
  limitforge replay limits.json --store redis://localhost:6379/0
  limitforge tenants create acme
  limitforge apply plans.yaml --dry-run

Each command says more with --help.
"""

# Of the extra `service`.
SERVICE_COMMANDS = {
    "demo": "Run the service with a tenant to try.",
    "serve": "Run the service.",
    "settings": "Show what the service is told.",
}
# Of the extra `catalog`. All of these are imported only when their command is run, since they bring in a lot.
CATALOG_GROUPS = {
    "tenants": "Whose traffic is limited.",
    "plans": "Named sets of limits, and their history.",
    "policies": "Which plan applies to which resources.",
    "keys": "API keys: what callers show.",
    "overrides": "Other numbers for one subject, for a while.",
    "operator": "What holds above all tenants.",
    "tokens": "Admin tokens: who may change the catalog.",
    "audit": "Who changed what, and when.",
    "db": "The catalog's database and its schema.",
}
FILE_COMMANDS = {
    "apply": "Bring the catalog to what a file says.",
    "diff": "Tell what apply would change.",
    "export": "Print the catalog as such a file.",
    "schema": "Print the JSON Schema of such files.",
}
COMMAND_MODULES = {"demo": "demo", "serve": "serve", "settings": "serve"} | dict.fromkeys(FILE_COMMANDS, "config")
EXTRA_PACKAGES = {
    "catalog": ("sqlalchemy", "alembic", "aiosqlite", "asyncpg", "greenlet", "yaml"),
    "service": ("uvicorn", "httptools", "fastapi", "starlette", "pydantic", "fastapi_swagger"),
}


def run() -> None:
    """Run the command; whatever limitforge refuses becomes one message and an exit status, never a traceback."""
    try:
        build_app()(prog_name="limitforge")
    except LimitforgeError as error:
        print(f"Error: {error}", file=sys.stderr)
        is_away = isinstance(error, StoreError | CatalogUnavailable)
        raise SystemExit(EXIT_UNAVAILABLE if is_away else EXIT_WRONG_INPUT) from None
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        extra = next((extra for extra, packages in EXTRA_PACKAGES.items() if package in packages), None)
        if extra is None:
            raise
        print(f"This command needs a few more packages: pip install 'limitforge[{extra}]'", file=sys.stderr)
        raise SystemExit(EXIT_WRONG_INPUT) from None


def build_app() -> typer.Typer:
    app = typer.Typer(cls=_LazyCommands, help=HELP, no_args_is_help=True, **TYPER_SETTINGS)
    app.callback()(_global_options)
    app.command(rich_help_panel="Limits")(burst)
    app.command(rich_help_panel="Limits")(replay)
    return app


class _LazyCommands(TyperGroup):
    """All commands; those of the catalog stand here by name until one of them is run."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        panels = {"Service": SERVICE_COMMANDS, "Catalog": CATALOG_GROUPS, "Configuration as a file": FILE_COMMANDS}
        for panel, listed in panels.items():
            for name, said in listed.items():
                self.add_command(TyperCommand(name=name, help=said, callback=None, rich_help_panel=panel))

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
