"""Decide checks on Redis from threads and forked workers."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from limitforge.core.check import Check
from limitforge.core.clock import Clock
from limitforge.core.decision import Decision, Outcome
from limitforge.core.keys import Keys
from limitforge.errors import LimitforgeError
from limitforge.observability.events import log_event
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import Command, ResultT, StoreStatus
from limitforge.stores.redis.codec import batches_by_slot
from limitforge.stores.redis.core import COMMAND_TIMEOUT_SECONDS, CheckBatch, RedisCore, is_for_local_handle
from limitforge.stores.redis.denial_cache import Invalidation
from limitforge.stores.redis.hot_keys import SAMPLE_EVERY
from limitforge.stores.redis.invalidation import SyncInvalidationListener
from limitforge.stores.redis.multi_step.cross_slot import FinishHold, MultiStepFlow, is_cross_slot
from limitforge.stores.redis.prepaid.shares import TopUpRequest
from limitforge.stores.redis.prepaid.top_up import TopUp, top_up_batches
from limitforge.stores.redis.script_call import Flow, T
from limitforge.stores.redis.sync.flows import FlowRunner
from limitforge.stores.redis.sync.servers import ServerPools

_log = logging.getLogger(__name__)


class SyncRedisStore:
    """A store on Redis for threads. It uses the clock of Redis, unless tests or replays pass a `clock`.

    A forked process starts with a fresh state: it shares no socket, lock or cache with its parent.
    """

    def __init__(
        self, url: str, *, keys: Keys | None = None, clock: Clock | None = None, options: StoreOptions | None = None
    ) -> None:
        self.keys = keys or Keys()
        self._url = url
        self._clock = clock
        self._options = options or StoreOptions()
        self._start()
        _stores.add(self)

    def reset_after_fork(self) -> None:
        """Start again in a forked child, without the sockets, locks and threads of the parent."""
        self._pools.close_after_fork()
        self._start()

    def _start(self) -> None:
        self._core = RedisCore(self._url, self.keys, self._clock, self._options, self._charge_soon)
        self._topology = self._core.topology
        self._pools = ServerPools(self._topology, self._charge_soon)
        self._flows = FlowRunner(self._core, self._pools)
        self._lock = threading.Lock()
        self._check_count = 0
        self._listener: SyncInvalidationListener | None = None
        self._hybrid = self._core.create_hybrid()
        self._prepaid_thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def check(self, check: Check) -> Decision:
        (result,) = self.check_many((check,))
        if isinstance(result, LimitforgeError):
            raise result
        return result

    def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        self._pools.is_closed = False
        batch = CheckBatch(checks, self._decide_in_process)
        deadline = time.monotonic() + self._options.deadline_ms / 1_000
        single_step: list[int] = []
        multi_step: dict[int, MultiStepFlow[Decision | LimitforgeError]] = {}
        for index, check in enumerate(batch.to_send):
            if check.is_hybrid:
                if self._prepaid_thread is None:
                    self._start_prepaid_sync()
                multi_step[index] = self._core.hybrid_check(check, self._hybrid, self._send_refunds)
            elif not self._topology.is_single and is_cross_slot(check, self._topology.slot_of):
                multi_step[index] = self._core.cross_slot_check(check, self._send_refunds)
            else:
                single_step.append(index)
        decided = self._flows.decide_batch([batch.to_send[index] for index in single_step], deadline)
        for index, result in zip(single_step, decided, strict=True):
            batch.set_result(index, result)
        if multi_step:
            for index, result in self._flows.run_multi_step(multi_step, deadline).items():
                batch.set_result(index, result)
        return cast("list[Decision | LimitforgeError]", batch.results)

    def run(self, command: Command[ResultT]) -> ResultT:
        if is_for_local_handle(command):
            return self._core.local_store.run(command)
        self._pools.is_closed = False
        deadline = time.monotonic() + max(COMMAND_TIMEOUT_SECONDS, self._options.deadline_ms / 1_000)
        try:
            result = self._run_flow(self._core.command_flow(command), deadline)
        except BaseException as error:
            self._core.invalidate_after_failure(command, error)
            raise
        invalidation = self._core.invalidate_for(command)
        if invalidation is not None:
            self._publish_invalidation(invalidation, deadline)
        return result

    def status(self) -> StoreStatus:
        return self._core.status()

    def close(self) -> None:
        """Close every connection. The store may be used again."""
        self._return_prepaid()  # first, because the prepaid thread may start the listener
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        self._pools.close()
        self._topology.close()

    def _run_flow(self, flow: Flow[T], deadline: float) -> T:
        return self._flows.run(flow, deadline)

    def _send_refunds(self, refunds: Sequence[FinishHold]) -> None:
        """Send refunds in a thread. If a message is lost, its hold lapses and is refunded then."""
        if refunds:
            args = [refunds, time.monotonic() + COMMAND_TIMEOUT_SECONDS]
            threading.Thread(target=self._flows.run_steps, args=args, name="limitforge-undo", daemon=True).start()

    # -- charges after an outage

    def _charge_soon(self, charges: Sequence[Check]) -> None:
        """Send pending charges in a thread, so that no caller waits for them."""
        if charges:
            threading.Thread(target=self._charge, args=[charges], name="limitforge-charges", daemon=True).start()

    def _charge(self, charges: Sequence[Check]) -> None:
        results: list[Any] = []
        batches = list(batches_by_slot(charges, self._topology.slot_of))
        charges = [charge for batch in batches for charge in batch]
        for batch in batches:
            results += self._flows.decide_batch(batch, time.monotonic() + COMMAND_TIMEOUT_SECONDS)
        self._core.record_charges(charges, results)

    # -- prepaid shares and the heartbeat

    def _start_prepaid_sync(self) -> None:
        """Keep prepaid shares in step with the store, in a thread that runs until the store is closed."""
        self._start_listening()
        with self._lock:
            if self._prepaid_thread is None:
                self._stopped = threading.Event()
                loop = PrepaidSyncLoop(weakref.ref(self), self._stopped, self._options.sync_interval_ms / 1_000)
                self._prepaid_thread = threading.Thread(target=loop.run, name="limitforge-prepaid", daemon=True)
                self._prepaid_thread.start()

    def sync_prepaid(self) -> None:
        """Send the heartbeat and the top-ups that are due."""
        if self._listener is None:
            self._start_listening()
        heartbeat = self._core.heartbeat
        if heartbeat.claim_if_due():
            with suppress(LimitforgeError):
                deadline = time.monotonic() + COMMAND_TIMEOUT_SECONDS
                heartbeat.set_process_count(self._run_flow(self._core.heartbeat_flow(), deadline))
        self._top_up(self._hybrid.shares.due_requests(), time.monotonic() + COMMAND_TIMEOUT_SECONDS)

    def _top_up(self, requests: Sequence[TopUpRequest], deadline: float) -> None:
        shares = self._hybrid.shares
        for batch in top_up_batches(requests, self._topology.slot_of):
            with TopUp(shares, batch) as top_up:
                top_up.replies = self._run_flow(self._core.top_up_flow(batch, shares.lapse_us), deadline)

    def _return_prepaid(self) -> None:
        """Return all prepaid balances, and remove this process from the count of live processes."""
        with self._lock:
            thread, self._prepaid_thread = self._prepaid_thread, None
        if thread is not None:
            self._stopped.set()
            thread.join(COMMAND_TIMEOUT_SECONDS)
            self._top_up(self._hybrid.shares.return_all(), time.monotonic() + COMMAND_TIMEOUT_SECONDS)
            if self._core.heartbeat.is_needed:
                with suppress(LimitforgeError):
                    self._run_flow(self._core.heartbeat_flow(alive_us=0), time.monotonic() + COMMAND_TIMEOUT_SECONDS)

    # -- denials

    def _decide_in_process(self, check: Check) -> Decision | Outcome | None:
        """Return the result if a cached denial or a prepaid share decides the check, else None."""
        self._check_count += 1
        if not self._check_count % SAMPLE_EVERY:
            self._core.hot_keys.record(check)
        result: Decision | Outcome | None = None
        cache = self._core.denial_cache
        if cache is not None and cache.has_entries:
            if self._listener is None:
                self._start_listening()
            result = cache.get(check)
        return self._hybrid.decide_from_share(check) if result is None and check.is_hybrid else result

    def _start_listening(self) -> None:
        if not self._topology.servers:
            return  # no server is known yet
        with self._lock:
            if self._listener is None:
                self._listener = SyncInvalidationListener(self._topology, self._core.channel, self._core.caches)
                self._listener.start()

    def _publish_invalidation(self, invalidation: Invalidation, deadline: float) -> None:
        """Publish on any server: a Cluster forwards it to all."""
        command = ("PUBLISH", self._core.channel, invalidation.encode())
        try:
            server = self._pools.server_of_slot(0, deadline)
            reply = self._pools.execute_without_breaker(
                server, deadline, lambda connection: connection.send_command(command, deadline)
            )
        except LimitforgeError as error:
            self._core.warn_not_published(error)
        else:
            if isinstance(reply, Exception):
                self._core.warn_not_published(reply)


class PrepaidSyncLoop(NamedTuple):
    """The body of the prepaid thread. It ends when the store is closed or garbage-collected."""

    store: "weakref.ref[SyncRedisStore]"
    stopped: threading.Event
    interval_seconds: float

    def run(self) -> None:
        while not self.stopped.wait(self.interval_seconds):
            store = self.store()
            if store is None:
                return
            try:
                store.sync_prepaid()
            except Exception as error:  # noqa: BLE001 - a bug must not end the thread
                log_event(
                    _log,
                    logging.ERROR,
                    "store.prepaid_sync_failed",
                    "prepaid shares were not topped up, the next interval tries again",
                    exc_info=error,
                )
            del store


_stores: "weakref.WeakSet[SyncRedisStore]" = weakref.WeakSet()


def _reset_after_fork() -> None:
    for store in list(_stores):
        store.reset_after_fork()


os.register_at_fork(after_in_child=_reset_after_fork)
