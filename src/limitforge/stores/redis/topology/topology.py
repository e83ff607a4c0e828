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
from limitforge.stores.memory.store import MemoryStore
from limitforge.stores.options import StoreOptions
from limitforge.stores.redis.prepaid.heartbeat import Heartbeat
from limitforge.stores.redis.resp import Address, parse_address
from limitforge.stores.redis.topology.hash_slots import SLOT_COUNT, SlotOf, hash_slot, single_slot
from limitforge.stores.resilience.breaker import BreakerState
from limitforge.stores.resilience.failure import LOCAL_MAX_KEYS, LOCAL_NEW_BUCKETS, Resilience

REFRESH_INTERVAL_US = 300_000  # while in doubt, the servers are asked for at most this often
DISCOVERY_TIMEOUT_SECONDS = 0.5  # what one of them may take to answer
TRYAGAIN_DELAY_SECONDS = 0.005  # how soon to ask again for keys that are on their way
MAX_REDIRECTS = 3  # beyond these, servers seem to point at each other: give them a moment
MAX_SEEDS = 64
_PORT = re.compile(r":\w+$")  # also of an address in brackets
_WORST_FIRST = (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED)


class DeploymentKind(StrEnum):
    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where a URL leads: whom to ask, and how to speak to the servers that they name."""

    kind: DeploymentKind
    seeds: tuple[Address, ...]
    server_template: Address
    master_name: str = ""


@dataclass(eq=False, slots=True)
class Server:
    """One server that decides, and how it is doing."""

    address: Address
    resilience: Resilience
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.address.host}:{self.address.port}"


class Topology:
    """Who decides about what. One object serves all event loops and threads of a store."""

    def __init__(self, url: str, keys: Keys, options: StoreOptions, clock: Clock | None) -> None:
        target = parse_store_url(url)
        self.deployment = replace(
            target, server_template=target.server_template.with_wait(options.wait_replicas, options.deadline_ms)
        )
        self.kind = self.deployment.kind
        self.slot_of: SlotOf = hash_slot if self.kind is DeploymentKind.CLUSTER else single_slot
        self.heartbeat = Heartbeat(keys, options.processes, MonotonicClock())
        budget = options.new_buckets_per_minute
        if budget is not None and options.cap_budget_by_memory:
            budget = min(budget, LOCAL_NEW_BUCKETS)
        self.local_store = MemoryStore(
            keys=keys,
            clock=clock,
            max_keys=LOCAL_MAX_KEYS,
            processes=self.heartbeat.process_count,
            new_buckets_per_minute=budget,
            budget_from=LOCAL_MAX_KEYS // 2,  # in an outage everybody is new here
        )
        self.is_stale = False
        """Whether somebody had reason to think that things are no longer as they were told."""
        self._options = options
        self._lock = threading.Lock()
        self._now_us = MonotonicClock().now_us
        self._refresh_began_us = self._refreshed_us = LONG_AGO_US
        self._next_sentinel = -1
        self._servers: dict[tuple[str, int], Server] = {}
        self._retired_degraded: Counter[str] = Counter()  # of servers that were let go of
        self._owner_of_slot: list[Server | None] = [None] * (SLOT_COUNT if self.kind is DeploymentKind.CLUSTER else 1)
        self.unknown_server = Server(self.deployment.server_template, self._resilience("store"))
        """Stands in while nobody is known who could decide."""
        if self.kind is DeploymentKind.SINGLE:
            self._owner_of_slot = [self.unknown_server]

    @property
    def is_sharded(self) -> bool:
        return self.kind is DeploymentKind.CLUSTER

    @property
    def is_single(self) -> bool:
        return self.kind is DeploymentKind.SINGLE

    @property
    def servers(self) -> list[Server]:
        """All that decide about anything now."""
        return [self.unknown_server] if self.is_single else list(self._servers.values())

    def server_of_slot(self, slot: int) -> Server:
        return self._owner_of_slot[slot] or self.unknown_server

    def healthiest_server(self) -> Server:
        """One that is doing well, if there is any."""
        return min(self.servers, key=lambda node: not node.resilience.is_healthy, default=self.unknown_server)

    def server_at(self, host: str, port: int) -> Server:
        """The server at that address, known or new."""
        with self._lock:
            return self._get_or_add(host, port)

    def is_current(self, server: Server) -> bool:
        return server is self.unknown_server or self._servers.get((server.address.host, server.address.port)) is server

    def record_move(self, slot: int, host: str, port: int) -> Server:
        """A server said that another one decides about a slot."""
        with self._lock:
            self.is_stale = True
            node = self._owner_of_slot[slot] = self._get_or_add(host, port)
            return node

    def mark_stale(self) -> None:
        """Somebody did not answer as it should: has it been replaced?"""
        self.is_stale = not self.is_single

    # -- asking who there is

    def claim_refresh(self) -> bool:
        """Whether to ask now; whoever is told so must."""
        if not self.is_stale:
            return False
        with self._lock:
            now_us = self._now_us()
            if now_us - self._refresh_began_us < REFRESH_INTERVAL_US:
                return False
            self._refresh_began_us = now_us
            return True

    def was_refreshed_recently(self) -> bool:
        """Whether nothing else is to be expected from asking again."""
        return self._now_us() - self._refreshed_us < REFRESH_INTERVAL_US

    def discovery_queries(self) -> Iterator[tuple[Address, tuple[str, ...]]]:
        """Whom to ask what, in turn, until an answer is `heard`."""
        if self.kind is DeploymentKind.SENTINEL:
            self._next_sentinel += 1  # one that is cut off from the rest must not have the last word each time
            first = self._next_sentinel % len(self.deployment.seeds)
            for seed in (*self.deployment.seeds[first:], *self.deployment.seeds[:first]):
                yield seed, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.deployment.master_name)
            return
        known = sorted(self.servers, key=lambda node: not node.resilience.is_healthy)
        asked: set[tuple[str, int]] = set()
        for address in [*(node.address for node in known), *self.deployment.seeds]:
            if (address.host, address.port) not in asked:
                asked.add((address.host, address.port))
                yield address.with_login_only(), ("CLUSTER", "SLOTS")

    def apply_reply(self, asked: Address, reply: Any) -> list[Check] | None:
        """Take an answer in: what is owed to servers that were let go of, for their successors. None if it is none."""
        owners = parse_owners(self.kind, asked, reply)
        if not owners:
            return None
        with self._lock:
            before = self._servers
            self._servers = {}
            for place in {place for place in owners if place is not None}:
                self._servers[place] = before.get(place) or self._create_server(*place)
            self._owner_of_slot = [None if place is None else self._servers[place] for place in owners]
            self.is_stale = None in self._owner_of_slot
            self._refreshed_us = self._now_us()  # last: whoever reads it, without the lock, then looks at the owners
            gone = [node for place, node in before.items() if place not in self._servers]
            for node in gone:
                self._retired_degraded.update(node.resilience.degraded)
        return [charge for node in gone for charge in node.resilience.retire()]

    def _get_or_add(self, host: str, port: int) -> Server:
        node = self._servers.get((host, port))
        if node is None:
            node = self._servers[(host, port)] = self._create_server(host, port)
        return node

    def _create_server(self, host: str, port: int) -> Server:
        return Server(self.deployment.server_template.at(host, port), self._resilience(f"store at {host}:{port}"))

    def _resilience(self, name: str) -> Resilience:
        return Resilience(self._options, self.local_store, name)

    # -- the account

    @property
    def degraded(self) -> dict[str, int]:
        """How many checks were decided without their server, by behaviour."""
        total = Counter(self._retired_degraded)
        for node in {self.unknown_server, *self.servers}:
            total.update(node.resilience.degraded)
        return dict(total)

    @property
    def worst_resilience(self) -> Resilience:
        """That of the server that does worst."""
        known = [self.unknown_server, *self.servers]
        return min((node.resilience for node in known), key=lambda one: _WORST_FIRST.index(one.state))

    def requeue_charges(self, charges: Iterable[Check]) -> None:
        """These were surely not charged: they are owed again."""
        for charge in charges:
            _, key, *_ = charge.debits[0]
            self.server_of_slot(self.slot_of(key)).resilience.requeue_charges([charge])

    def close(self) -> None:
        for node in {self.unknown_server, *self.servers}:
            node.resilience.close()


def parse_store_url(url: str) -> Deployment:
    """Refuses a URL that can't be used, by name; nothing is opened yet."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if not kind:
        address = parse_address(url)
        return Deployment(DeploymentKind.SINGLE, (address,), address)
    login, _, hosts = parts.netloc.rpartition("@")
    login = f"{login}@" if login else ""
    seeds = [seed for seed in hosts.split(",") if seed]
    if not 1 <= len(seeds) <= MAX_SEEDS:
        raise InvalidInput("url", f"names {len(seeds)} servers to start with; give 1 to {MAX_SEEDS}, with commas")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if kind == DeploymentKind.CLUSTER:
        if parts.path.strip("/") not in ("", "0"):
            raise InvalidInput("url", "a Cluster has no databases: leave out what follows the servers")
        query = urlencode(options)
        addresses = tuple(parse_address(f"{scheme}://{login}{seed}/0?{query}") for seed in seeds)
        return Deployment(DeploymentKind.CLUSTER, addresses, addresses[0].for_cluster())
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise InvalidInput("url", "names no master: redis+sentinel://host:26379,host:26379/name")
    user, password = options.pop("sentinel_username", ""), options.pop("sentinel_password", "")
    query = urlencode(options)
    sentinel = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    sentinels = tuple(
        parse_address(
            f"{scheme}://{sentinel}{seed if _PORT.search(seed) else f'{seed}:26379'}/0?{query}"
        ).with_login_only()
        for seed in seeds
    )
    server = parse_address(f"{scheme}://{login}localhost/{database or 0}?{query}").for_master()
    return Deployment(DeploymentKind.SENTINEL, sentinels, server, service)


