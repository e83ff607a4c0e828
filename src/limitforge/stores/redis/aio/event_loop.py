"""A store's side on one event loop: a pipeline for each server, and the way of every check to the right one."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any

from limitforge.core.check import Check
from limitforge.core.decision import CheckResult, Decision, Outcome
from limitforge.errors import LimitforgeError, StoreError, StoreUnavailable
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import Command
from limitforge.stores.redis.aio.connection import Connection
from limitforge.stores.redis.aio.pipeline import OnReply, PendingCheck, Pipeline
from limitforge.stores.redis.aio.reconnecting import ReconnectingConnection
from limitforge.stores.redis.codec import (
    Flow,
    Reply,
    ScriptCall,
    T,
    as_corrupt_reply,
    batches_by_slot,
    single_call_flow,
)
from limitforge.stores.redis.core import COMMAND_TIMEOUT_SECONDS, MultiStepFlow, RedisCore
from limitforge.stores.redis.denial_cache import Invalidation
from limitforge.stores.redis.hot_keys import SAMPLE_EVERY
from limitforge.stores.redis.invalidation import InvalidationListener
from limitforge.stores.redis.prepaid.sync import PrepaidSync
from limitforge.stores.redis.resp import Address, Redirected, SlotMigrating, connection_error
from limitforge.stores.redis.topology.cross_slot import FinishHold, HoldAction, Step, is_cross_slot, routing_key
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


class EventLoopClient:
    """What of a store belongs to one event loop."""

    def __init__(self, parts: RedisCore, options: StoreOptions) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread_id = get_ident()
        """Where its loop runs, and stays: asking asyncio which loop is the running one takes a system call."""
        self._check_count = 0
        self.deadline_seconds = options.deadline_ms / 1_000
        self._core = parts
        self._options = options
        self._topology: Topology = parts.topology
        self._denial_cache = parts.denial_cache
        self._hot_keys = parts.hot_keys
        self._listener: InvalidationListener | None = None
        self._publishing: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pipelines: dict[Server, Pipeline] = {}
        self._draining: set[Pipeline] = set()  # of servers that were let go of, until what was asked is answered
        self._discovery: asyncio.Task[StoreUnavailable | None] | None = None
        self._is_closed = False
        self._hybrid = parts.create_hybrid()
        self._prepaid_sync = PrepaidSync(
            parts, self._hybrid.shares, options.sync_interval_ms / 1_000, self.run_flow, self._start_listening
        )
        self.only_pipeline = self._pipeline_of(self._topology.unknown_server) if self._topology.is_single else None
        """The pipeline of the only server there is."""
        self._loop_shutdown = self._close_with_loop()
        with suppress(StopIteration):
            self._loop_shutdown.asend(None).send(None)

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        """Loops end their generators before they are closed: so connections never outlive `asyncio.run`."""
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
        """How many checks are owed an answer."""
        return sum(pipeline.pending_count for pipeline in list(self._pipelines.values()))

    # -- asking

    def start_check(self, check: Check, on_reply: OnReply) -> None:
        """Tell what needs no asking, or submit."""
        decided = self.decide_in_process(check)
        if decided is not None:
            self.reply(PendingCheck(check, on_reply, 0), decided)
        elif self.only_pipeline is not None and not check.is_partly_local:
            self.only_pipeline.submit(PendingCheck(check, on_reply, self.loop.time() + self.deadline_seconds))
        else:
            self.submit(check, on_reply)

    def submit(self, check: Check, on_reply: OnReply, group: object = None) -> "PendingCheck | MultiStepCheck":
        """Ask. The answer comes by `tell`, perhaps before this returns; who no longer wants it sets that to None."""
        due = self.loop.time() + self.deadline_seconds
        if check.is_partly_local:
            return self._start_hybrid(check, on_reply, due)
        if self.only_pipeline is not None:
            asked = PendingCheck(check, on_reply, due, group)
            self.only_pipeline.submit(asked)
            return asked
        if is_cross_slot(check, self._topology.slot_of):
            errand = MultiStepCheck(self, self._core.cross_slot_check(check, self.undo), on_reply, due)
            errand.start()
            return errand
        asked = PendingCheck(check, on_reply, due, group)
        self.route(asked)
        return asked

    def route(self, pending: PendingCheck) -> None:
        """To whom decides about its slot."""
        if self._is_closed:
            self._pipeline_of(self._topology.unknown_server).resolve(pending, NotServerFault("the limiter was closed"))
            return
        if not self._topology.is_single:
            pending.slot = self._topology.slot_of(routing_key(pending.check))
        node = self._topology.server_of_slot(pending.slot)
        if self._topology.is_stale or not node.resilience.is_healthy:
            self.refresh_topology()  # also if it was too early to ask when the doubt came up
        self._pipeline_of(node).submit(pending)

    def reply(self, pending: PendingCheck, result: CheckResult) -> None:
        """Tell what needs no asking."""
        self._pipeline_of(self._topology.unknown_server).reply(pending, result)

    def undo(self, refunds: Sequence[FinishHold]) -> None:
        """Give back, without anybody waiting: what does not arrive goes back by itself."""
        for one in refunds:
            self.route(PendingCheck(one, _ignore_reply, self.loop.time() + COMMAND_TIMEOUT_SECONDS))

    def _pipeline_of(self, server: Server) -> Pipeline:
        pipeline = self._pipelines.get(server)
        if pipeline is None:
            is_search = not self._topology.is_single and server is self._topology.unknown_server
            pipeline = self._pipelines[server] = Pipeline(
                server,
                self._core,
                self,
                deadline_ms=self._options.deadline_ms,
                max_waiting=self._options.max_waiting,
                is_sharded=self._topology.is_sharded,
            )
            if is_search:
                pipeline.connection = DiscoveringConnection(self, pipeline)
        return pipeline

    # -- who decides: the router of the pipelines

    def redirect(self, batch: list[PendingCheck], redirection: Redirected | SlotMigrating, server: Server) -> None:
        now = self.loop.time()
        is_lost = any(asked.redirects >= MAX_REDIRECTS for asked in batch)
        for asked in batch:
            asked.is_resubmitted, asked.needs_asking = True, False
            asked.redirects = 0 if is_lost else asked.redirects + 1
            asked.own_call_only = asked.own_call_only or isinstance(redirection, SlotMigrating)
            if asked.deadline <= now:
                self._pipeline_of(server).resolve(asked, redirection)
        if isinstance(redirection, SlotMigrating) or is_lost:
            self.loop.call_at(now + TRYAGAIN_DELAY_SECONDS, self._route_all, batch)
            return
        host = redirection.host or server.address.host
        if not redirection.is_ask:
            self._topology.record_move(redirection.slot, host, redirection.port)
            self.refresh_topology()
            self._route_all(batch)
            return
        pipeline = self._pipeline_of(self._topology.server_at(host, redirection.port))
        for asked in batch:
            if asked.on_reply is not None:
                asked.needs_asking = True
                pipeline.submit(asked)

    def refresh_topology(self) -> None:
        self._topology.mark_stale()
        if self._topology.claim_refresh() and not self._is_closed:
            self.start_discovery()

    def start_discovery(self) -> "asyncio.Task[StoreUnavailable | None]":
        if self._discovery is None or self._discovery.done():
            self._discovery = self.loop.create_task(self._discover())
        return self._discovery

    async def discover(self) -> StoreUnavailable | None:
        """Who there is was told a moment ago, or is asked now."""
        return None if self._topology.was_refreshed_recently() else await asyncio.shield(self.start_discovery())

    async def _discover(self) -> StoreUnavailable | None:
        """Ask who there is, until somebody knows."""
        problem: BaseException | None = None
        for address, question in self._topology.discovery_queries():
            try:
                owed = self._topology.apply_reply(address, await _query_once(address, question))
            except (OSError, TimeoutError, LimitforgeError) as error:
                problem = error
                continue
            if owed is not None:
                self._retire_servers()
                self._core.charge(owed)
                return None
        return discovery_error(problem)

    def _retire_servers(self) -> None:
        """Of servers that decide about nothing any more; what waits for them is asked of their successors."""
        for node, pipeline in list(self._pipelines.items()):
            if not self._topology.is_current(node):
                del self._pipelines[node]
                self._draining.add(pipeline)
                self._route_all(pipeline.take_queue())
                self.loop.call_later(
                    max(2 * self.deadline_seconds, COMMAND_TIMEOUT_SECONDS), self._close_drained, pipeline
                )
        if self._listener is not None:
            self._listener.follow_topology()

    def _close_drained(self, pipeline: Pipeline) -> None:
        pipeline.close()
        self._draining.discard(pipeline)

    def _route_all(self, batch: Sequence[PendingCheck]) -> None:
        for asked in batch:
            if asked.on_reply is not None:
                self.route(asked)

    def on_discovered(self, pipeline: Pipeline) -> StoreUnavailable | None:
        """Somebody knew who there is: on with those who waited for that. What nobody has even so is an error."""
        problem: StoreUnavailable | None = None
        for asked in pipeline.take_queue():
            if self._topology.server_of_slot(asked.slot) is self._topology.unknown_server:
                problem = uncovered_slot_error(asked.slot)
                pipeline.resolve(asked, problem)
            elif asked.on_reply is not None:
                self.route(asked)
        return problem

    # -- commands

    async def run(self, command: Command[T]) -> T:
        return await self.run_flow(self._core.command(command), max(COMMAND_TIMEOUT_SECONDS, self.deadline_seconds))

    async def run_flow(self, flow: Flow[T], seconds: float) -> T:
        """Run a flow of its own, beside the batches; raise StoreUnavailable when it takes longer than that."""
        if self.only_pipeline is not None:
            return await self.only_pipeline.connection.run_flow(flow, seconds)
        due = self.loop.time() + seconds
        answer: T
        try:
            call = next(flow)
            while True:
                call = flow.send(await self._call_routed(call, due))
        except StopIteration as done:
            answer = done.value
            return answer

    async def _call_routed(self, call: ScriptCall, deadline: float) -> Reply:
        slot = self._topology.slot_of(call.keys[0]) if call.keys else 0
        node, asking, hops = await self._server_of_slot(slot), False, 0
        while True:
            if self.loop.time() >= deadline:
                raise NotServerFault("there was no time left")
            link = self._pipeline_of(node).connection
            try:
                return await link.run_flow(single_call_flow(call), deadline - self.loop.time(), asking=asking)
            except Redirected as answer:
                hops += 1
                if not self._topology.is_sharded:
                    raise
                if hops > MAX_REDIRECTS:
                    await asyncio.sleep(TRYAGAIN_DELAY_SECONDS)
                host = answer.host or node.address.host
                node = self._topology.server_at(host, answer.port)
                asking = answer.is_ask
                if not answer.is_ask:
                    self._topology.record_move(answer.slot, host, answer.port)
            except SlotMigrating:
                await asyncio.sleep(TRYAGAIN_DELAY_SECONDS)
                node, asking = self._topology.server_of_slot(slot), False

    async def _server_of_slot(self, slot: int) -> Server:
        node = self._topology.server_of_slot(slot)
        if node is self._topology.unknown_server and not self._topology.is_single:
            error = await self.discover()
            node = self._topology.server_of_slot(slot)
            if node is self._topology.unknown_server:
                raise error or uncovered_slot_error(slot)
        return node

    # -- what this process decides

    def _start_hybrid(self, check: Check, on_reply: OnReply, deadline: float) -> "MultiStepCheck":
        self._prepaid_sync.ensure_running()
        errand = MultiStepCheck(self, self._core.hybrid_check(check, self._hybrid, self.undo), on_reply, deadline)
        errand.start()
        return errand

    # -- denials

    def decide_in_process(self, check: Check) -> Decision | Outcome | None:
        """What needs no asking: a denial that is known, or what a share pays for."""
        self._check_count += 1
        if not self._check_count % SAMPLE_EVERY:
            self._hot_keys.record(check)
        decision: Decision | Outcome | None = None
        denials = self._denial_cache
        if denials is not None and denials.has_entries:
            if self._listener is None or not self._listener.is_running:
                self._start_listening()
            decision = denials.get(check)
        return self._hybrid.decide_from_share(check) if decision is None and check.is_partly_local else decision

    def _start_listening(self) -> None:
        if not self._topology.servers:
            return  # nobody is known yet whom one could listen to
        if self._listener is None or not self._listener.is_running:
            self._listener = InvalidationListener(self._topology, self._core.channel, self._core.caches)
            self._listener.start()

    async def publish_invalidation(self, drop: Invalidation) -> None:
        """Nobody waits for the answer, unless the limiter is closed before it comes. Any server tells all others."""
        told = self.loop.create_future()
        self._publishing.add(told)
        try:
            link = self._pipeline_of(await self._server_of_slot(0)).connection
            await link.publish(self._core.channel, drop.encode(), partial(self._on_published, told))
        except (TimeoutError, LimitforgeError) as error:
            self._on_published(told, StoreUnavailable(str(error) or "Redis did not answer"))

    def _on_published(self, published: "asyncio.Future[None]", reply: Reply | LimitforgeError) -> None:
        self._publishing.discard(published)
        if not published.done():
            published.set_result(None)
        if isinstance(reply, LimitforgeError):
            self._core.warn_not_published(reply)

    # -- the end

    def close_soon(self) -> None:
        """For another thread's loop."""
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

    def charge_soon(self, charges: Sequence[Check]) -> None:
        if charges:
            self._start_task(self._charge(charges))

    async def _charge(self, charges: Sequence[Check]) -> None:
        """What was admitted without the store, beside the callers and in no hurry."""
        answers: list[Any] = []
        batches = list(batches_by_slot(charges, self._topology.slot_of))
        charges = [charge for part in batches for charge in part]
        for part in batches:
            try:
                answers += await self.run_flow(self._core.checks_flow(part), COMMAND_TIMEOUT_SECONDS)
            except LimitforgeError as error:
                answers += [error] * len(part)
            except asyncio.CancelledError:
                lost = StoreUnavailable("the event loop ended", maybe_counted=True)
                self._core.record_charges(charges, [*answers, *[lost] * (len(charges) - len(answers))])
                raise
        self._core.record_charges(charges, answers)

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class DiscoveringConnection(ReconnectingConnection):
    """The link to a server that is not known yet: opening it is finding out."""

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


