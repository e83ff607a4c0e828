"""The Redis servers behind one URL: which there are, and which of them decides about what.

    redis://host:6379/0                              one server
    redis+sentinel://host:26379,host:26379/name/0    the master that the sentinels name
    redis+cluster://host:6379,host:6379              the masters of a Cluster, slot by slot

Nothing here does I/O: a shell asks the `questions` until one answer is `heard`. A server that is the master of nothing
any more is let go of, and whatever was noted about it moves on to its successor.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from limitforge.core.check import Check
from limitforge.core.clock import LONG_AGO_US, Clock, MonotonicClock
from limitforge.core.keys import Keys
from limitforge.errors import InvalidInput, StoreUnavailable
from limitforge.stores.breaker import BreakerState
from limitforge.stores.membership import Membership
from limitforge.stores.memory import MemoryStore
from limitforge.stores.options import StoreOptions
from limitforge.stores.resilience import LOCAL_BUDGET, LOCAL_KEYS, Resilience
from limitforge.stores.resp import Address, address_of
from limitforge.stores.slots import SLOTS, SlotOf, cluster_slot, one_slot

ASK_AGAIN_US = 300_000  # while in doubt, the servers are asked for at most this often
QUESTION_SECONDS = 0.5  # what one of them may take to answer
MOVING_SECONDS = 0.005  # how soon to ask again for keys that are on their way
MANY_HOPS = 3  # beyond these, servers seem to point at each other: give them a moment
MAX_SEEDS = 64
_PORT = re.compile(r":\w+$")  # also of an address in brackets
_ORDER = (BreakerState.OPEN, BreakerState.PROBING, BreakerState.CLOSED)


class Kind(StrEnum):
    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads: whom to ask, and how to speak to the servers that they name."""

    kind: Kind
    seeds: tuple[Address, ...]
    server: Address
    service: str = ""


@dataclass(eq=False, slots=True)
class Node:
    """One server that decides, and how it is doing."""

    address: Address
    resilience: Resilience
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.address.host}:{self.address.port}"


class Fleet:
    """Who decides about what. One object serves all event loops and threads of a store."""

    def __init__(self, url: str, keys: Keys, options: StoreOptions, clock: Clock | None) -> None:
        target = target_of(url)
        self.target = replace(target, server=target.server.waiting(options.wait_replicas, options.deadline_ms))
        self.kind = self.target.kind
        self.slot_of: SlotOf = cluster_slot if self.kind is Kind.CLUSTER else one_slot
        self.members = Membership(keys, options.nodes, MonotonicClock())
        budget = options.new_buckets_per_minute
        if budget is not None and options.fits_memory:
            budget = min(budget, LOCAL_BUDGET)
        self.local = MemoryStore(
            keys=keys,
            clock=clock,
            max_keys=LOCAL_KEYS,
            nodes=self.members.nodes,
            new_buckets_per_minute=budget,
            bounded_from=LOCAL_KEYS // 2,  # in an outage everybody is new here
        )
        self.in_doubt = False
        """Whether somebody had reason to think that things are no longer as they were told."""
        self._options = options
        self._lock = threading.Lock()
        self._now_us = MonotonicClock().now_us
        self._asked_us = self._heard_us = LONG_AGO_US
        self._turn = -1
        self._nodes: dict[tuple[str, int], Node] = {}
        self._past_degraded: Counter[str] = Counter()  # of servers that were let go of
        self._owners: list[Node | None] = [None] * (SLOTS if self.kind is Kind.CLUSTER else 1)
        self.nobody = Node(self.target.server, self._resilience("store"))
        """Stands in while nobody is known who could decide."""
        if self.kind is Kind.SINGLE:
            self._owners = [self.nobody]

    @property
    def is_sharded(self) -> bool:
        return self.kind is Kind.CLUSTER

    @property
    def is_single(self) -> bool:
        return self.kind is Kind.SINGLE

    @property
    def nodes(self) -> list[Node]:
        """All that decide about anything now."""
        return [self.nobody] if self.is_single else list(self._nodes.values())

    def node_of(self, slot: int) -> Node:
        return self._owners[slot] or self.nobody

    def any_node(self) -> Node:
        """One that is doing well, if there is any."""
        return min(self.nodes, key=lambda node: not node.resilience.is_quiet, default=self.nobody)

    def node_at(self, host: str, port: int) -> Node:
        """The server at that address, known or new."""
        with self._lock:
            return self._known(host, port)

    def knows(self, node: Node) -> bool:
        return node is self.nobody or self._nodes.get((node.address.host, node.address.port)) is node

    def moved(self, slot: int, host: str, port: int) -> Node:
        """A server said that another one decides about a slot."""
        with self._lock:
            self.in_doubt = True
            node = self._owners[slot] = self._known(host, port)
            return node

    def doubt(self) -> None:
        """Somebody did not answer as it should: has it been replaced?"""
        self.in_doubt = not self.is_single

    # -- asking who there is

    def is_due(self) -> bool:
        """Whether to ask now; whoever is told so must."""
        if not self.in_doubt:
            return False
        with self._lock:
            now_us = self._now_us()
            if now_us - self._asked_us < ASK_AGAIN_US:
                return False
            self._asked_us = now_us
            return True

    def heard_lately(self) -> bool:
        """Whether nothing else is to be expected from asking again."""
        return self._now_us() - self._heard_us < ASK_AGAIN_US

    def questions(self) -> Iterator[tuple[Address, tuple[str, ...]]]:
        """Whom to ask what, in turn, until an answer is `heard`."""
        if self.kind is Kind.SENTINEL:
            self._turn += 1  # one that is cut off from the rest must not have the last word each time
            first = self._turn % len(self.target.seeds)
            for seed in (*self.target.seeds[first:], *self.target.seeds[:first]):
                yield seed, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.target.service)
            return
        known = sorted(self.nodes, key=lambda node: not node.resilience.is_quiet)
        asked: set[tuple[str, int]] = set()
        for address in [*(node.address for node in known), *self.target.seeds]:
            if (address.host, address.port) not in asked:
                asked.add((address.host, address.port))
                yield address.greeted(), ("CLUSTER", "SLOTS")

    def heard(self, asked: Address, reply: Any) -> list[Check] | None:
        """Take an answer in: what is owed to servers that were let go of, for their successors. None if it is none."""
        owners = owners_told(self.kind, asked, reply)
        if not owners:
            return None
        with self._lock:
            before = self._nodes
            self._nodes = {}
            for place in {place for place in owners if place is not None}:
                self._nodes[place] = before.get(place) or self._new(*place)
            self._owners = [None if place is None else self._nodes[place] for place in owners]
            self.in_doubt = None in self._owners
            self._heard_us = self._now_us()  # last: whoever reads it, without the lock, then looks at the owners
            gone = [node for place, node in before.items() if place not in self._nodes]
            for node in gone:
                self._past_degraded.update(node.resilience.degraded)
        return [charge for node in gone for charge in node.resilience.retire()]

    def _known(self, host: str, port: int) -> Node:
        node = self._nodes.get((host, port))
        if node is None:
            node = self._nodes[(host, port)] = self._new(host, port)
        return node

    def _new(self, host: str, port: int) -> Node:
        return Node(self.target.server.at(host, port), self._resilience(f"store at {host}:{port}"))

    def _resilience(self, name: str) -> Resilience:
        return Resilience(self._options, self.local, name)

    # -- the account

    @property
    def degraded(self) -> dict[str, int]:
        """How many checks were decided without their server, by behaviour."""
        total = Counter(self._past_degraded)
        for node in {self.nobody, *self.nodes}:
            total.update(node.resilience.degraded)
        return dict(total)

    @property
    def worst(self) -> Resilience:
        """That of the server that does worst."""
        known = [self.nobody, *self.nodes]
        return min((node.resilience for node in known), key=lambda one: _ORDER.index(one.state))

    def owe(self, charges: Iterable[Check]) -> None:
        """These were surely not charged: they are owed again."""
        for charge in charges:
            _, key, *_ = charge.takes[0]
            self.node_of(self.slot_of(key)).resilience.owe([charge])

    def close(self) -> None:
        for node in {self.nobody, *self.nodes}:
            node.resilience.close()


