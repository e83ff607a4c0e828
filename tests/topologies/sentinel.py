"""A master with replicas, watched by real sentinels."""

import time
from pathlib import Path

from tests.servers import ServerFailed
from tests.topologies.common import (
    HOST,
    WAIT_SECONDS,
    GroupServer,
    Reply,
    ServerGroup,
    is_in_sync,
    query,
    query_fields,
)


class Sentinel(GroupServer):
    """A sentinel. A restart keeps its port and, in its file, its state."""

    # Faster than the defaults, and not out of service for 30 s after a pause. A sentinel connects to a new master up to
    # one ping period late. By default that is as long as our `down_after_ms`, so it would replace the new master, too.
    # It trusts the INFO of a replica, which it requests once a second, for five ping periods.
    _PACE = (
        *("PING-PERIOD", 400, "INFO-PERIOD", 500, "PUBLISH-PERIOD", 500),
        *("TILT-TRIGGER", 10_000, "TILT-PERIOD", 1_000),
    )

    def __init__(self, *lines: str) -> None:
        super().__init__()
        self._lines = lines
        self._written_for = 0

    def _arguments(self, folder: Path) -> list[str]:
        file = folder / "sentinel.conf"
        if self._written_for != self.port:
            own = (f"port {self.port}", f"bind {HOST}", f"dir {folder}")
            file.write_text("\n".join([*own, *self._lines, ""]))
            self._written_for = self.port
        return [str(file), "--sentinel"]

    def _launch(self, *options: str) -> bool:
        if not super()._launch(*options):
            return False
        query(self, "SENTINEL", "DEBUG", *self._PACE)
        return True


