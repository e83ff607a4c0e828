"""What Redis sees: one call for each check, and a TTL on every key. One bad key affects no other check."""

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis as redis_py

from limitforge import (
    Concurrency,
    Decision,
    Entry,
    FixedWindow,
    LeakyBucket,
    Limit,
    Limiter,
    Limits,
    ManualClock,
    Quota,
    Request,
    SlidingWindow,
    SlidingWindowCounter,
    StoreCorrupt,
    StoreUnavailable,
    SyncLimiter,
    TokenBucket,
    TooManyReservations,
    lua,
)
from limitforge.stores.redis.script_call import with_encoded_strings
from limitforge.stores.redis.sync.flows import FlowRunner
from limitforge.stores.redis.sync.store import SyncRedisStore
from tests.contract.conftest import PATIENT, open_limiter
from tests.servers import RedisServer

EVERY = [
    TokenBucket(name="t", bucket_capacity=10, refill_rate_per_sec=1),
    LeakyBucket(name="l", bucket_capacity=10, leak_rate_per_sec=1),
    FixedWindow(name="f", limit=10, window_seconds=60),
    FixedWindow(name="h", limit=10, window_seconds=60, align="first_hit"),
    FixedWindow(name="p", limit=10, window_seconds=60, spread=True),
    SlidingWindow(name="s", limit=10, window_seconds=60),
    SlidingWindowCounter(name="w", limit=10, window_seconds=60),
    Concurrency(name="c", max_concurrent=10, lease_ttl_seconds=60),
    Quota(name="q", limit=10, period="month"),
]
each_limit = pytest.mark.parametrize("limit", EVERY, ids=lambda limit: limit.name)


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    client = redis_py.Redis.from_url(redis_url)
    client.config_resetstat()
    yield client
    client.close()


@pytest.fixture
def limiter(redis_url: str) -> Iterator[SyncLimiter]:
    """A limiter that uses the clock of Redis."""
    limiter = SyncLimiter.connect(redis_url, options=PATIENT)
    yield limiter
    limiter.close()


def calls(raw: Any, command: str) -> int:
    stats: Any = raw.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


def values(raw: Any) -> dict[bytes, bytes]:
    keys: Any = raw.keys("lf:*")
    return {key: raw.dump(key) for key in keys}


@pytest.mark.parametrize("store", ["redis", "redis-async"])
def test_a_check_is_one_round_trip_with_any_limits_and_overrides(redis_url: str, raw: Any, store: str) -> None:
    limiter = open_limiter(store, redis_url)
    limiter.set_override("r", "s", {"t": {"limit": 50}}, limits=EVERY, ttl_seconds=60)
    limiter.check("r", "s", limits=EVERY)
    raw.config_resetstat()
    assert limiter.check("r", "s", limits=EVERY).limits["t"].limit == 50
    sent: Any = raw.info("commandstats")
    assert calls(raw, "evalsha") == 1
    assert set(sent) <= {
        f"cmdstat_{name}" for name in ("evalsha", "mget", "exists", "set", "time", "config|resetstat", "info")
    }
    limiter.close()


def test_each_key_is_read_once_and_written_once_per_batch(limiter: SyncLimiter, raw: Any) -> None:
    limiter.check("r", "s", limits=EVERY[:3])
    raw.config_resetstat()
    limiter.check_many([Request(resource="r", subject="s", limits=EVERY[:3])] * 9)
    assert (calls(raw, "evalsha"), calls(raw, "mget"), calls(raw, "set")) == (1, 1, 3)


def test_every_key_has_a_ttl(limiter: SyncLimiter, raw: Any) -> None:
    decision = limiter.reserve("r", "s", limits=EVERY, cost=2)
    limiter.set_override("r", "s", {"t": "blocked"}, limits=EVERY, ttl_seconds=60)
    limiter.settle(limiter.reserve("r", "s2", limits=EVERY, cost=2).reservation_id or "", 1)
    limiter.renew(decision.lease_id or "")
    keys: Any = raw.keys("lf:*")
    assert len(keys) == 2 * len(EVERY) + 4
    assert all(raw.pttl(key) > 60_000 for key in keys)
    limiter.release(decision.lease_id or "")
    (slots,) = raw.keys("*:1:s:c:c")
    assert 0 < raw.pttl(slots) <= 60_000


