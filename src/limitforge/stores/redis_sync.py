"""Decisions on Redis, for threads and forked workers: `redis.py` without `await`, on the same parts."""

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
from limitforge.core.plan import BUCKET_US
from limitforge.errors import LimitforgeError, StoreError, StoreUnavailable
from limitforge.stores.codec import Call, Flow, NotReplicated, Reply, T, as_corrupt, fitting, parts
from limitforge.stores.denials import Drop
from limitforge.stores.fleet import Node
from limitforge.stores.heat import SAMPLED
from limitforge.stores.listener import SyncListener
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import Answer, Command, StoreStatus
from limitforge.stores.redis_parts import COMMAND_SECONDS, Batch, Parts, Steps, is_local
from limitforge.stores.resilience import as_counted
from limitforge.stores.resp import Elsewhere, Moving
from limitforge.stores.servers_sync import Ask, Servers
from limitforge.stores.shares import Grant, Wish
from limitforge.stores.slots import by_slot
from limitforge.stores.spread import Finish, Step, a_key_of, is_spread
from limitforge.stores.wire_sync import SyncWire

_log = logging.getLogger(__name__)


class SyncRedisStore:
    """Decides in Redis, by Redis's time. A `clock` replaces that time: for tests and replays only.

    Any number of threads may use it. A forked process starts afresh: it shares no socket, lock or cache with its
    parent.
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

    def start_afresh(self) -> None:
        """In a forked child: sockets, locks and threads of the parent are not ours."""
        self._servers.abandon()
        self._start()

    def _start(self) -> None:
        self._parts = Parts(self._url, self.keys, self._clock, self._options, self._charge_soon)
        self._fleet = self._parts.fleet
        self._servers = Servers(self._fleet, self._charge_soon)
        self._lock = threading.Lock()
        self._asked = 0
        self._listener: SyncListener | None = None
        self._blender = self._parts.blender()
        self._keeper: threading.Thread | None = None
        self._stopped = threading.Event()

    def check(self, check: Check) -> Decision:
        (answer,) = self.check_many((check,))
        if isinstance(answer, LimitforgeError):
            raise answer
        return answer

    def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        self._servers.is_closed = False
        batch = Batch(checks, self._decided)
        due = time.monotonic() + self._options.deadline_ms / 1_000
        together: list[int] = []
        stepwise: dict[int, Steps[Decision | LimitforgeError]] = {}
        for at, check in enumerate(batch.asked):
            if check.is_mixed:
                if self._keeper is None:
                    self._keep_up()
                stepwise[at] = self._parts.blend(check, self._blender, self._undo)
            elif not self._fleet.is_single and is_spread(check, self._fleet.slot_of):
                stepwise[at] = self._parts.spread(check, self._undo)
            else:
                together.append(at)
        for at, answer in zip(together, self._judged([batch.asked[at] for at in together], due), strict=True):
            batch.answer(at, answer)
        if stepwise:
            for at, answer in self._in_steps(stepwise, due).items():
                batch.answer(at, answer)
        return cast("list[Decision | LimitforgeError]", batch.answers)

    def run(self, command: Command[Answer]) -> Answer:
        if is_local(command):
            return self._fleet.local.run(command)
        self._servers.is_closed = False
        due = time.monotonic() + max(COMMAND_SECONDS, self._options.deadline_ms / 1_000)
        try:
            answer = self._carry(self._parts.command(command), due)
        except BaseException as error:
            self._parts.drop_after(command, error)
            raise
        drop = self._parts.drop(command)
        if drop is not None:
            self._tell_others(drop, due)
        return answer

    def status(self) -> StoreStatus:
        return self._parts.status()

    def close(self) -> None:
        """Let go of every connection. It may be used again."""
        self._leave()  # first: what keeps the shares also begins to listen
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        self._servers.close()
        self._fleet.close()

    # -- talking

    def _judged(self, checks: Sequence[Check], due: float) -> list[Any]:
        """What the store tells of each, or what its failure behaviour says."""
        answers: list[Any] = [None] * len(checks)
        batches = [
            places[part.start : part.stop]
            for places in by_slot(range(len(checks)), lambda at: self._slot(checks[at]))
            for part in fitting([checks[at].weight_us for at in places])
        ]
        runs = [(self._slot(checks[places[0]]), [checks[at] for at in places]) for places in batches]
        told = self._run_all([(slot, self._parts.judge(batch)) for slot, batch in runs], due)
        for places, (slot, batch), judged in zip(batches, runs, told, strict=True):
            decide = self._fleet.node_of(slot).resilience.decide
            each = judged if isinstance(judged, list) else [judged] * len(batch)
            for place, check, answer in zip(places, batch, each, strict=True):
                is_lost = isinstance(answer, StoreUnavailable) and not check.is_part
                answers[place] = decide(check, answer) if is_lost else answer
        return answers

    def _run_all(self, runs: Sequence[tuple[int, Flow[list[Any]]]], due: float) -> list[list[Any] | LimitforgeError]:
        """Flows of several slots: those of one server begin in one write, and the servers work side by side."""
        if len(runs) <= 1 or self._fleet.is_single:
            return [self._outcome(flow, due) for _, flow in runs]
        calls = [next(flow) for _, flow in runs]
        by_node: dict[Node, list[int]] = {}
        for at, (slot, _) in enumerate(runs):
            by_node.setdefault(self._fleet.node_of(slot), []).append(at)
        by_node.pop(self._fleet.nobody, None)
        if any(not node.resilience.is_quiet for node in by_node):
            self._servers.doubt()
        asks = {node: _calling_all([calls[at] for at in places], due) for node, places in by_node.items()}
        replies: dict[int, Reply | StoreError] = {}
        for node, told in self._servers.ask_all(asks, due).items():
            each = told if isinstance(told, list) else [told] * len(by_node[node])
            replies.update(zip(by_node[node], each, strict=True))
        return [
            self._outcome(flow, due, call, replies.get(at))
            for at, ((_, flow), call) in enumerate(zip(runs, calls, strict=True))
        ]

    def _outcome(
        self, flow: Flow[list[Any]], due: float, call: Call | None = None, reply: Reply | StoreError | None = None
    ) -> list[Any] | LimitforgeError:
        """What a flow comes to, perhaps from its first call and the reply to that on."""
        try:
            if call is None:
                return self._carry(flow, due)
            if isinstance(reply, StoreError):
                if not isinstance(reply, Elsewhere | Moving):
                    return reply
                reply = None
            return self._go_on(flow, call, due, reply)
        except LimitforgeError as error:
            return error

    def _slot(self, check: Check) -> int:
        return self._fleet.slot_of(a_key_of(check))

    def _in_steps(
        self, flows: dict[int, Steps[Decision | LimitforgeError]], due: float
    ) -> dict[int, Decision | LimitforgeError]:
        """Checks over several slots, or of which this process decides a part: side by side, step by step."""
        answers: dict[int, Decision | LimitforgeError] = {}
        told: dict[int, Sequence[Any] | None] = dict.fromkeys(flows)
        while told:
            steps: dict[int, list[Step]] = {}
            for at, heard in told.items():
                try:
                    steps[at] = next(flows[at]) if heard is None else flows[at].send(heard)
                except StopIteration as done:
                    answers[at] = done.value
                except Exception as error:  # noqa: BLE001 - a bug of ours: it spoils no other
                    answers[at] = as_corrupt(error)
            replies = iter(self._told([step for asked in steps.values() for step in asked], due))
            told = {at: [next(replies) for _ in asked] for at, asked in steps.items()}
        return answers

    def _told(self, steps: Sequence[Any], due: float) -> list[Any]:
        """What the store says to each step; what ends something goes first."""
        answers: list[Any] = [None] * len(steps)
        ending = [at for at, step in enumerate(steps) if isinstance(step, Finish)]
        asking = [at for at, step in enumerate(steps) if not isinstance(step, Finish)]
        batches = [
            together[part.start : part.stop]
            for together in by_slot(ending, lambda at: self._fleet.slot_of(a_key_of(steps[at])))
            for part in fitting([steps[at].weight_us for at in together])
        ]
        runs = [
            (self._fleet.slot_of(a_key_of(steps[places[0]])), self._parts.finish([steps[at] for at in places]))
            for places in batches
        ]
        for places, told in zip(batches, self._run_all(runs, due), strict=True):
            each = told if isinstance(told, list) else [told] * len(places)
            for at, answer in zip(places, each, strict=True):
                answers[at] = answer
        for at, answer in zip(asking, self._judged([cast("Check", steps[at]) for at in asking], due), strict=True):
            answers[at] = answer
        return answers

    def _undo(self, undone: Sequence[Finish]) -> None:
        """Give back on a thread of its own: no caller waits, and what does not arrive goes back by itself."""
        if undone:
            due = time.monotonic() + COMMAND_SECONDS
            threading.Thread(target=self._told, args=[undone, due], name="limitforge-undo", daemon=True).start()

    def _carry(self, flow: Flow[T], due: float) -> T:
        """Run a flow, or raise StoreUnavailable when it takes longer than that."""
        try:
            call = next(flow)
        except StopIteration as done:
            nothing_asked: T = done.value
            return nothing_asked
        if not self._fleet.is_single:
            return self._go_on(flow, call, due)
        answer: T = self._servers.ask(self._fleet.nobody, due, lambda wire: _walk(flow, call, wire, due))
        return answer

    def _go_on(self, flow: Flow[T], call: Call, due: float, reply: Reply | None = None) -> T:
        """Run a flow on from a call, perhaps from its reply, each call to where its keys are."""
        is_begun = reply is not None
        try:
            while True:
                reply = reply or self._servers.call(call, due)
                call, reply, is_begun = flow.send(reply), None, True
        except StopIteration as done:
            answer: T = done.value
            return answer
        except StoreUnavailable as error:
            if is_begun and not error.maybe_counted:
                raise as_counted(error) from error
            raise
        except LimitforgeError:
            raise
        except Exception as error:
            raise as_corrupt(error) from error

    def _charge_soon(self, charges: Sequence[Check]) -> None:
        """What the store is owed after an outage is charged on a thread of its own: no caller waits for it."""
        if charges:
            threading.Thread(target=self._charge, args=[charges], name="limitforge-charges", daemon=True).start()

    def _charge(self, charges: Sequence[Check]) -> None:
        answers: list[Any] = []
        batches = list(parts(charges, self._fleet.slot_of))
        charges = [charge for part in batches for charge in part]
        for part in batches:
            answers += self._judged(part, time.monotonic() + COMMAND_SECONDS)
        self._parts.charged(charges, answers)

    # -- what this process decides

    def _keep_up(self) -> None:
        """Keep shares and heartbeats going on a thread of its own, for as long as anybody needs them."""
        self._listen()
        with self._lock:
            if self._keeper is None:
                self._stopped = threading.Event()
                kept = Kept(weakref.ref(self), self._stopped, self._options.sync_interval_ms / 1_000)
                self._keeper = threading.Thread(target=kept.run, name="limitforge-shares", daemon=True)
                self._keeper.start()

    def keep(self) -> None:
        """Tell the store what it should know by now."""
        if self._listener is None:
            self._listen()
        if self._fleet.members.is_due():
            with suppress(LimitforgeError):
                due = time.monotonic() + COMMAND_SECONDS
                self._fleet.members.heard(self._carry(self._parts.beat(), due))
        self._sync(self._blender.shares.wishes(), time.monotonic() + COMMAND_SECONDS)

    def _sync(self, wishes: Sequence[Wish], due: float) -> None:
        shares = self._blender.shares
        for together in by_slot(wishes, lambda wish: self._fleet.slot_of(wish.share.key)):
            for part in fitting([BUCKET_US] * len(together)):
                batch = together[part.start : part.stop]
                sent_us = shares.now_us()
                grants: Sequence[Grant | None] | None = None
                try:
                    grants = self._carry(self._parts.shares(batch, shares.lapse_us), due)
                except StoreUnavailable as error:
                    grants = None if error.maybe_counted else [None] * len(batch)
                except LimitforgeError:
                    grants = None
                finally:
                    shares.answered(batch, grants, sent_us)

    def _leave(self) -> None:
        """Give back what was paid for and not spent, and do not count as alive any more."""
        with self._lock:
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            self._stopped.set()
            keeper.join(COMMAND_SECONDS)
            self._sync(self._blender.shares.farewell(), time.monotonic() + COMMAND_SECONDS)
            if self._fleet.members.is_wanted:
                with suppress(LimitforgeError):
                    self._carry(self._parts.beat(0), time.monotonic() + COMMAND_SECONDS)

    # -- denials

    def _decided(self, check: Check) -> Decision | Outcome | None:
        """What needs no asking: a denial that is known, or what a share pays for."""
        self._asked += 1
        if not self._asked % SAMPLED:
            self._parts.heat.note(check)
        decision: Decision | Outcome | None = None
        denials = self._parts.denials
        if denials is not None and denials.is_active:
            if self._listener is None:
                self._listen()
            decision = denials.look(check)
        return self._blender.decide(check) if decision is None and check.is_mixed else decision

    def _listen(self) -> None:
        if not self._fleet.nodes:
            return  # nobody is known yet whom one could listen to
        with self._lock:
            if self._listener is None:
                self._listener = SyncListener(self._fleet, self._parts.channel, self._parts.caches)
                self._listener.start()

    def _tell_others(self, drop: Drop, due: float) -> None:
        """Any server tells all the others."""
        message = ("PUBLISH", self._parts.channel, drop.message())
        try:
            reply = self._servers.use(self._servers.node_of(0, due), due, lambda wire: wire.ask(message, due))
        except LimitforgeError as error:
            self._parts.warn_untold(error)
        else:
            if isinstance(reply, Exception):
                self._parts.warn_untold(reply)


class Kept(NamedTuple):
    """Keeps a store's shares going until it is closed, or nobody has it any more."""

    store: "weakref.ref[SyncRedisStore]"
    stopped: threading.Event
    seconds: float

    def run(self) -> None:
        while not self.stopped.wait(self.seconds):
            store = self.store()
            if store is None:
                return
            try:
                store.keep()
            except Exception:  # noqa: BLE001 - it must go on, whatever that was
                _log.exception("the shares of this process could not be kept in step")
            del store


def _calling_all(calls: Sequence[Call], due: float) -> Ask:
    def ask(wire: SyncWire) -> list[Reply | StoreError]:
        return wire.call_all(calls, due)

    return ask


def _walk(flow: Flow[T], call: Call, wire: SyncWire, due: float) -> T:
    is_begun = False
    try:
        while True:
            reply: Reply = wire.call(call, due)
            call, is_begun = flow.send(reply), True
    except StopIteration as done:
        answer: T = done.value
        return answer
    except NotReplicated:
        raise
    except StoreUnavailable as error:  # lost, or the answer to another call: nothing that comes here can be trusted
        wire.close()
        if is_begun and not error.maybe_counted:
            raise as_counted(error) from error
        raise


_stores: "weakref.WeakSet[SyncRedisStore]" = weakref.WeakSet()


def _start_afresh() -> None:
    for store in list(_stores):
        store.start_afresh()


os.register_at_fork(after_in_child=_start_afresh)
