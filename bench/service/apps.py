"""What people write with limits and with slowapi: a FastAPI app with a route for each plan, which asks Redis for each
limit in turn and answers JSON with X-RateLimit headers. uvicorn runs them.

A caller is known by a header here; nobody checks a key.
"""

import os
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from limits import parse_many
from limits.aio.storage import RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter
from slowapi import Limiter
from slowapi.errors import RateLimitExceeded

from bench.service.plans import PLANS, Limit

REDIS_URL = "BENCH_REDIS_URL"
CALLER = "x-caller"

Endpoint = Callable[[Request], Awaitable[Response]]


def with_limits() -> FastAPI:
    storage = RedisStorage(f"async+{os.environ[REDIS_URL]}", implementation="redispy", key_prefix="limits")
    strategy = FixedWindowRateLimiter(storage)
    app = FastAPI(openapi_url=None)
    for plan, limits in PLANS.items():
        app.add_api_route(f"/{plan}", _make_endpoint(strategy, plan, limits), response_model=None)
    return app


def _make_endpoint(strategy: FixedWindowRateLimiter, plan: str, limits: tuple[Limit, ...]) -> Endpoint:
    items = parse_many(_text(limits))

    async def check(request: Request) -> Response:
        caller = request.headers[CALLER]
        told, allowed = items[0], True
        for item in items:
            if not await strategy.hit(item, plan, caller):
                told, allowed = item, False
                break
        stats = await strategy.get_window_stats(told, plan, caller)
        headers = {
            "X-RateLimit-Limit": str(told.amount),
            "X-RateLimit-Remaining": str(stats.remaining),
            "X-RateLimit-Reset": str(int(stats.reset_time)),
        }
        return JSONResponse({"allowed": allowed}, 200 if allowed else 429, headers)

    return check


def with_slowapi() -> FastAPI:
    limiter = Limiter(lambda request: request.headers[CALLER], storage_uri=os.environ[REDIS_URL], headers_enabled=True)
    app = FastAPI(openapi_url=None)
    app.state.limiter = limiter
    app.add_exception_handler(RateLimitExceeded, _denied_response)
    for plan, limits in PLANS.items():

        async def check(request: Request) -> Response:  # noqa: ARG001 - slowapi asks for it
            return JSONResponse({"allowed": True})

        check.__name__ = plan  # slowapi knows a route by it
        app.add_api_route(f"/{plan}", limiter.limit(_text(limits))(check), response_model=None)
    return app


def _denied_response(request: Request, _: Exception) -> Response:
    """As slowapi's own handler, which answers JSON too."""
    limiter: Limiter = request.app.state.limiter
    response = JSONResponse({"allowed": False}, 429)
    return limiter._inject_headers(response, request.state.view_rate_limit)  # noqa: SLF001 - as its own handler does


def _text(limits: tuple[Limit, ...]) -> str:
    return ";".join(f"{limit.amount}/{limit.unit}" for limit in limits)
