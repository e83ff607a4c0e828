"""Store URLs, discovery, and the owners of slots."""

import os
import sys
from contextlib import suppress
from threading import Thread
from typing import Any

import pytest

from limitforge import InvalidInput, ManualClock, StoreOptions, StoreUnavailable, SyncLimiter
from limitforge.core.check import Check
from limitforge.core.keys import Keys
from limitforge.stores.memory.store import MemoryStore
from limitforge.stores.redis.prepaid.heartbeat import Heartbeat
from limitforge.stores.redis.topology.deployment import DeploymentKind, parse_store_url
from limitforge.stores.redis.topology.discovery import discover_owners, parse_owners
from limitforge.stores.redis.topology.hash_slots import SLOT_COUNT, hash_slot
from limitforge.stores.redis.topology.topology import Topology

CLUSTER = "redis+cluster://user:secret@one:7001,two:7002"
SENTINEL = "redis+sentinel://user:secret@one:26379,two/forge/3?sentinel_password=other"


def topology(url: str = CLUSTER) -> Topology:
    return Topology(url, StoreOptions(), MemoryStore(keys=Keys(), clock=None))


def apply_reply(topology: Topology, reply: Any, seed: int = 0) -> list[Check] | None:
    owners = parse_owners(topology.deployment.kind, topology.deployment.seeds[seed], reply)
    return None if owners is None else topology.update_owners(owners)


def queried_hosts(topology: Topology) -> list[tuple[str, int]]:
    """The servers that a discovery asks if none of them answers."""
    flow, hosts = topology.discover(), []
    query = next(flow)
    with suppress(StoreUnavailable):
        while True:
            hosts.append((query.address.host, query.address.port))
            query = flow.send(OSError("no answer"))
    return hosts


def slots(*rows: tuple[int, int, Any, int]) -> list[Any]:
    return [[first, last, [host, port, b"id", []], [b"replica", 1, b"id", []]] for first, last, host, port in rows]


# -- URLs


def test_a_cluster_is_asked_at_every_server_of_the_url() -> None:
    deployment = parse_store_url(CLUSTER)
    assert deployment.kind is DeploymentKind.CLUSTER
    assert [(seed.host, seed.port) for seed in deployment.seeds] == [("one", 7001), ("two", 7002)]


def test_sentinels_have_a_port_and_a_password_of_their_own() -> None:
    deployment = parse_store_url(SENTINEL)
    assert (deployment.kind, deployment.master_name) == (DeploymentKind.SENTINEL, "forge")
    assert [(seed.host, seed.port) for seed in deployment.seeds] == [("one", 26379), ("two", 26379)]
    assert all(b"other" in seed.handshake and b"secret" not in seed.handshake for seed in deployment.seeds)
    assert b"secret" in deployment.server_template.handshake
    assert b"SELECT" in deployment.server_template.handshake
    assert b"ROLE" in deployment.server_template.handshake


