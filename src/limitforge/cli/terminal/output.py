"""What the commands print: tables for people, one JSON value for programs. Names from outside are never markup."""

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

LINES_PER_RENDER = 200  # to render each line by itself costs rich 0.25 ms, which a large file has 100,000 times
PIPED_WIDTH = 10_000  # what is piped is not wrapped: each entry stays on its line


def make_console() -> Console:
    made = Console(highlight=False, markup=False, soft_wrap=False)
    return made if made.is_terminal else Console(highlight=False, markup=False, width=PIPED_WIDTH)


def print_json(value: Any, *, indent: int = 0) -> None:
    encoded = msgspec.json.encode(value)
    if indent:
        encoded = msgspec.json.format(encoded, indent=indent)
    sys.stdout.buffer.write(encoded + b"\n")
    sys.stdout.buffer.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty_message: str) -> None:
    """`nothing` is said, beside the table's place, where there are no rows."""
    listed = list(rows)
    if not listed:
        print(empty_message, file=sys.stderr)
        return
    screen = make_console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for name in columns:
        table.add_column(Text(name), overflow="fold")
    for row in listed:
        table.add_row(*(Text(format_value(each)) for each in row))
    _print_rendered(screen, table)


def print_fields(fields: Mapping[str, Any]) -> None:
    """One thing, a field to a line; what is nothing is left out."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False, show_edge=False)
    table.add_column(overflow="fold", style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if value not in (None, "", {}, [], ()):
            table.add_row(Text(name.replace("_", " ")), Text(format_value(value)))
    _print_rendered(make_console(), table)


def print_lines(lines: Iterable[str], colours: Mapping[str, str]) -> None:
    """As they are; on a terminal coloured by how they start."""
    screen = make_console()
    if not screen.is_terminal:
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return
    for block in _batched(lines, LINES_PER_RENDER):
        text = Text()
        for line in block:
            text.append(line + "\n", next((colour for start, colour in colours.items() if line.startswith(start)), ""))
        screen.print(text, soft_wrap=True, end="")


def _batched(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    rest = iter(lines)
    while block := list(islice(rest, size)):
        yield block


def format_value(value: Any) -> str:
    """A value on one line. What a terminal would obey is shown instead."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, str):
        return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in value)
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return format_value(", ".join(value))
    if isinstance(value, dict | list | tuple):
        return format_value(msgspec.json.encode(value).decode())
    return str(value)


def _print_rendered(screen: Console, table: Table) -> None:
    """Without the blanks that fill lines up, which only matter on a terminal."""
    if screen.is_terminal:
        screen.print(table)
        return
    with screen.capture() as captured:
        screen.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_warnings(warnings: Iterable[str]) -> None:
    """Beside the output, one to a line."""
    for warning in warnings:
        print(f"warning: {format_value(warning)}", file=sys.stderr)


def print_done(verb: str, entity: Any, *, as_json: bool) -> None:
    """What was done to an entity; for programs, the entity itself."""
    if as_json:
        print_json(to_public_dict(entity))
    else:
        called = entity.resource if entity.kind == "policy" else entity.name
        is_operator = entity.id == OPERATOR
        print(f"{verb} the operator." if is_operator else f"{verb} {entity.kind} {format_value(called)} ({entity.id}).")


def print_secret(entity: Any, secret: str, *, as_json: bool) -> None:
    """A new key or token: the only time that it is seen."""
    if as_json:
        print_json({**to_public_dict(entity), entity.kind: secret})
        return
    print(
        f"The {entity.kind} {format_value(entity.name)} ({entity.id}). It is shown this once: keep it.\n\n  {secret}\n"
    )
