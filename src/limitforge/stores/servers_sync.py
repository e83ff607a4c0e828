"""The servers of a store, for threads: a pool of connections to each, and the way of a call to the right one."""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from limitforge.core.check import Check
from limitforge.errors import LimitforgeError, StoreUnavailable
from limitforge.stores.codec import Call, Reply, as_corrupt
from limitforge.stores.fleet import (
    MANY_HOPS,
    MOVING_SECONDS,
    QUESTION_SECONDS,
    Fleet,
    Node,
    nobody_decides,
    nobody_knows,
)
from limitforge.stores.resilience import NotAsked
from limitforge.stores.resp import Elsewhere, Moving
from limitforge.stores.wire_sync import SyncWire, WirePool

MAX_CONNECTIONS = 64  # to each server
MAX_SIDE_BY_SIDE = 32  # servers that are asked at once
GRACE_SECONDS = 0.02  # for a thread to tell what it heard just in time

Ask = Callable[[SyncWire], Any]


class Servers:
    """Pools by server. `charge` is handed what a server is owed after an outage."""

    def __init__(self, fleet: Fleet, charge: Callable[[Sequence[Check]], None]) -> None:
        self._fleet = fleet
        self._charge = charge
        self._lock = threading.Lock()
        self._finding: Future[None] | None = None
        self._pools: dict[Node, WirePool] = {}
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

    def abandon(self) -> None:
        """After a fork, without the locks: nobody may be left to open them."""
        for pool in self._pools.values():
            pool.abandon()

    # -- asking

    def ask(self, node: Node, due: float, ask: Ask) -> Any:
        """Ask one server; it is told how that went."""
        resilience = node.resilience
        began_us = resilience.now_us()
        if time.monotonic() >= due:
            raise NotAsked("there was no time left")
        resilience.admit()
        try:
            answer = self.use(node, due, ask)
        except (Elsewhere, Moving):
            self._succeeded(node)  # it answered that it was not the right one to ask
            raise
        except StoreUnavailable as error:
            resilience.failed(error, began_us)
            self.doubt()
            raise
        except Exception as error:
            self._succeeded(node)  # whatever it said: it answered
            raise as_corrupt(error) from error
        told = answer if isinstance(answer, list) else ()
        failed = [one for one in told if isinstance(one, StoreUnavailable) and not isinstance(one, NotAsked)]
        if failed and len(failed) == len(told):
            resilience.failed(failed[0], began_us)
            self.doubt()
        else:
            self._succeeded(node, told)
        return answer

    def ask_all(self, asks: dict[Node, Ask], due: float) -> dict[Node, Any]:
        """Ask several servers side by side: to each its answer or its error."""
        if len(asks) <= 1:
            return {node: self._answer(node, due, ask) for node, ask in asks.items()}
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MAX_SIDE_BY_SIDE, "limitforge-servers")
            threads = self._threads
        try:
            asked = {node: threads.submit(self._answer, node, due, ask) for node, ask in asks.items()}
        except RuntimeError:  # closed meanwhile, or the interpreter ends
            return {node: self._answer(node, due, ask) for node, ask in asks.items()}
        return {node: _in_time(future, due) for node, future in asked.items()}

    def _answer(self, node: Node, due: float, ask: Ask) -> Any:
        try:
            return self.ask(node, due, ask)
        except LimitforgeError as error:
            return error

    def use(self, node: Node, due: float, ask: Ask) -> Any:
        """The same without an account."""
        with self._lock:
            pool = self._pools.get(node)
            if pool is None:
                pool = self._pools[node] = WirePool(node.address, MAX_CONNECTIONS)
        try:
            return pool.use(due, ask)
        finally:
            if self.is_closed:
                self._close_pools()

    def call(self, call: Call, due: float) -> Reply:
        """Call the script where the slot of its keys is decided, wherever that may be by now."""
        slot = self._fleet.slot_of(call.keys[0]) if call.keys else 0
        node, asking, hops = self.node_of(slot, due), False, 0
        while True:
            try:
                reply: Reply = self.ask(node, due, _calling(call, due, asking=asking))
                return reply
            except Elsewhere as answer:
                if not self._fleet.is_sharded:
                    raise
                hops += 1
                if hops > MANY_HOPS:
                    time.sleep(MOVING_SECONDS)
                host = answer.host or node.address.host
                node = self._fleet.node_at(host, answer.port)
                asking = answer.once
                if not answer.once:
                    self._fleet.moved(answer.slot, host, answer.port)
                    self.doubt()
            except Moving:
                time.sleep(MOVING_SECONDS)
                node, asking = self._fleet.node_of(slot), False

    def _succeeded(self, node: Node, answers: Sequence[object] = ()) -> None:
        if not node.resilience.is_quiet:
            self._charge(node.resilience.succeeded(answers))

    # -- who decides

    def node_of(self, slot: int, due: float) -> Node:
        """Who decides about a slot; the first to ask finds out."""
        node = self._fleet.node_of(slot)
        if node is not self._fleet.nobody:
            if self._fleet.in_doubt or not node.resilience.is_quiet:
                self.doubt()  # also if it was too early to ask when the doubt came up
            return node
        if self._fleet.is_single:
            return node
        resilience = node.resilience
        resilience.admit()
        began_us = resilience.now_us()
        try:
            if not self._fleet.heard_lately():
                self._find().result(max(due - time.monotonic(), 0))
        except TimeoutError:
            late = StoreUnavailable("nobody knows yet who decides")
            resilience.failed(late, began_us)
            raise late from None
        except StoreUnavailable as error:
            resilience.failed(error, began_us)
            raise copy.copy(error) from None  # others wait for the same answer
        node = self._fleet.node_of(slot)
        if node is self._fleet.nobody:
            raise nobody_decides(slot)
        self._succeeded(self._fleet.nobody)
        return node

    def _find(self) -> "Future[None]":
        """Ask who there is, on a thread of its own: one that does not answer must not use up a caller's time."""
        with self._lock:
            if self._finding is None or self._finding.done():
                self._finding = Future()
                args = [self._finding]
                threading.Thread(target=self._discover_for, args=args, name="limitforge-discovery", daemon=True).start()
            return self._finding

    def _discover_for(self, finding: "Future[None]") -> None:
        try:
            self._discover()
        except BaseException as error:  # noqa: BLE001 - those who wait must hear of it
            finding.set_exception(error)
        else:
            finding.set_result(None)

    def doubt(self) -> None:
        """Ask on a thread of its own: no caller waits for it."""
        self._fleet.doubt()
        if self._fleet.is_due():
            threading.Thread(target=self._discover_quietly, name="limitforge-discovery", daemon=True).start()

    def _discover_quietly(self) -> None:
        try:
            self._discover()
        except LimitforgeError:
            return  # whoever asks next will see

    def _discover(self) -> None:
        problem: Exception | None = None
        for address, question in self._fleet.questions():
            until = time.monotonic() + QUESTION_SECONDS
            try:
                wire = SyncWire(address, until)
                try:
                    owed = self._fleet.heard(address, wire.ask(question, until))
                finally:
                    wire.close()
            except LimitforgeError as error:
                problem = error
                continue
            if owed is not None:
                self._let_go()
                self._charge(owed)
                return
        raise nobody_knows(problem)

    def _let_go(self) -> None:
        with self._lock:
            gone = [node for node in self._pools if not self._fleet.knows(node)]
            pools = [self._pools.pop(node) for node in gone]
        for pool in pools:
            pool.close()


def _in_time(future: "Future[Any]", due: float) -> Any:
    """What a thread was told; an error if it was not told in time."""
    try:
        return future.result(max(due - time.monotonic(), 0) + GRACE_SECONDS)
    except TimeoutError:
        if future.cancel():
            return NotAsked("every thread for asking servers side by side is in use")
        return StoreUnavailable("no answer in time", maybe_counted=True)


def _calling(call: Call, due: float, *, asking: bool) -> Ask:
    def ask(wire: SyncWire) -> Reply:
        return wire.call(call, due, asking=asking)

    return ask
