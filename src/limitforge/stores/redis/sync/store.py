"""Decisions on Redis, for threads and forked workers: `redis.py` without `await`, on the same parts."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from limitforge.core.check import Check, ResultKind
from limitforge.core.clock import Clock
from limitforge.core.decision import Decision, Outcome
from limitforge.core.keys import Keys
from limitforge.core.plan import BUCKET_US
from limitforge.errors import LimitforgeError, StoreError, StoreUnavailable
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import Command, ResultT, StoreStatus
from limitforge.stores.redis.codec import (
    Flow,
    NotReplicated,
    Reply,
    ScriptCall,
    T,
    as_corrupt_reply,
    batches_by_slot,
    split_by_weight,
)
from limitforge.stores.redis.core import (
    COMMAND_TIMEOUT_SECONDS,
    CallerBatch,
    MultiStepFlow,
    RedisCore,
    is_for_local_handle,
)
from limitforge.stores.redis.denial_cache import Invalidation
from limitforge.stores.redis.hot_keys import SAMPLE_EVERY
from limitforge.stores.redis.invalidation import SyncInvalidationListener
from limitforge.stores.redis.prepaid.shares import TopUpReply, TopUpRequest
from limitforge.stores.redis.resp import Redirected, SlotMigrating
from limitforge.stores.redis.sync.connection import SyncConnection
from limitforge.stores.redis.sync.servers import Operation, ServerPools
from limitforge.stores.redis.topology.cross_slot import FinishHold, Step, is_cross_slot, routing_key
from limitforge.stores.redis.topology.hash_slots import group_by_slot
from limitforge.stores.redis.topology.topology import Server
from limitforge.stores.resilience.failure import as_maybe_counted

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

    def reset_after_fork(self) -> None:
        """In a forked child: sockets, locks and threads of the parent are not ours."""
        self._pools.close_after_fork()
        self._start()

    def _start(self) -> None:
        self._core = RedisCore(self._url, self.keys, self._clock, self._options, self._charge_soon)
        self._topology = self._core.topology
        self._pools = ServerPools(self._topology, self._charge_soon)
        self._lock = threading.Lock()
        self._check_count = 0
        self._listener: SyncInvalidationListener | None = None
        self._hybrid = self._core.create_hybrid()
        self._prepaid_thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def check(self, check: Check) -> Decision:
        (answer,) = self.check_many((check,))
        if isinstance(answer, LimitforgeError):
            raise answer
        return answer

    def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        self._pools.is_closed = False
        batch = CallerBatch(checks, self._decide_in_process)
        due = time.monotonic() + self._options.deadline_ms / 1_000
        together: list[int] = []
        stepwise: dict[int, MultiStepFlow[Decision | LimitforgeError]] = {}
        for at, check in enumerate(batch.to_send):
            if check.is_partly_local:
                if self._prepaid_thread is None:
                    self._start_prepaid_sync()
                stepwise[at] = self._core.hybrid_check(check, self._hybrid, self._undo)
            elif not self._topology.is_single and is_cross_slot(check, self._topology.slot_of):
                stepwise[at] = self._core.cross_slot_check(check, self._undo)
            else:
                together.append(at)
        for at, answer in zip(together, self._decide_batch([batch.to_send[at] for at in together], due), strict=True):
            batch.set_result(at, answer)
        if stepwise:
            for at, answer in self._run_multi_step(stepwise, due).items():
                batch.set_result(at, answer)
        return cast("list[Decision | LimitforgeError]", batch.results)

    def run(self, command: Command[ResultT]) -> ResultT:
        if is_for_local_handle(command):
            return self._topology.local_store.run(command)
        self._pools.is_closed = False
        due = time.monotonic() + max(COMMAND_TIMEOUT_SECONDS, self._options.deadline_ms / 1_000)
        try:
            answer = self._run_flow(self._core.command(command), due)
        except BaseException as error:
            self._core.invalidate_after_failure(command, error)
            raise
        drop = self._core.invalidate_for(command)
        if drop is not None:
            self._publish_invalidation(drop, due)
        return answer

    def status(self) -> StoreStatus:
        return self._core.status()

    def close(self) -> None:
        """Let go of every connection. It may be used again."""
        self._return_prepaid()  # first: what keeps the shares also begins to listen
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        self._pools.close()
        self._topology.close()

    # -- talking

    def _decide_batch(self, checks: Sequence[Check], due: float) -> list[Any]:
        """What the store tells of each, or what its failure behaviour says."""
        answers: list[Any] = [None] * len(checks)
        batches = [
            places[part.start : part.stop]
            for places in group_by_slot(range(len(checks)), lambda at: self._slot_of(checks[at]))
            for part in split_by_weight([checks[at].weight_us for at in places])
        ]
        runs = [(self._slot_of(checks[places[0]]), [checks[at] for at in places]) for places in batches]
        told = self._run_flows([(slot, self._core.checks_flow(batch)) for slot, batch in runs], due)
        for places, (slot, batch), judged in zip(batches, runs, told, strict=True):
            decide = self._topology.server_of_slot(slot).resilience.decide_without_store
            each = judged if isinstance(judged, list) else [judged] * len(batch)
            for place, check, answer in zip(places, batch, each, strict=True):
                is_lost = isinstance(answer, StoreUnavailable) and check.result_kind is not ResultKind.PART
                answers[place] = decide(check, answer) if is_lost else answer
        return answers

    def _run_flows(self, runs: Sequence[tuple[int, Flow[list[Any]]]], due: float) -> list[list[Any] | LimitforgeError]:
        """Flows of several slots: those of one server begin in one write, and the servers work side by side."""
        if len(runs) <= 1 or self._topology.is_single:
            return [self._flow_result(flow, due) for _, flow in runs]
        calls = [next(flow) for _, flow in runs]
        by_node: dict[Server, list[int]] = {}
        for at, (slot, _) in enumerate(runs):
            by_node.setdefault(self._topology.server_of_slot(slot), []).append(at)
        by_node.pop(self._topology.unknown_server, None)
        if any(not node.resilience.is_healthy for node in by_node):
            self._pools.refresh_topology()
        asks = {node: _many_calls([calls[at] for at in places], due) for node, places in by_node.items()}
        replies: dict[int, Reply | StoreError] = {}
        for node, told in self._pools.execute_many(asks, due).items():
            each = told if isinstance(told, list) else [told] * len(by_node[node])
            replies.update(zip(by_node[node], each, strict=True))
        return [
            self._flow_result(flow, due, call, replies.get(at))
            for at, ((_, flow), call) in enumerate(zip(runs, calls, strict=True))
        ]

    def _flow_result(
        self, flow: Flow[list[Any]], due: float, call: ScriptCall | None = None, reply: Reply | StoreError | None = None
    ) -> list[Any] | LimitforgeError:
        """What a flow comes to, perhaps from its first call and the reply to that on."""
        try:
            if call is None:
                return self._run_flow(flow, due)
            if isinstance(reply, StoreError):
                if not isinstance(reply, Redirected | SlotMigrating):
                    return reply
                reply = None
            return self._resume_flow(flow, call, due, reply)
        except LimitforgeError as error:
            return error

    def _slot_of(self, check: Check) -> int:
        return self._topology.slot_of(routing_key(check))

    def _run_multi_step(
        self, flows: dict[int, MultiStepFlow[Decision | LimitforgeError]], due: float
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
                    answers[at] = as_corrupt_reply(error)
            replies = iter(self._run_steps([step for asked in steps.values() for step in asked], due))
            told = {at: [next(replies) for _ in asked] for at, asked in steps.items()}
        return answers

    def _run_steps(self, steps: Sequence[Any], due: float) -> list[Any]:
        """What the store says to each step; what ends something goes first."""
        answers: list[Any] = [None] * len(steps)
        ending = [at for at, step in enumerate(steps) if isinstance(step, FinishHold)]
        asking = [at for at, step in enumerate(steps) if not isinstance(step, FinishHold)]
        batches = [
            together[part.start : part.stop]
            for together in group_by_slot(ending, lambda at: self._topology.slot_of(routing_key(steps[at])))
            for part in split_by_weight([steps[at].weight_us for at in together])
        ]
        runs = [
            (
                self._topology.slot_of(routing_key(steps[places[0]])),
                self._core.finish_flow([steps[at] for at in places]),
            )
            for places in batches
        ]
        for places, told in zip(batches, self._run_flows(runs, due), strict=True):
            each = told if isinstance(told, list) else [told] * len(places)
            for at, answer in zip(places, each, strict=True):
                answers[at] = answer
        for at, answer in zip(
            asking, self._decide_batch([cast("Check", steps[at]) for at in asking], due), strict=True
        ):
            answers[at] = answer
        return answers

    def _undo(self, undone: Sequence[FinishHold]) -> None:
        """Give back on a thread of its own: no caller waits, and what does not arrive goes back by itself."""
        if undone:
            due = time.monotonic() + COMMAND_TIMEOUT_SECONDS
            threading.Thread(target=self._run_steps, args=[undone, due], name="limitforge-undo", daemon=True).start()

    def _run_flow(self, flow: Flow[T], due: float) -> T:
        """Run a flow, or raise StoreUnavailable when it takes longer than that."""
        try:
            call = next(flow)
        except StopIteration as done:
            nothing_asked: T = done.value
            return nothing_asked
        if not self._topology.is_single:
            return self._resume_flow(flow, call, due)
        answer: T = self._pools.execute(
            self._topology.unknown_server, due, lambda wire: _run_on_connection(flow, call, wire, due)
        )
        return answer

    def _resume_flow(self, flow: Flow[T], call: ScriptCall, due: float, reply: Reply | None = None) -> T:
        """Run a flow on from a call, perhaps from its reply, each call to where its keys are."""
        is_begun = reply is not None
        try:
            while True:
                reply = reply or self._pools.call_routed(call, due)
                call, reply, is_begun = flow.send(reply), None, True
        except StopIteration as done:
            answer: T = done.value
            return answer
        except StoreUnavailable as error:
            if is_begun and not error.maybe_counted:
                raise as_maybe_counted(error) from error
            raise
        except LimitforgeError:
            raise
        except Exception as error:
            raise as_corrupt_reply(error) from error

    def _charge_soon(self, charges: Sequence[Check]) -> None:
        """What the store is owed after an outage is charged on a thread of its own: no caller waits for it."""
        if charges:
            threading.Thread(target=self._charge, args=[charges], name="limitforge-charges", daemon=True).start()

    def _charge(self, charges: Sequence[Check]) -> None:
        answers: list[Any] = []
        batches = list(batches_by_slot(charges, self._topology.slot_of))
        charges = [charge for part in batches for charge in part]
        for part in batches:
            answers += self._decide_batch(part, time.monotonic() + COMMAND_TIMEOUT_SECONDS)
        self._core.record_charges(charges, answers)

    # -- what this process decides

    def _start_prepaid_sync(self) -> None:
        """Keep shares and heartbeats going on a thread of its own, for as long as anybody needs them."""
        self._start_listening()
        with self._lock:
            if self._prepaid_thread is None:
                self._stopped = threading.Event()
                kept = PrepaidSyncLoop(weakref.ref(self), self._stopped, self._options.sync_interval_ms / 1_000)
                self._prepaid_thread = threading.Thread(target=kept.run, name="limitforge-shares", daemon=True)
                self._prepaid_thread.start()

    def sync_prepaid(self) -> None:
        """Tell the store what it should know by now."""
        if self._listener is None:
            self._start_listening()
        if self._topology.heartbeat.claim_if_due():
            with suppress(LimitforgeError):
                due = time.monotonic() + COMMAND_TIMEOUT_SECONDS
                self._topology.heartbeat.set_process_count(self._run_flow(self._core.heartbeat_flow(), due))
        self._top_up(self._hybrid.shares.due_requests(), time.monotonic() + COMMAND_TIMEOUT_SECONDS)

    def _top_up(self, wishes: Sequence[TopUpRequest], due: float) -> None:
        shares = self._hybrid.shares
        for together in group_by_slot(wishes, lambda wish: self._topology.slot_of(wish.share.key)):
            for part in split_by_weight([BUCKET_US] * len(together)):
                batch = together[part.start : part.stop]
                sent_us = shares.now_us()
                grants: Sequence[TopUpReply | None] | None = None
                try:
                    grants = self._run_flow(self._core.top_up_flow(batch, shares.lapse_us), due)
                except StoreUnavailable as error:
                    grants = None if error.maybe_counted else [None] * len(batch)
                except LimitforgeError:
                    grants = None
                finally:
                    shares.apply_replies(batch, grants, sent_us)

    def _return_prepaid(self) -> None:
        """Give back what was paid for and not spent, and do not count as alive any more."""
        with self._lock:
            keeper, self._prepaid_thread = self._prepaid_thread, None
        if keeper is not None:
            self._stopped.set()
            keeper.join(COMMAND_TIMEOUT_SECONDS)
            self._top_up(self._hybrid.shares.return_all(), time.monotonic() + COMMAND_TIMEOUT_SECONDS)
            if self._topology.heartbeat.is_needed:
                with suppress(LimitforgeError):
                    self._run_flow(self._core.heartbeat_flow(0), time.monotonic() + COMMAND_TIMEOUT_SECONDS)

    # -- denials

    def _decide_in_process(self, check: Check) -> Decision | Outcome | None:
        """What needs no asking: a denial that is known, or what a share pays for."""
        self._check_count += 1
        if not self._check_count % SAMPLE_EVERY:
            self._core.hot_keys.record(check)
        decision: Decision | Outcome | None = None
        denials = self._core.denial_cache
        if denials is not None and denials.has_entries:
            if self._listener is None:
                self._start_listening()
            decision = denials.get(check)
        return self._hybrid.decide_from_share(check) if decision is None and check.is_partly_local else decision

    def _start_listening(self) -> None:
        if not self._topology.servers:
            return  # nobody is known yet whom one could listen to
        with self._lock:
            if self._listener is None:
                self._listener = SyncInvalidationListener(self._topology, self._core.channel, self._core.caches)
                self._listener.start()

    def _publish_invalidation(self, drop: Invalidation, due: float) -> None:
        """Any server tells all the others."""
        message = ("PUBLISH", self._core.channel, drop.encode())
        try:
            reply = self._pools.execute_unmonitored(
                self._pools.server_of_slot(0, due), due, lambda wire: wire.send_command(message, due)
            )
        except LimitforgeError as error:
            self._core.warn_not_published(error)
        else:
            if isinstance(reply, Exception):
                self._core.warn_not_published(reply)


class PrepaidSyncLoop(NamedTuple):
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
                store.sync_prepaid()
            except Exception:  # noqa: BLE001 - it must go on, whatever that was
                _log.exception("the shares of this process could not be kept in step")
            del store


def _many_calls(calls: Sequence[ScriptCall], due: float) -> Operation:
    def ask(wire: SyncConnection) -> list[Reply | StoreError]:
        return wire.call_many(calls, due)

    return ask


def _run_on_connection(flow: Flow[T], call: ScriptCall, wire: SyncConnection, due: float) -> T:
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
            raise as_maybe_counted(error) from error
        raise


_stores: "weakref.WeakSet[SyncRedisStore]" = weakref.WeakSet()


def _reset_after_fork() -> None:
    for store in list(_stores):
        store.reset_after_fork()


os.register_at_fork(after_in_child=_reset_after_fork)
