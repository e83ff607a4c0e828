"""The admin API as one application: everything that is not asked with an API key."""

from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.routing import iter_route_contexts

from limitforge.catalog.node import Node
from limitforge.limiter import Limiter
from limitforge.service.admin import (
    audit,
    keys,
    mode,
    operator,
    overrides,
    plans,
    policies,
    reset,
    tenants,
    throttled,
    tokens,
    usage,
)
from limitforge.service.admin.access import Access
from limitforge.service.admin.docs import TITLE, serve_reference
from limitforge.service.admin.routing import Under, tell_problems
from limitforge.service.admin.session import Session
from limitforge.service.admin.usage import UsageLog
from limitforge.service.throttled import Throttled

PARTS = (tenants, plans, keys, policies, overrides, tokens, audit, reset, operator, mode, usage, throttled)


def create_admin(
    node: Node,
    limiter: Limiter,
    access: Access,
    *,
    usage_log: UsageLog,
    heavy_hitters: Throttled,
    root_path: str = "",
) -> FastAPI:
    """`/v1/admin/*`, `/openapi.json` and `/docs`, under `root_path`; whatever else is asked for is a 404."""
    app = FastAPI(
        title=TITLE,
        version=version("limitforge"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,
        generate_unique_id_function=lambda route: route.name,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.limiter = limiter
    app.state.snapshots = node.snapshots
    app.state.usage = usage_log
    app.state.throttled = heavy_hitters

    async def admit(request: Request) -> None:
        source = "" if request.client is None else request.client.host
        token = await access.admit(request.headers.getlist("authorization"), source)
        request.state.session = Session(token, node.catalog)

    app.state.admit = admit
    app.add_middleware(Under, root_path=root_path)
    tell_problems(app)
    for part in PARTS:
        app.include_router(part.router)
    serve_reference(app, root_path)
    list(iter_route_contexts(app.routes))  # FastAPI would make them when first asked, and checks would wait for it
    return app
