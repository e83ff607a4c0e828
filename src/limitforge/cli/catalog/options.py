"""The arguments and options that several commands of the catalog share."""

import sys
from typing import Annotated, Any

import typer

from limitforge.catalog.fields import field_docs
from limitforge.catalog.model import Entity, Tenant
from limitforge.core.limits import Mode
from limitforge.errors import InvalidInput


def field_option(
    entity_type: type[Entity], field: str, *names: str, clearable: bool = False, note: str = "", **settings: Any
) -> Any:
    """Return a Typer option for a field of an entity, with the description of the model as its help.

    `note` is another sentence of the help. With `clearable`, the help says that the word `none` removes the value.
    """
    sentences = [field_docs(entity_type)[field].description.replace("`", "")]
    if note:
        sentences.append(note)
    if clearable:
        sentences.append("The word none removes it.")
    return typer.Option(*names, help=" ".join(sentences), **settings)


DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database",
        metavar="URL",
        envvar="LIMITFORGE_DATABASE_URL",
        help="The database of the catalog: sqlite:///FILE or postgresql://...",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
YesFlag = Annotated[bool, typer.Option("--yes", help="Don't ask for confirmation.")]

NameOrId = Annotated[str, typer.Argument(metavar="NAME", help="Its name or id.")]
CreatedName = Annotated[str, typer.Argument(metavar="NAME", help="1 to 64 letters, digits or -_./ characters.")]
NewName = Annotated[str | None, typer.Option("--name", metavar="NEW", help="The new name.")]

TenantOption = Annotated[str, typer.Option("--tenant", metavar="NAME", help="The tenant, by its name or id.")]
TenantFilter = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant, by its name or id.")
]

ModeOption = Annotated[Mode | None, field_option(Tenant, "mode")]
TimeZoneOption = Annotated[str | None, field_option(Tenant, "time_zone", "--time-zone", metavar="ZONE")]
FailureOption = Annotated[str | None, field_option(Tenant, "failure", metavar="NAME", clearable=True)]
PriorityOption = Annotated[str | None, field_option(Tenant, "priority", metavar="P0-P3", clearable=True)]
ExpiresOption = Annotated[
    str | None, typer.Option("--expires", metavar="WHEN", help="90d, 2026-12-31T00:00:00Z, or none for never.")
]


def confirm(question: str, *, yes: bool) -> None:
    """Ask before an action that can't be undone. Without a terminal, `--yes` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput("--yes", "is required when the standard input is not a terminal")
    typer.confirm(question, abort=True)