def test_a_record_lives_for_its_reservation_and_a_day(limiter: SyncLimiter, raw: Any) -> None:
    limiter.reserve("r", "s", limits="100/hour", cost=1, ttl_seconds=3 * 86_400)
    (record,) = raw.keys("*:v:*")
    assert 0 <= 4 * 86_400_000 - raw.pttl(record) < 60_000


def test_a_bucket_of_an_injected_time_lives_for_an_hour_at_least(redis_url: str, raw: Any) -> None:
    """The clock of Redis does not tell how long such a bucket is needed."""
    limiter = SyncLimiter.connect(redis_url, clock=ManualClock(), options=PATIENT)
    limiter.check("r", "s", limits="10/second")
    limiter.close()
    (key,) = raw.keys("lf:*")
    assert 0 <= 3_600_000 - raw.pttl(key) < 60_000


def test_a_bucket_holds_a_thousand_open_reservations_and_not_one_more(limiter: SyncLimiter) -> None:
    limit = FixedWindow(name="hour", limit=2_000, window_seconds=3_600)
    for _ in range(1_000):
        limiter.reserve("r", "s", limits=limit, cost=1)
    with pytest.raises(TooManyReservations, match="1000 open reservations"):
        limiter.reserve("r", "s", limits=limit, cost=1)
    assert limiter.check("r", "s", limits=limit).remaining == 999


def test_a_bucket_lives_a_minute_longer_than_it_matters(limiter: SyncLimiter, raw: Any) -> None:
    limiter.check("r", "s", limits=TokenBucket(name="t", bucket_capacity=4, refill_rate_per_sec=10), cost=1)
    (key,) = raw.keys("lf:*")
    assert 59_000 < raw.pttl(key) <= 60_100


@each_limit
def test_peeks_and_plain_denials_write_nothing(limiter: SyncLimiter, raw: Any, limit: Limit) -> None:
    limiter.check("r", "s", limits=limit, cost=0)
    assert not limiter.check("r", "s", limits=limit, cost=11).allowed
    limiter.release(limiter.check("r", "other", limits=EVERY[7]).lease_id or "")
    assert len(raw.keys("lf:*")) == 1
    limiter.check("r", "s", limits=limit, cost=10)
    before = values(raw)
    limiter.check("r", "s", limits=limit, cost=0)
    assert not limiter.check("r", "s", limits=limit, cost=11).allowed
    assert values(raw) == before


@each_limit
@pytest.mark.parametrize(
    "poison",
    [
        ("RPUSH", "a list"),
        ("SADD", "a set"),
        ("SET", ""),
        ("SET", "garbage"),
        ("SET", "1234"),
        ("SET", b"\x01\x01\x2c"),
        ("SET", b"\x00" * 44),
        ("SET", bytes(range(256))),
    ],
    ids=lambda poison: f"{poison[0]}-{len(poison[1])}",
)
def test_a_poisoned_key_fails_its_own_check_and_no_other(
    limiter: SyncLimiter, raw: Any, limit: Limit, poison: tuple[str, Any]
) -> None:
    limiter.check("r", "bad", limits=limit)
    (key,) = raw.keys("lf:*")
    raw.delete(key)
    raw.execute_command(poison[0], key, poison[1])
    before = values(raw)
    requests = [
        Request(resource="r", subject=subject, limits=[limit, EVERY[2]] if limit.name != "f" else limit)
        for subject in ("s1", "bad", "s2")
    ]
    first, bad, last = limiter.check_many(requests)
    assert isinstance(bad, StoreCorrupt)
    assert f"limit {limit.name!r}" in str(bad)
    assert "bad" not in str(bad)  # the subject
    assert all(isinstance(good, Decision) and good.allowed for good in (first, last))
    assert values(raw)[key] == before[key]
    with pytest.raises(StoreCorrupt):
        limiter.check("r", "bad", limits=limit, cost=0)
    limiter.reset("r", "bad", limits=limit)
    assert limiter.check("r", "bad", limits=limit).allowed


