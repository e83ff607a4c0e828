"""A real Redis Cluster."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.servers import ServerFailed, find_free_port
from tests.topologies.common import (
    HOST,
    SLOT_COUNT,
    WAIT_SECONDS,
    GroupServer,
    ServerGroup,
    is_in_sync,
    query,
    query_fields,
    query_text,
)


class ClusterServer(GroupServer):
    """A server of a Cluster. A restart keeps its id, port and bus port, and loses its keys."""

    def __init__(self, *options: str, password: str | None = None) -> None:
        super().__init__("--cluster-enabled", "yes", "--cluster-announce-ip", HOST, *options, password=password)
        self._bus = (0, 0)  # a port, and the bus port that belongs to it

    @property
    def bus_port(self) -> int:
        return self._bus[1]

    def _listen(self, folder: Path) -> list[str]:
        if self._bus[0] != self.port:
            self._bus = (self.port, find_free_port())
        return [*super()._listen(folder), "--cluster-port", str(self.bus_port)]


@dataclass(frozen=True, slots=True)
class _Peer:
    """What one server knows about a server, itself included."""

    id: str
    port: int
    flags: frozenset[str]
    master: str  # its id; "-" for a master
    epoch: int
    connected: bool
    slots: tuple[range, ...]

    @classmethod
    def parse(cls, line: str) -> Self:
        """Parse one line of CLUSTER NODES."""
        identity, address, flags, master, _ping, _pong, epoch, link, *slots = line.split()
        spans = [span.partition("-") for span in slots if not span.startswith("[")]  # "[": a slot on the move
        return cls(
            id=identity,
            port=int(address.split("@")[0].rsplit(":", 1)[1]),
            flags=frozenset(flags.split(",")),
            master=master,
            epoch=int(epoch),
            connected=link == "connected",
            slots=tuple(range(int(first), int(last or first) + 1) for first, _, last in spans),
        )


class RedisCluster(ServerGroup):
    """A real Redis Cluster. `masters` share the slots evenly, and each has its own `replicas`.

    Usable as a context manager; `options` are redis-server's own, for every server. Nothing is kept on disk but who is
    who, so a master that dies and is back before a replica took over comes back empty, and empties its replicas.
    """

    def __init__(
        self,
        masters: int = 3,
        replicas: int = 1,
        node_timeout_ms: int = 2_000,
        *options: str,
        password: str | None = None,
    ) -> None:
        super().__init__(password)
        self._shape = (masters, replicas)
        self._node_timeout_ms = node_timeout_ms
        self._options = (
            *("--cluster-require-full-coverage", "no", "--cluster-node-timeout", str(node_timeout_ms)),
            *("--cluster-replica-validity-factor", "0", "--cluster-allow-replica-migration", "no", *options),
        )
        self._server_by_id: dict[str, ClusterServer] = {}
        self._moves: dict[int, tuple[ClusterServer, ClusterServer]] = {}  # by slot: its source and its target
        self._elected_at: dict[int, float] = {}  # by port: when the server last became a master

    @property
    def servers(self) -> list[ClusterServer]:
        """All servers, including dead ones. Those that were masters at the start come first."""
        return list(self._server_by_id.values())

    @property
    def url(self) -> str:
        """The URL of the servers that were masters at the start. It never changes."""
        return f"redis+cluster://{self._authority(self.servers[: self._shape[0]])}"

    def masters(self) -> list[ClusterServer]:
        """Return the servers that own slots now. A dead master counts until a replica has taken over."""
        owners = set(_owners(self._views()))
        return [server for identity, server in self._server_by_id.items() if identity in owners]

    def master_of(self, slot: int) -> ClusterServer:
        """Return the owner of a slot. If the reachable servers disagree, the newest configuration counts."""
        owner = _owners(self._views())[slot]
        if not owner:
            raise ServerFailed(f"no server owns slot {slot}")
        return self._server_by_id[owner]

    def replicas_of(self, server: ClusterServer) -> list[ClusterServer]:
        """Return the reachable replicas of a master."""
        identity = self._id(server)
        return [
            self._server_by_id[peer.id]
            for view in self._views()
            for peer in view
            if "myself" in peer.flags and peer.master == identity
        ]

    def failover(self, server: ClusterServer) -> ClusterServer:
        """Let a replica take over from a live master. Return the new master.

        No write is lost, and clients wait for a moment only. When it returns, the old master is a replica and all
        servers agree. A replica that was a master a moment ago first has to sit out four node timeouts.
        """
        if server not in self.masters():
            raise ServerFailed(f"{server.port} is no master")
        slot = _owners(self._views()).index(self._id(server))
        replica = self._candidate(server)
        asked_at = float("-inf")

        def missing() -> str:
            nonlocal asked_at
            if self.master_of(slot) is not server:
                return self._find_problem()
            if time.monotonic() - asked_at > 10:  # a replica that got no votes gives up after 5 s
                asked_at = time.monotonic()
                query(replica, "CLUSTER", "FAILOVER")
            return f"the servers still name {server.port}"

        self._wait(f"another master than {server.port}", missing)
        return self.wait_for_new_master(slot, server)

    def wait_for_new_master(self, slot: int, other_than: ClusterServer, seconds: float = WAIT_SECONDS) -> ClusterServer:
        """Return the new master of the slot, once all reachable servers agree on it."""
        new = self._wait_for_owner(slot, other_than, seconds)
        self._elected_at[new.port] = time.monotonic()
        return new

    def wait_until_ok(self, seconds: float = WAIT_SECONDS) -> None:
        """Wait until all reachable servers agree, all slots are served, and replicas are in sync."""
        self._wait("a cluster in order", self._find_problem, seconds)

    def heal(self) -> None:
        """Resume paused servers, restart dead ones, and abort migrations. Returns once the Cluster is healthy.

        Who is master may stay changed. Keys that an unfinished migration had moved are out of sight.
        """
        for server in self.servers:
            if not server.running:
                server.restart()
            elif not server.is_reachable:
                server.resume()
        self.wait_until_ok()
        for slot in list(self._moves):
            for server in self.masters():
                query(server, "CLUSTER", "SETSLOT", slot, "STABLE")
            del self._moves[slot]

    def flush(self) -> None:
        """Delete all keys. Loaded scripts stay."""
        for server in self.masters():
            server.flush()

    def migrate(self, slot: int, to: ClusterServer, portion: int = 10, pause_seconds: float = 0.0) -> None:
        """Move a slot with its keys to another master while it is in use, as `redis-cli --cluster reshard` does."""
        self.start_migration(slot, to)
        while self.move_keys(slot, portion):
            time.sleep(pause_seconds)
        self.finish_migration(slot)

    def start_migration(self, slot: int, to: ClusterServer) -> None:
        """Start to move a slot. From now on the source answers ASK for keys that it does not have."""
        source = self.master_of(slot)
        if source is to:
            raise ServerFailed(f"slot {slot} is on {to.port} already")
        query(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", self._id(source))
        query(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self._id(to))
        self._moves[slot] = (source, to)

    def move_keys(self, slot: int, count: int) -> int:
        """Move at most `count` keys of a migrating slot. Return how many were moved, 0 if none was left."""
        source, to = self._moves[slot]
        keys = query(source, "CLUSTER", "GETKEYSINSLOT", slot, count)
        if not isinstance(keys, list):
            raise ServerFailed(f"keys of slot {slot}: {keys!r}")
        if keys:
            login = () if self._password is None else ("AUTH", self._password)
            names = [key for key in keys if isinstance(key, bytes)]
            query(source, "MIGRATE", HOST, to.port, "", 0, 10_000, *login, "KEYS", *names)
        return len(keys)

    def finish_migration(self, slot: int) -> None:
        """Give the slot to the target, after all keys were moved. Returns once all servers know."""
        source, to = self._moves[slot]
        if left := query(source, "CLUSTER", "COUNTKEYSINSLOT", slot):
            raise ServerFailed(f"slot {slot} still has {left!r} keys on {source.port}")
        others = [server for server in self.masters() if server not in (source, to) and server.is_reachable]
        for server in (to, source, *others):
            query(server, "CLUSTER", "SETSLOT", slot, "NODE", self._id(to))
        del self._moves[slot]
        self._wait_for_owner(slot, source)

    def _start_all(self) -> None:
        masters, replicas = self._shape
        servers = [ClusterServer(*self._options, password=self._password) for _ in range(masters * (1 + replicas))]
        self._server_by_id.clear()
        self._moves.clear()
        self._elected_at.clear()
        for server in servers:
            self._start(server)
            self._server_by_id[query_text(server, "CLUSTER", "MYID")] = server
        for index, server in enumerate(servers[:masters]):
            first, end = SLOT_COUNT * index // masters, SLOT_COUNT * (index + 1) // masters
            query(server, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for index, server in enumerate(servers):
            query(server, "CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for index, server in enumerate(servers):  # every pair, because waiting for gossip takes seconds
            for other in servers[index + 1 :]:
                query(server, "CLUSTER", "MEET", HOST, other.port, other.bus_port)
        self._wait("servers that know each other", self._find_unknown_peers)
        for index, server in enumerate(servers[masters:]):
            query(server, "CLUSTER", "REPLICATE", self._id(servers[index % masters]))
        self.wait_until_ok()

    def _wait_for_owner(self, slot: int, other_than: ClusterServer, seconds: float = WAIT_SECONDS) -> ClusterServer:
        def missing() -> str:
            owners = {_owners([view])[slot] for view in self._views()}
            if len(owners) == 1 and owners.isdisjoint({"", self._id(other_than)}):
                return ""
            return f"the servers name {sorted(self._server_by_id[owner].port for owner in owners if owner)}"

        self._wait(f"another master than {other_than.port} for slot {slot}", missing, seconds)
        return self.master_of(slot)

    def _id(self, server: ClusterServer) -> str:
        return next(identity for identity, known in self._server_by_id.items() if known is server)

    def _reachable(self) -> list[ClusterServer]:
        return [server for server in self.servers if server.is_reachable]

    def _views(self) -> list[list[_Peer]]:
        """Return what each reachable server knows."""
        servers = self._reachable()
        if not servers:
            raise ServerFailed("no server is reachable")
        return [
            [_Peer.parse(line) for line in query_text(server, "CLUSTER", "NODES").splitlines()] for server in servers
        ]

    def _candidate(self, server: ClusterServer) -> ClusterServer:
        """Return a replica that can stand for election at once.

        After an election it sits out four node timeouts, at least 4 s. Asked to stand before, it has its master hold
        up all writes in the meantime.
        """
        found: list[ClusterServer] = []

        def missing() -> str:
            found[:] = filter(is_in_sync, self.replicas_of(server))
            return "" if found else "none is in sync"

        self._wait(f"a replica of {server.port}", missing)
        replica = min(found, key=self._electable_at)
        time.sleep(max(0.0, self._electable_at(replica) - time.monotonic()))
        return replica

    def _electable_at(self, server: ClusterServer) -> float:
        return self._elected_at.get(server.port, float("-inf")) + max(4.0, self._node_timeout_ms * 4 / 1_000) + 0.5

    def _find_unknown_peers(self) -> str:
        """Return which reachable servers do not know each other, or "" if all do."""
        ports = {server.port for server in self._reachable()}
        for view in self._views():
            met = {peer.port for peer in view if "myself" in peer.flags or (peer.connected and not _is_suspected(peer))}
            if ports - met or len(view) != len(self._server_by_id):
                return f"a server does not see {sorted(ports - met)} among {len(view)}"
        return ""

    def _find_problem(self) -> str:
        if strangers := self._find_unknown_peers():
            return strangers
        expected = {
            "cluster_state": "ok",
            "cluster_slots_ok": str(SLOT_COUNT),
            "cluster_slots_assigned": str(SLOT_COUNT),
        }
        for server in self._reachable():
            info = query_fields(server, "CLUSTER", "INFO")
            if wrong := {name: info.get(name) for name, value in expected.items() if info.get(name) != value}:
                return f"{server.port}: {wrong}"
        views = self._views()
        if len({tuple(_owners([view])) for view in views}) != 1:
            return "the servers disagree on the owners of slots"
        reachable = {identity for identity, server in self._server_by_id.items() if server.is_reachable}
        if len({frozenset((peer.id, peer.master) for peer in view if peer.id in reachable) for view in views}) != 1:
            return "the servers disagree on the masters of replicas"
        owners = set(_owners(views))
        for identity, server in self._server_by_id.items():
            if identity not in owners and server.is_reachable and not is_in_sync(server):
                return f"{server.port} is a replica out of sync"
        return ""


def _is_suspected(peer: _Peer) -> bool:
    return not peer.flags.isdisjoint({"fail", "fail?", "handshake", "noaddr"})


def _owners(views: Sequence[Sequence[_Peer]]) -> list[str]:
    """Return the id of the owner of each slot, "" if there is none. The newest configuration counts."""
    owners = [""] * SLOT_COUNT
    for peer in sorted((peer for view in views for peer in view), key=lambda peer: peer.epoch):
        for slots in peer.slots:
            owners[slots.start : slots.stop] = [peer.id] * len(slots)
    return owners