class MultiStepCheck:
    """A check in several steps on its way: what to do next is told by its flow."""

    def __init__(
        self,
        client: EventLoopClient,
        flow: MultiStepFlow[Decision | LimitforgeError],
        on_reply: OnReply,
        deadline: float,
    ) -> None:
        self.on_reply: OnReply | None = on_reply
        self._client = client
        self._deadline = deadline
        self._flow = flow
        self._has_started = False
        self._pending_replies = 0
        self._replies: list[Any] = []

    def start(self) -> None:
        self._advance(partial(next, self._flow))

    def _advance(self, step: Any) -> None:
        try:
            steps: list[Step] = step()
        except StopIteration as done:
            self._finish(done.value)
            return
        except Exception as error:  # noqa: BLE001 - a bug of ours: the caller must hear of it
            self._finish(as_corrupt_reply(error))
            return
        is_aged, self._has_started = self._has_started, True
        if self.on_reply is None and any(
            isinstance(one, FinishHold) and one.action is HoldAction.CONFIRM for one in steps
        ):
            gone = StoreError("the caller is gone")  # nothing shall be charged for nobody
            self._advance(partial(self._flow.send, [gone] * len(steps)))
            return
        self._pending_replies, self._replies = len(steps), [None] * len(steps)
        for at, one in enumerate(steps):
            self._client.route(
                PendingCheck(one, partial(self._on_step_reply, at), self._deadline, is_resubmitted=is_aged)
            )

    def _finish(self, answer: Decision | LimitforgeError) -> None:
        if self.on_reply is not None:
            self._client.reply(PendingCheck(_EMPTY_CHECK, self.on_reply, self._deadline), answer)

    def _on_step_reply(self, at: int, answer: Any) -> None:
        self._replies[at] = answer
        self._pending_replies -= 1
        if not self._pending_replies:
            self._advance(partial(self._flow.send, self._replies))


_EMPTY_CHECK = Check([], ())


def _ignore_reply(_answer: Any) -> None:
    """What did not arrive goes back by itself."""


async def _query_once(address: Address, command: tuple[str, ...]) -> Any:
    """Ask one server one thing."""
    replied: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def heard(reply: Any) -> None:
        if not replied.done():
            replied.set_result(reply)

    wire = await Connection.open(address, lambda _wire, error: heard(error), DISCOVERY_TIMEOUT_SECONDS)
    try:
        wire.send_command(command, heard)
        async with asyncio.timeout(DISCOVERY_TIMEOUT_SECONDS):
            reply = await replied
    finally:
        wire.abort()
    if isinstance(reply, Exception):
        raise connection_error(reply)
    return reply