def test_no_text_contains_a_password() -> None:
    for url in (CLUSTER, SENTINEL):
        deployment = parse_store_url(url)
        assert "secret" not in repr(deployment)
        assert "other" not in repr(deployment)
        assert "secret" not in repr(topology(url).unknown_server.address)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis+cluster://", "servers"),
        ("redis+cluster://a,b/3", "databases"),
        ("redis+sentinel://a,b", "master"),
        ("redis+sentinel://a,b/forge/x", "number"),
        ("redis+cluster://" + ",".join(["a"] * 65), "servers"),
        ("redis+cluster://a:port", "port"),
        ("redis+quorum://a", "memory://"),
    ],
)
def test_an_invalid_url_is_refused_by_name(url: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as refused:
        SyncLimiter.connect(url)
    assert refused.value.field == "url"


# -- discovery


def test_before_the_first_answer_every_owner_is_unknown() -> None:
    unknown = topology()
    assert unknown.server_of_slot(5) is unknown.unknown_server


def test_each_range_of_slots_has_its_master() -> None:
    known = topology()
    assert apply_reply(known, slots((0, 99, b"a", 1), (100, SLOT_COUNT - 1, b"b", 2))) == []
    assert [known.server_of_slot(slot).name for slot in (0, 99, 100, SLOT_COUNT - 1)] == ["a:1", "a:1", "b:2", "b:2"]
    assert not known.is_stale


@pytest.mark.parametrize("host", [b"", None])
def test_a_server_without_a_host_name_is_the_one_that_was_asked(host: bytes | None) -> None:
    known = topology()
    apply_reply(known, slots((0, SLOT_COUNT - 1, host, 7)), seed=1)
    assert known.server_of_slot(0).name == "two:7"


@pytest.mark.parametrize(
    "reply", [None, [], b"", 5, [[1]], [[0, SLOT_COUNT, [b"a", 1]]], [[0, 5, b"a"]], [[5, 0, [b"a", 1]]], {"a": 1}]
)
def test_invalid_replies_change_nothing(reply: Any) -> None:
    known = topology()
    assert apply_reply(known, reply) is None
    assert known.server_of_slot(0) is known.unknown_server


def test_an_uncovered_slot_makes_the_topology_stale() -> None:
    known = topology()
    apply_reply(known, slots((0, 99, b"a", 1)))
    assert known.is_stale
    assert known.server_of_slot(100) is known.unknown_server


def test_a_thread_that_sees_a_recent_refresh_sees_its_owners() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            known = topology()
            reply = slots(*[(slot, slot + 1, b"a", 1) for slot in range(0, SLOT_COUNT, 2)])
            discovery = Thread(target=apply_reply, args=(known, reply))
            discovery.start()
            while not known.was_refreshed_recently():
                pass
            assert known.server_of_slot(5) is not known.unknown_server
            discovery.join()
    finally:
        sys.setswitchinterval(interval)


def test_a_server_keeps_its_health_while_it_owns_slots() -> None:
    known = topology()
    apply_reply(known, slots((0, SLOT_COUNT - 1, b"a", 1)))
    first = known.server_of_slot(0)
    apply_reply(known, slots((0, 99, b"a", 1), (100, SLOT_COUNT - 1, b"b", 2)))
    assert known.server_of_slot(0) is first
    apply_reply(known, slots((0, SLOT_COUNT - 1, b"b", 2)))
    assert not known.is_current(first)
    apply_reply(known, slots((0, SLOT_COUNT - 1, b"a", 1)))
    assert known.server_of_slot(0) is not first


def test_a_slot_that_moved_is_known_before_the_next_discovery() -> None:
    known = topology()
    apply_reply(known, slots((0, SLOT_COUNT - 1, b"a", 1)))
    known.record_move(7, "b", 2)
    assert [known.server_of_slot(slot).name for slot in (6, 7, 8)] == ["a:1", "b:2", "a:1"]
    assert known.is_stale


def test_a_stale_topology_is_refreshed_by_one_caller_and_not_too_often() -> None:
    known = topology()
    assert not known.claim_refresh()
    known.mark_stale()
    assert [known.claim_refresh(), known.claim_refresh()] == [True, False]


def test_the_topology_of_one_server_is_never_stale() -> None:
    alone = topology("redis://localhost")
    alone.mark_stale()
    assert not alone.claim_refresh()
    assert alone.server_of_slot(0) is alone.only_server


def test_a_discovery_asks_each_server_once() -> None:
    known = topology()
    apply_reply(known, slots((0, 99, b"one", 7001), (100, SLOT_COUNT - 1, b"b", 2)))
    assert sorted(queried_hosts(known)) == [("b", 2), ("one", 7001), ("two", 7002)]


def test_a_sentinel_names_the_master() -> None:
    known = topology(SENTINEL)
    assert apply_reply(known, None) is None
    assert apply_reply(known, [b"10.0.0.1", b"6379"]) == []
    assert known.server_of_slot(0).name == "10.0.0.1:6379"


def test_a_discovery_goes_on_after_errors_and_invalid_replies() -> None:
    deployment = parse_store_url(CLUSTER)
    flow = discover_owners(deployment, deployment.seeds)
    assert next(flow).address.host == "one"
    assert flow.send(OSError("gone")).address.host == "two"
    with pytest.raises(StopIteration) as done:
        flow.send(slots((0, SLOT_COUNT - 1, b"a", 1)))
    assert set(done.value.value) == {("a", 1)}


def test_a_discovery_without_a_valid_answer_fails_with_the_last_error() -> None:
    deployment = parse_store_url(CLUSTER)
    flow = discover_owners(deployment, deployment.seeds)
    next(flow)
    flow.send(OSError("gone"))
    with pytest.raises(StoreUnavailable, match="current masters: gone"):
        flow.send([])


# -- slots


@pytest.mark.parametrize(("key", "slot"), [("lf:{user1000}:a", 3443), (b"{user1000}", 3443), ("{123456789}", 12739)])
def test_slots_are_those_of_redis(key: str | bytes, slot: int) -> None:
    assert hash_slot(key) == slot


def test_sentinels_take_turns_in_being_asked_first() -> None:
    sentinels = topology(SENTINEL)
    orders = [[host for host, _ in queried_hosts(sentinels)] for _ in range(3)]
    assert orders == [["one", "two"], ["two", "one"], ["one", "two"]]


# -- how many processes there are


def test_a_process_counts_itself_also_if_redis_has_forgotten_it() -> None:
    members = Heartbeat(Keys(), 4, ManualClock(0))
    assert members.process_count() == 4
    for count, nodes in ((3, 3), (0, 1)):
        members.set_process_count(count)
        assert members.process_count() == nodes


def test_a_forked_process_has_a_heartbeat_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    members = Heartbeat(Keys(), 1, ManualClock(0))
    name = members.name
    assert members.name == name
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert members.name != name
