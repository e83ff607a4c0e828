"""Follow the redirections of a Redis Cluster: MOVED, ASK and TRYAGAIN."""

from limitforge.stores.errors import Redirected, SlotMigrating
from limitforge.stores.redis.topology.topology import Server, Topology

TRYAGAIN_DELAY_SECONDS = 0.005  # before a call is repeated whose keys are being migrated
MAX_REDIRECTS = 3  # beyond this, servers probably redirect in a cycle: wait before the next attempt


class CallRoute:
    """The server that one call goes to next, while servers redirect it."""

    def __init__(self, topology: Topology, slot: int, server: Server) -> None:
        self._topology = topology
        self._slot = slot
        self._server: Server | None = server
        self._redirects = 0
        self.needs_asking = False

    @property
    def server(self) -> Server:
        return self._server or self._topology.server_of_slot(self._slot)

    def follow(self, redirection: Redirected | SlotMigrating) -> float:
        """Go where a server redirects the call. Return how many seconds to wait before the next attempt.

        Raises the redirection if this deployment is not a Cluster.
        """
        if isinstance(redirection, SlotMigrating):
            self._server, self.needs_asking = None, False
            return TRYAGAIN_DELAY_SECONDS
        if not self._topology.is_sharded:
            raise redirection
        host = redirection.host or self.server.address.host
        self._server = self._topology.server_at(host, redirection.port)
        self.needs_asking = redirection.is_ask
        if not redirection.is_ask:
            self._topology.record_move(redirection.slot, host, redirection.port)
        self._redirects += 1
        return TRYAGAIN_DELAY_SECONDS if self._redirects > MAX_REDIRECTS else 0.0
