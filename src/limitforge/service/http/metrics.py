"""`/metrics`: what was counted, in the text format of Prometheus. It names tenants, so it takes an admin token; or it
has a port of its own, which only Prometheus should reach.
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
from limitforge.service.http.asgi import Receive, Scope, Send, send_response, source_address
from limitforge.service.problems import HttpError

METRICS_PATH = "/metrics"
TEXT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

Authorize = Callable[[Iterable[str], str], Awaitable[None]]
"""Refuses whoever may not see all tenants, by their `Authorization` fields and where they come from."""
Sample = tuple[dict[str, str], int]
CatalogStatus = LiveCatalogStatus | LiveFileStatus

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class MetricsEndpoint:
    """The call that takes a token; as an ASGI application, the one that needs none and serves nothing else."""

    def __init__(
        self,
        sums: SharedCounters,
        admit: Authorize,
        budget: Callable[[], int | None],
        catalog: Callable[[], CatalogStatus],
    ) -> None:
        """`budget` returns how many buckets a tenant may begin a minute; None for any number."""
        self._shared_counters = sums
        self._authorize = admit
        self._new_buckets = budget
        self._lock = asyncio.Lock()
        self._latest: tuple[int, bytes] = (0, b"")
        self._requested = 0
        self._catalog_status = catalog

    async def respond_authorized(self, scope: Scope, _: Receive) -> Response:
        authorization = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        await self._authorize(authorization, source_address(scope))
        return await self._respond()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] != METRICS_PATH:
                raise HttpError(404, "unknown_path", f"there is nothing here but {METRICS_PATH}")
            if scope["method"] not in ("GET", "HEAD"):
                raise HttpError(405, "method_not_allowed", "this path takes GET", allow="GET, HEAD")
            answer = await self._respond()
        except LimitforgeError as error:
            answer = problem_response(error)
        await send_response(send, answer)

    async def _respond(self) -> Response:
        """Many who ask at once share one text, which holds all that was counted before they asked."""
        self._requested += 1
        asked = self._requested
        async with self._lock:
            if self._latest[0] < asked:
                upto = self._requested
                self._latest = (
                    upto,
                    exposition(await self._shared_counters.totals(), self._new_buckets(), self._catalog_status()),
                )
            return Response(200, TEXT_TYPE, b"", self._latest[1])


def exposition(
    totals: Totals, new_buckets_per_minute: int | None = None, catalog: CatalogStatus | None = None
) -> bytes:
    tenants = sorted(totals.tenants.items())
    requests = sorted(totals.requests.items())
    lines = [
        *_counter(
            "rl_allowed_total", "Checks that were allowed.", [({"tenant": n}, row[ALLOWED]) for n, row in tenants]
        ),
        *_counter("rl_blocked_total", "Checks that were denied.", [({"tenant": n}, row[DENIED]) for n, row in tenants]),
        *_counter(
            "rl_overflow_total",
            "Checks of new subjects that a shared bucket decided: their tenant had begun as many buckets as it may.",
            [({"tenant": n}, row[OVERFLOW]) for n, row in tenants],
        ),
        *_counter(
            "requests_total",
            "Answers, by what was called and the HTTP status.",
            [({"call": call, "status": str(status)}, number) for (call, status), number in requests],
        ),
        *_counter(
            "overrides_restored_total",
            "Overrides that Redis had lost, by eviction or otherwise, and that were set again from the catalog.",
            [({}, totals.overrides_restored)],
        ),
    ]
    if new_buckets_per_minute is not None:
        says = "How many buckets a tenant may begin a minute; beyond that its new subjects share one for each limit."
        lines += _gauge("rl_new_buckets_per_minute", says, new_buckets_per_minute)
    if catalog is not None:
        lines += _catalog_gauges(catalog)
    return "".join(f"{line}\n" for line in lines).encode()


def _catalog_gauges(status: CatalogStatus) -> Iterable[str]:
    """Return the gauges of the catalog as the worker that answers has it."""
    yield from _gauge("rl_catalog_revision", "The newest revision of the catalog that is in force.", status.revision)
    yield from _gauge("rl_catalog_tenants", "How many tenants this worker has in memory.", status.cache.tenants)
    if isinstance(status, LiveCatalogStatus):
        says = "Whether this worker hears of changes at once (1), by source; without any it polls the database."
        sources = [({"source": each}, int(each in status.listening)) for each in ("postgres", "redis")]
        yield from _samples("gauge", "rl_catalog_listening", says, sources)
    policies = Counter(status.overrides.evicting.values())
    yield from _samples(
        "gauge",
        "rl_redis_evicting",
        "Redis servers that may evict counters and overrides when they are full, by `maxmemory-policy`.",
        [({"policy": policy}, number) for policy, number in sorted(policies.items())],
    )


def _gauge(name: str, says: str, number: int) -> Iterable[str]:
    return _samples("gauge", name, says, [({}, number)])


def _counter(name: str, says: str, samples: Iterable[Sample]) -> Iterable[str]:
    return _samples("counter", name, says, samples)


def _samples(kind: str, name: str, says: str, samples: Iterable[Sample]) -> Iterable[str]:
    yield f"# HELP {name} {says}"
    yield f"# TYPE {name} {kind}"
    for labels, number in samples:
        shown = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in labels.items())
        yield f"{name}{{{shown}}} {number}" if shown else f"{name} {number}"
