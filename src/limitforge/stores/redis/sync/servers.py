"""The servers of a store, for threads: a pool of connections to each, and the way of a call to the right one."""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from limitforge.core.check import Check
from limitforge.errors import LimitforgeError, StoreUnavailable
from limitforge.stores.redis.codec import Reply, ScriptCall, as_corrupt_reply
from limitforge.stores.redis.resp import Redirected, SlotMigrating
from limitforge.stores.redis.sync.connection import ConnectionPool, SyncConnection
from limitforge.stores.redis.topology.topology import (
    DISCOVERY_TIMEOUT_SECONDS,
    MAX_REDIRECTS,
    TRYAGAIN_DELAY_SECONDS,
    Server,
    Topology,
    discovery_error,
    uncovered_slot_error,
)
from limitforge.stores.resilience.failure import NotServerFault

MAX_CONNECTIONS = 64  # to each server
MAX_PARALLEL_SERVERS = 32  # servers that are asked at once
GRACE_SECONDS = 0.02  # for a thread to tell what it heard just in time

Operation = Callable[[SyncConnection], Any]


class ServerPools:
    """Pools by server. `charge` is handed what a server is owed after an outage."""

    def __init__(self, topology: Topology, charge: Callable[[Sequence[Check]], None]) -> None:
        self._topology = topology
        self._charge = charge
        self._lock = threading.Lock()
        self._discovery: Future[None] | None = None
        self._pools: dict[Server, ConnectionPool] = {}
        self._threads: ThreadPoolExecutor | None = None
        self.is_closed = False

    def close(self) -> None:
        """Let go of every connection, also of those that somebody still opens to give something back."""
        self.is_closed = True
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)
        self._close_pools()

    def _close_pools(self) -> None:
        with self._lock:
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()

    def close_after_fork(self) -> None:
        """After a fork, without the locks: nobody may be left to open them."""
        for pool in self._pools.values():
            pool.close_idle_unlocked()

    # -- asking

    def execute(self, server: Server, deadline: float, operation: Operation) -> Any:
        """Ask one server; it is told how that went."""
        resilience = server.resilience
        began_us = resilience.now_us()
        if time.monotonic() >= deadline:
            raise NotServerFault("there was no time left")
        resilience.ensure_allowed()
        try:
            answer = self.execute_unmonitored(server, deadline, operation)
        except (Redirected, SlotMigrating):
            self._on_success(server)  # it answered that it was not the right one to ask
            raise
        except StoreUnavailable as error:
            resilience.record_failure(error, began_us)
            self.refresh_topology()
            raise
        except Exception as error:
            self._on_success(server)  # whatever it said: it answered
            raise as_corrupt_reply(error) from error
        told = answer if isinstance(answer, list) else ()
        failed = [one for one in told if isinstance(one, StoreUnavailable) and not isinstance(one, NotServerFault)]
        if failed and len(failed) == len(told):
            resilience.record_failure(failed[0], began_us)
            self.refresh_topology()
        else:
            self._on_success(server, told)
        return answer

    def execute_many(self, operations: dict[Server, Operation], deadline: float) -> dict[Server, Any]:
        """Ask several servers side by side: to each its answer or its error."""
        if len(operations) <= 1:
            return {node: self._execute_or_error(node, deadline, ask) for node, ask in operations.items()}
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MAX_PARALLEL_SERVERS, "limitforge-servers")
            threads = self._threads
        try:
            asked = {
                node: threads.submit(self._execute_or_error, node, deadline, ask) for node, ask in operations.items()
            }
        except RuntimeError:  # closed meanwhile, or the interpreter ends
            return {node: self._execute_or_error(node, deadline, ask) for node, ask in operations.items()}
        return {node: _result_before(future, deadline) for node, future in asked.items()}

    def _execute_or_error(self, node: Server, due: float, ask: Operation) -> Any:
        try:
            return self.execute(node, due, ask)
        except LimitforgeError as error:
            return error

    def execute_unmonitored(self, server: Server, deadline: float, operation: Operation) -> Any:
        """The same without an account."""
        with self._lock:
            pool = self._pools.get(server)
            if pool is None:
                pool = self._pools[server] = ConnectionPool(server.address, MAX_CONNECTIONS)
        try:
            return pool.use(deadline, operation)
        finally:
            if self.is_closed:
                self._close_pools()

    def call_routed(self, call: ScriptCall, deadline: float) -> Reply:
        """Call the script where the slot of its keys is decided, wherever that may be by now."""
        slot = self._topology.slot_of(call.keys[0]) if call.keys else 0
        node, asking, hops = self.server_of_slot(slot, deadline), False, 0
        while True:
            try:
                reply: Reply = self.execute(node, deadline, _single_call(call, deadline, asking=asking))
                return reply
            except Redirected as answer:
                if not self._topology.is_sharded:
                    raise
                hops += 1
                if hops > MAX_REDIRECTS:
                    time.sleep(TRYAGAIN_DELAY_SECONDS)
                host = answer.host or node.address.host
                node = self._topology.server_at(host, answer.port)
                asking = answer.is_ask
                if not answer.is_ask:
                    self._topology.record_move(answer.slot, host, answer.port)
                    self.refresh_topology()
            except SlotMigrating:
                time.sleep(TRYAGAIN_DELAY_SECONDS)
                node, asking = self._topology.server_of_slot(slot), False

    def _on_success(self, server: Server, answers: Sequence[object] = ()) -> None:
        if not server.resilience.is_healthy:
            self._charge(server.resilience.record_success(answers))

    # -- who decides

    def server_of_slot(self, slot: int, deadline: float) -> Server:
        """Who decides about a slot; the first to ask finds out."""
        node = self._topology.server_of_slot(slot)
        if node is not self._topology.unknown_server:
            if self._topology.is_stale or not node.resilience.is_healthy:
                self.refresh_topology()  # also if it was too early to ask when the doubt came up
            return node
        if self._topology.is_single:
            return node
        resilience = node.resilience
        resilience.ensure_allowed()
        began_us = resilience.now_us()
        try:
            if not self._topology.was_refreshed_recently():
                self._start_discovery().result(max(deadline - time.monotonic(), 0))
        except TimeoutError:
            late = StoreUnavailable("nobody knows yet who decides")
            resilience.record_failure(late, began_us)
            raise late from None
        except StoreUnavailable as error:
            resilience.record_failure(error, began_us)
            raise copy.copy(error) from None  # others wait for the same answer
        node = self._topology.server_of_slot(slot)
        if node is self._topology.unknown_server:
            raise uncovered_slot_error(slot)
        self._on_success(self._topology.unknown_server)
        return node

    def _start_discovery(self) -> "Future[None]":
        """Ask who there is, on a thread of its own: one that does not answer must not use up a caller's time."""
        with self._lock:
            if self._discovery is None or self._discovery.done():
                self._discovery = Future()
                args = [self._discovery]
                threading.Thread(
                    target=self._discover_into, args=args, name="limitforge-discovery", daemon=True
                ).start()
            return self._discovery

    def _discover_into(self, finding: "Future[None]") -> None:
        try:
            self._discover()
        except BaseException as error:  # noqa: BLE001 - those who wait must hear of it
            finding.set_exception(error)
        else:
            finding.set_result(None)

    def refresh_topology(self) -> None:
        """Ask on a thread of its own: no caller waits for it."""
        self._topology.mark_stale()
        if self._topology.claim_refresh():
            threading.Thread(target=self._discover_quietly, name="limitforge-discovery", daemon=True).start()

    def _discover_quietly(self) -> None:
        try:
            self._discover()
        except LimitforgeError:
            return  # whoever asks next will see

    def _discover(self) -> None:
        problem: Exception | None = None
        for address, question in self._topology.discovery_queries():
            until = time.monotonic() + DISCOVERY_TIMEOUT_SECONDS
            try:
                wire = SyncConnection(address, until)
                try:
                    owed = self._topology.apply_reply(address, wire.send_command(question, until))
                finally:
                    wire.close()
            except LimitforgeError as error:
                problem = error
                continue
            if owed is not None:
                self._close_retired()
                self._charge(owed)
                return
        raise discovery_error(problem)

    def _close_retired(self) -> None:
        with self._lock:
            gone = [node for node in self._pools if not self._topology.is_current(node)]
            pools = [self._pools.pop(node) for node in gone]
        for pool in pools:
            pool.close()


def _result_before(future: "Future[Any]", deadline: float) -> Any:
    """What a thread was told; an error if it was not told in time."""
    try:
        return future.result(max(deadline - time.monotonic(), 0) + GRACE_SECONDS)
    except TimeoutError:
        if future.cancel():
            return NotServerFault("every thread for asking servers side by side is in use")
        return StoreUnavailable("no answer in time", maybe_counted=True)


def _single_call(call: ScriptCall, due: float, *, asking: bool) -> Operation:
    def ask(wire: SyncConnection) -> Reply:
        return wire.call(call, due, asking=asking)

    return ask
