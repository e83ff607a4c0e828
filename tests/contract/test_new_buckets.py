"""The budget of new buckets per minute: beyond it, the new subjects of a tenant share one bucket per limit."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from limitforge import (
    Concurrency,
    Entry,
    FixedWindow,
    InvalidInput,
    LeakyBucket,
    Limits,
    ManualClock,
    Quota,
    Request,
    SlidingWindow,
    SlidingWindowCounter,
    StoreOptions,
    SyncLimiter,
    TokenBucket,
)
from limitforge.stores.memory.store import MemoryStore
from limitforge.stores.redis import core as core_module
from tests.contract.conftest import PATIENT, QUICK, STORES, empty_server, on_few_stores, open_limiter
from tests.servers import RedisServer
from tests.state_machines import run_machine

BUDGET = 20
BASE_US = 1_700_006_400_000_000
FIVE = Limits(FixedWindow(name="five", limit=5, window_seconds=3_600))
TENANT = "greedy"


@pytest.fixture(params=[s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in STORES])
def limiter(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[SyncLimiter]:
    """Yield a limiter on each store in turn, empty and with a small budget."""
    url = empty_server(request.param, request)
    limiter = open_limiter(request.param, url, clock, new_buckets_per_minute=BUDGET)
    yield limiter
    limiter.close()


def ask(limiter: SyncLimiter, subject: str, limits: Any = FIVE, **asked: Any) -> Any:
    return limiter.check(asked.pop("resource", "r"), subject, limits=limits, tenant=TENANT, **asked)


def use_up(limiter: SyncLimiter, limits: Any = FIVE) -> None:
    for number in range(BUDGET):
        assert not ask(limiter, f"known {number}", limits).overflow


def status(limiter: SyncLimiter) -> Any:
    inner: Any = limiter
    return getattr(inner, "_limiter", inner).status()


def test_beyond_the_budget_new_subjects_share_one_bucket(limiter: SyncLimiter) -> None:
    use_up(limiter)
    decisions = [ask(limiter, f"new {number}") for number in range(8)]
    assert all(decision.overflow for decision in decisions)
    assert [decision.allowed for decision in decisions] == [True] * 5 + [False] * 3
    assert [decision.remaining for decision in decisions] == [4, 3, 2, 1, 0, 0, 0, 0]


def test_a_known_subject_keeps_its_own_bucket(limiter: SyncLimiter) -> None:
    use_up(limiter)
    for _ in range(8):
        ask(limiter, "new")
    for number in range(BUDGET):
        decision = ask(limiter, f"known {number}")
        assert (decision.allowed, decision.overflow, decision.remaining) == (True, False, 3)


def test_other_tenants_are_not_affected(limiter: SyncLimiter) -> None:
    use_up(limiter)
    assert ask(limiter, "new").overflow
    for number in range(BUDGET):
        decision = limiter.check("r", f"new {number}", limits=FIVE, tenant="modest")
        assert (decision.allowed, decision.overflow, decision.remaining) == (True, False, 4)


def test_a_minute_later_it_may_begin_some_more(limiter: SyncLimiter, clock: ManualClock) -> None:
    use_up(limiter)
    assert ask(limiter, "new").overflow
    clock.advance_us(120_000_000)
    assert not ask(limiter, "new").overflow


def test_no_more_than_the_budget_begins_in_any_minute(limiter: SyncLimiter, clock: ManualClock) -> None:
    begun_at: list[int] = []
    for number in range(100):
        if not ask(limiter, f"s{number}").overflow:
            begun_at.append(clock.now_us())
        clock.advance_us(2_000_000)
    for start in begun_at:
        in_that_minute = [at for at in begun_at if start <= at < start + 60_000_000]
        assert len(in_that_minute) <= BUDGET + 2  # the counter is an estimate
    assert len(begun_at) > BUDGET


def test_a_window_that_has_ended_while_its_key_remains_is_known(limiter: SyncLimiter, clock: ManualClock) -> None:
    brief = Limits(FixedWindow(name="brief", limit=5, window_seconds=1))
    use_up(limiter, brief)
    clock.advance_us(5_000_000)
    for number in range(BUDGET):
        assert not ask(limiter, f"known {number}", brief).overflow
    assert ask(limiter, "new", brief).overflow


def test_each_limit_counts_and_each_has_an_overflow_bucket_of_its_own(limiter: SyncLimiter) -> None:
    both = Limits(
        FixedWindow(name="a", limit=3, window_seconds=3_600),
        SlidingWindowCounter(name="b", limit=100, window_seconds=3_600),
    )
    for number in range(BUDGET // 2):
        assert not ask(limiter, f"known {number}", both).overflow
    decisions = [ask(limiter, f"new {number}", both) for number in range(4)]
    assert [decision.allowed for decision in decisions] == [True, True, True, False]
    assert all(decision.overflow for decision in decisions)
    assert decisions[2].limits["b"].remaining == 97


def test_a_limit_of_which_the_subject_is_known_stays_its_own(limiter: SyncLimiter) -> None:
    use_up(limiter)
    joined = Limits(*FIVE, FixedWindow(name="more", limit=100, window_seconds=3_600))
    for number in range(4):
        decision = ask(limiter, f"known {number}", joined)
        assert decision.overflow
        assert decision.limits["five"].remaining == 3
        assert decision.limits["more"].remaining == 99 - number


@on_few_stores
@pytest.mark.parametrize("scope", ["caller", "resource"])
def test_callers_and_resources_are_bounded_too(limiter: SyncLimiter, scope: str) -> None:
    wide = Limits(FixedWindow(name="five", limit=5, window_seconds=3_600, scope=scope))  # type: ignore[arg-type]
    for number in range(BUDGET):
        assert not ask(limiter, f"s{number}", wide, resource=f"r{number}").overflow
    decisions = [ask(limiter, f"new {number}", wide, resource=f"new {number}") for number in range(7)]
    assert [decision.allowed for decision in decisions] == [True] * 5 + [False] * 2
    assert all(decision.overflow for decision in decisions)


def test_what_all_subjects_share_begins_in_any_case(limiter: SyncLimiter) -> None:
    use_up(limiter)
    shared = Limits(FixedWindow(name="all", limit=1_000, window_seconds=3_600, scope="tenant"))
    assert not ask(limiter, "new", shared).overflow
    assert ask(limiter, "newer", shared).remaining == 998


def test_a_denied_check_and_a_peek_begin_nothing(limiter: SyncLimiter) -> None:
    for number in range(3 * BUDGET):
        assert not ask(limiter, f"denied {number}", cost=6).allowed
        assert not ask(limiter, f"seen {number}", cost=0).overflow
    use_up(limiter)
    assert ask(limiter, "new", cost=0).overflow


def test_a_reset_of_a_known_subject_leaves_room_for_it(limiter: SyncLimiter) -> None:
    use_up(limiter)
    assert ask(limiter, "new").overflow
    limiter.reset("r", "known 0", limits=FIVE, tenant=TENANT)
    assert ask(limiter, "known 0").allowed


def test_overrides_still_apply(limiter: SyncLimiter) -> None:
    use_up(limiter)
    for subject, change in {"out": "blocked", "free": "unlimited", "more": {"limit": 50}}.items():
        limiter.set_override("r", subject, {"five": change}, limits=FIVE, ttl_seconds=600, tenant=TENANT)
    assert not ask(limiter, "out").allowed
    free = ask(limiter, "free")
    assert (free.allowed, free.overflow) == (True, False)  # an unlimited limit needs no bucket
    for _ in range(6):
        ask(limiter, "new")
    assert not ask(limiter, "new").allowed
    more = ask(limiter, "more")
    assert (more.allowed, more.overflow, more.limit, more.remaining) == (True, True, 50, 44)


def test_an_override_of_the_window_does_not_restart_the_shared_bucket(limiter: SyncLimiter) -> None:
    use_up(limiter)
    other = {"five": {"window_seconds": 7_200}}
    limiter.set_override("r", "odd", other, limits=FIVE, ttl_seconds=3_600, tenant=TENANT)
    admitted = sum(ask(limiter, subject).allowed for _ in range(20) for subject in ("odd", "new"))
    assert admitted == 5


@on_few_stores
@pytest.mark.parametrize(("kind", "rate"), [(TokenBucket, "refill_rate_per_sec"), (LeakyBucket, "leak_rate_per_sec")])
def test_an_override_of_the_rate_does_not_refill_the_shared_bucket(
    limiter: SyncLimiter, clock: ManualClock, kind: Any, rate: str
) -> None:
    slow = Limits(kind(name="slow", bucket_capacity=5, **{rate: 0.001}))
    use_up(limiter, slow)
    fast = {"slow": {"bucket_capacity": 1_000, rate: 1_000}}
    limiter.set_override("r", "fast", fast, limits=slow, ttl_seconds=3_600, tenant=TENANT)
    admitted = 0
    for number in range(50):
        ask(limiter, "fast", slow)
        clock.advance_us(100_000)
        admitted += ask(limiter, f"new {number}", slow).allowed
    assert 1 <= admitted <= 5


def test_leases_of_an_overflow_bucket_end_there(limiter: SyncLimiter) -> None:
    slots = Limits(Concurrency(name="slots", max_concurrent=2, lease_ttl_seconds=60))
    use_up(limiter)
    first, second, third = (ask(limiter, f"new {number}", slots) for number in range(3))
    assert (first.allowed, second.allowed, third.allowed) == (True, True, False)
    assert limiter.renew(first.lease_id)
    limiter.release(first.lease_id)
    assert not limiter.renew(first.lease_id)
    assert ask(limiter, "new 3", slots).allowed
    assert not ask(limiter, "new 4", slots).allowed


def test_reservations_of_an_overflow_bucket_are_settled_there(limiter: SyncLimiter) -> None:
    use_up(limiter)
    held = limiter.reserve("r", "new", limits=FIVE, cost=4, tenant=TENANT)
    assert held.overflow
    assert held.reservation_id
    assert not ask(limiter, "newer", cost=2).allowed
    assert limiter.settle(held.reservation_id, 1).outcome == "settled"
    assert ask(limiter, "newer", cost=4).allowed
    assert not ask(limiter, "newest").allowed


@on_few_stores
@pytest.mark.parametrize(
    "limit",
    [
        TokenBucket(name="l", bucket_capacity=5, refill_rate_per_sec="0.001"),
        SlidingWindow(name="l", limit=5, window_seconds=3_600),
        SlidingWindowCounter(name="l", limit=5, window_seconds=3_600),
        Quota(name="l", limit=5, period="year"),
        FixedWindow(name="l", limit=5, window_seconds=3_600, spread=True),
        FixedWindow(name="l", limit=5, window_seconds=3_600, align="first_hit"),
    ],
    ids=lambda limit: limit.algorithm,
)
def test_every_algorithm_can_overflow(limiter: SyncLimiter, limit: Any) -> None:
    use_up(limiter, limit)
    decisions = [ask(limiter, f"new {number}", limit) for number in range(7)]
    assert [decision.allowed for decision in decisions] == [True] * 5 + [False] * 2
    assert all(decision.overflow for decision in decisions)


def test_limits_of_one_name_and_other_numbers_do_not_share_an_overflow_bucket(limiter: SyncLimiter) -> None:
    """Two routes of a tenant: the generous limit must not refill or use up what the strict one counts."""
    strict = TokenBucket(bucket_capacity=5, refill_rate_per_sec="0.001")
    loose = TokenBucket(bucket_capacity=1_000, refill_rate_per_sec=1_000)
    use_up(limiter)
    admitted = 0
    for number in range(20):
        assert ask(limiter, f"a{number}", loose, resource="loose").allowed
        admitted += ask(limiter, f"b{number}", strict, resource="strict").allowed
    assert admitted == 5


def test_no_subject_moves_the_window_that_all_share(limiter: SyncLimiter, clock: ManualClock) -> None:
    spread = Limits(FixedWindow(name="w", limit=5, window_seconds=3_600, spread=True))
    admitted = 0
    for hour in range(4):
        for number in range(BUDGET):
            ask(limiter, f"known {hour} {number}", spread)
        admitted += sum(ask(limiter, f"new {hour} {number}", spread).allowed for number in range(10))
        clock.advance_us(3_600_000_000 - 1_000_000)
    assert admitted == 5 * 3  # two of the four hours are in one window


def test_two_entries_of_one_check_never_share_an_overflow_bucket(limiter: SyncLimiter) -> None:
    use_up(limiter)
    (limit,) = FIVE
    for turn in range(8):
        entries = [Entry(limit, "r", f"new {number}", 1) for number in range(3)]
        decision = limiter.check_entries(entries, tenant=TENANT)
        assert decision.allowed is (turn < 5)


def test_the_local_store_of_an_outage_enforces_the_budget_only_when_half_full() -> None:
    store = MemoryStore(max_keys=100, new_buckets_per_minute=5, budget_from=50)
    with SyncLimiter(store) as limiter:
        decisions = [ask(limiter, f"s{number}").overflow for number in range(60)]
    assert decisions == [False] * 50 + [True] * 10


@pytest.mark.parametrize(("fits_memory", "overflows"), [(True, True), (False, False)])
def test_a_budget_that_an_operator_set_holds_for_local_limits_as_it_is(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, *, fits_memory: bool, overflows: bool
) -> None:
    monkeypatch.setattr(core_module, "LOCAL_MAX_KEYS", 1_000)
    monkeypatch.setattr(core_module, "LOCAL_NEW_BUCKETS", 100)
    options = StoreOptions(
        deadline_ms=30_000, failure="raise", new_buckets_per_minute=1_000, cap_budget_by_memory=fits_memory
    )
    local = Limits(FixedWindow(name="local", limit=1, window_seconds=3_600, consistency="local"))
    with SyncLimiter.connect(redis_url, options=options) as limiter:
        requests = [Request(resource="r", subject=f"s{number}", limits=local, tenant=TENANT) for number in range(510)]
        decisions: list[Any] = limiter.check_many(requests)
    assert any(decision.overflow for decision in decisions) == overflows


def test_a_shadow_plan_overflows_by_itself(limiter: SyncLimiter) -> None:
    for number in range(BUDGET // 2):
        ask(limiter, f"known {number}", shadow=FIVE)
    decision = ask(limiter, "new", shadow=FIVE)
    assert decision.overflow
    assert decision.shadow is not None
    assert decision.shadow.overflow


def test_the_status_shows_the_budget_and_how_often_it_was_used_up(limiter: SyncLimiter) -> None:
    use_up(limiter)
    before = status(limiter)
    assert (before.new_buckets_per_minute, before.overflowed) == (BUDGET, 0)
    for number in range(3):
        ask(limiter, f"new {number}")
    assert status(limiter).overflowed == 3


def test_without_a_budget_any_number_begins(redis_url: str) -> None:
    for url in ("memory://", redis_url):
        with SyncLimiter.connect(url, options=PATIENT) as limiter:
            assert not any(ask(limiter, f"s{number}").overflow for number in range(200))
            assert limiter.status().new_buckets_per_minute is None


def test_a_known_subject_costs_the_budget_no_read(redis_url: str) -> None:
    raw: Any = redis_py.Redis.from_url(redis_url)
    with SyncLimiter.connect(
        redis_url, options=StoreOptions(new_buckets_per_minute=BUDGET, deadline_ms=30_000)
    ) as limiter:
        ask(limiter, "known")
        raw.config_resetstat()
        for _ in range(4):
            ask(limiter, "known")
        stats = raw.info("commandstats")
        assert stats["cmdstat_evalsha"]["calls"] == 4
        assert "cmdstat_get" not in stats
    raw.close()


def test_a_tenant_that_overflows_needs_one_call_the_next_time(redis_url: str) -> None:
    raw: Any = redis_py.Redis.from_url(redis_url)
    with SyncLimiter.connect(
        redis_url, options=StoreOptions(new_buckets_per_minute=BUDGET, deadline_ms=30_000)
    ) as limiter:
        use_up(limiter)
        raw.config_resetstat()
        for number in range(5):
            assert ask(limiter, f"new {number}").overflow
        assert raw.info("commandstats")["cmdstat_evalsha"]["calls"] == 6
    raw.close()


def test_many_tenants_that_overflow_together_take_one_more_call(redis_url: str) -> None:
    raw: Any = redis_py.Redis.from_url(redis_url)
    options = StoreOptions(new_buckets_per_minute=1, deadline_ms=30_000)
    with SyncLimiter.connect(redis_url, options=options) as limiter:

        def all_at_once(subject: str) -> list[Any]:
            asked = [Request(resource="r", subject=subject, limits=FIVE, tenant=f"t{number}") for number in range(60)]
            return limiter.check_many(asked)

        all_at_once("first")
        calls = []
        for again in range(5):  # sometimes a batch needs another call
            raw.config_resetstat()
            assert all(decision.overflow for decision in all_at_once(f"later {again}"))
            calls.append(raw.info("commandstats")["cmdstat_evalsha"]["calls"])
        assert min(calls) == 2, calls
    raw.close()


def test_a_counter_with_a_foreign_value_bounds_nothing(redis_url: str) -> None:
    raw: Any = redis_py.Redis.from_url(redis_url)
    raw.lpush("lf:{greedy}:b", "something else")
    with SyncLimiter.connect(
        redis_url, options=StoreOptions(new_buckets_per_minute=1, failure="raise", deadline_ms=30_000)
    ) as limiter:
        assert not any(ask(limiter, f"s{number}").overflow for number in range(5))
    raw.close()


@pytest.mark.parametrize("budget", [0, -1, "many", 1.5, True])
def test_an_invalid_budget_is_refused_by_its_name(budget: Any) -> None:
    with pytest.raises(InvalidInput, match="new_buckets_per_minute"):
        StoreOptions(new_buckets_per_minute=budget)


def test_prepaid_shares_begin_no_bucket_beyond_the_budget(redis_url: str) -> None:
    raw: Any = redis_py.Redis.from_url(redis_url)
    paid = Limits(FixedWindow(name="paid", limit=100_000, window_seconds=86_400, consistency="prepaid"))
    options = StoreOptions(new_buckets_per_minute=BUDGET, sync_interval_ms=10, deadline_ms=30_000)
    with SyncLimiter.connect(redis_url, options=options) as limiter:
        use_up(limiter)
        for _ in range(50):
            for number in range(30):
                ask(limiter, f"new {number}", paid)
    assert not list(raw.scan_iter("lf:{greedy}:sp:*paid*"))
    assert len(list(raw.scan_iter("lf:{greedy}:wp*paid*"))) == 1
    raw.close()


# A greedy tenant beside a modest one, compared with a model that counts by itself.


class GreedyTenant(RuleBasedStateMachine):
    """Two tenants begin buckets, return and wait. The model knows which of them may begin another one."""

    server: RedisServer
    store = "redis"

    def __init__(self) -> None:
        super().__init__()
        self.server.flush()
        self.clock = ManualClock(BASE_US)
        url = "memory://" if self.store == "memory" else self.server.url
        self.limiter = open_limiter(self.store, url, self.clock, new_buckets_per_minute=BUDGET)
        self.begun: dict[str, list[int]] = {"greedy": [], "modest": []}
        self.known: dict[str, int] = {}
        self.window = 0
        self.shared: Counter[str] = Counter()
        self.subjects = 0

    def teardown(self) -> None:
        self.limiter.close()

    def left(self, tenant: str) -> int:
        minute, now = 60_000_000, self.clock.now_us()
        ages = Counter(now // minute - at // minute for at in self.begun[tenant])
        return BUDGET - ages[1] * (minute - now % minute) // minute - ages[0]

    def check(self, tenant: str, subject: str) -> None:
        window = self.clock.now_us() // 3_600_000_000
        if window != self.window:
            self.window, self.shared = window, Counter()
            self.known = dict.fromkeys(self.known, 0)
        may_begin, is_known = self.left(tenant) > 0, subject in self.known
        decision = self.limiter.check("r", subject, limits=FIVE, tenant=tenant)
        assert decision.overflow is not (is_known or may_begin)
        counted, name = (self.shared, tenant) if decision.overflow else (self.known, subject)
        used = counted.get(name, 0)
        assert decision.allowed is (used < 5)
        assert decision.remaining == max(5 - used - 1, 0)
        counted[name] = min(used + 1, 5)
        if not is_known and not decision.overflow:
            self.begun[tenant].append(self.clock.now_us())

    @rule(tenant=st.sampled_from(["greedy", "greedy", "greedy", "modest"]), times=st.integers(1, 30))
    def new_subjects_come(self, tenant: str, times: int) -> None:
        for _ in range(times):
            self.subjects += 1
            self.check(tenant, f"{tenant} {self.subjects}")

    @precondition(lambda self: self.known)
    @rule(data=st.data(), times=st.integers(1, 6))
    def a_known_subject_comes_back(self, data: st.DataObject, times: int) -> None:
        subject = data.draw(st.sampled_from(sorted(self.known)))
        for _ in range(times):
            self.check(subject.partition(" ")[0], subject)

    @rule(seconds=st.sampled_from([0.5, 3, 20, 60, 61, 130]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance_us(int(seconds * 1e6))


@pytest.mark.parametrize("store", ["memory", "redis", pytest.param("coalesced", marks=pytest.mark.slow)])
def test_a_greedy_tenant_keeps_to_its_budget_and_affects_no_other(redis_server: RedisServer, store: str) -> None:
    run_machine(type("GreedyTenant", (GreedyTenant,), {"server": redis_server, "store": store}), 5, 1)


@pytest.mark.soak
@pytest.mark.parametrize("store", ["memory", "redis", "coalesced"])
def test_a_greedy_tenant_in_ever_new_traces(redis_server: RedisServer, store: str) -> None:
    run_machine(type("GreedyTenant", (GreedyTenant,), {"server": redis_server, "store": store}), 500, None)


# The experiment: one tenant fills Redis, then new subjects of another tenant arrive.

SUBJECTS = 12


def flood(limiter: SyncLimiter, count: int) -> None:
    day, hour = (FixedWindow(limit=5, window_seconds=seconds, align="first_hit") for seconds in (86_400, 3_600))
    both = Limits(day, hour)  # neither window ends while a slow machine is still busy
    for start in range(0, count, 1_000):
        subjects = (f"subject {number}" for number in range(start, start + 1_000))
        limiter.check_many([Request(resource="r", subject=s, limits=both, tenant=TENANT) for s in subjects])


def after_the_flood(limiter: SyncLimiter, **asked: Any) -> list[Any]:
    return [limiter.check("r", f"honest {number}", limits=FIVE, tenant="modest", **asked) for number in range(SUBJECTS)]


@pytest.fixture
def small_redis() -> Iterator[RedisServer]:
    with RedisServer("--maxmemory", "6mb", "--maxmemory-policy", "noeviction") as server:
        yield server


def test_a_tenant_can_not_fill_redis_within_its_budget(small_redis: RedisServer) -> None:
    options = StoreOptions(deadline_ms=30_000, new_buckets_per_minute=5_000)
    with SyncLimiter.connect(small_redis.url, options=options) as limiter:
        flood(limiter, 30_000)
        assert limiter.status().overflowed >= 20_000  # all but 2,500 per minute of the test
        decisions = after_the_flood(limiter)
    assert [(decision.allowed, decision.degraded, decision.remaining) for decision in decisions] == [
        (True, None, 4)
    ] * 12


def test_a_full_redis_decides_new_subjects_locally_unless_a_policy_says_otherwise(small_redis: RedisServer) -> None:
    with SyncLimiter.connect(small_redis.url, options=StoreOptions(deadline_ms=30_000)) as limiter:
        flood(limiter, 1_000)
        small_redis.command_ok("CONFIG SET maxmemory 1")  # stays full when the buffers of the flood are freed
        decisions = after_the_flood(limiter)
        assert {decision.degraded for decision in decisions} == {"local"}
        again = [limiter.check("r", "honest 0", limits=FIVE, tenant="modest").allowed for _ in range(6)]
        assert again == [True] * 4 + [False] * 2
        for failure in ("open", "closed"):
            assert {decision.degraded for decision in after_the_flood(limiter, failure=failure)} == {failure}