@pytest.mark.parametrize("poison", [b"garbage", b"\x93\x01\x02\x03", b"\xc0", b""])
def test_poisoned_overrides_fail_their_subjects_checks_only(limiter: SyncLimiter, raw: Any, poison: bytes) -> None:
    limiter.set_override("r", "bad", {"f": "blocked"}, limits=EVERY[2], ttl_seconds=60)
    (key,) = raw.keys("*:o:bad")
    raw.set(key, poison)
    with pytest.raises(StoreCorrupt, match="overrides"):
        limiter.check("r", "bad", limits=EVERY[2])
    with pytest.raises(StoreCorrupt, match="overrides"):
        limiter.get_override("r", "bad")
    assert limiter.check("r", "good", limits=EVERY[2]).allowed
    limiter.clear_overrides()
    assert limiter.check("r", "bad", limits=EVERY[2]).allowed


def test_a_poisoned_record_fails_its_settlement_and_changes_nothing(limiter: SyncLimiter, raw: Any) -> None:
    reservation = limiter.reserve("r", "s", limits=EVERY[2], cost=4).reservation_id or ""
    (key,) = raw.keys("*:v:*")
    raw.set(key, b"\x93garbage")
    with pytest.raises(StoreCorrupt):
        limiter.settle(reservation, 1)
    assert limiter.check("r", "s", limits=EVERY[2], cost=0).remaining == 6


def test_an_error_names_the_limit_whose_bucket_is_corrupt(limiter: SyncLimiter, raw: Any) -> None:
    limiter.check("r", "s", limits=EVERY[5], cost=3)
    (key,) = raw.keys("lf:*")
    value = bytearray(raw.get(key))
    value[10] = 10  # more in use than its items hold
    raw.set(key, bytes(value))
    with pytest.raises(StoreCorrupt, match="limit 's'"):
        limiter.check("r", "s", limits=[EVERY[5], EVERY[2]], cost=5)


def test_an_index_of_another_program_leaves_overrides_as_they_are(limiter: SyncLimiter, raw: Any) -> None:
    limiter.set_override("r", "s", {"f": {"limit": 7}}, limits=EVERY[2], ttl_seconds=60)
    raw.set("lf:{default}:x", "foreign")
    for change in (
        lambda: limiter.set_override("r", "s", {"f": {"limit": 9}}, limits=EVERY[2], ttl_seconds=60),
        lambda: limiter.delete_override("r", "s"),
        limiter.clear_overrides,
        limiter.list_overrides,
    ):
        with pytest.raises(StoreCorrupt, match="overrides"):
            change()
    assert limiter.check("r", "s", limits=EVERY[2]).limit == 7


def test_a_read_only_redis_is_unavailable_not_corrupt(own_redis_server: RedisServer) -> None:
    with SyncLimiter.connect(own_redis_server.url, options=PATIENT) as limiter:
        limiter.check("r", "s", limits=EVERY[2])
        own_redis_server.command("REPLICAOF 127.0.0.1 1")
        for change in (
            lambda: limiter.check("r", "s", limits=EVERY[2]),
            lambda: limiter.reserve("r", "s", limits=EVERY[2], cost=0),
            lambda: limiter.set_override("r", "s", {"f": "blocked"}, limits=EVERY[2], ttl_seconds=5),
        ):
            with pytest.raises(StoreUnavailable):
                change()


def test_a_full_redis_is_unavailable_not_corrupt(own_redis_server: RedisServer) -> None:
    with SyncLimiter.connect(own_redis_server.url, options=PATIENT) as limiter:
        own_redis_server.command("CONFIG SET maxmemory 1mb")
        with pytest.raises(StoreUnavailable):
            limiter.reserve("r", "s", limits=EVERY[2], cost=0)


