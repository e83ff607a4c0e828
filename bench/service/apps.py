"""Typical applications with limits and slowapi: a FastAPI app with a route per plan.

Each route checks one limit after the other in Redis, and answers JSON with X-RateLimit headers. uvicorn runs the apps.
A header identifies the caller; no key is verified.
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
        shown, allowed = items[0], True
        for item in items:
            if not await strategy.hit(item, plan, caller):
                shown, allowed = item, False
                break
        stats = await strategy.get_window_stats(shown, plan, caller)
        headers = {
            "X-RateLimit-Limit": str(shown.amount),
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

        async def check(request: Request) -> Response:  # noqa: ARG001 - slowapi requires it
            return JSONResponse({"allowed": True})

        check.__name__ = plan  # slowapi identifies a route by it
        app.add_api_route(f"/{plan}", limiter.limit(_text(limits))(check), response_model=None)
    return app


def _denied_response(request: Request, _: Exception) -> Response:
    """Answer like slowapi's own handler, which also sends JSON."""
    limiter: Limiter = request.app.state.limiter
    response = JSONResponse({"allowed": False}, 429)
    return limiter._inject_headers(response, request.state.view_rate_limit)  # noqa: SLF001 - slowapi's own handler does this too


def _text(limits: tuple[Limit, ...]) -> str:
    return ";".join(f"{limit.amount}/{limit.unit}" for limit in limits)
