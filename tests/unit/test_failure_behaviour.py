"""Decisions without the store: failure behaviour, ids of leases and reservations, and the part of each process."""

import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitforge import (
    Concurrency,
    Decision,
    FixedWindow,
    LeakyBucket,
    Limit,
    Limiter,
    LimitforgeError,
    Limits,
    ManualClock,
    Quota,
    SlidingWindow,
    SlidingWindowCounter,
    StoreOptions,
    StoreUnavailable,
    SyncLimiter,
    TokenBucket,
    TooManyReservations,
)
from limitforge.core.check import FailureName
from limitforge.core.handles import Lease, decode_handle, encode_handle
from limitforge.stores.memory.store import MemoryStore
from limitforge.stores.resilience import failure as resilience_module
from tests.contract.conftest import BlockingLimiter
from tests.contract.strategies import NAMES, PRIORITIES, SUBJECTS, costs, limits
from tests.unit.unavailable_store import OutageLimiter, UnavailableStore

TEN = FixedWindow(name="ten", limit=10, window_seconds=3_600)
ONE = FixedWindow(name="one", limit=1, window_seconds=3_600)
SLOTS = Concurrency(name="slots", max_concurrent=8, lease_ttl_seconds=30)

Build = Callable[..., OutageLimiter]
each_kind = pytest.mark.parametrize("kind", ["open", "closed", "local"])


@pytest.fixture
def start_process(monkeypatch: pytest.MonkeyPatch) -> Build:
    return lambda **options: OutageLimiter(monkeypatch, **options)


# -- the three behaviours


def test_open_lets_pass_and_knows_nothing(start_process: Build) -> None:
    assert start_process(failure="open").check([TEN, ONE], cost=11) == Decision(
        allowed=True,
        limit=None,
        remaining=None,
        reset_after_ms=None,
        reset_at=None,
        retry_after_ms=0,
        delay_ms=None,
        limits={},
        binding=None,
        degraded="open",
    )


def test_closed_denies_and_knows_nothing(start_process: Build) -> None:
    assert start_process(failure="closed").check([TEN, ONE]) == Decision(
        allowed=False,
        limit=None,
        remaining=None,
        reset_after_ms=None,
        reset_at=None,
        retry_after_ms=1_000,
        delay_ms=None,
        limits={},
        binding=None,
        degraded="closed",
    )


def test_closed_reports_when_the_store_is_called_again(start_process: Build) -> None:
    process = start_process(failure="closed", breaker_seconds=7)
    process.fail(3)
    assert process.check(TEN).retry_after_ms == 7_000
    process.monotonic.advance_us(2_500_001)
    assert process.check(TEN).retry_after_ms == 4_500
    process.monotonic.advance_us(10_000_000)
    assert process.check(TEN).retry_after_ms == 1_000  # retry soon: another caller probes now


def test_local_counts_in_this_process(start_process: Build) -> None:
    process = start_process(failure="local")
    decisions = [process.check([TEN, ONE]) for _ in range(2)]
    assert [decision.allowed for decision in decisions] == [True, False]
    assert [decision.degraded for decision in decisions] == ["local", "local"]
    assert decisions[1].binding == "one"
    assert decisions[1].retry_after_ms == 3_600_000
    assert process.check(TEN).remaining == 8
    assert process.check(TEN, "another").remaining == 9


def test_local_denies_what_does_not_even_fit_into_this_process(
    start_process: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resilience_module, "LOCAL_MAX_KEYS", 1)
    process = start_process(failure="local")
    assert process.check(SLOTS).degraded == "local"
    refused = process.check(SLOTS, "another")
    assert (refused.allowed, refused.degraded) == (False, "closed")


