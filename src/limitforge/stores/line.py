"""A store's side on one event loop: a pipeline for each server, and the way of every check to the right one."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any

from limitforge.core.check import Check
from limitforge.core.decision import Decision, Judged, Outcome
from limitforge.errors import LimitforgeError, StoreError, StoreUnavailable
from limitforge.stores.codec import Call, Flow, Reply, T, as_corrupt, one_call, parts
from limitforge.stores.denials import Drop
from limitforge.stores.fleet import (
    MANY_HOPS,
    MOVING_SECONDS,
    QUESTION_SECONDS,
    Fleet,
    Node,
    nobody_decides,
    nobody_knows,
)
from limitforge.stores.heat import SAMPLED
from limitforge.stores.keeper import Keeper
from limitforge.stores.link import Link
from limitforge.stores.listener import Listener
from limitforge.stores.options import StoreOptions
from limitforge.stores.pipeline import Asked, Pipeline, Tell
from limitforge.stores.protocol import Command
from limitforge.stores.redis_parts import COMMAND_SECONDS, Parts, Steps
from limitforge.stores.resilience import NotAsked
from limitforge.stores.resp import Address, Elsewhere, Moving, unreachable
from limitforge.stores.spread import Ending, Finish, Step, a_key_of, is_spread
from limitforge.stores.wire import Wire


class Line:
    """What of a store belongs to one event loop."""

    def __init__(self, parts: Parts, options: StoreOptions) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread = get_ident()
        """Where its loop runs, and stays: asking asyncio which loop is the running one takes a system call."""
        self._asked = 0
        self.deadline = options.deadline_ms / 1_000
        self._parts = parts
        self._options = options
        self._fleet: Fleet = parts.fleet
        self._denials = parts.denials
        self._heat = parts.heat
        self._listener: Listener | None = None
        self._telling: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pipelines: dict[Node, Pipeline] = {}
        self._leaving: set[Pipeline] = set()  # of servers that were let go of, until what was asked is answered
        self._discovering: asyncio.Task[StoreUnavailable | None] | None = None
        self._is_closed = False
        self._blender = parts.blender()
        self._keeper = Keeper(parts, self._blender.shares, options.sync_interval_ms / 1_000, self.carry, self._listen)
        self.single = self._pipeline(self._fleet.nobody) if self._fleet.is_single else None
        """The pipeline of the only server there is."""
        self._guard = self._until_the_loop_ends()
        with suppress(StopIteration):
            self._guard.asend(None).send(None)

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        """Loops end their generators before they are closed: so connections never outlive `asyncio.run`."""
        try:
            yield
        finally:
            self._is_closed = True
            self._keeper.stop()
            if self._discovering is not None:
                self._discovering.cancel()
            for pipeline in [*self._pipelines.values(), *self._leaving]:
                pipeline.close()

    @property
    def waiting(self) -> int:
        """How many checks are owed an answer."""
        return sum(pipeline.waiting for pipeline in list(self._pipelines.values()))

    # -- asking

    def ask(self, check: Check, tell: Tell) -> None:
        """Tell what needs no asking, or submit."""
        decided = self.decided(check)
        if decided is not None:
            self.answer(Asked(check, tell, 0), decided)
        elif self.single is not None and not check.is_mixed:
            self.single.submit(Asked(check, tell, self.loop.time() + self.deadline))
        else:
            self.submit(check, tell)

    def submit(self, check: Check, tell: Tell, group: object = None) -> "Asked | Errand":
        """Ask. The answer comes by `tell`, perhaps before this returns; who no longer wants it sets that to None."""
        due = self.loop.time() + self.deadline
        if check.is_mixed:
            return self._blended(check, tell, due)
        if self.single is not None:
            asked = Asked(check, tell, due, group)
            self.single.submit(asked)
            return asked
        if is_spread(check, self._fleet.slot_of):
            errand = Errand(self, self._parts.spread(check, self.undo), tell, due)
            errand.start()
            return errand
        asked = Asked(check, tell, due, group)
        self.route(asked)
        return asked

    def route(self, asked: Asked) -> None:
        """To whom decides about its slot."""
        if self._is_closed:
            self._pipeline(self._fleet.nobody).decide(asked, NotAsked("the limiter was closed"))
            return
        if not self._fleet.is_single:
            asked.slot = self._fleet.slot_of(a_key_of(asked.check))
        node = self._fleet.node_of(asked.slot)
        if self._fleet.in_doubt or not node.resilience.is_quiet:
            self.doubt()  # also if it was too early to ask when the doubt came up
        self._pipeline(node).submit(asked)

    def answer(self, asked: Asked, judged: Judged) -> None:
        """Tell what needs no asking."""
        self._pipeline(self._fleet.nobody).tell(asked, judged)

    def undo(self, undone: Sequence[Finish]) -> None:
        """Give back, without anybody waiting: what does not arrive goes back by itself."""
        for one in undone:
            self.route(Asked(one, _nobody_cares, self.loop.time() + COMMAND_SECONDS))

    def _pipeline(self, node: Node) -> Pipeline:
        pipeline = self._pipelines.get(node)
        if pipeline is None:
            is_search = not self._fleet.is_single and node is self._fleet.nobody
            pipeline = self._pipelines[node] = Pipeline(
                node,
                self._parts,
                self,
                deadline_ms=self._options.deadline_ms,
                max_waiting=self._options.max_waiting,
                is_sharded=self._fleet.is_sharded,
            )
            if is_search:
                pipeline.link = Search(self, pipeline)
        return pipeline

    # -- who decides: the router of the pipelines

    def redirect(self, batch: list[Asked], answer: Elsewhere | Moving, node: Node) -> None:
        now = self.loop.time()
        is_lost = any(asked.hops >= MANY_HOPS for asked in batch)
        for asked in batch:
            asked.is_aged, asked.asking = True, False
            asked.hops = 0 if is_lost else asked.hops + 1
            asked.alone = asked.alone or isinstance(answer, Moving)
            if asked.due <= now:
                self._pipeline(node).decide(asked, answer)
        if isinstance(answer, Moving) or is_lost:
            self.loop.call_at(now + MOVING_SECONDS, self._route_all, batch)
            return
        host = answer.host or node.address.host
        if not answer.once:
            self._fleet.moved(answer.slot, host, answer.port)
            self.doubt()
            self._route_all(batch)
            return
        pipeline = self._pipeline(self._fleet.node_at(host, answer.port))
        for asked in batch:
            if asked.tell is not None:
                asked.asking = True
                pipeline.submit(asked)

    def doubt(self) -> None:
        self._fleet.doubt()
        if self._fleet.is_due() and not self._is_closed:
            self.discover_soon()

    def discover_soon(self) -> "asyncio.Task[StoreUnavailable | None]":
        if self._discovering is None or self._discovering.done():
            self._discovering = self.loop.create_task(self._discover())
        return self._discovering

    async def discovered(self) -> StoreUnavailable | None:
        """Who there is was told a moment ago, or is asked now."""
        return None if self._fleet.heard_lately() else await asyncio.shield(self.discover_soon())

    async def _discover(self) -> StoreUnavailable | None:
        """Ask who there is, until somebody knows."""
        problem: BaseException | None = None
        for address, question in self._fleet.questions():
            try:
                owed = self._fleet.heard(address, await _ask_once(address, question))
            except (OSError, TimeoutError, LimitforgeError) as error:
                problem = error
                continue
            if owed is not None:
                self._let_go()
                self._parts.charge(owed)
                return None
        return nobody_knows(problem)

    def _let_go(self) -> None:
        """Of servers that decide about nothing any more; what waits for them is asked of their successors."""
        for node, pipeline in list(self._pipelines.items()):
            if not self._fleet.knows(node):
                del self._pipelines[node]
                self._leaving.add(pipeline)
                self._route_all(pipeline.hand_over())
                self.loop.call_later(max(2 * self.deadline, COMMAND_SECONDS), self._left, pipeline)
        if self._listener is not None:
            self._listener.follow()

    def _left(self, pipeline: Pipeline) -> None:
        pipeline.close()
        self._leaving.discard(pipeline)

    def _route_all(self, batch: Sequence[Asked]) -> None:
        for asked in batch:
            if asked.tell is not None:
                self.route(asked)

    def found(self, pipeline: Pipeline) -> StoreUnavailable | None:
        """Somebody knew who there is: on with those who waited for that. What nobody has even so is an error."""
        problem: StoreUnavailable | None = None
        for asked in pipeline.hand_over():
            if self._fleet.node_of(asked.slot) is self._fleet.nobody:
                problem = nobody_decides(asked.slot)
                pipeline.decide(asked, problem)
            elif asked.tell is not None:
                self.route(asked)
        return problem

    # -- commands

    async def run(self, command: Command[T]) -> T:
        return await self.carry(self._parts.command(command), max(COMMAND_SECONDS, self.deadline))

    async def carry(self, flow: Flow[T], seconds: float) -> T:
        """Run a flow of its own, beside the batches; raise StoreUnavailable when it takes longer than that."""
        if self.single is not None:
            return await self.single.link.carry(flow, seconds)
        due = self.loop.time() + seconds
        answer: T
        try:
            call = next(flow)
            while True:
                call = flow.send(await self._carried(call, due))
        except StopIteration as done:
            answer = done.value
            return answer

    async def _carried(self, call: Call, due: float) -> Reply:
        slot = self._fleet.slot_of(call.keys[0]) if call.keys else 0
        node, asking, hops = await self._node_of(slot), False, 0
        while True:
            if self.loop.time() >= due:
                raise NotAsked("there was no time left")
            link = self._pipeline(node).link
            try:
                return await link.carry(one_call(call), due - self.loop.time(), asking=asking)
            except Elsewhere as answer:
                hops += 1
                if not self._fleet.is_sharded:
                    raise
                if hops > MANY_HOPS:
                    await asyncio.sleep(MOVING_SECONDS)
                host = answer.host or node.address.host
                node = self._fleet.node_at(host, answer.port)
                asking = answer.once
                if not answer.once:
                    self._fleet.moved(answer.slot, host, answer.port)
            except Moving:
                await asyncio.sleep(MOVING_SECONDS)
                node, asking = self._fleet.node_of(slot), False

    async def _node_of(self, slot: int) -> Node:
        node = self._fleet.node_of(slot)
        if node is self._fleet.nobody and not self._fleet.is_single:
            error = await self.discovered()
            node = self._fleet.node_of(slot)
            if node is self._fleet.nobody:
                raise error or nobody_decides(slot)
        return node

    # -- what this process decides

    def _blended(self, check: Check, tell: Tell, due: float) -> "Errand":
        self._keeper.keep_up()
        errand = Errand(self, self._parts.blend(check, self._blender, self.undo), tell, due)
        errand.start()
        return errand

    # -- denials

    def decided(self, check: Check) -> Decision | Outcome | None:
        """What needs no asking: a denial that is known, or what a share pays for."""
        self._asked += 1
        if not self._asked % SAMPLED:
            self._heat.note(check)
        decision: Decision | Outcome | None = None
        denials = self._denials
        if denials is not None and denials.is_active:
            if self._listener is None or not self._listener.is_running:
                self._listen()
            decision = denials.look(check)
        return self._blender.decide(check) if decision is None and check.is_mixed else decision

    def _listen(self) -> None:
        if not self._fleet.nodes:
            return  # nobody is known yet whom one could listen to
        if self._listener is None or not self._listener.is_running:
            self._listener = Listener(self._fleet, self._parts.channel, self._parts.caches)
            self._listener.start()

    async def tell_others(self, drop: Drop) -> None:
        """Nobody waits for the answer, unless the limiter is closed before it comes. Any server tells all others."""
        told = self.loop.create_future()
        self._telling.add(told)
        try:
            link = self._pipeline(await self._node_of(0)).link
            await link.publish(self._parts.channel, drop.message(), partial(self._told, told))
        except (TimeoutError, LimitforgeError) as error:
            self._told(told, StoreUnavailable(str(error) or "Redis did not answer"))

    def _told(self, told: "asyncio.Future[None]", reply: Reply | LimitforgeError) -> None:
        self._telling.discard(told)
        if not told.done():
            told.set_result(None)
        if isinstance(reply, LimitforgeError):
            self._parts.warn_untold(reply)

    # -- the end

    def close_soon(self) -> None:
        """For another thread's loop."""
        self._start(self.close())

    async def close(self) -> None:
        try:
            await self._keeper.leave()
            if self._telling:
                await asyncio.wait(self._telling, timeout=self.deadline)
        finally:
            await self._guard.aclose()
            if self._listener is not None:
                await self._listener.stop()

    def charge_soon(self, charges: Sequence[Check]) -> None:
        if charges:
            self._start(self._charge(charges))

    async def _charge(self, charges: Sequence[Check]) -> None:
        """What was admitted without the store, beside the callers and in no hurry."""
        answers: list[Any] = []
        batches = list(parts(charges, self._fleet.slot_of))
        charges = [charge for part in batches for charge in part]
        for part in batches:
            try:
                answers += await self.carry(self._parts.judge(part), COMMAND_SECONDS)
            except LimitforgeError as error:
                answers += [error] * len(part)
            except asyncio.CancelledError:
                lost = StoreUnavailable("the event loop ended", maybe_counted=True)
                self._parts.charged(charges, [*answers, *[lost] * (len(charges) - len(answers))])
                raise
        self._parts.charged(charges, answers)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Search(Link):
    """The link to a server that is not known yet: opening it is finding out."""

    def __init__(self, line: Line, owner: Pipeline) -> None:
        super().__init__(owner.node.address, owner.node.resilience, owner, QUESTION_SECONDS)
        self._line = line
        self._pipeline = owner

    async def _connect(self) -> StoreUnavailable | None:
        began_us = self._resilience.now_us()
        error = await self._line.discovered()
        self._connecting = None
        error = error or self._line.found(self._pipeline)
        if error is not None:
            self._owner.unopened(error, began_us)
        else:
            self._owner.succeeded()
        return error


