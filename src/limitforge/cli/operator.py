"""`limitforge operator`: the plan and the mode that apply to all tenants."""

from typing import Annotated

import typer

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import OPERATOR
from limitforge.cli.catalog.connect import run_with_catalog
from limitforge.cli.catalog.lookup import NamesById, find_tenant
from limitforge.cli.catalog.options import AsJson, DatabaseUrl, TimeZoneOption
from limitforge.cli.catalog.show import print_entity
from limitforge.cli.catalog.values import given_fields
from limitforge.cli.tenants import change_tenant
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_done
from limitforge.core.limits import Mode

HELP = """The operator: a plan that applies to every check, and the mode of all tenants.

Create the operator's plans like other plans, with --tenant operator.

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
        operator = await find_tenant(catalog, OPERATOR)
        names = await NamesById.load(catalog, [operator])
        unused = dict.fromkeys(("default_plan_id", "lanes", "suspended", "revision"))
        await print_entity(catalog, operator, as_json=as_json, plan=names[operator.default_plan_id] or "none", **unused)

    run_with_catalog(database, work)


@app.command("set")
def set_fields(
    mode: Annotated[
        Mode | None, typer.Option(help="The mode of all tenants: monitor and off allow every check.")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(metavar="PLAN", help="The plan that applies to every check. The word none removes it.")
    ] = None,
    time_zone: TimeZoneOption = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Set the operator's plan or mode. All nodes apply it within a second."""
    fields = given_fields(mode=mode, default_plan=plan, time_zone=time_zone)
    print_done("Changed", change_tenant(database, OPERATOR, fields), as_json=as_json)
