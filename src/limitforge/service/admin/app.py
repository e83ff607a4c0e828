"""The admin API as one application: everything that is not asked with an API key."""

from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.routing import iter_route_contexts

from limitforge.catalog.live.live_catalog import LiveCatalog
from limitforge.limiter import Limiter
from limitforge.service.admin.authentication import TokenAuthenticator
from limitforge.service.admin.openapi.reference_page import TITLE, add_reference_routes
from limitforge.service.admin.routes import (
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
from limitforge.service.admin.routes.usage import UsageRecorder
from limitforge.service.admin.routing import RootPathMiddleware, add_error_handlers
from limitforge.service.admin.session import AdminSession
from limitforge.service.counters.throttled import ThrottledTracker

ROUTE_MODULES = (tenants, plans, keys, policies, overrides, tokens, audit, reset, operator, mode, usage, throttled)


def create_admin_app(
    live_catalog: LiveCatalog,
    limiter: Limiter,
    authenticator: TokenAuthenticator,
    *,
    usage_recorder: UsageRecorder,
    throttled_subjects: ThrottledTracker,
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
    app.state.snapshots = live_catalog.cache
    app.state.usage = usage_recorder
    app.state.throttled = throttled_subjects

    async def admit(request: Request) -> None:
        source = "" if request.client is None else request.client.host
        token = await authenticator.authenticate(request.headers.getlist("authorization"), source)
        request.state.session = AdminSession(token, live_catalog.catalog)

    app.state.admit = admit
    app.add_middleware(RootPathMiddleware, root_path=root_path)
    add_error_handlers(app)
    for part in ROUTE_MODULES:
        app.include_router(part.router)
    add_reference_routes(app, root_path)
    list(iter_route_contexts(app.routes))  # FastAPI would make them when first asked, and checks would wait for it
    return app