@pytest.mark.parametrize("store", ["redis", "redis-async"])
def test_a_full_redis_still_denies_and_answers_peeks(own_redis_server: RedisServer, store: str) -> None:
    limiter = open_limiter(store, own_redis_server.url)
    assert limiter.check("r", "s", limits=EVERY[2], cost=10).allowed
    own_redis_server.command("CONFIG SET maxmemory 1mb")
    requests = [
        Request(resource="r", subject="new", limits=EVERY[2]),
        Request(resource="r", subject="s", limits=EVERY[2]),
        Request(resource="r", subject="s", limits=EVERY[2], cost=0),
        Request(resource="r", subject="new", limits=EVERY[:5], failure="closed"),
        Request(resource="r", subject="s", limits=()),
    ]
    taker, denied, peek, refused, free = limiter.check_many(requests)
    assert isinstance(free, Decision)
    assert (free.allowed, free.degraded) == (True, None)
    assert isinstance(taker, StoreUnavailable)
    assert not taker.maybe_counted
    assert isinstance(denied, Decision)
    assert (denied.allowed, denied.degraded) == (False, None)
    assert isinstance(peek, Decision)
    assert (peek.allowed, peek.remaining, peek.degraded) == (True, 0, None)
    assert isinstance(refused, Decision)
    assert refused.degraded == "closed"
    own_redis_server.command("CONFIG SET maxmemory 0")
    assert limiter.check("r", "new", limits=EVERY[2]).remaining == 9
    limiter.close()


@pytest.mark.parametrize("store", ["redis", "redis-async"])
def test_no_check_is_denied_for_what_a_full_redis_could_not_write(own_redis_server: RedisServer, store: str) -> None:
    one = FixedWindow(name="one", limit=1, window_seconds=3_600)
    limiter = open_limiter(store, own_redis_server.url)
    limiter.check("r", "first", limits=one)
    own_redis_server.command("CONFIG SET maxmemory 1mb")
    request = Request(resource="r", subject="s", limits=one)
    took, misled, stands = limiter.check_many([request, request, Request(resource="r", subject="first", limits=one)])
    assert isinstance(took, StoreUnavailable)
    assert isinstance(misled, StoreUnavailable)
    assert isinstance(stands, Decision)
    assert not stands.allowed
    own_redis_server.command("CONFIG SET maxmemory 0")
    assert limiter.check("r", "s", limits=one).allowed
    limiter.close()


async def test_a_reservation_that_a_full_redis_refuses_affects_no_other_check(own_redis_server: RedisServer) -> None:
    one = FixedWindow(name="one", limit=1, window_seconds=3_600)
    unlimited = FixedWindow(name="all", limit=None, window_seconds=3_600)
    options = dataclasses.replace(PATIENT, failure="open")
    async with Limiter.connect(own_redis_server.url, options=options) as limiter:
        await limiter.check("r", "s", limits=one)
        own_redis_server.command("CONFIG SET maxmemory 1mb")
        reserved, denied = await asyncio.gather(
            limiter.reserve("r", "t", limits=unlimited, cost=1, failure="open"), limiter.check("r", "s", limits=one)
        )
    assert reserved.degraded == "open"
    assert (denied.allowed, denied.degraded) == (False, None)


def test_a_missing_script_is_loaded_again_without_an_error(limiter: SyncLimiter, raw: Any) -> None:
    limiter.check("r", "s", limits=EVERY)
    for _ in range(3):
        raw.script_flush()
        assert limiter.check("r", "s", limits=EVERY).allowed
    assert limiter.check("r", "s", limits=EVERY, cost=0).limits["f"].remaining == 6


def test_prefixes_separate_limiters_that_share_a_redis(redis_url: str, raw: Any) -> None:
    limiters = [open_limiter("redis", redis_url, key_prefix=prefix) for prefix in ("app-1", "app-2")]
    for limiter in limiters:
        assert limiter.check("r", "s", limits=EVERY[2], cost=10).allowed
    keys: Any = raw.keys("app-*")
    assert sorted(key.split(b":")[0] for key in keys) == [b"app-1", b"app-2"]
    lease = limiters[0].check("r", "s", limits=EVERY[7]).lease_id or ""
    with pytest.raises(ValueError, match="another key prefix"):
        limiters[1].release(lease)
    for limiter in limiters:
        limiter.close()


