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
    """One node: it keeps its identity, its port and its bus port over a restart, and forgets its keys."""

    def __init__(self, *options: str, password: str | None = None) -> None:
        super().__init__("--cluster-enabled", "yes", "--cluster-announce-ip", HOST, *options, password=password)
        self._bus = (0, 0)  # a port, and the bus port that was chosen for it

    @property
    def bus_port(self) -> int:
        return self._bus[1]

    def _listen(self, folder: Path) -> list[str]:
        if self._bus[0] != self.port:
            self._bus = (self.port, find_free_port())
        return [*super()._listen(folder), "--cluster-port", str(self.bus_port)]


@dataclass(frozen=True, slots=True)
class _Peer:
    """What one node knows of one node, itself included."""

    id: str
    port: int
    flags: frozenset[str]
    master: str  # its id; "-" for a master
    epoch: int
    connected: bool
    slots: tuple[range, ...]

    @classmethod
    def parse(cls, line: str) -> Self:
        """One line of CLUSTER NODES."""
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
    """A real Redis Cluster: `masters` share the slots evenly, and each has `replicas` of its own.

    Usable as a context manager; `options` are redis-server's own, for every node. Nothing is kept on disk but who is
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
        self._moves: dict[int, tuple[ClusterServer, ClusterServer]] = {}  # of a slot: from where, to where
        self._elected_at: dict[int, float] = {}  # of a port: when it was last seen to have become a master

    @property
    def servers(self) -> list[ClusterServer]:
        """All of them, also the dead; those that were masters at the start come first."""
        return list(self._server_by_id.values())

    @property
    def url(self) -> str:
        """Names the nodes that were masters at the start, and stays the same."""
        return f"redis+cluster://{self._authority(self.servers[: self._shape[0]])}"

    def masters(self) -> list[ClusterServer]:
        """Those that own slots now. A dead master counts until a replica has taken over."""
        owners = set(_owners(self._views()))
        return [node for identity, node in self._server_by_id.items() if identity in owners]

    def master_of(self, slot: int) -> ClusterServer:
        """As the nodes that can be asked see it; where they differ, the newest configuration counts."""
        owner = _owners(self._views())[slot]
        if not owner:
            raise ServerFailed(f"nobody owns slot {slot}")
        return self._server_by_id[owner]

    def replicas_of(self, server: ClusterServer) -> list[ClusterServer]:
        """Those that can be asked, and say that `server` is their master."""
        identity = self._id(server)
        return [
            self._server_by_id[peer.id]
            for view in self._views()
            for peer in view
            if "myself" in peer.flags and peer.master == identity
        ]

    def failover(self, server: ClusterServer) -> ClusterServer:
        """Have a replica take over from this master, which stays alive; returns the new master.

        No write is lost, and clients wait for a moment only. When it returns, the old master is a replica and all
        nodes agree. A replica that was a master a moment ago first has to sit out four node timeouts.
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
            if time.monotonic() - asked_at > 10:  # it gives up by itself after 5 s, if for once it got no votes
                asked_at = time.monotonic()
                query(replica, "CLUSTER", "FAILOVER")
            return f"the nodes still name {server.port}"

        self._wait(f"another master than {server.port}", missing)
        return self.wait_for_new_master(slot, server)

    def wait_for_new_master(self, slot: int, other_than: ClusterServer, seconds: float = WAIT_SECONDS) -> ClusterServer:
        """The new master of the slot, once all nodes that can be asked name it, itself included."""
        new = self._wait_for_owner(slot, other_than, seconds)
        self._elected_at[new.port] = time.monotonic()
        return new

    def wait_until_ok(self, seconds: float = WAIT_SECONDS) -> None:
        """Until all nodes that can be asked agree, see each other and all slots served, and replicas are in sync."""
        self._wait("a cluster in order", self._find_problem, seconds)

    def heal(self) -> None:
        """Resume the paused, restart the dead, forget unfinished migrations; returns once all is in order.

        Who is master may stay changed. Keys that an unfinished migration had moved are out of sight.
        """
        for node in self.servers:
            if not node.running:
                node.restart()
            elif not node.is_reachable:
                node.resume()
        self.wait_until_ok()
        for slot in list(self._moves):
            for node in self.masters():
                query(node, "CLUSTER", "SETSLOT", slot, "STABLE")
            del self._moves[slot]

    def flush(self) -> None:
        """Delete all keys; loaded scripts stay."""
        for node in self.masters():
            node.flush()

    def migrate(self, slot: int, to: ClusterServer, portion: int = 10, pause_seconds: float = 0.0) -> None:
        """Move a slot with its keys to another master while it is in use, as `redis-cli --cluster reshard` does."""
        self.start_migration(slot, to)
        while self.move_keys(slot, portion):
            time.sleep(pause_seconds)
        self.finish_migration(slot)

    def start_migration(self, slot: int, to: ClusterServer) -> None:
        """From now on the source answers with ASK for keys that it does not have."""
        source = self.master_of(slot)
        if source is to:
            raise ServerFailed(f"slot {slot} is on {to.port} already")
        query(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", self._id(source))
        query(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self._id(to))
        self._moves[slot] = (source, to)

    def move_keys(self, slot: int, count: int) -> int:
        """Move at most `count` keys of a slot on the move; returns how many it took, 0 when none was left."""
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
        """Give the slot to the target, once all its keys are there; returns once all nodes know."""
        source, to = self._moves[slot]
        if left := query(source, "CLUSTER", "COUNTKEYSINSLOT", slot):
            raise ServerFailed(f"slot {slot} still has {left!r} keys on {source.port}")
        others = [node for node in self.masters() if node not in (source, to) and node.is_reachable]
        for node in (to, source, *others):
            query(node, "CLUSTER", "SETSLOT", slot, "NODE", self._id(to))
        del self._moves[slot]
        self._wait_for_owner(slot, source)

    def _start_all(self) -> None:
        masters, replicas = self._shape
        nodes = [ClusterServer(*self._options, password=self._password) for _ in range(masters * (1 + replicas))]
        self._server_by_id.clear()
        self._moves.clear()
        self._elected_at.clear()
        for node in nodes:
            self._start(node)
            self._server_by_id[query_text(node, "CLUSTER", "MYID")] = node
        for index, node in enumerate(nodes[:masters]):
            first, end = SLOT_COUNT * index // masters, SLOT_COUNT * (index + 1) // masters
            query(node, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for index, node in enumerate(nodes):
            query(node, "CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for index, node in enumerate(nodes):  # each meets each: waiting for gossip takes seconds
            for other in nodes[index + 1 :]:
                query(node, "CLUSTER", "MEET", HOST, other.port, other.bus_port)
        self._wait("nodes that know each other", self._find_unknown_peers)
        for index, node in enumerate(nodes[masters:]):
            query(node, "CLUSTER", "REPLICATE", self._id(nodes[index % masters]))
        self.wait_until_ok()

    def _wait_for_owner(self, slot: int, other_than: ClusterServer, seconds: float = WAIT_SECONDS) -> ClusterServer:
        def missing() -> str:
            owners = {_owners([view])[slot] for view in self._views()}
            if len(owners) == 1 and owners.isdisjoint({"", self._id(other_than)}):
                return ""
            return f"the nodes name {sorted(self._server_by_id[owner].port for owner in owners if owner)}"

        self._wait(f"another master than {other_than.port} for slot {slot}", missing, seconds)
        return self.master_of(slot)

    def _id(self, server: ClusterServer) -> str:
        return next(identity for identity, node in self._server_by_id.items() if node is server)

    def _reachable(self) -> list[ClusterServer]:
        return [node for node in self.servers if node.is_reachable]

    def _views(self) -> list[list[_Peer]]:
        """What each node that can be asked knows."""
        nodes = self._reachable()
        if not nodes:
            raise ServerFailed("no node can be asked")
        return [[_Peer.parse(line) for line in query_text(node, "CLUSTER", "NODES").splitlines()] for node in nodes]

    def _candidate(self, server: ClusterServer) -> ClusterServer:
        """A replica that can stand for election at once.

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

    def _electable_at(self, node: ClusterServer) -> float:
        return self._elected_at.get(node.port, float("-inf")) + max(4.0, self._node_timeout_ms * 4 / 1_000) + 0.5

    def _find_unknown_peers(self) -> str:
        """Who does not know whom, among those that can be asked; "" if all know all."""
        ports = {node.port for node in self._reachable()}
        for view in self._views():
            met = {peer.port for peer in view if "myself" in peer.flags or (peer.connected and not _is_suspected(peer))}
            if ports - met or len(view) != len(self._server_by_id):
                return f"a node does not see {sorted(ports - met)} among {len(view)}"
        return ""

    def _find_problem(self) -> str:
        if strangers := self._find_unknown_peers():
            return strangers
        expected = {
            "cluster_state": "ok",
            "cluster_slots_ok": str(SLOT_COUNT),
            "cluster_slots_assigned": str(SLOT_COUNT),
        }
        for node in self._reachable():
            info = query_fields(node, "CLUSTER", "INFO")
            if wrong := {name: info.get(name) for name, value in expected.items() if info.get(name) != value}:
                return f"{node.port}: {wrong}"
        views = self._views()
        if len({tuple(_owners([view])) for view in views}) != 1:
            return "the nodes disagree on who has which slot"
        reachable = {identity for identity, node in self._server_by_id.items() if node.is_reachable}
        if len({frozenset((peer.id, peer.master) for peer in view if peer.id in reachable) for view in views}) != 1:
            return "the nodes disagree on who is whose replica"
        owners = set(_owners(views))
        for identity, node in self._server_by_id.items():
            if identity not in owners and node.is_reachable and not is_in_sync(node):
                return f"{node.port} is a replica out of sync"
        return ""


def _is_suspected(peer: _Peer) -> bool:
    return not peer.flags.isdisjoint({"fail", "fail?", "handshake", "noaddr"})


def _owners(views: Sequence[Sequence[_Peer]]) -> list[str]:
    """The owner's id for each slot, "" where there is none; where views differ, the newest configuration counts."""
    owners = [""] * SLOT_COUNT
    for peer in sorted((peer for view in views for peer in view), key=lambda peer: peer.epoch):
        for slots in peer.slots:
            owners[slots.start : slots.stop] = [peer.id] * len(slots)
    return owners
