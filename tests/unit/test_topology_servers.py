"""The groups of servers of the tests do what their names say.

Most of it is in `make soak`: other tests of `make test` kill, pause and move the same servers. After a change to
`tests/topologies`, run `make soak ARGS=tests/unit`.
"""

from collections.abc import Iterator

import pytest

from tests.servers import RedisServer, ServerFailed
from tests.topologies import SLOT_COUNT, GroupServer, RedisCluster, SentinelGroup, ServerGroup, query, query_fields

KEYS = [f"{{forge}}:{number}" for number in range(25)]


@pytest.fixture(scope="module")
def running_cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: RedisCluster) -> RedisCluster:
    """Healthy and empty."""
    running_cluster.heal()
    running_cluster.flush()
    return running_cluster


@pytest.fixture(scope="module")
def running_sentinels() -> Iterator[SentinelGroup]:
    with SentinelGroup() as sentinels:
        yield sentinels


@pytest.fixture
def sentinels(running_sentinels: SentinelGroup) -> SentinelGroup:
    running_sentinels.heal()
    running_sentinels.flush()
    return running_sentinels


def test_a_reply_of_any_size_and_shape_is_read_completely(redis_server: RedisServer) -> None:
    redis_server.flush()
    value = bytes(range(256)) * 4_096
    assert query(redis_server, "SET", "key", value) == b"OK"
    assert query(redis_server, "MGET", "key", "no such key", "key") == [value, None, value]
    assert query(redis_server, "STRLEN", "key") == len(value)


def test_an_error_reply_names_the_server_and_the_command(redis_server: RedisServer) -> None:
    with pytest.raises(ServerFailed, match=f"{redis_server.port}: NO-SUCH-COMMAND: ERR unknown command"):
        query(redis_server, "NO-SUCH-COMMAND")


