"""Decides which batches a process works on, so that no tenant's batches hold up another tenant.

A process works on a few batches at once, or on many small ones. The others wait as bytes, and tenants take turns.
Active batches work in slices, about one per iteration of the event loop: everything else that is ready runs in between.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine

import msgspec

from limitforge.service.problems import HttpError

MAX_ACTIVE_BYTES = 262_144  # one that is larger is worked on alone, or with those of other tenants
MAX_ACTIVE_BYTES_OF_TENANT = 131_072
MAX_ACTIVE_TENANTS = 4  # each may have one batch of any size, which takes up to 4 MB
MAX_WAITING_BYTES = 9_437_184
MAX_WAITING_BYTES_OF_TENANT = 3_145_728  # about sixty batches of 1,000 usual checks
MIN_BATCH_WEIGHT = 1_024  # bytes that a small batch counts as
MAX_WAIT_SECONDS = 10.0  # after that its client has probably given up
CHECKS_PER_ITERATION = 50  # that batches read or decide in one iteration of the event loop


class WaitingBatch(msgspec.Struct, eq=False):
    """A batch that waits to be worked on. Exactly one of `start` and `refuse` is called."""

    tenant_id: str
    weight: int
    start: Callable[[], Coroutine[None, None, None]]
    refuse: Callable[[HttpError], None]
    deadline: float


class BatchQueue:
    """The batches of one process, on one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[WaitingBatch]] = {}
        """By tenant; the tenant whose turn is next comes first."""
        self._weights: Counter[str] = Counter()
        """Of the batches that wait, by tenant."""
        self._active: Counter[str] = Counter()
        """Bytes of the batches that are worked on, by tenant."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._checks_left = CHECKS_PER_ITERATION
        """How many checks batches may still work on in this iteration of the event loop."""

    def submit(
        self,
        tenant_id: str,
        size: int,
        start: Callable[[], Coroutine[None, None, None]],
        refuse: Callable[[HttpError], None],
    ) -> None:
        """Call `start` when it is this batch's turn, or `refuse` if too many wait or it has waited for too long."""
        deadline = asyncio.get_running_loop().time() + MAX_WAIT_SECONDS
        batch = WaitingBatch(tenant_id, max(size, MIN_BATCH_WEIGHT), start, refuse, deadline)
        self._waiting.setdefault(tenant_id, deque()).append(batch)
        self._weights[tenant_id] += batch.weight
        self._start_next()
        if self._weights[tenant_id] > MAX_WAITING_BYTES_OF_TENANT:
            self._refuse_last(tenant_id)
        elif self._weights.total() > MAX_WAITING_BYTES:
            self._refuse_last(max(self._weights, key=self._weights.__getitem__))  # not the one who happened to be last

    async def wait_for_turn(self, checks: int) -> None:
        """Wait for an iteration of the event loop in which batches may work on so many checks more. Everything else
        that is ready runs in between, and active batches take turns.
        """
        loop = asyncio.get_running_loop()
        if self._checks_left == CHECKS_PER_ITERATION:
            loop.call_soon(self._begin_iteration)
        if self._checks_left > 0 and not self._turns:
            self._checks_left -= checks
            return
        paused: asyncio.Future[None] = loop.create_future()
        self._turns.append((checks, paused))
        await paused

    def _begin_iteration(self) -> None:
        """Resume one slice, or several small ones: with `asyncio.sleep(0)` all batches would run in one iteration."""
        self._checks_left = CHECKS_PER_ITERATION
        if self._turns:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        while self._turns and self._checks_left > 0:
            checks, paused = self._turns.popleft()
            self._checks_left -= checks
            if not paused.done():  # its batch may have been cancelled
                paused.set_result(None)

    def _start_next(self) -> None:
        while (tenant_id := next(filter(self._has_room, self._waiting), None)) is not None:
            batches = self._waiting.pop(tenant_id)
            batch = batches.popleft()
            if batches:
                self._waiting[tenant_id] = batches  # behind the other tenants
            self._release(batch)
            self._start(batch)

    def _has_room(self, tenant_id: str) -> bool:
        """Return whether the next batch of a tenant can be worked on now."""
        if not self._active[tenant_id] and len(self._active) < MAX_ACTIVE_TENANTS:
            return True
        weight = self._waiting[tenant_id][0].weight
        of_tenant, of_all = self._active[tenant_id] + weight, self._active.total() + weight
        return of_tenant <= MAX_ACTIVE_BYTES_OF_TENANT and of_all <= MAX_ACTIVE_BYTES

    def _start(self, batch: WaitingBatch) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() > batch.deadline:
            batch.refuse(_too_many_batches())
            return
        self._active[batch.tenant_id] += batch.weight
        task = loop.create_task(batch.start())
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._on_ended(task, batch))

    def _on_ended(self, task: asyncio.Task[None], batch: WaitingBatch) -> None:
        self._tasks.discard(task)
        self._active[batch.tenant_id] -= batch.weight
        if not self._active[batch.tenant_id]:
            del self._active[batch.tenant_id]
        if not task.cancelled():  # else the process ends
            self._start_next()

    def _refuse_last(self, tenant_id: str) -> None:
        batches = self._waiting[tenant_id]
        batch = batches.pop()
        if not batches:
            del self._waiting[tenant_id]
        self._release(batch)
        batch.refuse(_too_many_batches())

    def _release(self, batch: WaitingBatch) -> None:
        self._weights[batch.tenant_id] -= batch.weight
        if not self._weights[batch.tenant_id]:
            del self._weights[batch.tenant_id]


def _too_many_batches() -> HttpError:
    detail = "too many batches of this tenant wait in this process: send fewer at a time"
    return HttpError(429, "too_many_batches", detail, **{"retry-after": "1"})
