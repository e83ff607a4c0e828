"""Send the calls of threads to the right server, over a pool of connections for each server."""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from limitforge.core.check import Check
from limitforge.errors import LimitforgeError, StoreUnavailable
from limitforge.stores.errors import NotServerFault, Redirected, SlotMigrating
from limitforge.stores.redis.script_call import Reply, ScriptCall, as_internal_error
from limitforge.stores.redis.sync.connection import ConnectionPool, SyncConnection
from limitforge.stores.redis.topology.discovery import (
    DISCOVERY_TIMEOUT_SECONDS,
    DiscoveryQuery,
    uncovered_slot_error,
)
from limitforge.stores.redis.topology.redirects import CallRoute
from limitforge.stores.redis.topology.topology import Server, Topology

MAX_CONNECTIONS = 64  # to each server
MAX_PARALLEL_SERVERS = 32
HANDOVER_SECONDS = 0.02  # for a thread to hand over a reply that arrived just in time

Operation = Callable[[SyncConnection], Any]


class ServerPools:
    """A connection pool for each server. `charge` sends pending charges to the store after an outage."""

    def __init__(self, topology: Topology, charge: Callable[[Sequence[Check]], None]) -> None:
        self._topology = topology
        self._charge = charge
        self._lock = threading.Lock()
        self._discovery: Future[None] | None = None
        self._pools: dict[Server, ConnectionPool] = {}
        self._threads: ThreadPoolExecutor | None = None
        self.is_closed = False

    def close(self) -> None:
        """Close every connection, including those that other threads open after this."""
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
        """Close idle connections in a forked child, without locks: the threads that held them are gone."""
        for pool in self._pools.values():
            pool.close_idle_unlocked()

    # -- calls

    def execute(self, server: Server, deadline: float, operation: Operation) -> Any:
        """Run an operation on a connection to a server, and record whether the server answered."""
        resilience = server.resilience
        began_us = resilience.now_us()
        if time.monotonic() >= deadline:
            raise NotServerFault("the deadline has passed")
        resilience.ensure_allowed()
        try:
            result = self.execute_without_breaker(server, deadline, operation)
        except (Redirected, SlotMigrating):
            self._on_success(server)  # a redirection is an answer
            raise
        except StoreUnavailable as error:
            resilience.record_failure(error, began_us)
            self.refresh_topology()
            raise
        except Exception as error:
            self._on_success(server)  # an error reply is an answer
            raise as_internal_error(error) from error
        results = result if isinstance(result, list) else ()
        failures = [r for r in results if isinstance(r, StoreUnavailable) and not isinstance(r, NotServerFault)]
        if failures and len(failures) == len(results):
            resilience.record_failure(failures[0], began_us)
            self.refresh_topology()
        else:
            self._on_success(server, results)
        return result

    def execute_many(self, operations: dict[Server, Operation], deadline: float) -> dict[Server, Any]:
        """Run one operation on each server, in parallel. Return the result or the error of each."""
        if len(operations) <= 1:
            return {server: self._execute_or_error(server, deadline, run) for server, run in operations.items()}
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MAX_PARALLEL_SERVERS, "limitforge-servers")
            threads = self._threads
        try:
            futures = {
                server: threads.submit(self._execute_or_error, server, deadline, run)
                for server, run in operations.items()
            }
        except RuntimeError:  # the executor was shut down, by `close` or by the interpreter
            return {server: self._execute_or_error(server, deadline, run) for server, run in operations.items()}
        return {server: _result_before(future, deadline) for server, future in futures.items()}

    def _execute_or_error(self, server: Server, deadline: float, operation: Operation) -> Any:
        try:
            return self.execute(server, deadline, operation)
        except LimitforgeError as error:
            return error

    def execute_without_breaker(self, server: Server, deadline: float, operation: Operation) -> Any:
        """Run an operation without recording whether the server answered."""
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
        """Send a call to the server that owns the slot of its keys, and follow redirections."""
        slot = self._topology.slot_of(call.keys[0]) if call.keys else 0
        route = CallRoute(self._topology, slot, self.server_of_slot(slot, deadline))
        while True:
            try:
                operation = _single_call(call, deadline, asking=route.needs_asking)
                reply: Reply = self.execute(route.server, deadline, operation)
                return reply
            except (Redirected, SlotMigrating) as redirection:
                delay = route.follow(redirection)
                if self._topology.is_stale:
                    self.refresh_topology()
                if delay:
                    time.sleep(delay)

    def _on_success(self, server: Server, results: Sequence[object] = ()) -> None:
        if not server.resilience.is_healthy:
            self._charge(server.resilience.record_success(results))

    # -- discovery

    def server_of_slot(self, slot: int, deadline: float) -> Server:
        """Return the owner of a slot. If it is unknown, wait for a discovery."""
        server = self._topology.server_of_slot(slot)
        if server is not self._topology.unknown_server:
            if self._topology.is_stale or not server.resilience.is_healthy:
                self.refresh_topology()  # again: an earlier request may have come too soon after the last refresh
            return server
        resilience = server.resilience
        resilience.ensure_allowed()
        began_us = resilience.now_us()
        try:
            if not self._topology.was_refreshed_recently():
                self._start_discovery().result(max(deadline - time.monotonic(), 0))
        except TimeoutError:
            late = StoreUnavailable("the discovery of the current masters took too long")
            resilience.record_failure(late, began_us)
            raise late from None
        except StoreUnavailable as error:
            resilience.record_failure(error, began_us)
            raise copy.copy(error) from None  # other threads raise the same object
        server = self._topology.server_of_slot(slot)
        if server is self._topology.unknown_server:
            raise uncovered_slot_error(slot)
        self._on_success(self._topology.unknown_server)
        return server

    def _start_discovery(self) -> "Future[None]":
        """Start a discovery in a thread, because a server that does not answer may take longer than a check may."""
        with self._lock:
            if self._discovery is None or self._discovery.done():
                self._discovery = Future()
                args = [self._discovery]
                threading.Thread(
                    target=self._discover_into, args=args, name="limitforge-discovery", daemon=True
                ).start()
            return self._discovery

    def _discover_into(self, discovered: "Future[None]") -> None:
        try:
            self._discover()
        except BaseException as error:  # noqa: BLE001 - the threads that wait must get a result
            discovered.set_exception(error)
        else:
            discovered.set_result(None)

    def refresh_topology(self) -> None:
        """Start a discovery in a thread, unless there was one a moment ago."""
        self._topology.mark_stale()
        if self._topology.claim_refresh():
            threading.Thread(target=self._discover_quietly, name="limitforge-discovery", daemon=True).start()

    def _discover_quietly(self) -> None:
        try:
            self._discover()
        except LimitforgeError:
            return  # the next check tries again

    def _discover(self) -> None:
        flow = self._topology.discover()
        try:
            query = next(flow)
            while True:
                query = flow.send(_send_query(query))
        except StopIteration as done:
            self._close_retired()
            self._charge(done.value)

    def _close_retired(self) -> None:
        with self._lock:
            retired = [server for server in self._pools if not self._topology.is_current(server)]
            pools = [self._pools.pop(server) for server in retired]
        for pool in pools:
            pool.close()


def _send_query(query: DiscoveryQuery) -> Any:
    """Send a discovery query on a connection of its own. Return the reply, or the error that prevented one."""
    deadline = time.monotonic() + DISCOVERY_TIMEOUT_SECONDS
    try:
        connection = SyncConnection(query.address, deadline)
        try:
            return connection.send_command(query.command, deadline)
        finally:
            connection.close()
    except LimitforgeError as error:
        return error


def _result_before(future: "Future[Any]", deadline: float) -> Any:
    """Return the result of a thread, or an error if there is none in time."""
    try:
        return future.result(max(deadline - time.monotonic(), 0) + HANDOVER_SECONDS)
    except TimeoutError:
        if future.cancel():
            return NotServerFault("all threads for parallel calls are in use")
        return StoreUnavailable("no answer in time", maybe_counted=True)


def _single_call(call: ScriptCall, deadline: float, *, asking: bool) -> Operation:
    def operation(connection: SyncConnection) -> Reply:
        return connection.call(call, deadline, asking=asking)

    return operation
