"""Who decides about what: where URLs lead, and what is made of what servers say."""

import os
import sys
from threading import Thread
from typing import Any

import pytest

from limitforge import InvalidInput, ManualClock, StoreOptions, SyncLimiter
from limitforge.core.keys import Keys
from limitforge.stores.redis.prepaid.heartbeat import Heartbeat
from limitforge.stores.redis.topology.hash_slots import SLOT_COUNT, hash_slot
from limitforge.stores.redis.topology.topology import DeploymentKind, Topology, parse_store_url

CLUSTER = "redis+cluster://user:secret@one:7001,two:7002"
SENTINEL = "redis+sentinel://user:secret@one:26379,two/forge/3?sentinel_password=other"


def fleet(url: str = CLUSTER) -> Topology:
    return Topology(url, Keys(), StoreOptions(), None)


def slots(*rows: tuple[int, int, Any, int]) -> list[Any]:
    return [[first, last, [host, port, b"id", []], [b"replica", 1, b"id", []]] for first, last, host, port in rows]


# -- URLs


def test_a_cluster_is_asked_at_every_server_of_the_url() -> None:
    target = parse_store_url(CLUSTER)
    assert target.kind is DeploymentKind.CLUSTER
    assert [(seed.host, seed.port) for seed in target.seeds] == [("one", 7001), ("two", 7002)]


def test_sentinels_have_a_port_and_a_password_of_their_own() -> None:
    target = parse_store_url(SENTINEL)
    assert (target.kind, target.master_name) == (DeploymentKind.SENTINEL, "forge")
    assert [(seed.host, seed.port) for seed in target.seeds] == [("one", 26379), ("two", 26379)]
    assert all(b"other" in seed.handshake and b"secret" not in seed.handshake for seed in target.seeds)
    assert b"secret" in target.server_template.handshake
    assert b"SELECT" in target.server_template.handshake
    assert b"ROLE" in target.server_template.handshake


