"""How the help of every command looks."""

from typing import Any

import typer

LOOKS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def group(said: str) -> typer.Typer:
    """A group of commands; without one of them it shows its help."""
    made = typer.Typer(help=said, no_args_is_help=True, **LOOKS)
    made.callback()(_nothing)  # so that it is a group, even of one
    return made


def _nothing() -> None:
    pass