class SentinelGroup(ServerGroup):
    """A master with replicas, and sentinels that replace it once two of them cannot reach it.

    Usable as a context manager. With a `password`, the servers ask for it and the sentinels do not. Nothing is kept
    on disk, so a master that dies and is back within `down_after_ms` comes back empty, and empties its replicas.
    """

    NAME = "forge"  # the master's

    def __init__(
        self, replicas: int = 2, sentinels: int = 3, down_after_ms: int = 1_000, *, password: str | None = None
    ) -> None:
        super().__init__(password)
        self._counts = (replicas, sentinels)
        self._down_after_ms = down_after_ms
        self.servers: list[GroupServer] = []  # including dead ones; the first master comes first
        self.sentinels: list[Sentinel] = []

    @property
    def url(self) -> str:
        """The URL of the sentinels. It never changes."""
        return f"redis+sentinel://{self._authority(self.sentinels)}/{self.NAME}"

    def master(self) -> GroupServer:
        """Return the master that the sentinels name. If they disagree, the newest configuration counts."""
        views = [self._view(sentinel) for sentinel in self._reachable_sentinels()]
        return self._server(max(views, key=lambda view: int(view["config-epoch"]))["port"])

    def failover(self) -> GroupServer:
        """Let the sentinels replace a live master. Return the new master.

        Writes that no replica had yet are lost. When it returns, the old master is a replica and all agree.
        """
        old = self.master()
        asked_at = float("-inf")

        def missing() -> str:
            nonlocal asked_at
            agreed = self._agreed()
            if agreed is None:
                return "no living master that all agree on"
            if agreed is not old:
                return self._find_problem()
            if time.monotonic() - asked_at > 5:  # Redis refuses it while another one is in progress
                asked_at = time.monotonic()
                query(self._reachable_sentinels()[0], "SENTINEL", "FAILOVER", self.NAME)
            return f"the sentinels still name {old.port}"

        self._wait(f"another master than {old.port}", missing)
        return self.master()

    def wait_for_new_master(self, other_than: GroupServer, seconds: float = WAIT_SECONDS) -> GroupServer:
        """Return the new master, once all reachable sentinels and the server itself agree."""

        def missing() -> str:
            agreed = self._agreed()
            if agreed is None:
                return "no living master that all agree on"
            return "" if agreed is not other_than else f"the sentinels still name {agreed.port}"

        self._wait(f"another master than {other_than.port}", missing, seconds)
        return self.master()

    def wait_until_ok(self, seconds: float = WAIT_SECONDS) -> None:
        """Wait until reachable sentinels agree and know all others, and replicas are in sync."""
        self._wait("a master with replicas and sentinels in order", self._find_problem, seconds)

    def heal(self) -> None:
        """Resume paused servers and restart dead ones. Returns once the group is healthy, perhaps with a new master."""
        for server in self._servers:
            if not server.running:
                server.restart()
            elif not server.is_reachable:
                server.resume()
        self.wait_until_ok()

    def flush(self) -> None:
        """Delete all keys. Loaded scripts stay."""
        self.master().flush()

    def _start_all(self) -> None:
        replicas, sentinels = self._counts
        self.servers = [GroupServer(password=self._password) for _ in range(1 + replicas)]
        for server in self.servers:
            self._start(server)
        master = self.servers[0]
        for server in self.servers[1:]:
            query(server, "REPLICAOF", HOST, master.port)
        self._wait("replicas in sync", lambda: "" if all(map(is_in_sync, self.servers[1:])) else "not all are")

        lines = [f"sentinel monitor {self.NAME} {HOST} {master.port} {min(2, sentinels)}"]
        if self._password is not None:
            lines.append(f"sentinel auth-pass {self.NAME} {self._password}")
        lines.append(f"sentinel down-after-milliseconds {self.NAME} {self._down_after_ms}")
        lines.append(f"sentinel failover-timeout {self.NAME} 3000")
        lines.append(f"sentinel parallel-syncs {self.NAME} 1")
        self.sentinels = [Sentinel(*lines) for _ in range(sentinels)]
        for sentinel in self.sentinels:
            self._start(sentinel)
        self.wait_until_ok()

    def _server(self, port: str) -> GroupServer:
        return next(server for server in self.servers if server.port == int(port))

    def _reachable_sentinels(self) -> list[Sentinel]:
        if sentinels := [sentinel for sentinel in self.sentinels if sentinel.is_reachable]:
            return sentinels
        raise ServerFailed("no sentinel is reachable")

    def _view(self, sentinel: Sentinel) -> dict[str, str]:
        return _pairs(query(sentinel, "SENTINEL", "MASTER", self.NAME))

    def _agreed(self) -> GroupServer | None:
        """Return the master on which all sentinels and the server itself agree, or None."""
        port, *others = {self._view(sentinel)["port"] for sentinel in self._reachable_sentinels()}
        server = self._server(port)
        if others or not server.is_reachable:
            return None
        return server if query_fields(server, "INFO", "replication")["role"] == "master" else None

    def _find_problem(self) -> str:
        master = self._agreed()
        if master is None:
            return "no living master that all agree on"
        alive = {str(server.port) for server in self._servers if server.is_reachable}
        for sentinel in self._reachable_sentinels():
            others = {}
            for kind, flags in (("REPLICAS", "slave"), ("SENTINELS", "sentinel")):
                found = query(sentinel, "SENTINEL", kind, self.NAME)
                others[kind] = [_pairs(item) for item in found] if isinstance(found, list) else []
                if doubt := [peer["port"] for peer in others[kind] if peer["port"] in alive and peer["flags"] != flags]:
                    return f"sentinel {sentinel.port} is in doubt about {doubt}"
            for peer in others["REPLICAS"]:
                seen = (peer["master-port"], peer["master-link-status"])
                if peer["port"] in alive and seen != (str(master.port), "ok"):
                    return f"sentinel {sentinel.port} sees {peer['port']} with {seen}"
            if self._view(sentinel)["flags"] != "master":
                return f"sentinel {sentinel.port} is in doubt about the master"
            counts = (len(others["REPLICAS"]), len(others["SENTINELS"]) + 1)
            if counts != self._counts:
                return f"sentinel {sentinel.port} knows {counts} of {self._counts} replicas and sentinels"
        for server in self.servers:
            if server is not master and server.is_reachable:
                info = query_fields(server, "INFO", "replication")
                if (info.get("master_port"), info.get("master_link_status")) != (str(master.port), "up"):
                    return f"{server.port} is not in sync with {master.port}"
        return ""


def _pairs(reply: Reply) -> dict[str, str]:
    """Convert a flat list of names and values to a dict."""
    if not isinstance(reply, list):
        raise ServerFailed(f"a list expected, not {reply!r}")
    words = [word.decode() for word in reply if isinstance(word, bytes)]
    return dict(zip(words[::2], words[1::2], strict=True))
