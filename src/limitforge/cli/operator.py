"""`limitforge operator`: what holds above all tenants."""

from typing import Annotated

import typer

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import OPERATOR
from limitforge.cli.catalog.lookup import find_tenant
from limitforge.cli.catalog.options import AsJson, DatabaseUrl, given_fields, run_with_catalog
from limitforge.cli.tenants import TimeZone, change_tenant, print_tenant
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_done
from limitforge.core.limits import Mode

HELP = """The operator: the plan that every check goes through, and the fleet's mode.

Its plans are made like any other's, with --tenant operator.

Examples:
  limitforge operator set --mode monitor
  limitforge plans create fleet --tenant operator --limits "10000/second"
  limitforge operator set --plan fleet
"""

app = command_group(HELP)


@app.command()
def show(database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the operator's plan and mode."""

    async def work(catalog: Catalog) -> None:
        await print_tenant(catalog, await find_tenant(catalog, OPERATOR), as_json=as_json)

    run_with_catalog(database, work)


@app.command("set")
def set_fields(
    mode: Annotated[Mode | None, typer.Option(help="Of the whole fleet: monitor and off let everything pass.")] = None,
    plan: Annotated[str | None, typer.Option(metavar="PLAN", help="For every check; none for none.")] = None,
    time_zone: TimeZone = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Set the operator's plan or mode. Every node has it within a second."""
    fields = given_fields(mode=mode, default_plan=plan, time_zone=time_zone)
    print_done("Changed", change_tenant(database, OPERATOR, fields), as_json=as_json)