def target_of(url: str) -> Target:
    """Refuses a URL that can't be used, by name; nothing is opened yet."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if not kind:
        address = address_of(url)
        return Target(Kind.SINGLE, (address,), address)
    login, _, hosts = parts.netloc.rpartition("@")
    login = f"{login}@" if login else ""
    seeds = [seed for seed in hosts.split(",") if seed]
    if not 1 <= len(seeds) <= MAX_SEEDS:
        raise InvalidInput("url", f"names {len(seeds)} servers to start with; give 1 to {MAX_SEEDS}, with commas")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if kind == Kind.CLUSTER:
        if parts.path.strip("/") not in ("", "0"):
            raise InvalidInput("url", "a Cluster has no databases: leave out what follows the servers")
        query = urlencode(options)
        addresses = tuple(address_of(f"{scheme}://{login}{seed}/0?{query}") for seed in seeds)
        return Target(Kind.CLUSTER, addresses, addresses[0].of_cluster())
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise InvalidInput("url", "names no master: redis+sentinel://host:26379,host:26379/name")
    user, password = options.pop("sentinel_username", ""), options.pop("sentinel_password", "")
    query = urlencode(options)
    sentinel = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    sentinels = tuple(
        address_of(f"{scheme}://{sentinel}{seed if _PORT.search(seed) else f'{seed}:26379'}/0?{query}").greeted()
        for seed in seeds
    )
    server = address_of(f"{scheme}://{login}localhost/{database or 0}?{query}").of_master()
    return Target(Kind.SENTINEL, sentinels, server, service)


Place = tuple[str, int]


def owners_told(kind: Kind, asked: Address, reply: Any) -> list[Place | None] | None:
    """Who decides about which slot, as a server was asked; None if its answer is none."""
    return _master(reply) if kind is Kind.SENTINEL else _slots(reply, asked)


def _master(reply: Any) -> list[Place | None] | None:
    """What a sentinel says: host and port."""
    match reply:
        case [bytes(host), bytes(port)] if port.isdigit():
            return [(host.decode(), int(port))]
    return None


def _slots(reply: Any, asked: Address) -> list[Place | None] | None:
    """What a node of a Cluster says: ranges of slots, each with its master first. One that names no host is itself."""
    if not isinstance(reply, list) or not reply:
        return None
    owners: list[Place | None] = [None] * SLOTS
    for row in reply:
        match row:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                name = host.decode() if isinstance(host, bytes) else ""
                if name != "?":
                    owners[first : last + 1] = [(name or asked.host, port)] * (last - first + 1)
            case _:
                return None
    return owners


def nobody_decides(slot: int) -> StoreUnavailable:
    return StoreUnavailable(f"no server of the Cluster has slot {slot}")


def nobody_knows(problem: BaseException | None) -> StoreUnavailable:
    said = "none of the servers of the URL knows who decides"
    return StoreUnavailable(f"{said}: {problem}" if problem is not None else said)