@pytest.mark.parametrize("kind", [RedisCluster, SentinelGroup])
def test_when_it_cannot_start_nothing_is_left_running(
    kind: type[RedisCluster | SentinelGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ServerGroup) -> None:
        started.extend(self._servers)
        raise KeyboardInterrupt

    started: list[RedisServer] = []
    monkeypatch.setattr(kind, "wait_until_ok", fail)
    with pytest.raises(KeyboardInterrupt):
        kind(1, 1).start()
    assert len(started) > 1
    assert not any(server.running for server in started)


@pytest.mark.soak
def test_a_wait_that_times_out_fails_with_the_reason_and_the_logs(cluster: RedisCluster) -> None:
    master = cluster.master_of(0)
    with pytest.raises(ServerFailed, match=rf"the servers name \[{master.port}\]\n--- ") as failed:
        cluster.wait_for_new_master(0, master, seconds=0)
    assert all(f"--- {server.port}\n" in str(failed.value) for server in cluster.servers)


@pytest.mark.soak
def test_a_cluster_serves_every_slot_and_every_master_has_a_replica(cluster: RedisCluster) -> None:
    masters = cluster.masters()
    assert len(masters) == 3
    assert [len(cluster.replicas_of(master)) for master in masters] == [1, 1, 1]
    assert {cluster.master_of(slot) for slot in (0, SLOT_COUNT // 2, SLOT_COUNT - 1)} == set(masters)
    for node in cluster.servers:
        info = query_fields(node, "CLUSTER", "INFO")
        assert (info["cluster_state"], info["cluster_slots_ok"], info["cluster_size"]) == ("ok", str(SLOT_COUNT), "3")
    assert cluster.url == "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in cluster.servers[:3])


@pytest.mark.soak
def test_a_replica_takes_over_by_command_and_has_all_keys(cluster: RedisCluster) -> None:
    slot = fill(cluster)
    old = cluster.master_of(slot)
    new = cluster.failover(old)
    assert cluster.master_of(slot) is new
    assert cluster.replicas_of(new) == [old]
    assert count(new, slot) == len(KEYS)
    with pytest.raises(ServerFailed, match="no master"):
        cluster.failover(old)


@pytest.mark.soak
def test_a_replica_takes_over_from_a_killed_master_which_comes_back_as_a_replica(cluster: RedisCluster) -> None:
    slot = fill(cluster)
    old = cluster.master_of(slot)
    assert query(old, "WAIT", 1, 10_000) == 1
    old.kill()
    new = cluster.wait_for_new_master(slot, old)
    assert new is not old
    assert old not in cluster.masters()
    old.restart()
    cluster.wait_until_ok()
    assert cluster.replicas_of(new) == [old]
    assert count(new, slot) == count(old, slot) == len(KEYS)


@pytest.mark.soak
def test_a_replica_takes_over_from_a_paused_master_which_wakes_up_as_a_replica(cluster: RedisCluster) -> None:
    old = cluster.master_of(0)
    old.pause()
    new = cluster.wait_for_new_master(0, old)
    cluster.heal()
    assert cluster.replicas_of(new) == [old]


@pytest.mark.soak
def test_a_slot_migrates_with_all_its_keys_and_back(cluster: RedisCluster) -> None:
    slot = fill(cluster)
    source = cluster.master_of(slot)
    target = next(master for master in cluster.masters() if master is not source)
    for old, new in ((source, target), (target, source)):
        cluster.migrate(slot, new, portion=10, pause_seconds=0.001)
        assert cluster.master_of(slot) is new
        assert (count(old, slot), count(new, slot)) == (0, len(KEYS))
        with pytest.raises(ServerFailed, match=f"MOVED {slot} 127.0.0.1:{new.port}"):
            query(old, "GET", KEYS[0])
        assert query(new, "GET", KEYS[0]) == b"value"
    with pytest.raises(ServerFailed, match="already"):
        cluster.migrate(slot, source)


@pytest.mark.soak
def test_a_slot_can_be_inspected_in_the_middle_of_its_migration(cluster: RedisCluster) -> None:
    slot = fill(cluster)
    source = cluster.master_of(slot)
    target = next(master for master in cluster.masters() if master is not source)
    cluster.start_migration(slot, target)
    assert cluster.move_keys(slot, 10) == 10
    assert (count(source, slot), count(target, slot)) == (len(KEYS) - 10, 10)
    with pytest.raises(ServerFailed, match=f"ASK {slot} 127.0.0.1:{target.port}"):
        query(source, "GET", "{forge}:new")
    with pytest.raises(ServerFailed, match="15 keys"):
        cluster.finish_migration(slot)
    assert [cluster.move_keys(slot, 10) for _ in range(3)] == [10, 5, 0]
    cluster.finish_migration(slot)
    assert cluster.master_of(slot) is target


@pytest.mark.soak
def test_healing_ends_an_unfinished_migration(cluster: RedisCluster) -> None:
    slot = fill(cluster)
    source = cluster.master_of(slot)
    cluster.start_migration(slot, next(master for master in cluster.masters() if master is not source))
    cluster.heal()
    assert cluster.master_of(slot) is source
    assert query(source, "GET", "{forge}:new") is None


@pytest.mark.soak
def test_a_cluster_with_a_password_fails_over_and_migrates() -> None:
    with RedisCluster(2, 1, password="pass#word") as cluster:  # noqa: S106 - of these servers alone
        assert cluster.url.startswith("redis+cluster://:pass%23word@127.0.0.1:")
        slot = fill(cluster)
        source = cluster.master_of(slot)
        target = next(master for master in cluster.masters() if master is not source)
        new = cluster.failover(target)
        cluster.migrate(slot, new)
        assert count(new, slot) == len(KEYS)


@pytest.mark.soak
def test_the_sentinels_name_the_master_and_know_all_others(sentinels: SentinelGroup) -> None:
    master = sentinels.master()
    assert query_fields(master, "INFO", "replication")["connected_slaves"] == "2"
    for sentinel in sentinels.sentinels:
        address = query(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "forge")
        assert address == [b"127.0.0.1", str(master.port).encode()]
    ports = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels.sentinels)
    assert sentinels.url == f"redis+sentinel://{ports}/forge"


def eventually_replicated(master: GroupServer) -> None:
    """Wait until both replicas have every write, because a failover loses all others."""
    with master.connection() as connection:
        connection.sendall(b"SET replicated yes\r\nWAIT 2 60000\r\n")
        said = b""
        while said.count(b"\r\n") < 2:
            said += connection.recv(1_024)
    assert said == b"+OK\r\n:2\r\n"


@pytest.mark.soak
def test_the_sentinels_choose_another_master_by_command(sentinels: SentinelGroup) -> None:
    old = sentinels.master()
    assert query(old, "SET", "key", "value") == b"OK"
    eventually_replicated(old)
    new = sentinels.failover()
    assert new is sentinels.master()
    assert new is not old
    assert query_fields(old, "INFO", "replication")["master_port"] == str(new.port)
    assert query(new, "GET", "key") == b"value"


@pytest.mark.soak
def test_the_sentinels_replace_a_killed_master_which_comes_back_as_a_replica(sentinels: SentinelGroup) -> None:
    old = sentinels.master()
    old.kill()
    new = sentinels.wait_for_new_master(old)
    assert new is not old
    sentinels.heal()
    assert sentinels.master() is new
    assert query_fields(old, "INFO", "replication")["master_port"] == str(new.port)


@pytest.mark.soak
def test_two_of_three_sentinels_are_enough(sentinels: SentinelGroup) -> None:
    sentinels.sentinels[0].kill()
    old = sentinels.master()
    old.pause()
    new = sentinels.wait_for_new_master(old)
    sentinels.heal()
    assert sentinels.master() is new


@pytest.mark.soak
def test_servers_with_a_password_are_watched_by_the_sentinels() -> None:
    with SentinelGroup(password="pass#word") as sentinels:  # noqa: S106 - of these servers alone
        assert sentinels.url.startswith("redis+sentinel://:pass%23word@127.0.0.1:")
        old = sentinels.master()
        assert sentinels.failover() is not old


def fill(cluster: RedisCluster) -> int:
    """Write all of `KEYS`, which share a slot. Return the slot."""
    slot = query(cluster.servers[0], "CLUSTER", "KEYSLOT", KEYS[0])
    assert isinstance(slot, int)
    master = cluster.master_of(slot)
    for key in KEYS:
        assert query(master, "SET", key, "value") == b"OK"
    return slot


def count(server: RedisServer, slot: int) -> object:
    return query(server, "CLUSTER", "COUNTKEYSINSLOT", slot)
