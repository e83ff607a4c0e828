"""Create a catalog in an SQLite file with a few large edits: tenants with a key, plans and policies each."""

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from bench.harness import progress
from bench.service.plans import PLANS
from limitforge.catalog.credentials import PREFIXES, Credential, Peppers, new_id
from limitforge.catalog.database import outbox
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.outbox import OUTBOX_RETENTION
from limitforge.catalog.model import Entity, Key, Plan, Policy, Tenant

AT_ONCE = 1_000


class Seeded(NamedTuple):
    """The settings for the service, and one key per tenant for the callers."""

    database_url: str
    peppers: str
    keys: tuple[str, ...]
    areas: tuple[str, ...]
    """First path segments with a policy; any segment may follow."""


class _Sizes(NamedTuple):
    tenants: int
    keys: int
    plans: tuple[str, ...]
    areas: tuple[str, ...]


class _Rows(NamedTuple):
    tenants: list[Tenant]
    plans: list[Plan]
    policies: list[Policy]
    keys: list[Key]


def seed(
    file: Path, *, tenants: int = 1, keys: int = 1, policies: int = 10, plans: Sequence[str] = tuple(PLANS)
) -> Seeded:
    """Create the catalog. `keys` and `policies` are per tenant.

    Each plan belongs to the resource `GET:/<plan>`. The other policies are for areas, and use the last plan.
    """
    logging.getLogger("limitforge").setLevel(logging.ERROR)
    areas = tuple(f"area{number:05}" for number in range(policies - len(plans)))
    peppers = Peppers.generate_text()
    texts = asyncio.run(_write_catalog(f"sqlite:///{file}", peppers, _Sizes(tenants, keys, tuple(plans), areas)))
    return Seeded(f"sqlite:///{file}", peppers, tuple(texts), areas)


async def _write_catalog(url: str, text: str, sizes: _Sizes) -> list[str]:
    database, peppers = Database(url), Peppers.parse(text)
    await database.upgrade()
    catalog = Catalog(database, peppers=peppers)
    texts: list[str] = []
    for first in range(0, sizes.tenants, AT_ONCE):
        rows = _Rows([], [], [], [])
        end = min(first + AT_ONCE, sizes.tenants)
        for number in range(first, end):
            texts += _add(rows, f"tenant-{number}", peppers, sizes)
        entities: list[Entity] = [*rows.tenants, *rows.plans, *rows.policies, *rows.keys]
        async with catalog.edit("bench") as edit:
            await edit.write_changes((None, entity) for entity in entities)
        if sizes.tenants > AT_ONCE:
            progress(f"service: {end:,} of {sizes.tenants:,} tenants are written")
    async with database.writing() as connection:  # as after a day: all processes have applied the changes
        await outbox.trim_outbox(connection, datetime.now(UTC) + OUTBOX_RETENTION)
    await database.close()
    return texts


def _add(rows: _Rows, name: str, peppers: Peppers, sizes: _Sizes) -> list[str]:
    """Add a tenant with its plans, policies and keys, and return the texts of the keys."""
    tenant = Tenant(id=new_id("ten"), name=name)
    plans = {
        f"GET:/{plan}": Plan(id=new_id("pla"), tenant_id=tenant.id, name=plan, limits=_limits(plan))
        for plan in sizes.plans
    }
    placed = {resource: plan.id for resource, plan in plans.items()}
    placed |= dict.fromkeys((f"GET:/{area}/{{id}}" for area in sizes.areas), plans[f"GET:/{sizes.plans[-1]}"].id)
    rows.tenants.append(tenant)
    rows.plans.extend(plans.values())
    rows.policies.extend(
        Policy(id=new_id("pol"), tenant_id=tenant.id, resource=resource, plan_id=plan_id)
        for resource, plan_id in placed.items()
    )
    texts = []
    for number in range(sizes.keys):
        key_id = new_id("key")
        credential = Credential.generate(PREFIXES["live"], key_id.removeprefix("key_"), peppers)
        sealed = peppers.hash_credential(credential)
        rows.keys.append(Key(id=key_id, tenant_id=tenant.id, name=f"key-{number}", secrets=(sealed,)))
        texts.append(credential.text)
    return texts


def _limits(plan: str) -> tuple[dict[str, object], ...]:
    return tuple(
        {"name": limit.unit, "algorithm": "fixed_window", "limit": limit.amount, "window_seconds": limit.seconds}
        for limit in PLANS[plan]
    )