def test_an_error_of_the_check_itself_is_the_same_as_with_the_store(
    start_process: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limitforge.core.evaluate.MAX_PENDING", 2)
    process = start_process(failure="local")
    for _ in range(2):
        assert process.limiter.reserve("r", "s", limits=TEN, cost=1).allowed
    with pytest.raises(TooManyReservations):
        process.limiter.reserve("r", "s", limits=TEN, cost=1)


@each_kind
def test_what_a_check_says_beats_what_the_store_says(start_process: Build, kind: FailureName) -> None:
    others: list[FailureName] = ["open", "closed", "local", "raise"]
    for other in others:
        assert start_process(failure=other).check(TEN, failure=kind).degraded == kind


def test_raise_leaves_it_to_the_caller_and_counts_nothing(start_process: Build) -> None:
    process = start_process(failure="raise")
    with pytest.raises(StoreUnavailable, match="connection refused"):
        process.check(TEN)
    with pytest.raises(StoreUnavailable):
        start_process(failure="open").check(TEN, failure="raise")
    assert process.resilience.degraded == {"open": 0, "closed": 0, "local": 0}
    assert process.resilience.is_healthy


@each_kind
def test_a_peek_is_always_allowed(start_process: Build, kind: FailureName) -> None:
    process = start_process(failure=kind)
    for _ in range(3):
        look = process.check([ONE, FixedWindow(name="blocked", limit=0, window_seconds=1)], cost=0)
        assert (look.allowed, look.retry_after_ms, look.degraded) == (True, 0, kind)
        process.check(ONE)


def test_a_check_with_any_cost_is_not_a_peek(start_process: Build) -> None:
    assert not start_process(failure="closed").check([TEN, ONE], cost=0, costs={"one": 1}).allowed


@each_kind
def test_checks_are_counted_by_kind(start_process: Build, kind: FailureName) -> None:
    process = start_process(failure=kind)
    for _ in range(5):
        process.check(ONE)
    assert process.resilience.degraded == {"open": 0, "closed": 0, "local": 0} | {kind: 5}


# -- ids


@pytest.fixture
def nowhere() -> Iterator[str]:
    """Return a URL at which every connection is refused: the port is bound, but does not listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{taken.getsockname()[1]}/0"


@pytest.fixture(params=["sync", "async"])
def alone(request: pytest.FixtureRequest, nowhere: str, clock: ManualClock) -> Iterator[Callable[..., SyncLimiter]]:
    """Return real sync and async limiters without a Redis."""
    opened: list[SyncLimiter] = []

    def connect(**options: Any) -> SyncLimiter:
        chosen = StoreOptions(**options)
        if request.param == "sync":
            opened.append(SyncLimiter.connect(nowhere, clock=clock, options=chosen))
        else:
            opened.append(cast("SyncLimiter", BlockingLimiter(Limiter.connect(nowhere, clock=clock, options=chosen))))
        return opened[-1]

    yield connect
    for limiter in opened:
        limiter.close()


@pytest.mark.parametrize("failures", [1, 9], ids=["asked", "breaker open"])
def test_a_lease_that_holds_nothing_is_released_and_renewed_without_the_store(
    alone: Callable[..., SyncLimiter], failures: int
) -> None:
    limiter = alone(failure="open", denial_cache_ms=0)
    held = [limiter.check("r", "s", limits=SLOTS) for _ in range(failures)][-1]
    assert held.lease_id
    assert decode_handle("lease_id", Lease, held.lease_id, "lf").keys == []
    assert limiter.renew(held.lease_id)
    limiter.release(held.lease_id)
    limiter.release(held.lease_id)
    somewhere = encode_handle(Lease(b"12345678", [b"lf:{t}:slots"]))
    for ask in (limiter.renew, limiter.release):  # a lease that holds slots can't be
        with pytest.raises(StoreUnavailable):
            ask(somewhere)


def test_a_reservation_that_holds_nothing_is_settled_like_any(alone: Callable[..., SyncLimiter]) -> None:
    limiter = alone(failure="open", denial_cache_ms=0)
    held = limiter.reserve("r", "s", limits=[TEN, ONE], cost=1)
    assert held.reservation_id
    for _ in range(2):
        settled = limiter.settle(held.reservation_id, 3, costs={"ten": 2})
        assert (settled.outcome, settled.cost) == ("settled", 3)


def test_slots_that_are_held_here_count_here_until_they_are_released(alone: Callable[..., SyncLimiter]) -> None:
    limiter = alone(failure="local", processes=4)
    held = limiter.check("r", "s", limits=SLOTS, cost=2)
    assert held.lease_id
    assert not limiter.check("r", "s", limits=SLOTS).allowed
    assert limiter.renew(held.lease_id)
    limiter.release(held.lease_id)
    limiter.release(held.lease_id)
    assert not limiter.renew(held.lease_id)
    assert limiter.check("r", "s", limits=SLOTS, cost=2).allowed


def test_a_slot_that_is_held_here_goes_stale_unless_it_is_renewed(
    alone: Callable[..., SyncLimiter], clock: ManualClock
) -> None:
    limiter = alone(failure="local", processes=8)
    held = limiter.check("r", "s", limits=SLOTS)
    clock.advance_us(29_000_000)
    assert limiter.renew(held.lease_id or "")
    clock.advance_us(29_000_000)
    assert not limiter.check("r", "s", limits=SLOTS).allowed
    clock.advance_us(1_000_000)
    assert limiter.check("r", "s", limits=SLOTS).allowed


def test_what_is_reserved_here_is_settled_here_and_once(alone: Callable[..., SyncLimiter]) -> None:
    limiter = alone(failure="local")
    held = limiter.reserve("r", "s", limits=TEN, cost=8)
    assert held.reservation_id
    assert held.remaining == 2
    for cost in (3, 5):
        assert limiter.settle(held.reservation_id, cost).cost == 3
    assert limiter.check("r", "s", limits=TEN, cost=0).remaining == 7


@pytest.mark.parametrize("kind", ["closed", "local"])
def test_a_denied_check_holds_nothing(start_process: Build, kind: FailureName) -> None:
    denied = start_process(failure=kind).limiter.reserve("r", "s", limits=[SLOTS, TEN], cost=11)
    assert (denied.allowed, denied.lease_id, denied.reservation_id) == (False, None, None)


@each_kind
def test_a_peek_holds_nothing_as_with_the_store(start_process: Build, kind: FailureName) -> None:
    assert start_process(failure=kind).check([SLOTS, TEN], cost=0).lease_id is None


# -- the part of this process

EVERY = [
    TEN,
    FixedWindow(name="spread", limit=10, window_seconds=60, spread=True),
    FixedWindow(name="first", limit=10, window_seconds=60, align="first_hit"),
    TokenBucket(name="bucket", bucket_capacity=10, refill_rate_per_sec=1),
    LeakyBucket(name="leaky", bucket_capacity=10, leak_rate_per_sec=1),
    SlidingWindow(name="log", limit=10, window_seconds=60),
    SlidingWindowCounter(name="counter", limit=10, window_seconds=60),
    Concurrency(name="slots", max_concurrent=10, lease_ttl_seconds=60),
    Quota(name="quota", limit=10, period="month", time_zone="Europe/Berlin", anchor_day=31),
]
every_algorithm = pytest.mark.parametrize("limit", EVERY, ids=lambda limit: limit.name)


@every_algorithm
@pytest.mark.parametrize(("processes", "share"), [(1, 10), (3, 3), (4, 2), (10, 1), (11, 1), (1_000, 1)])
def test_a_process_admits_its_part_of_every_limit_and_at_least_one(
    start_process: Build, limit: Limit, processes: int, share: int
) -> None:
    process = start_process(failure="local", processes=processes)
    decisions = [process.check(limit) for _ in range(share + 2)]
    assert [decision.allowed for decision in decisions] == [True] * share + [False] * 2
    assert [decision.remaining for decision in decisions] == [*range(share - 1, -1, -1), 0, 0]


@every_algorithm
def test_the_whole_limit_is_reported(start_process: Build, limit: Limit) -> None:
    process = start_process(failure="local", processes=4)
    for _ in range(4):
        decision = process.check(limit)
        assert decision.limit == 10
        assert decision.limits[limit.name].limit == 10


@every_algorithm
def test_the_reported_wait_is_enough_and_needed(start_process: Build, limit: Limit) -> None:
    process = start_process(failure="local", processes=4)
    for _ in range(2):
        process.check(limit)
    wait_us = (process.check(limit, cost=2).retry_after_ms or 0) * 1_000
    assert wait_us > 0
    process.clock.advance_us(wait_us - 1_000)
    assert not process.check(limit, cost=2).allowed
    process.clock.advance_us(1_000)
    assert process.check(limit, cost=2).allowed


def test_rates_are_divided_too(start_process: Build) -> None:
    process = start_process(failure="local", processes=4)
    bucket = TokenBucket(name="bucket", bucket_capacity=40, refill_rate_per_sec=1)
    leaky = LeakyBucket(name="leaky", bucket_capacity=40, leak_rate_per_sec=1)
    for limit in (bucket, leaky):
        assert process.check(limit, cost=10).reset_after_ms == 40_000
        assert process.check(limit, cost=3).retry_after_ms == 12_000
    process.clock.advance_us(4_000_000)
    assert process.check(leaky).delay_ms == 36_000


def test_a_priority_share_applies_to_the_part_of_the_process(start_process: Build) -> None:
    process = start_process(failure="local", processes=2)
    shared = FixedWindow(name="shared", limit=20, window_seconds=60, shares={"P3": 50})
    assert sum(process.check(shared, priority="P3").allowed for _ in range(20)) == 5
    assert sum(process.check(shared).allowed for _ in range(20)) == 5


def test_a_priority_with_a_share_has_at_least_one_of_the_part_of_a_process(start_process: Build) -> None:
    process = start_process(failure="local", processes=10)
    shared = FixedWindow(name="shared", limit=10, window_seconds=60, shares={"P2": 50, "P3": 0})
    assert sum(process.check(shared, priority="P2").allowed for _ in range(3)) == 1
    assert not start_process(failure="local", processes=10).check(shared, priority="P3").allowed


@pytest.mark.parametrize("processes", [1, 4])
def test_blocked_and_unlimited_stay_what_they_are(start_process: Build, processes: int) -> None:
    process = start_process(failure="local", processes=processes)
    blocked = process.check(FixedWindow(name="blocked", limit=0, window_seconds=60))
    assert (blocked.allowed, blocked.limit, blocked.retry_after_ms) == (False, 0, None)
    free = process.check(FixedWindow(name="free", limit=None, window_seconds=60), cost=10**9)
    assert (free.allowed, free.limit, free.limits["free"].limit) == (True, None, None)


def test_a_cost_above_the_part_of_this_process_may_retry_when_the_store_is_back(start_process: Build) -> None:
    process = start_process(failure="local", processes=4, breaker_seconds=7)
    assert process.check(TEN, cost=3).retry_after_ms == 1_000
    process.fail(3)
    denied = process.check(TEN, cost=10)
    assert (denied.allowed, denied.binding, denied.retry_after_ms) == (False, "ten", 7_000)
    assert denied.limits["ten"].retry_after_ms == 7_000


@pytest.mark.parametrize("processes", [1, 4])
def test_no_wait_is_reported_for_a_cost_above_the_whole_limit(start_process: Build, processes: int) -> None:
    denied = start_process(failure="local", processes=processes).check(TEN, cost=11)
    assert denied.retry_after_ms is None
    assert denied.limits["ten"].retry_after_ms is None


def test_overrides_are_not_known_here(start_process: Build) -> None:
    process = start_process(failure="local")
    process.limiter.set_override("r", "s", {"one": "unlimited"}, limits=ONE, ttl_seconds=60)
    assert [process.check(ONE).allowed for _ in range(2)] == [True, False]


WHOLES = [limit for limit in EVERY if limit.name != "counter"]


@given(
    limit=st.sampled_from(WHOLES),
    processes=st.integers(1, 10),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.sampled_from([0, 0, 0, 1, 999_983, 7_000_000]))),
)
def test_all_processes_together_admit_only_what_one_limiter_would(
    limit: Limit, processes: int, steps: list[tuple[int, int, int]]
) -> None:
    clock = ManualClock()
    fleet = [SyncLimiter(UnavailableStore(clock, failure="local", processes=processes)) for _ in range(processes)]
    whole = SyncLimiter(MemoryStore(clock=clock))
    for at, cost, by_us in steps:
        clock.advance_us(by_us)
        if fleet[at % processes].check("r", "s", limits=limit, cost=cost).allowed:
            assert whole.check("r", "s", limits=limit, cost=cost).allowed


@given(
    processes=st.integers(1, 10), steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9_000_000)), max_size=100)
)
def test_all_processes_together_keep_to_the_count_of_each_window(processes: int, steps: list[tuple[int, int]]) -> None:
    """A sum of estimates is rounded down more often than the estimate of a sum, so compare fixed windows."""
    clock = ManualClock()
    counter = SlidingWindowCounter(name="counter", limit=10, window_seconds=60)
    fleet = [SyncLimiter(UnavailableStore(clock, failure="local", processes=processes)) for _ in range(processes)]
    admitted: dict[int, int] = {}
    for at, by_us in steps:
        clock.advance_us(by_us)
        if fleet[at % processes].check("r", "s", limits=counter).allowed:
            window = clock.now_us() // 60_000_000
            admitted[window] = admitted.get(window, 0) + 1
    assert max(admitted.values(), default=0) <= 10


# -- a single process decides like a memory store


def comparable(answer: object) -> object:
    if isinstance(answer, LimitforgeError):
        return type(answer)
    if isinstance(answer, Decision):
        return msgspec.structs.replace(answer, degraded=None, lease_id=None, reservation_id=None)
    return answer


@given(
    plan=st.tuples(*(limits(name=name) for name in NAMES)),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["check", "check", "check", "reserve", "settle", "release", "renew"]),
            st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
            st.sampled_from(SUBJECTS),
            costs(),
            st.sampled_from(PRIORITIES),
            st.sampled_from([0, 0, 1, 333_333, 10_000_000, 3_600_000_000]),
        ),
        max_size=40,
    ),
)
def test_a_single_process_decides_as_a_memory_store_does(
    plan: tuple[Limit, ...], steps: list[tuple[str, list[str], str, int, str, int]]
) -> None:
    clock = ManualClock()
    pair = [SyncLimiter(UnavailableStore(clock, failure="local")), SyncLimiter(MemoryStore(clock=clock))]
    by_name = {limit.name: limit for limit in plan}
    ids: list[list[Any]] = [["", ""]]
    for kind, names, subject, cost, priority, by_us in steps:
        clock.advance_us(by_us)
        chosen = Limits(*(by_name[name] for name in names))
        answers: list[Any] = []
        for limiter, known in zip(pair, ids[-1], strict=True):
            try:
                if kind == "check":
                    answers.append(limiter.check("r", subject, limits=chosen, cost=cost, priority=priority))
                elif kind == "reserve":
                    answers.append(limiter.reserve("r", subject, limits=chosen, cost=cost, priority=priority))
                elif kind == "settle":
                    answers.append(limiter.settle(known, cost))
                else:
                    answers.append(getattr(limiter, kind)(known))
            except LimitforgeError as error:
                answers.append(error)
        assert comparable(answers[0]) == comparable(answers[1])
        given_out = [
            getattr(answer, "encode_reservation_id", None) or getattr(answer, "lease_id", None) for answer in answers
        ]
        assert bool(given_out[0]) == bool(given_out[1])
        if given_out[0]:
            ids.append(given_out)
