"""`/metrics`: what was counted, in the text format of Prometheus. It names tenants, so it takes an admin token; or it
has a port of its own, which only Prometheus should reach.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from limitforge.catalog.file import FileStatus
from limitforge.catalog.node import NodeStatus
from limitforge.errors import LimitforgeError
from limitforge.service.answers import Answer, refused
from limitforge.service.asgi import Receive, Scope, Send, send_answer, source_of
from limitforge.service.counters import ALLOWED, DENIED, OVERFLOW
from limitforge.service.problems import BadRequest
from limitforge.service.sums import Sums, Totals

PATH = "/metrics"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"

Admit = Callable[[Iterable[str], str], Awaitable[None]]
"""Refuses whoever may not see all tenants, by their `Authorization` fields and where they come from."""
Sample = tuple[dict[str, str], int]
CatalogStatus = NodeStatus | FileStatus

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Metrics:
    """The call that takes a token; as an ASGI application, the one that needs none and serves nothing else."""

    def __init__(
        self, sums: Sums, admit: Admit, budget: Callable[[], int | None], catalog: Callable[[], CatalogStatus]
    ) -> None:
        """`budget` returns how many buckets a tenant may begin a minute; None for any number."""
        self._sums = sums
        self._admit = admit
        self._budget = budget
        self._writing = asyncio.Lock()
        self._written: tuple[int, bytes] = (0, b"")
        self._asked = 0
        self._catalog = catalog

    async def guarded(self, scope: Scope, _: Receive) -> Answer:
        authorization = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        await self._admit(authorization, source_of(scope))
        return await self._told()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] != PATH:
                raise BadRequest(404, "unknown_path", f"there is nothing here but {PATH}")
            if scope["method"] not in ("GET", "HEAD"):
                raise BadRequest(405, "method_not_allowed", "this path takes GET", allow="GET, HEAD")
            answer = await self._told()
        except LimitforgeError as error:
            answer = refused(error)
        await send_answer(send, answer)

    async def _told(self) -> Answer:
        """Many who ask at once share one text, which holds all that was counted before they asked."""
        self._asked += 1
        asked = self._asked
        async with self._writing:
            if self._written[0] < asked:
                upto = self._asked
                self._written = (upto, exposition(await self._sums.totals(), self._budget(), self._catalog()))
            return Answer(200, TEXT, b"", self._written[1])


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
        lines += _of_catalog(catalog)
    return "".join(f"{line}\n" for line in lines).encode()


def _of_catalog(status: CatalogStatus) -> Iterable[str]:
    """Return the gauges of the catalog as the worker that answers has it."""
    yield from _gauge("rl_catalog_revision", "The newest revision of the catalog that is in force.", status.revision)
    yield from _gauge("rl_catalog_tenants", "How many tenants this worker has in memory.", status.cache.tenants)
    if isinstance(status, NodeStatus):
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