@each_limit
def test_a_live_bucket_takes_at_most_160_bytes(limiter: SyncLimiter, raw: Any, limit: Limit) -> None:
    limiter.check("GET:/orders", "user:12345", limits=limit, tenant="acme")
    (key,) = raw.keys("lf:*")
    assert len(key) <= 60
    assert raw.memory_usage(key) <= 160


def test_all_keys_of_a_tenant_are_in_one_slot_and_global_ones_in_their_own(limiter: SyncLimiter, raw: Any) -> None:
    tenant = "a{b}c/d%e"
    scopes = [
        FixedWindow(name=scope, limit=5, window_seconds=60, scope=scope)
        for scope in ("subject", "caller", "resource", "tenant")
    ]
    limiter.reserve("r{x}", "s}", limits=scopes, cost=1, tenant=tenant)
    limiter.set_override("r", "s{y}", {"subject": "blocked"}, limits=scopes, ttl_seconds=60, tenant=tenant)
    keys: Any = raw.keys("lf:*")
    assert len(keys) == 7
    assert len({key[key.index(b"{") : key.index(b"}")] for key in keys}) == 1
    raw.flushall()
    limiter.check("r", "s", limits=FixedWindow(name="g", limit=5, window_seconds=60, scope="global"), tenant=tenant)
    (key,) = raw.keys("lf:*")
    assert b"{%}" in key


class NextReleaseFlows(FlowRunner):
    """Writes four more bytes into every bucket's fixed part, as a later format may."""

    SCRIPT = lua.script()
    for old, new in (
        (b"  FORMAT = 1,", b"  FORMAT = 2,"),
        (b"code, level.WIDTH, state.last_us", b"code, 48, state.last_us"),
        (b"state.level, limit, tokens, per_us)\n    end", b"state.level, limit, tokens, per_us) .. 'more'\n    end"),
        (b"CODE, WIDTH, state.last_us, state.until_us, used,", b"CODE, 43, state.last_us, state.until_us, used,"),
        (b"used, limit, window_us, kind)\n  end", b"used, limit, window_us, kind) .. 'more'\n  end"),
    ):
        assert SCRIPT.count(old) == 1, old
        SCRIPT = SCRIPT.replace(old, new)

    url = ""

    def run(self, flow: Any, deadline: float) -> Any:
        with redis_py.Redis.from_url(self.url) as redis:
            try:
                call = next(flow)
                while True:
                    keys, args, *_ = with_encoded_strings(call)
                    call = flow.send(redis.execute_command("EVAL", self.SCRIPT, len(keys), *keys, *args))
            except StopIteration as done:
                return done.value


class NextRelease(SyncRedisStore):
    """A store of a later release."""

    def _start(self) -> None:
        super()._start()
        self._flows = NextReleaseFlows(self._core, self._pools)
        self._flows.url = self._url


@pytest.mark.parametrize("limit", [EVERY[0], EVERY[1], EVERY[2], EVERY[4]], ids=lambda limit: limit.name)
def test_an_old_and_a_new_format_work_on_the_same_keys(redis_url: str, raw: Any, limit: Limit) -> None:
    clock = ManualClock()
    today = SyncLimiter.connect(redis_url, clock=clock, options=PATIENT)
    tomorrow = SyncLimiter(NextRelease(redis_url, clock=clock, options=PATIENT))
    lengths = set()
    for number in range(10):
        limiter = (today, tomorrow)[number % 2]
        decision = (
            limiter.reserve("r", "s", limits=limit, cost=1)
            if number in (4, 5)
            else limiter.check("r", "s", limits=limit)
        )
        assert (decision.allowed, decision.remaining) == (True, 9 - number)
        (key,) = raw.keys("*:t")[:1] or raw.keys("*:[fl]*")[:1]
        lengths.add(raw.strlen(key))
    assert not today.check("r", "s", limits=limit).allowed
    assert not tomorrow.check("r", "s", limits=limit).allowed
    assert len(lengths) > 2
    today.close()
    tomorrow.close()


