"""The command line as a whole: its commands, its help, and how an error ends it."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from limitforge.cli.burst import burst
from limitforge.cli.replay import replay
from limitforge.errors import LimitforgeError, StoreError

WRONG_INPUT = 2
STORE_FAILED = 3

HELP = """Rate limiting as a contract: what a caller may do now, what is left, and when to come back.

Examples:

  limitforge burst "100/minute" --requests 150 --rate 50/s
  limitforge replay limits.json --store redis://localhost:6379/0

Each command says more with --help.
"""


def run() -> None:
    """Run the command; whatever limitforge refuses becomes one message and an exit status, never a traceback."""
    try:
        build()(prog_name="limitforge")
    except LimitforgeError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(STORE_FAILED if isinstance(error, StoreError) else WRONG_INPUT) from None


def build() -> typer.Typer:
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    app.command()(burst)
    app.command()(replay)
    return app


def _show_version(asked: bool) -> None:
    if asked:
        print(f"limitforge {version('limitforge')}")
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
