"""Create a demo tenant: a plan for each algorithm, and three tiers with one key each."""

import contextlib
from typing import Any

import msgspec

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.queries import get_by_name_or_id
from limitforge.catalog.model import Plan, Tenant, Token
from limitforge.errors import NotFound

NAME = "demo"
ACTOR = "demo"

ALGORITHMS: dict[str, dict[str, Any]] = {
    "token_bucket": {"bucket_capacity": 10, "refill_rate_per_sec": 2},
    "leaky_bucket": {"bucket_capacity": 10, "leak_rate_per_sec": 2},
    "fixed_window": {"limit": 10, "window_seconds": 10},
    "sliding_window": {"limit": 10, "window_seconds": 10},
    "sliding_window_counter": {"limit": 10, "window_seconds": 10},
    "concurrency": {"max_concurrent": 3, "lease_ttl_seconds": 30},
    "quota": {"limit": 1_000, "period": "month"},
}
TIERS: dict[str, tuple[int | None, int | None]] = {
    "free": (100, 1_000),
    "pro": (1_000, 50_000),
    "enterprise": (10_000, None),
}


class DemoTenant(msgspec.Struct, frozen=True):
    """Ids and secrets of a demo tenant. `api_key` has the default plan. The secrets can't be read again later."""

    base_url: str
    admin_token: str
    tenant_id: str
    api_key: str
    plans: dict[str, str]
    keys: dict[str, str]


async def create_demo_tenant(catalog: Catalog, base_url: str) -> DemoTenant:
    """Create the tenant. Replace the one of an earlier demo, if any."""
    async with catalog.edit(ACTOR) as edit:
        for entity_type in (Tenant, Token):
            with contextlib.suppress(NotFound):
                await edit.delete(entity_type, (await get_by_name_or_id(edit.connection, entity_type, NAME)).id)
        tenant = await edit.create(Tenant, {"name": NAME})
        plans: dict[str, str] = {}
        for name, numbers in ALGORITHMS.items():
            plan = await edit.create(Plan, {"tenant_id": tenant.id, "name": name, "algorithm": name, **numbers})
            plans[name] = plan.id
        for name, (minute, hour) in TIERS.items():
            limits = [_window_limit("minute", minute, 60), _window_limit("hour", hour, 3_600)]
            plans[name] = (await edit.create(Plan, {"tenant_id": tenant.id, "name": name, "limits": limits})).id
        await edit.update(Tenant, tenant.id, {"default_plan_id": plans["token_bucket"]})
        _, default_key = await edit.create_key({"tenant_id": tenant.id, "name": NAME})
        keys = {}
        for name in TIERS:
            _, key = await edit.create_key({"tenant_id": tenant.id, "name": name, "plan_id": plans[name]})
            keys[name] = key.text
        _, admin_token = await edit.create_token({"name": NAME, "scopes": ["read", "write"]})
    return DemoTenant(base_url, admin_token.text, tenant.id, default_key.text, plans, keys)


def _window_limit(name: str, limit: int | None, seconds: int) -> dict[str, Any]:
    return {"name": name, "algorithm": "sliding_window_counter", "limit": limit, "window_seconds": seconds}