def test_the_header_of_the_script_matches_the_encoder(redis_url: str) -> None:
    """The header of check.lua counts the integers of a check; the encoder must send as many."""
    import msgspec

    from limitforge.core.check import Check, Hold, build_check, build_check_from_entries
    from limitforge.core.keys import Keys
    from limitforge.stores.redis.codec import encode_checks

    keys = Keys()
    check = build_check(keys, Limits(*EVERY), "r", "s", cost=1, costs=None, tenant="t", priority="P0", shadow=None)

    def sent(*checks: Check, time_us: int = 5) -> Any:
        return msgspec.msgpack.decode(cast("bytes", encode_checks(checks, time_us).args[0]))

    operation, time_us, rules, flat, _ = sent(check)
    assert (operation, time_us, len(rules), len(flat)) == (1, 5, len(EVERY), 3 + 5 * len(EVERY))
    assert len(encode_checks([check], 5).keys) == len(EVERY) + 1
    check.hold = Hold("lf:{t}:v:00", b"12345678", 1_000, refund=True)
    assert len(sent(check)[3]) == 6 + 5 * len(EVERY)
    entries = build_check_from_entries(keys, [Entry(EVERY[0], "r", "s")], tenant="t", priority="P0")
    assert sent(entries, entries)[3] == [1, 0, 0, 1, 1, 1, 2, 2] * 2


@pytest.mark.parametrize("limit", [EVERY[2], EVERY[3], EVERY[4], EVERY[8]], ids=lambda limit: limit.name)
def test_a_window_keeps_its_time_to_live_while_it_lasts(limiter: SyncLimiter, raw: Any, limit: Limit) -> None:
    limiter.check("r", "s", limits=limit)
    (key,) = raw.keys("lf:*")
    expires = raw.pexpiretime(key)
    assert expires > 0
    for _ in range(3):
        limiter.check("r", "s", limits=limit)
        assert raw.pexpiretime(key) == expires
    limiter.reset("r", "s", limits=limit)
    limiter.check("r", "s", limits=limit)
    assert raw.pexpiretime(key) > 0


@pytest.mark.parametrize("limit", [2, 3, 5])
@pytest.mark.parametrize("align", ["clock", "first_hit"])
def test_a_window_that_begins_in_a_batch_has_a_ttl(redis_url: str, raw: Any, limit: int, align: Any) -> None:
    window = FixedWindow(name="w", limit=limit, window_seconds=3_600, align=align, count_denied=True)
    with SyncLimiter.connect(redis_url, options=PATIENT) as limiter:
        request = Request(resource="r", subject="s", limits=window)
        results = limiter.check_many([request] * 4)  # the compact encoding, or the long one where denials count
    assert [isinstance(result, Decision) and result.allowed for result in results] == [
        number < limit for number in range(4)
    ]
    (key,) = raw.keys("lf:*")
    assert 0 < raw.pttl(key) <= 3_660_000


@pytest.mark.parametrize(
    "limit",
    [
        FixedWindow(name="w", limit=5, window_seconds=3_600),
        Quota(name="q", limit=5, period="month"),
        TokenBucket(name="t", bucket_capacity=5, refill_rate_per_sec=0.001),
        SlidingWindowCounter(name="c", limit=5, window_seconds=3_600),
    ],
    ids=lambda limit: limit.algorithm,
)
def test_every_bucket_that_begins_or_continues_has_a_ttl(redis_url: str, raw: Any, limit: Limit) -> None:
    with SyncLimiter.connect(redis_url, options=PATIENT) as limiter:
        for left in (4, 3, 2):
            assert limiter.check("r", "s", limits=limit).remaining == left
            (key,) = raw.keys("lf:*")
            assert raw.pttl(key) > 60_000
