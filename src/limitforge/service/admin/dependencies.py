"""The parts of the service that routes use, as FastAPI dependencies. `create_admin_app` sets them in `app.state`."""

from typing import Annotated

from fastapi import Depends, Request

from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.limiter import Limiter
from limitforge.service.admin.usage_recorder import UsageRecorder
from limitforge.service.counters.throttled import ThrottledTracker


def _limiter(request: Request) -> Limiter:
    limiter: Limiter = request.app.state.limiter
    return limiter


def _catalog_cache(request: Request) -> CatalogCache:
    cache: CatalogCache = request.app.state.catalog_cache
    return cache


def _usage_recorder(request: Request) -> UsageRecorder:
    recorder: UsageRecorder = request.app.state.usage_recorder
    return recorder


def _throttled_tracker(request: Request) -> ThrottledTracker:
    tracker: ThrottledTracker = request.app.state.throttled_tracker
    return tracker


ServiceLimiter = Annotated[Limiter, Depends(_limiter)]
ServiceCatalogCache = Annotated[CatalogCache, Depends(_catalog_cache)]
ServiceUsageRecorder = Annotated[UsageRecorder, Depends(_usage_recorder)]
ServiceThrottledTracker = Annotated[ThrottledTracker, Depends(_throttled_tracker)]
