"""`/metrics` in the text format of Prometheus.

It names tenants, so it requires an admin token, unless it has its own port, which only Prometheus should reach.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from limitforge.catalog.live.live_catalog import LiveCatalogStatus
from limitforge.catalog.live.live_file import LiveFileStatus
from limitforge.errors import LimitforgeError
from limitforge.service.checks.responses import Response, problem_response
from limitforge.service.counters.process_counters import ALLOWED, DENIED, OVERFLOW
from limitforge.service.counters.shared_counters import SharedCounters, Totals
from limitforge.service.http.asgi import Receive, Scope, Send, read_client_ip, send_response
from limitforge.service.problems import HttpError

METRICS_PATH = "/metrics"
TEXT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

Authorize = Callable[[Iterable[str], str], Awaitable[None]]
"""Raises an error unless the client may read the numbers of all tenants: (authorization fields, client IP address)."""
Sample = tuple[dict[str, str], int]
CatalogStatus = LiveCatalogStatus | LiveFileStatus

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class MetricsEndpoint:
    """Responds to authorized requests. As an ASGI app on its own port, it serves nothing else and needs no token."""

    def __init__(
        self,
        shared_counters: SharedCounters,
        authorize: Authorize,
        new_buckets: Callable[[], int | None],
        catalog_status: Callable[[], CatalogStatus],
    ) -> None:
        """`new_buckets` returns how many buckets a tenant may create per minute, None if any number."""
        self._shared_counters = shared_counters
        self._authorize = authorize
        self._new_buckets = new_buckets
        self._catalog_status = catalog_status
        self._lock = asyncio.Lock()
        self._latest: tuple[int, bytes] = (0, b"")
        """The number of the last request that the latest text covers, and that text."""
        self._requested = 0

    async def respond_authorized(self, scope: Scope, _: Receive) -> Response:
        authorization = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        await self._authorize(authorization, read_client_ip(scope))
        return await self._respond()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] != METRICS_PATH:
                raise HttpError(404, "unknown_path", f"this port serves only {METRICS_PATH}")
            if scope["method"] not in ("GET", "HEAD"):
                raise HttpError(405, "method_not_allowed", "this path accepts GET", allow="GET, HEAD")
            response = await self._respond()
        except LimitforgeError as error:
            response = problem_response(error)
        await send_response(send, response)

    async def _respond(self) -> Response:
        """Return everything that was counted before this request. Concurrent requests share one text."""
        self._requested += 1
        number = self._requested
        async with self._lock:
            if self._latest[0] < number:
                last = self._requested
                totals = await self._shared_counters.totals()
                self._latest = (last, exposition(totals, self._new_buckets(), self._catalog_status()))
            return Response(200, TEXT_TYPE, b"", self._latest[1])


def exposition(
    totals: Totals, new_buckets_per_minute: int | None = None, catalog: CatalogStatus | None = None
) -> bytes:
    """Return all metrics in the text exposition format."""
    tenants = sorted(totals.tenants.items())
    requests = sorted(totals.requests.items())
    lines = [
        *_counter("rl_allowed_total", "Allowed checks.", [({"tenant": n}, row[ALLOWED]) for n, row in tenants]),
        *_counter("rl_blocked_total", "Denied checks.", [({"tenant": n}, row[DENIED]) for n, row in tenants]),
        *_counter(
            "rl_overflow_total",
            "Checks of new subjects that a shared bucket decided, because their tenant had created too many buckets.",
            [({"tenant": n}, row[OVERFLOW]) for n, row in tenants],
        ),
        *_counter(
            "requests_total",
            "Responses by call and HTTP status.",
            [({"call": call, "status": str(status)}, number) for (call, status), number in requests],
        ),
        *_counter(
            "overrides_restored_total",
            "Overrides that Redis had lost, such as by eviction, and that were set again from the catalog.",
            [({}, totals.overrides_restored)],
        ),
    ]
    if new_buckets_per_minute is not None:
        description = "Buckets that a tenant may create per minute; beyond that its new subjects share one per limit."
        lines += _gauge("rl_new_buckets_per_minute", description, new_buckets_per_minute)
    if catalog is not None:
        lines += _catalog_gauges(catalog)
    return "".join(f"{line}\n" for line in lines).encode()


def _catalog_gauges(status: CatalogStatus) -> Iterable[str]:
    """Return the gauges of the catalog, as the worker that responds has it."""
    yield from _gauge("rl_catalog_revision", "The newest revision of the catalog that is in force.", status.revision)
    yield from _gauge("rl_catalog_tenants", "Tenants that this worker has in memory.", status.cache.tenants)
    if isinstance(status, LiveCatalogStatus):
        description = "1 if this worker receives changes at once from this source; without any it polls the database."
        sources = [({"source": each}, int(each in status.listening)) for each in ("postgres", "redis")]
        yield from _samples("gauge", "rl_catalog_listening", description, sources)
    policies = Counter(status.overrides.evicting.values())
    yield from _samples(
        "gauge",
        "rl_redis_evicting",
        "Redis servers that may evict counters and overrides when they are full, by `maxmemory-policy`.",
        [({"policy": policy}, number) for policy, number in sorted(policies.items())],
    )


def _gauge(name: str, description: str, number: int) -> Iterable[str]:
    return _samples("gauge", name, description, [({}, number)])


def _counter(name: str, description: str, samples: Iterable[Sample]) -> Iterable[str]:
    return _samples("counter", name, description, samples)


def _samples(kind: str, name: str, description: str, samples: Iterable[Sample]) -> Iterable[str]:
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} {kind}"
    for labels, number in samples:
        text = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in labels.items())
        yield f"{name}{{{text}}} {number}" if text else f"{name} {number}"
