"""The Redis servers of a store, their health, and which of them owns which slot.

Nothing here does I/O: the stores run the `discover` flow. A server that is not a master any more is retired, and what
was recorded about it is kept, or passed on to its successor.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from limitforge.core.check import Check
from limitforge.core.clock import LONG_AGO_US, MonotonicClock
from limitforge.stores.memory.store import MemoryStore
from limitforge.stores.options import StoreOptions
from limitforge.stores.redis.address import Address
from limitforge.stores.redis.topology.deployment import DeploymentKind, parse_store_url
from limitforge.stores.redis.topology.discovery import DiscoveryFlow, HostPort, Owners, discover_owners
from limitforge.stores.redis.topology.hash_slots import SLOT_COUNT, SlotOf, hash_slot, single_slot
from limitforge.stores.resilience.breaker import BreakerState
from limitforge.stores.resilience.failure import Resilience

REFRESH_INTERVAL_US = 300_000  # a stale topology is refreshed at most this often
_WORST_FIRST = (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED)


@dataclass(eq=False, slots=True)
class Server:
    """A Redis master, with its circuit breaker and the statistics of its outage."""

    address: Address
    resilience: Resilience

    @property
    def name(self) -> str:
        return self.address.name


class Topology:
    """The masters and the slots that they own. One object serves all event loops and threads of a store.

    `local_store` decides checks with `failure="local"` while a server is unavailable.
    """

    def __init__(self, url: str, options: StoreOptions, local_store: MemoryStore) -> None:
        deployment = parse_store_url(url)
        template = deployment.server_template.with_wait(options.wait_replicas, options.deadline_ms)
        self.deployment = replace(deployment, server_template=template)
        self.is_single = deployment.kind is DeploymentKind.SINGLE
        self.is_sharded = deployment.kind is DeploymentKind.CLUSTER
        self.slot_of: SlotOf = hash_slot if self.is_sharded else single_slot
        self.is_stale = False
        """True after a sign that a master was replaced or a slot moved."""
        self._options = options
        self._local_store = local_store
        self._lock = threading.Lock()
        self._now_us = MonotonicClock().now_us
        self._refresh_began_us = self._refreshed_us = LONG_AGO_US
        self._next_sentinel = -1
        self._servers: dict[HostPort, Server] = {}
        self._retired_degraded: Counter[str] = Counter()
        self.only_server = Server(template, self._resilience(template.name)) if self.is_single else None
        """The server of a URL that names one, else None."""
        self.unknown_server = Server(template, self._resilience("store"))
        """Stands for the owner of a slot while the owner is unknown."""
        self._owner_of_slot: list[Server | None] = [self.only_server] * (SLOT_COUNT if self.is_sharded else 1)

    @property
    def servers(self) -> list[Server]:
        """All current masters."""
        return list(self._servers.values()) if self.only_server is None else [self.only_server]

    def server_of_slot(self, slot: int) -> Server:
        return self._owner_of_slot[slot] or self.unknown_server

    def healthiest_server(self) -> Server:
        """Return a healthy server if there is one, else any server."""
        return min(self.servers, key=_is_unhealthy, default=self.unknown_server)

    def server_at(self, host: str, port: int) -> Server:
        """Return the server at that address. It is added if it is not known yet."""
        with self._lock:
            return self._get_or_add(host, port)

    def is_current(self, server: Server) -> bool:
        """Return False for a retired server."""
        if server is self.only_server or server is self.unknown_server:
            return True
        return self._servers.get((server.address.host, server.address.port)) is server

    def record_move(self, slot: int, host: str, port: int) -> None:
        """Change the owner of a slot, after a MOVED reply."""
        with self._lock:
            self.is_stale = True
            self._owner_of_slot[slot] = self._get_or_add(host, port)

    def mark_stale(self) -> None:
        """Ask for a refresh, after a server failed: it may have been replaced."""
        self.is_stale = not self.is_single

    # -- discovery

    def claim_refresh(self) -> bool:
        """Return True if a refresh is due. The caller must then run `discover`; other callers get False."""
        if not self.is_stale:
            return False
        with self._lock:
            now_us = self._now_us()
            if now_us - self._refresh_began_us < REFRESH_INTERVAL_US:
                return False
            self._refresh_began_us = now_us
            return True

    def was_refreshed_recently(self) -> bool:
        return self._now_us() - self._refreshed_us < REFRESH_INTERVAL_US

    def discover(self) -> DiscoveryFlow[list[Check]]:
        """Ask the servers for the current masters. Return the pending charges of retired servers.

        Raises StoreUnavailable if no server gives a valid answer.
        """
        owners = yield from discover_owners(self.deployment, self._discovery_addresses())
        return self.update_owners(owners)

    def _discovery_addresses(self) -> list[Address]:
        seeds = list(self.deployment.seeds)
        if not self.is_sharded:
            self._next_sentinel += 1  # take turns: the first one may be cut off and know an outdated master
            first = self._next_sentinel % len(seeds)
            return seeds[first:] + seeds[:first]
        return [*(server.address for server in sorted(self.servers, key=_is_unhealthy)), *seeds]

    def update_owners(self, owners: Owners) -> list[Check]:
        """Replace the owners of all slots. Return the pending charges of servers that own none any more."""
        with self._lock:
            before = self._servers
            self._servers = {}
            for host_port in {host_port for host_port in owners if host_port is not None}:
                self._servers[host_port] = before.get(host_port) or self._create_server(*host_port)
            self._owner_of_slot = [None if host_port is None else self._servers[host_port] for host_port in owners]
            self.is_stale = None in self._owner_of_slot
            self._refreshed_us = self._now_us()  # set last: threads without the lock read it before the owners
            retired = [server for host_port, server in before.items() if host_port not in self._servers]
            for server in retired:
                self._retired_degraded.update(server.resilience.degraded)
        return [charge for server in retired for charge in server.resilience.take_charges()]

    def _get_or_add(self, host: str, port: int) -> Server:
        server = self._servers.get((host, port))
        if server is None:
            server = self._servers[(host, port)] = self._create_server(host, port)
        return server

    def _create_server(self, host: str, port: int) -> Server:
        address = self.deployment.server_template.at(host, port)
        return Server(address, self._resilience(address.name))

    def _resilience(self, name: str) -> Resilience:
        return Resilience(self._options, self._local_store, name)

    # -- health

    @property
    def degraded(self) -> dict[str, int]:
        """How many checks were decided without the store, by failure behaviour."""
        total = Counter(self._retired_degraded)
        for server in self._with_unknown():
            total.update(server.resilience.degraded)
        return dict(total)

    @property
    def worst_resilience(self) -> Resilience:
        """The resilience of the server whose breaker is in the worst state."""
        candidates = [server.resilience for server in self._with_unknown()]
        return min(candidates, key=lambda resilience: _WORST_FIRST.index(resilience.state))

    def requeue_charges(self, charges: Iterable[Check]) -> None:
        """Keep charges that were certainly not made, for the next attempt."""
        for charge in charges:
            _, key, *_ = charge.debits[0]
            self.server_of_slot(self.slot_of(key)).resilience.requeue_charges([charge])

    def close(self) -> None:
        for server in self._with_unknown():
            server.resilience.close()

    def _with_unknown(self) -> list[Server]:
        return self.servers if self.is_single else [self.unknown_server, *self.servers]


def _is_unhealthy(server: Server) -> bool:
    return not server.resilience.is_healthy