def test_no_password_is_told() -> None:
    for url in (CLUSTER, SENTINEL):
        target = parse_store_url(url)
        assert "secret" not in repr(target)
        assert "other" not in repr(target)
        assert "secret" not in repr(fleet(url).unknown_server.address)


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
def test_a_url_that_leads_nowhere_is_refused_by_name(url: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as refused:
        SyncLimiter.connect(url)
    assert refused.value.field == "url"


# -- what servers say


def test_before_anybody_said_anything_nobody_decides() -> None:
    unknown = fleet()
    assert unknown.server_of_slot(5) is unknown.unknown_server


def test_each_range_of_slots_has_its_master() -> None:
    known = fleet()
    assert known.apply_reply(known.deployment.seeds[0], slots((0, 99, b"a", 1), (100, SLOT_COUNT - 1, b"b", 2))) == []
    assert [known.server_of_slot(slot).name for slot in (0, 99, 100, SLOT_COUNT - 1)] == ["a:1", "a:1", "b:2", "b:2"]
    assert not known.is_stale


@pytest.mark.parametrize("host", [b"", None])
def test_a_server_that_does_not_know_its_name_is_the_one_that_was_asked(host: bytes | None) -> None:
    known = fleet()
    known.apply_reply(known.deployment.seeds[1], slots((0, SLOT_COUNT - 1, host, 7)))
    assert known.server_of_slot(0).name == "two:7"


@pytest.mark.parametrize(
    "reply", [None, [], b"", 5, [[1]], [[0, SLOT_COUNT, [b"a", 1]]], [[0, 5, b"a"]], [[5, 0, [b"a", 1]]], {"a": 1}]
)
def test_nonsense_is_not_heard(reply: Any) -> None:
    known = fleet()
    assert known.apply_reply(known.deployment.seeds[0], reply) is None
    assert known.server_of_slot(0) is known.unknown_server


def test_slots_that_nobody_has_stay_in_doubt() -> None:
    known = fleet()
    known.apply_reply(known.deployment.seeds[0], slots((0, 99, b"a", 1)))
    assert known.is_stale
    assert known.server_of_slot(100) is known.unknown_server


def test_a_thread_that_sees_that_somebody_answered_sees_the_answer() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            known = fleet()
            answer = slots(*[(slot, slot + 1, b"a", 1) for slot in range(0, SLOT_COUNT, 2)])
            telling = Thread(target=known.apply_reply, args=(known.deployment.seeds[0], answer))
            telling.start()
            while not known.was_refreshed_recently():
                pass
            assert known.server_of_slot(5) is not known.unknown_server
            telling.join()
    finally:
        sys.setswitchinterval(interval)


def test_a_server_keeps_its_record_for_as_long_as_it_decides() -> None:
    known = fleet()
    known.apply_reply(known.deployment.seeds[0], slots((0, SLOT_COUNT - 1, b"a", 1)))
    first = known.server_of_slot(0)
    known.apply_reply(known.deployment.seeds[0], slots((0, 99, b"a", 1), (100, SLOT_COUNT - 1, b"b", 2)))
    assert known.server_of_slot(0) is first
    known.apply_reply(known.deployment.seeds[0], slots((0, SLOT_COUNT - 1, b"b", 2)))
    assert not known.is_current(first)
    known.apply_reply(known.deployment.seeds[0], slots((0, SLOT_COUNT - 1, b"a", 1)))
    assert known.server_of_slot(0) is not first


def test_a_slot_that_moved_is_known_before_all_are_asked_again() -> None:
    known = fleet()
    known.apply_reply(known.deployment.seeds[0], slots((0, SLOT_COUNT - 1, b"a", 1)))
    known.record_move(7, "b", 2)
    assert [known.server_of_slot(slot).name for slot in (6, 7, 8)] == ["a:1", "b:2", "a:1"]
    assert known.is_stale


def test_while_in_doubt_one_asks_at_a_time_and_not_too_often() -> None:
    known = fleet()
    assert not known.claim_refresh()
    known.mark_stale()
    assert [known.claim_refresh(), known.claim_refresh()] == [True, False]


def test_one_server_is_never_in_doubt() -> None:
    alone = fleet("redis://localhost")
    alone.mark_stale()
    assert not alone.claim_refresh()
    assert alone.server_of_slot(0) is alone.unknown_server


def test_servers_that_do_well_are_asked_first_and_each_once() -> None:
    known = fleet()
    known.apply_reply(known.deployment.seeds[0], slots((0, 99, b"one", 7001), (100, SLOT_COUNT - 1, b"b", 2)))
    asked = [(address.host, address.port) for address, _ in known.discovery_queries()]
    assert sorted(asked) == [("b", 2), ("one", 7001), ("two", 7002)]


def test_a_sentinel_names_the_master() -> None:
    known = fleet(SENTINEL)
    assert known.apply_reply(known.deployment.seeds[0], None) is None
    assert known.apply_reply(known.deployment.seeds[0], [b"10.0.0.1", b"6379"]) == []
    assert known.server_of_slot(0).name == "10.0.0.1:6379"


# -- slots


@pytest.mark.parametrize(("key", "slot"), [("lf:{user1000}:a", 3443), (b"{user1000}", 3443), ("{123456789}", 12739)])
def test_slots_are_those_of_redis(key: str | bytes, slot: int) -> None:
    assert hash_slot(key) == slot


def test_sentinels_take_turns_to_be_asked_first() -> None:
    sentinels = fleet(SENTINEL)
    asked = [[address.host for address, _ in sentinels.discovery_queries()] for _ in range(3)]
    assert asked == [["one", "two"], ["two", "one"], ["one", "two"]]


# -- how many processes there are


def test_a_process_counts_itself_also_if_redis_has_forgotten_it() -> None:
    members = Heartbeat(Keys(), 4, ManualClock(0))
    assert members.process_count() == 4
    for count, nodes in ((3, 3), (0, 1)):
        members.set_process_count(count)
        assert members.process_count() == nodes


def test_a_forked_process_is_another_member(monkeypatch: pytest.MonkeyPatch) -> None:
    members = Heartbeat(Keys(), 1, ManualClock(0))
    name = members.name
    assert members.name == name
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert members.name != name