HostPort = tuple[str, int]


def parse_owners(kind: DeploymentKind, queried: Address, reply: Any) -> list[HostPort | None] | None:
    """Who decides about which slot, as a server was asked; None if its answer is none."""
    return _parse_sentinel_reply(reply) if kind is DeploymentKind.SENTINEL else _parse_cluster_slots(reply, queried)


def _parse_sentinel_reply(reply: Any) -> list[HostPort | None] | None:
    """What a sentinel says: host and port."""
    match reply:
        case [bytes(host), bytes(port)] if port.isdigit():
            return [(host.decode(), int(port))]
    return None


def _parse_cluster_slots(reply: Any, queried: Address) -> list[HostPort | None] | None:
    """What a node of a Cluster says: ranges of slots, each with its master first. One that names no host is itself."""
    if not isinstance(reply, list) or not reply:
        return None
    owners: list[HostPort | None] = [None] * SLOT_COUNT
    for row in reply:
        match row:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOT_COUNT:
                name = host.decode() if isinstance(host, bytes) else ""
                if name != "?":
                    owners[first : last + 1] = [(name or queried.host, port)] * (last - first + 1)
            case _:
                return None
    return owners


def uncovered_slot_error(slot: int) -> StoreUnavailable:
    return StoreUnavailable(f"no server of the Cluster has slot {slot}")


def discovery_error(problem: BaseException | None) -> StoreUnavailable:
    said = "none of the servers of the URL knows who decides"
    return StoreUnavailable(f"{said}: {problem}" if problem is not None else said)
