"""Print tables for people, and JSON for programs. Values are never interpreted as Rich markup."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from limitforge.catalog.model import OPERATOR, to_public_dict

LINES_PER_RENDER = 200  # Rich needs 0.25 ms per call, and the diff of a large file has 100,000 lines
PIPED_WIDTH = 10_000  # wide enough that a row stays on one line when the output is piped


def make_console() -> Console:
    console = Console(highlight=False, markup=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=PIPED_WIDTH)


def print_json(value: Any, *, indent: int = 0) -> None:
    encoded = msgspec.json.encode(value)
    if indent:
        encoded = msgspec.json.format(encoded, indent=indent)
    sys.stdout.buffer.write(encoded + b"\n")
    sys.stdout.buffer.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty_message: str) -> None:
    """Print a table, or `empty_message` to stderr if there are no rows."""
    all_rows = list(rows)
    if not all_rows:
        print(empty_message, file=sys.stderr)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for name in columns:
        table.add_column(Text(name), overflow="fold")
    for row in all_rows:
        table.add_row(*(Text(format_value(value)) for value in row))
    _print_rendered(make_console(), table)


def print_fields(fields: Mapping[str, Any]) -> None:
    """Print one field per line, without those that are None or empty."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False, show_edge=False)
    table.add_column(overflow="fold", style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if value not in (None, "", {}, [], ()):
            table.add_row(Text(name), Text(format_value(value)))
    _print_rendered(make_console(), table)


def print_lines(lines: Iterable[str], colours: Mapping[str, str]) -> None:
    """Print lines. On a terminal, `colours` maps the start of a line to its colour."""
    console = make_console()
    if not console.is_terminal:
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return
    for batch in _batched(lines, LINES_PER_RENDER):
        text = Text()
        for line in batch:
            colour = next((colour for start, colour in colours.items() if line.startswith(start)), "")
            text.append(f"{line}\n", colour)
        console.print(text, soft_wrap=True, end="")


def _batched(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    remaining = iter(lines)
    while batch := list(islice(remaining, size)):
        yield batch


def format_value(value: Any) -> str:
    """Format a value on one line. Control characters are escaped."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, str):
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in value)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return format_value(", ".join(value))
    if isinstance(value, dict | list | tuple):
        return format_value(msgspec.json.encode(value).decode())
    return str(value)


def _print_rendered(console: Console, table: Table) -> None:
    """Print a table. When piped, remove the trailing spaces that Rich adds."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_warnings(warnings: Iterable[str]) -> None:
    """Print warnings to stderr, one per line."""
    for warning in warnings:
        print(f"warning: {format_value(warning)}", file=sys.stderr)


def print_done(verb: str, entity: Any, *, as_json: bool) -> None:
    """Print what was done to an entity, or the entity as JSON."""
    if as_json:
        print_json(to_public_dict(entity))
    elif entity.id == OPERATOR:
        print(f"{verb} the operator.")
    else:
        name = entity.resource if entity.kind == "policy" else entity.name
        print(f"{verb} {entity.kind} {format_value(name)} ({entity.id}).")


def print_secret(entity: Any, secret: str, *, as_json: bool) -> None:
    """Print a new key or token with its secret, which can't be shown again."""
    if as_json:
        print_json({**to_public_dict(entity), entity.kind: secret})
        return
    print(
        f"The {entity.kind} {format_value(entity.name)} ({entity.id}). Keep it: it is shown only once.\n\n  {secret}\n"
    )
