"""Run call flows in the threads of callers, over the pools of all servers."""

from collections.abc import Sequence
from typing import Any, cast

from limitforge.core.check import Check, ResultKind
from limitforge.core.decision import Decision
from limitforge.errors import LimitforgeError, StoreError, StoreUnavailable
from limitforge.stores.errors import NotReplicated, Redirected, SlotMigrating, as_maybe_counted
from limitforge.stores.redis.codec import split_by_weight
from limitforge.stores.redis.core import RedisCore
from limitforge.stores.redis.multi_step.cross_slot import FinishHold, MultiStepFlow, Step, routing_key
from limitforge.stores.redis.script_call import Flow, Reply, ScriptCall, T, as_internal_error
from limitforge.stores.redis.sync.connection import SyncConnection
from limitforge.stores.redis.sync.servers import Operation, ServerPools
from limitforge.stores.redis.topology.hash_slots import group_by_slot
from limitforge.stores.redis.topology.topology import Server


class FlowRunner:
    """Runs flows to their results. Every method takes a `deadline` of the monotonic clock."""

    def __init__(self, core: RedisCore, pools: ServerPools) -> None:
        self._core = core
        self._topology = core.topology
        self._pools = pools

    def run(self, flow: Flow[T], deadline: float) -> T:
        """Run one flow. Raises StoreUnavailable if it does not end in time."""
        try:
            call = next(flow)
        except StopIteration as done:
            without_calls: T = done.value
            return without_calls
        only_server = self._topology.only_server
        if only_server is None:
            return self._resume(flow, call, deadline)
        result: T = self._pools.execute(
            only_server, deadline, lambda connection: run_on_connection(flow, call, connection, deadline)
        )
        return result

    def decide_batch(self, checks: Sequence[Check], deadline: float) -> list[Any]:
        """Return the result of each check. If its server is unavailable, the failure behaviour of the check decides."""
        results: list[Any] = [None] * len(checks)
        batches = self._split(checks, range(len(checks)))
        runs = [
            (self._slot_of(checks[indexes[0]]), self._core.checks_flow([checks[index] for index in indexes]))
            for indexes in batches
        ]
        for indexes, (slot, _), batch_result in zip(batches, runs, self._run_side_by_side(runs, deadline), strict=True):
            resilience = self._topology.server_of_slot(slot).resilience
            for index, result in zip(indexes, _one_for_each(batch_result, len(indexes)), strict=True):
                is_undecided = isinstance(result, StoreUnavailable) and checks[index].result_kind is not ResultKind.PART
                results[index] = resilience.decide_without_store(checks[index], result) if is_undecided else result
        return results

    def run_multi_step(
        self, flows: dict[int, MultiStepFlow[Decision | LimitforgeError]], deadline: float
    ) -> dict[int, Decision | LimitforgeError]:
        """Run multi-step checks side by side: each round sends the next steps of all."""
        results: dict[int, Decision | LimitforgeError] = {}
        replies_of: dict[int, Sequence[Any] | None] = dict.fromkeys(flows)
        while replies_of:
            steps_of: dict[int, list[Step]] = {}
            for index, step_replies in replies_of.items():
                try:
                    steps_of[index] = next(flows[index]) if step_replies is None else flows[index].send(step_replies)
                except StopIteration as done:
                    results[index] = done.value
                except Exception as error:  # noqa: BLE001 - a bug in limitforge: it must not affect the other checks
                    results[index] = as_internal_error(error)
            replies = iter(self.run_steps([step for steps in steps_of.values() for step in steps], deadline))
            replies_of = {index: [next(replies) for _ in steps] for index, steps in steps_of.items()}
        return results

    def run_steps(self, steps: Sequence[Step], deadline: float) -> list[Any]:
        """Return the reply to each step. Holds are finished first, so that checks see the effect."""
        replies: list[Any] = [None] * len(steps)
        finishes = [index for index, step in enumerate(steps) if isinstance(step, FinishHold)]
        checks = [index for index, step in enumerate(steps) if isinstance(step, Check)]
        batches = self._split(steps, finishes)
        runs = [
            (
                self._slot_of(steps[indexes[0]]),
                self._core.finish_flow([cast("FinishHold", steps[index]) for index in indexes]),
            )
            for indexes in batches
        ]
        for indexes, batch_result in zip(batches, self._run_side_by_side(runs, deadline), strict=True):
            for index, reply in zip(indexes, _one_for_each(batch_result, len(indexes)), strict=True):
                replies[index] = reply
        decided = self.decide_batch([cast("Check", steps[index]) for index in checks], deadline)
        for index, reply in zip(checks, decided, strict=True):
            replies[index] = reply
        return replies

    def _split(self, steps: Sequence[Step], indexes: Sequence[int]) -> list[Sequence[int]]:
        """Split indexes of steps into batches that each fit into one call: of one slot, and bounded by their weight."""
        return [
            same_slot[part.start : part.stop]
            for same_slot in group_by_slot(indexes, lambda index: self._slot_of(steps[index]))
            for part in split_by_weight([steps[index].weight_us for index in same_slot])
        ]

    def _slot_of(self, step: Step) -> int:
        return self._topology.slot_of(routing_key(step))

    def _run_side_by_side(
        self, runs: Sequence[tuple[int, Flow[list[Any]]]], deadline: float
    ) -> list[list[Any] | LimitforgeError]:
        """Run flows of several slots. First calls to one server share a write, and servers are called in parallel."""
        if len(runs) <= 1 or self._topology.is_single:
            return [self._result_or_error(flow, deadline) for _, flow in runs]
        calls = [next(flow) for _, flow in runs]
        runs_of: dict[Server, list[int]] = {}
        for index, (slot, _) in enumerate(runs):
            runs_of.setdefault(self._topology.server_of_slot(slot), []).append(index)
        runs_of.pop(self._topology.unknown_server, None)
        if any(not server.resilience.is_healthy for server in runs_of):
            self._pools.refresh_topology()
        operations = {
            server: _many_calls([calls[index] for index in indexes], deadline) for server, indexes in runs_of.items()
        }
        replies: dict[int, Reply | StoreError] = {}
        for server, server_replies in self._pools.execute_many(operations, deadline).items():
            indexes = runs_of[server]
            replies.update(zip(indexes, _one_for_each(server_replies, len(indexes)), strict=True))
        return [
            self._result_or_error(flow, deadline, call, replies.get(index))
            for index, ((_, flow), call) in enumerate(zip(runs, calls, strict=True))
        ]

    def _result_or_error(
        self,
        flow: Flow[list[Any]],
        deadline: float,
        call: ScriptCall | None = None,
        reply: Reply | StoreError | None = None,
    ) -> list[Any] | LimitforgeError:
        """Run a flow, or the rest of it after `call` and its reply. A redirected call is repeated."""
        try:
            if call is None:
                return self.run(flow, deadline)
            if isinstance(reply, StoreError):
                if not isinstance(reply, Redirected | SlotMigrating):
                    return reply
                reply = None
            return self._resume(flow, call, deadline, reply)
        except LimitforgeError as error:
            return error

    def _resume(self, flow: Flow[T], call: ScriptCall, deadline: float, reply: Reply | None = None) -> T:
        """Run the rest of a flow after `call`, or after its reply. Each call goes to the owner of its slot."""
        has_replies = reply is not None
        try:
            while True:
                reply = reply or self._pools.call_routed(call, deadline)
                call, reply, has_replies = flow.send(reply), None, True
        except StopIteration as done:
            result: T = done.value
            return result
        except StoreUnavailable as error:
            if has_replies and not error.maybe_counted:
                raise as_maybe_counted(error) from error
            raise
        except LimitforgeError:
            raise
        except Exception as error:
            raise as_internal_error(error) from error


def run_on_connection(flow: Flow[T], call: ScriptCall, connection: SyncConnection, deadline: float) -> T:
    """Run the rest of a flow after `call` on one connection. The connection is closed if it fails."""
    has_replies = False
    try:
        while True:
            reply: Reply = connection.call(call, deadline)
            call, has_replies = flow.send(reply), True
    except StopIteration as done:
        result: T = done.value
        return result
    except NotReplicated:
        raise
    except StoreUnavailable as error:  # lost, or out of step: no reply on this connection can be trusted
        connection.close()
        if has_replies and not error.maybe_counted:
            raise as_maybe_counted(error) from error
        raise


def _many_calls(calls: Sequence[ScriptCall], deadline: float) -> Operation:
    def operation(connection: SyncConnection) -> list[Reply | StoreError]:
        return connection.call_many(calls, deadline)

    return operation


def _one_for_each(result: list[Any] | LimitforgeError, count: int) -> list[Any]:
    """Return the results of a batch. An error of the whole batch counts for each of its `count` items."""
    return result if isinstance(result, list) else [result] * count
