"""The FastAPI application of the admin API, with the OpenAPI document and the reference page."""

from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.routing import iter_route_contexts

from limitforge.catalog.live.live_catalog import LiveCatalog
from limitforge.limiter import Limiter
from limitforge.service.admin.authentication import TokenAuthenticator
from limitforge.service.admin.error_handlers import add_error_handlers
from limitforge.service.admin.middleware import AdminMiddleware
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
from limitforge.service.admin.session import AdminSession
from limitforge.service.admin.usage_recorder import UsageRecorder
from limitforge.service.counters.throttled import ThrottledTracker

ROUTE_MODULES = (tenants, plans, keys, policies, overrides, tokens, audit, reset, operator, mode, usage, throttled)


def create_admin_app(
    live_catalog: LiveCatalog,
    limiter: Limiter,
    authenticator: TokenAuthenticator,
    *,
    usage_recorder: UsageRecorder,
    throttled_tracker: ThrottledTracker,
    root_path: str = "",
) -> FastAPI:
    """Create the app that serves `/v1/admin/*`, `/openapi.json` and `/docs` under `root_path`."""
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
    app.state.catalog_cache = live_catalog.cache
    app.state.usage_recorder = usage_recorder
    app.state.throttled_tracker = throttled_tracker

    async def authenticate(request: Request) -> None:
        client_address = "" if request.client is None else request.client.host
        token = await authenticator.authenticate(request.headers.getlist("authorization"), client_address)
        request.state.session = AdminSession(token, live_catalog.catalog)

    app.state.authenticate = authenticate
    app.add_middleware(AdminMiddleware, root_path=root_path)
    add_error_handlers(app)
    for module in ROUTE_MODULES:
        app.include_router(module.router)
    add_reference_routes(app, root_path)
    # FastAPI builds these at the first request. Build them now, or the checks on this event loop wait meanwhile.
    list(iter_route_contexts(app.routes))
    return app
