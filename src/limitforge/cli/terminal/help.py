"""The settings that all commands share, such as the format of their help."""

from typing import Any

import typer

TYPER_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def command_group(help_text: str) -> typer.Typer:
    """Return a new group of commands. Without a command it shows its help."""
    group = typer.Typer(help=help_text, no_args_is_help=True, **TYPER_SETTINGS)
    group.callback()(_no_op)  # without a callback, Typer makes a group of one command a plain command
    return group


def _no_op() -> None:
    pass