class Errand:
    """A check in several steps on its way: what to do next is told by its flow."""

    def __init__(self, line: Line, flow: Steps[Decision | LimitforgeError], tell: Tell, due: float) -> None:
        self.tell: Tell | None = tell
        self._line = line
        self._due = due
        self._flow = flow
        self._is_begun = False
        self._owed = 0
        self._answers: list[Any] = []

    def start(self) -> None:
        self._advance(partial(next, self._flow))

    def _advance(self, step: Any) -> None:
        try:
            steps: list[Step] = step()
        except StopIteration as done:
            self._end(done.value)
            return
        except Exception as error:  # noqa: BLE001 - a bug of ours: the caller must hear of it
            self._end(as_corrupt(error))
            return
        is_aged, self._is_begun = self._is_begun, True
        if self.tell is None and any(isinstance(one, Finish) and one.ending is Ending.CONFIRM for one in steps):
            gone = StoreError("the caller is gone")  # nothing shall be charged for nobody
            self._advance(partial(self._flow.send, [gone] * len(steps)))
            return
        self._owed, self._answers = len(steps), [None] * len(steps)
        for at, one in enumerate(steps):
            self._line.route(Asked(one, partial(self._answered, at), self._due, is_aged=is_aged))

    def _end(self, answer: Decision | LimitforgeError) -> None:
        if self.tell is not None:
            self._line.answer(Asked(_NOTHING, self.tell, self._due), answer)

    def _answered(self, at: int, answer: Any) -> None:
        self._answers[at] = answer
        self._owed -= 1
        if not self._owed:
            self._advance(partial(self._flow.send, self._answers))


_NOTHING = Check([], ())


def _nobody_cares(_answer: Any) -> None:
    """What did not arrive goes back by itself."""


async def _ask_once(address: Address, question: tuple[str, ...]) -> Any:
    """Ask one server one thing."""
    replied: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def heard(reply: Any) -> None:
        if not replied.done():
            replied.set_result(reply)

    wire = await Wire.open(address, lambda _wire, error: heard(error), QUESTION_SECONDS)
    try:
        wire.ask(question, heard)
        async with asyncio.timeout(QUESTION_SECONDS):
            reply = await replied
    finally:
        wire.abort()
    if isinstance(reply, Exception):
        raise unreachable(reply)
    return reply
