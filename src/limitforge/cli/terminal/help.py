"""How the help of every command looks."""

from typing import Any

import typer

TYPER_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def command_group(help_text: str) -> typer.Typer:
    """A group of commands; without one of them it shows its help."""
    made = typer.Typer(help=help_text, no_args_is_help=True, **TYPER_SETTINGS)
    made.callback()(_no_op)  # so that it is a group, even of one
    return made


def _no_op() -> None:
    pass
