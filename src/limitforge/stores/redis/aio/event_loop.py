"""Carry the checks and commands of one event loop to the right servers, with one pipeline for each server."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any

from limitforge.core.check import Check
from limitforge.core.decision import Decision, Outcome
from limitforge.errors import LimitforgeError, StoreUnavailable
from limitforge.stores.errors import NotServerFault, Redirected, SlotMigrating
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import Command
from limitforge.stores.redis.aio.connection import Connection, ignore_reply
from limitforge.stores.redis.aio.multi_step import MultiStepCheck
from limitforge.stores.redis.aio.pending import OnReply, PendingCheck, deliver
from limitforge.stores.redis.aio.pipeline import Pipeline
from limitforge.stores.redis.aio.prepaid_sync import PrepaidSync
from limitforge.stores.redis.aio.reconnecting import ReconnectingConnection
from limitforge.stores.redis.codec import batches_by_slot
from limitforge.stores.redis.core import COMMAND_TIMEOUT_SECONDS, RedisCore
from limitforge.stores.redis.denial_cache import Invalidation
from limitforge.stores.redis.hot_keys import SAMPLE_EVERY
from limitforge.stores.redis.invalidation import InvalidationListener
from limitforge.stores.redis.multi_step.cross_slot import FinishHold, is_cross_slot, routing_key
from limitforge.stores.redis.resp import connection_error
from limitforge.stores.redis.script_call import Flow, Reply, ScriptCall, T, single_call_flow
from limitforge.stores.redis.topology.discovery import (
    DISCOVERY_TIMEOUT_SECONDS,
    DiscoveryQuery,
    uncovered_slot_error,
)
from limitforge.stores.redis.topology.redirects import MAX_REDIRECTS, TRYAGAIN_DELAY_SECONDS, CallRoute
from limitforge.stores.redis.topology.topology import Server


class EventLoopClient:
    """The part of a store that belongs to one event loop: its connections, timers and tasks."""

    def __init__(self, core: RedisCore, options: StoreOptions) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread_id = get_ident()
        """The thread of the loop. Comparing it is cheaper than asking asyncio, which takes a system call."""
        self.deadline_seconds = options.deadline_ms / 1_000
        self._core = core
        self._options = options
        self._topology = core.topology
        self._denial_cache = core.denial_cache
        self._hot_keys = core.hot_keys
        self._check_count = 0
        self._listener: InvalidationListener | None = None
        self._publishing: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pipelines: dict[Server, Pipeline] = {}
        self._draining: set[Pipeline] = set()  # of retired servers, until their calls are answered
        self._discovery: asyncio.Task[StoreUnavailable | None] | None = None
        self._is_closed = False
        self._hybrid = core.create_hybrid()
        self._prepaid_sync = PrepaidSync(
            core, self._hybrid.shares, options.sync_interval_ms / 1_000, self.run_flow, self._start_listening
        )
        only_server = self._topology.only_server
        self.only_pipeline = None if only_server is None else self._pipeline_of(only_server)
        """The pipeline of the only server, None for Sentinel and Cluster."""
        self._loop_shutdown = self._close_with_loop()  # started, so that `asyncio.run` finalizes it
        with suppress(StopIteration):
            self._loop_shutdown.asend(None).send(None)

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        """Close the connections with the loop: `asyncio.run` finishes open generators before it closes the loop."""
        try:
            yield
        finally:
            self._is_closed = True
            self._prepaid_sync.stop()
            if self._discovery is not None:
                self._discovery.cancel()
            for pipeline in [*self._pipelines.values(), *self._draining]:
                pipeline.close()

    @property
    def pending_count(self) -> int:
        """The number of checks that wait for a reply."""
        return sum(pipeline.pending_count for pipeline in list(self._pipelines.values()))

    # -- checks

    def decide_or_submit(self, check: Check, on_reply: OnReply) -> None:
        """Decide a check in this process if possible, else submit it."""
        result = self.decide_in_process(check)
        if result is not None:
            deliver(self.loop, PendingCheck(check, on_reply, 0), result)
        elif self.only_pipeline is not None and not check.is_hybrid:
            self.only_pipeline.enqueue(PendingCheck(check, on_reply, self.loop.time() + self.deadline_seconds))
        else:
            self.submit(check, on_reply)

    def submit(self, check: Check, on_reply: OnReply, group: object = None) -> PendingCheck | MultiStepCheck:
        """Send a check to the store. `on_reply` is called once, perhaps before this method returns.

        To cancel the check, set `on_reply` of the returned object to None.
        """
        deadline = self.loop.time() + self.deadline_seconds
        if check.is_hybrid:
            self._prepaid_sync.ensure_running()
            flow = self._core.hybrid_check(check, self._hybrid, self.send_refunds)
            return MultiStepCheck.start(self.loop, self.route, flow, on_reply, deadline)
        if self.only_pipeline is None and is_cross_slot(check, self._topology.slot_of):
            flow = self._core.cross_slot_check(check, self.send_refunds)
            return MultiStepCheck.start(self.loop, self.route, flow, on_reply, deadline)
        pending = PendingCheck(check, on_reply, deadline, group)
        if self.only_pipeline is not None:
            self.only_pipeline.enqueue(pending)
        else:
            self.route(pending)
        return pending

    def route(self, pending: PendingCheck) -> None:
        """Submit a check, or a step of one, to the pipeline of the server that owns its slot."""
        if not self._topology.is_single:
            pending.slot = self._topology.slot_of(routing_key(pending.check))
        server = self._topology.server_of_slot(pending.slot)
        if self._is_closed:
            self._pipeline_of(server).resolve(pending, NotServerFault("the limiter was closed"))
            return
        if self._topology.is_stale or not server.resilience.is_healthy:
            self.refresh_topology()  # again: an earlier request may have come too soon after the last refresh
        self._pipeline_of(server).enqueue(pending)

    def send_refunds(self, refunds: Sequence[FinishHold]) -> None:
        """Send refunds without waiting for replies. If a message is lost, its hold lapses and is refunded then."""
        for refund in refunds:
            self.route(PendingCheck(refund, ignore_reply, self.loop.time() + COMMAND_TIMEOUT_SECONDS))

    def decide_in_process(self, check: Check) -> Decision | Outcome | None:
        """Return the result if a cached denial or a prepaid share decides the check, else None."""
        self._check_count += 1
        if not self._check_count % SAMPLE_EVERY:
            self._hot_keys.record(check)
        result: Decision | Outcome | None = None
        cache = self._denial_cache
        if cache is not None and cache.has_entries:
            if self._listener is None or not self._listener.is_running:
                self._start_listening()
            result = cache.get(check)
        return self._hybrid.decide_from_share(check) if result is None and check.is_hybrid else result

    def _pipeline_of(self, server: Server) -> Pipeline:
        pipeline = self._pipelines.get(server)
        if pipeline is None:
            pipeline = self._pipelines[server] = Pipeline(
                server,
                self._core,
                self,
                deadline_ms=self._options.deadline_ms,
                max_waiting=self._options.max_waiting,
                is_sharded=self._topology.is_sharded,
            )
            if server is self._topology.unknown_server:
                pipeline.connection = DiscoveringConnection(self, pipeline)
        return pipeline

    # -- redirections: called by the pipelines

    def redirect(self, batch: list[PendingCheck], redirection: Redirected | SlotMigrating, server: Server) -> None:
        """Send a batch that `server` did not execute to where it redirects. Checks past their deadline are resolved."""
        now = self.loop.time()
        is_redirect_cycle = any(pending.redirects >= MAX_REDIRECTS for pending in batch)
        for pending in batch:
            pending.is_resubmitted, pending.needs_asking = True, False
            pending.redirects = 0 if is_redirect_cycle else pending.redirects + 1
            pending.needs_own_call = pending.needs_own_call or isinstance(redirection, SlotMigrating)
            if pending.deadline <= now:
                self._pipeline_of(server).resolve(pending, redirection)
        if isinstance(redirection, SlotMigrating) or is_redirect_cycle:
            self.loop.call_at(now + TRYAGAIN_DELAY_SECONDS, self._route_all, batch)
            return
        host = redirection.host or server.address.host
        if not redirection.is_ask:
            self._topology.record_move(redirection.slot, host, redirection.port)
            self.refresh_topology()
            self._route_all(batch)
            return
        pipeline = self._pipeline_of(self._topology.server_at(host, redirection.port))
        for pending in batch:
            if pending.on_reply is not None:
                pending.needs_asking = True
                pipeline.enqueue(pending)

    def _route_all(self, batch: Sequence[PendingCheck]) -> None:
        for pending in batch:
            if pending.on_reply is not None:
                self.route(pending)

    # -- discovery

    def refresh_topology(self) -> None:
        """Start a discovery, unless there was one a moment ago."""
        self._topology.mark_stale()
        if self._topology.claim_refresh() and not self._is_closed:
            self._start_discovery()

    async def discover(self) -> StoreUnavailable | None:
        """Wait for a recent discovery. Return the error if it failed."""
        return None if self._topology.was_refreshed_recently() else await asyncio.shield(self._start_discovery())

    def _start_discovery(self) -> asyncio.Task[StoreUnavailable | None]:
        if self._discovery is None or self._discovery.done():
            self._discovery = self.loop.create_task(self._discover())
        return self._discovery

    async def _discover(self) -> StoreUnavailable | None:
        flow = self._topology.discover()
        try:
            query = next(flow)
            while True:
                query = flow.send(await _send_query(query))
        except StopIteration as done:
            self._retire_servers()
            self._core.charge(done.value)
            return None
        except StoreUnavailable as error:
            return error

    def _retire_servers(self) -> None:
        """Route the queues of retired servers to their successors, and close drained connections."""
        drain_seconds = max(2 * self.deadline_seconds, COMMAND_TIMEOUT_SECONDS)
        for server, pipeline in list(self._pipelines.items()):
            if not self._topology.is_current(server):
                del self._pipelines[server]
                self._draining.add(pipeline)
                self._route_all(pipeline.take_queue())
                self.loop.call_later(drain_seconds, self._close_drained, pipeline)
        if self._listener is not None:
            self._listener.follow_topology()

    def _close_drained(self, pipeline: Pipeline) -> None:
        pipeline.close()
        self._draining.discard(pipeline)

    def on_discovered(self, pipeline: Pipeline) -> StoreUnavailable | None:
        """Route the checks that waited for the discovery. Return the last error of a slot without an owner."""
        problem: StoreUnavailable | None = None
        for pending in pipeline.take_queue():
            if self._topology.server_of_slot(pending.slot) is self._topology.unknown_server:
                problem = uncovered_slot_error(pending.slot)
                pipeline.resolve(pending, problem)
            elif pending.on_reply is not None:
                self.route(pending)
        return problem

    async def _server_of_slot(self, slot: int) -> Server:
        server = self._topology.server_of_slot(slot)
        if server is self._topology.unknown_server:
            error = await self.discover()
            server = self._topology.server_of_slot(slot)
            if server is self._topology.unknown_server:
                raise error or uncovered_slot_error(slot)
        return server

    # -- commands

    async def run(self, command: Command[T]) -> T:
        seconds = max(COMMAND_TIMEOUT_SECONDS, self.deadline_seconds)
        return await self.run_flow(self._core.command_flow(command), seconds)

    async def run_flow(self, flow: Flow[T], seconds: float) -> T:
        """Run a flow outside the batches of checks. Raises StoreUnavailable if it takes longer than `seconds`."""
        if self.only_pipeline is not None:
            return await self.only_pipeline.connection.run_flow(flow, seconds)
        deadline = self.loop.time() + seconds
        result: T
        try:
            call = next(flow)
            while True:
                call = flow.send(await self._call_routed(call, deadline))
        except StopIteration as done:
            result = done.value
            return result

    async def _call_routed(self, call: ScriptCall, deadline: float) -> Reply:
        """Send a call to the server that owns the slot of its keys, and follow redirections."""
        slot = self._topology.slot_of(call.keys[0]) if call.keys else 0
        route = CallRoute(self._topology, slot, await self._server_of_slot(slot))
        while True:
            seconds = deadline - self.loop.time()
            if seconds <= 0:
                raise NotServerFault("the deadline has passed")
            connection = self._pipeline_of(route.server).connection
            try:
                return await connection.run_flow(single_call_flow(call), seconds, asking=route.needs_asking)
            except (Redirected, SlotMigrating) as redirection:
                if delay := route.follow(redirection):
                    await asyncio.sleep(delay)

    # -- invalidation

    def _start_listening(self) -> None:
        if not self._topology.servers:
            return  # no server is known yet
        if self._listener is None or not self._listener.is_running:
            self._listener = InvalidationListener(self._topology, self._core.channel, self._core.caches)
            self._listener.start()

    async def publish_invalidation(self, invalidation: Invalidation) -> None:
        """Publish on any server: a Cluster forwards it to all. Only `close` waits for the reply."""
        published = self.loop.create_future()
        self._publishing.add(published)
        try:
            connection = self._pipeline_of(await self._server_of_slot(0)).connection
            on_reply = partial(self._on_published, published)
            await connection.publish(self._core.channel, invalidation.encode(), on_reply)
        except (TimeoutError, LimitforgeError) as error:
            self._on_published(published, StoreUnavailable(str(error) or "Redis did not answer"))

    def _on_published(self, published: "asyncio.Future[None]", reply: Reply | LimitforgeError) -> None:
        self._publishing.discard(published)
        if not published.done():
            published.set_result(None)
        if isinstance(reply, LimitforgeError):
            self._core.warn_not_published(reply)

    # -- charges after an outage

    def charge_soon(self, charges: Sequence[Check]) -> None:
        if charges:
            self._start_task(self._charge(charges))

    async def _charge(self, charges: Sequence[Check]) -> None:
        """Charge what was admitted without the store, outside the batches of callers."""
        results: list[Any] = []
        batches = list(batches_by_slot(charges, self._topology.slot_of))
        charges = [charge for batch in batches for charge in batch]
        for batch in batches:
            try:
                results += await self.run_flow(self._core.checks_flow(batch), COMMAND_TIMEOUT_SECONDS)
            except LimitforgeError as error:
                results += [error] * len(batch)
            except asyncio.CancelledError:
                lost = StoreUnavailable("the event loop ended", maybe_counted=True)
                self._core.record_charges(charges, [*results, *[lost] * (len(charges) - len(results))])
                raise
        self._core.record_charges(charges, results)

    # -- closing

    def close_soon(self) -> None:
        """Close this client. Another thread schedules this method on the loop."""
        self._start_task(self.close())

    async def close(self) -> None:
        try:
            await self._prepaid_sync.shut_down()
            if self._publishing:
                await asyncio.wait(self._publishing, timeout=self.deadline_seconds)
        finally:
            await self._loop_shutdown.aclose()
            if self._listener is not None:
                await self._listener.stop()

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class DiscoveringConnection(ReconnectingConnection):
    """Stands in for the connection to a server that is not known yet: to connect, it runs a discovery."""

    def __init__(self, client: EventLoopClient, pipeline: Pipeline) -> None:
        super().__init__(pipeline.server.address, pipeline.server.resilience, pipeline, DISCOVERY_TIMEOUT_SECONDS)
        self._client = client
        self._pipeline = pipeline

    async def _connect(self) -> StoreUnavailable | None:
        began_us = self._resilience.now_us()
        error = await self._client.discover()
        self._connecting = None
        error = error or self._client.on_discovered(self._pipeline)
        if error is not None:
            self._observer.on_connect_failed(error, began_us)
        else:
            self._observer.on_success()
        return error


async def _send_query(query: DiscoveryQuery) -> Any:
    """Send a discovery query on a connection of its own. Return the reply, or the error that prevented one."""
    replied: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def on_reply(reply: Any) -> None:
        if not replied.done():
            replied.set_result(reply)

    connection: Connection | None = None
    try:
        connection = await Connection.open(
            query.address, lambda _connection, error: on_reply(error), DISCOVERY_TIMEOUT_SECONDS
        )
        connection.send_command(query.command, on_reply)
        async with asyncio.timeout(DISCOVERY_TIMEOUT_SECONDS):
            reply = await replied
    except (OSError, TimeoutError, LimitforgeError) as error:
        return error
    finally:
        if connection is not None:
            connection.abort()
    return connection_error(reply) if isinstance(reply, Exception) else reply
