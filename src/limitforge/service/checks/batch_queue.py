"""Schedule the batches of a process, so that the batches of one tenant do not delay another tenant.

A process works on a few batches at once, or on many small ones. The others wait unparsed, and tenants take turns.
Active batches work in slices, about one per iteration of the event loop, and everything else that is ready runs in
between.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine

import msgspec

from limitforge.service.problems import HttpError

MAX_ACTIVE_BYTES = 262_144  # a larger batch runs alone, or beside batches of other tenants
MAX_ACTIVE_BYTES_OF_TENANT = 131_072
MAX_ACTIVE_TENANTS = 4  # each may have one batch of any size, and a batch takes up to 4 MB of memory
MAX_WAITING_BYTES = 9_437_184
MAX_WAITING_BYTES_OF_TENANT = 3_145_728  # about sixty batches of 1,000 typical checks
MIN_BATCH_WEIGHT = 1_024  # a smaller batch counts as so many bytes
MAX_WAIT_SECONDS = 10.0  # by then the client has probably given up
CHECKS_PER_ITERATION = 50  # checks that all batches together parse or decide in one iteration of the event loop


class WaitingBatch(msgspec.Struct, eq=False):
    """A batch that has not been started. Exactly one of `start` and `reject` is called."""

    tenant_id: str
    weight: int
    start: Callable[[], Coroutine[None, None, None]]
    reject: Callable[[HttpError], None]
    deadline: float


class BatchQueue:
    """The batches of one process, on one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[WaitingBatch]] = {}
        """Batches by tenant. The tenant whose turn is next comes first."""
        self._weights: Counter[str] = Counter()
        """Bytes of the waiting batches, by tenant."""
        self._active: Counter[str] = Counter()
        """Bytes of the batches in progress, by tenant."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._checks_left = CHECKS_PER_ITERATION
        """How many checks the batches may still parse or decide in this iteration of the event loop."""

    def enqueue(
        self,
        tenant_id: str,
        size: int,
        start: Callable[[], Coroutine[None, None, None]],
        reject: Callable[[HttpError], None],
    ) -> None:
        """Call `start` at this batch's turn, or `reject` if too many batches wait or it has waited too long."""
        deadline = asyncio.get_running_loop().time() + MAX_WAIT_SECONDS
        batch = WaitingBatch(tenant_id, max(size, MIN_BATCH_WEIGHT), start, reject, deadline)
        self._waiting.setdefault(tenant_id, deque()).append(batch)
        self._weights[tenant_id] += batch.weight
        self._start_next()
        if self._weights[tenant_id] > MAX_WAITING_BYTES_OF_TENANT:
            self._reject_last(tenant_id)
        elif self._weights.total() > MAX_WAITING_BYTES:
            self._reject_last(max(self._weights, key=self._weights.__getitem__))  # not just the last to arrive

    async def wait_for_turn(self, checks: int) -> None:
        """Wait for an iteration of the event loop in which batches may work on that many more checks.

        Everything else that is ready runs in between, and active batches take turns.
        """
        loop = asyncio.get_running_loop()
        if self._checks_left == CHECKS_PER_ITERATION:
            loop.call_soon(self._begin_iteration)
        if self._checks_left > 0 and not self._turns:
            self._checks_left -= checks
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._turns.append((checks, turn))
        await turn

    def _begin_iteration(self) -> None:
        """Resume one slice, or several small ones.

        `asyncio.sleep(0)` would resume the slices of all batches in the same iteration.
        """
        self._checks_left = CHECKS_PER_ITERATION
        if self._turns:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        while self._turns and self._checks_left > 0:
            checks, turn = self._turns.popleft()
            self._checks_left -= checks
            if not turn.done():  # its batch may have been cancelled
                turn.set_result(None)

    def _start_next(self) -> None:
        while (tenant_id := next(filter(self._has_room, self._waiting), None)) is not None:
            batches = self._waiting.pop(tenant_id)
            batch = batches.popleft()
            if batches:
                self._waiting[tenant_id] = batches  # behind the other tenants
            self._release(batch)
            self._start(batch)

    def _has_room(self, tenant_id: str) -> bool:
        """Return whether the next batch of a tenant can start now."""
        if not self._active[tenant_id] and len(self._active) < MAX_ACTIVE_TENANTS:
            return True
        weight = self._waiting[tenant_id][0].weight
        of_tenant, of_all = self._active[tenant_id] + weight, self._active.total() + weight
        return of_tenant <= MAX_ACTIVE_BYTES_OF_TENANT and of_all <= MAX_ACTIVE_BYTES

    def _start(self, batch: WaitingBatch) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() > batch.deadline:
            batch.reject(_too_many_batches())
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
        if not task.cancelled():  # tasks are cancelled only when the process ends
            self._start_next()

    def _reject_last(self, tenant_id: str) -> None:
        batches = self._waiting[tenant_id]
        batch = batches.pop()
        if not batches:
            del self._waiting[tenant_id]
        self._release(batch)
        batch.reject(_too_many_batches())

    def _release(self, batch: WaitingBatch) -> None:
        self._weights[batch.tenant_id] -= batch.weight
        if not self._weights[batch.tenant_id]:
            del self._weights[batch.tenant_id]


def _too_many_batches() -> HttpError:
    detail = "too many batches of this tenant are waiting; send fewer at a time"
    return HttpError(429, "too_many_batches", detail, **{"retry-after": "1"})
