"""Statistics of an outage: few log lines, sums of what was admitted, and charges that are sent once."""

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest

from limitforge import (
    FixedWindow,
    InvalidLimit,
    LeakyBucket,
    Limit,
    Limits,
    Quota,
    SlidingWindow,
    SlidingWindowCounter,
    StoreOptions,
    StoreUnavailable,
    SyncLimiter,
    TokenBucket,
    limit_from_fields,
)
from limitforge.core.check import Check, FailureName, build_charge, build_check
from limitforge.core.keys import Keys
from limitforge.stores.errors import NotServerFault, StoreFull
from limitforge.stores.memory.store import MemoryStore
from limitforge.stores.redis.core import RedisCore
from limitforge.stores.resilience import outage as outage_module
from tests.unit.unavailable_store import TIMED_OUT, OutageLimiter, used

DAY = 86_400
SECOND_US = 1_000_000
PLAIN = FixedWindow(name="plain", limit=100, window_seconds=DAY)
CHARGED = FixedWindow(name="charged", limit=100, window_seconds=DAY, charge_after_outage=True)

Build = Callable[..., OutageLimiter]
admitting = pytest.mark.parametrize("kind", ["open", "local"])


@pytest.fixture
def start_process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Build:
    caplog.set_level(logging.DEBUG, "limitforge")
    return lambda **options: OutageLimiter(monkeypatch, **options)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("limitforge")]


def costs_of(charges: list[Check]) -> dict[str, int]:
    return {key: cost for charge in charges for _, key, cost, *_ in charge.debits}


# -- log lines


def test_thousands_of_checks_without_the_store_make_few_lines(
    start_process: Build, caplog: pytest.LogCaptureFixture
) -> None:
    process = start_process(failure="open")
    for _ in range(5_000):  # in 25 seconds
        process.check(PLAIN)
        process.monotonic.advance_us(5_000)
    assert lines(caplog) == [
        f"store.unavailable: checks are decided without the server server=store {fields}"
        for fields in (
            'decisions="open 1" error="connection refused"',
            'decisions="open 2001" error="connection refused"',
            'decisions="open 4001" error="connection refused"',
        )
    ]


def test_the_line_counts_each_failure_behaviour(start_process: Build, caplog: pytest.LogCaptureFixture) -> None:
    process = start_process(failure="open")
    kinds: list[FailureName] = ["open", "closed", "local", "local"]
    for kind in kinds:
        process.check(PLAIN, failure=kind)
    process.monotonic.advance_us(10 * SECOND_US)
    process.check(PLAIN)
    assert 'decisions="open 2, closed 1, local 2"' in lines(caplog)[-1]


def test_an_open_breaker_is_logged_once(start_process: Build, caplog: pytest.LogCaptureFixture) -> None:
    process = start_process(breaker_failures=3, breaker_seconds=30)
    process.fail(10)
    (line,) = lines(caplog)
    assert line == (
        "store.breaker_open: circuit breaker open, the server is not called until the next probe "
        'server=store retry_in_s=30 error="connection refused"'
    )
    assert process.resilience.state == "open"
    assert not process.resilience.allows_call()


def test_an_error_that_is_not_the_servers_fault_is_not_counted(
    start_process: Build, caplog: pytest.LogCaptureFixture
) -> None:
    process = start_process()
    for _ in range(10):
        assert not process.resilience.record_failure(NotServerFault("too many wait"), process.resilience.now_us())
    assert process.resilience.is_healthy
    assert lines(caplog) == []


def test_calls_that_were_in_flight_together_count_as_one_failure(start_process: Build) -> None:
    process = start_process()
    began_us = process.resilience.now_us()
    process.monotonic.advance_us(50_000)
    for _ in range(10):
        process.resilience.record_failure(TIMED_OUT, began_us)
    assert process.resilience.state == "closed"
    process.fail(2)
    assert process.resilience.state == "open"


def test_no_line_names_a_subject(start_process: Build, caplog: pytest.LogCaptureFixture) -> None:
    process = start_process(failure="open")
    for kind in ("open", "closed", "local"):
        process.check([PLAIN, CHARGED], "jane@example.com", tenant="secret-tenant", failure=kind)
    process.fail(3)
    process.resilience.record_success()
    assert len(lines(caplog)) == 3
    assert not any("jane" in line or "secret" in line for line in lines(caplog))


def test_no_line_names_a_password(caplog: pytest.LogCaptureFixture) -> None:
    with SyncLimiter.connect("redis://someone:hunter2@127.0.0.1:1/0") as limiter:
        for _ in range(5):
            assert limiter.check("r", "jane@example.com", limits=PLAIN).degraded == "open"
    assert len(lines(caplog)) == 3  # unavailable, breaker open, closed unavailable
    assert not any("hunter2" in line or "jane" in line for line in lines(caplog))


# -- sums


def test_admitted_costs_are_summed_by_limit_when_the_server_is_back(
    start_process: Build, caplog: pytest.LogCaptureFixture
) -> None:
    process = start_process(failure="open")
    process.check([PLAIN, CHARGED], cost=3)
    process.check(PLAIN, "another", cost=4)
    process.check(PLAIN, cost=0)
    process.check(PLAIN, failure="closed")
    process.store.error = TIMED_OUT
    process.check(CHARGED, cost=5)
    process.monotonic.advance_us(12 * SECOND_US)
    process.resilience.record_success()
    (line,) = [line for line in lines(caplog) if line.startswith("store.available:")]
    assert line == (
        "store.available: the server replies again and receives the pending charges server=store seconds=12 "
        'decisions="open 4, closed 1" admitted="plain 7, charged 8" charged_cost=3 charged_buckets=1 '
        "maybe_counted=1 unrecorded_cost=0"
    )


def test_local_sums_only_admitted_costs(start_process: Build, caplog: pytest.LogCaptureFixture) -> None:
    process = start_process(failure="local", processes=10)
    watched = replace(PLAIN, name="watched", limit=40, mode="monitor")
    for _ in range(20):
        process.check([PLAIN, watched])
    process.resilience.record_success()
    assert 'decisions="local 20" admitted="plain 10, watched 4"' in lines(caplog)[-1]


def test_admitted_costs_are_summed_if_the_server_never_came_back(
    start_process: Build, caplog: pytest.LogCaptureFixture
) -> None:
    process = start_process(failure="open")
    process.check(PLAIN, cost=3)
    caplog.clear()
    for _ in range(2):
        process.resilience.close()
    (line,) = lines(caplog)
    assert line.startswith("store.closed_unavailable: ")
    assert 'seconds=0 decisions="open 1" admitted="plain 3"' in line


def test_nothing_is_logged_of_a_store_without_degraded_checks(
    start_process: Build, caplog: pytest.LogCaptureFixture
) -> None:
    process = start_process()
    assert process.resilience.record_success() == []
    process.fail(1)
    assert not process.resilience.is_healthy
    assert process.resilience.record_success() == []
    assert process.resilience.is_healthy
    assert lines(caplog) == []


def test_the_state_of_the_breaker_has_its_time(start_process: Build) -> None:
    process = start_process()
    assert (process.resilience.state, process.resilience.since) == ("closed", None)
    process.fail(3)
    opened = process.resilience.since
    assert opened is not None
    process.monotonic.advance_us(30 * SECOND_US)
    assert process.resilience.allows_call()
    assert process.resilience.state == "half-open"
    assert not process.resilience.allows_call()
    process.resilience.record_success()
    assert process.resilience.state == "closed"
    assert (process.resilience.since or 0) >= opened


def test_charges_of_single_lost_calls_are_sent_together(start_process: Build, caplog: pytest.LogCaptureFixture) -> None:
    process = start_process(failure="open")
    charges: list[Check] = []
    for _ in range(100):
        process.check(CHARGED)
        charges += process.resilience.record_success()
        process.monotonic.advance_us(SECOND_US)
    process.monotonic.advance_us(10 * SECOND_US)
    charges += process.resilience.record_success()
    assert sum(cost for charge in charges for _, _, cost, *_ in charge.debits) == 100
    assert len([line for line in lines(caplog) if line.startswith("store.available:")]) <= 12


def test_charges_are_sent_at_once_when_the_breaker_closes(start_process: Build) -> None:
    process = start_process(failure="open")
    for _ in range(3):
        process.check(CHARGED)
        process.fail(3)
        assert costs_of(process.resilience.record_success())


def test_too_many_limit_names_are_summed_together(
    start_process: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outage_module, "MAX_NAMES", 2)
    process = start_process(failure="open")
    for name in "abcda":
        process.check(replace(PLAIN, name=name))
    process.resilience.record_success()
    assert 'admitted="a 2, b 1, (other limits) 2"' in lines(caplog)[-1]


# -- charges


@admitting
def test_what_was_admitted_is_charged_once(start_process: Build, kind: FailureName) -> None:
    process = start_process(failure=kind)
    for cost in (1, 2, 3):
        assert process.check([CHARGED, PLAIN], cost=cost).allowed
    back = process.store_after_charges()
    assert used(back, CHARGED) == 6
    assert used(back, PLAIN) == 0
    assert process.resilience.record_success() == []


EVERY: list[Limit] = [
    CHARGED,
    FixedWindow(name="spread", limit=100, window_seconds=DAY, spread=True, charge_after_outage=True),
    FixedWindow(name="first", limit=100, window_seconds=DAY, align="first_hit", charge_after_outage=True),
    TokenBucket(name="bucket", bucket_capacity=100, refill_rate_per_sec=1, charge_after_outage=True),
    LeakyBucket(name="leaky", bucket_capacity=100, leak_rate_per_sec=1, charge_after_outage=True),
    SlidingWindow(name="log", limit=100, window_seconds=DAY, charge_after_outage=True),
    SlidingWindowCounter(name="counter", limit=100, window_seconds=DAY, charge_after_outage=True),
    Quota(name="quota", limit=100, period="month", charge_after_outage=True),
]


@admitting
@pytest.mark.parametrize("limit", EVERY, ids=lambda limit: limit.name)
def test_every_limit_that_says_so_is_charged(start_process: Build, kind: FailureName, limit: Limit) -> None:
    process = start_process(failure=kind)
    for _ in range(7):
        assert process.check(limit).allowed
    assert used(process.store_after_charges(), limit) == 7


def test_slots_are_not_charged() -> None:
    with pytest.raises(InvalidLimit, match="charge_after_outage"):
        limit_from_fields(
            {"algorithm": "concurrency", "max_concurrent": 1, "lease_ttl_seconds": 1, "charge_after_outage": True}
        )


def test_what_may_have_been_counted_is_never_charged(start_process: Build) -> None:
    process = start_process(failure="open")
    process.check(CHARGED, cost=2)
    process.store.error = TIMED_OUT
    process.check(CHARGED, cost=40)
    assert used(process.store_after_charges(), CHARGED) == 2


@pytest.mark.parametrize("kind", ["closed", "raise"])
def test_what_was_not_admitted_is_not_charged(start_process: Build, kind: FailureName) -> None:
    process = start_process(failure="open")
    process.check(CHARGED)
    with nullcontext() if kind == "closed" else pytest.raises(StoreUnavailable):
        process.check(CHARGED, failure=kind)
    assert used(process.store_after_charges(), CHARGED) == 1


def test_a_local_denial_and_a_peek_are_not_charged(start_process: Build) -> None:
    process = start_process(failure="local", processes=50)
    for cost in (0, 1, 1, 1, 5, 0):
        process.check(CHARGED, cost=cost)
    assert used(process.store_after_charges(), CHARGED) == 2


def test_a_monitored_limit_is_charged_only_while_it_had_room(start_process: Build) -> None:
    process = start_process(failure="local")
    watched = replace(CHARGED, limit=3, mode="monitor")
    for _ in range(9):
        assert process.check(watched).allowed
    assert used(process.store_after_charges(), replace(CHARGED, limit=100)) == 3


def test_a_limit_that_counts_requests_is_charged_with_requests(start_process: Build) -> None:
    process = start_process(failure="open")
    requests = replace(CHARGED, counts="requests")
    for _ in range(3):
        process.check(requests, cost=20)
    assert used(process.store_after_charges(), requests) == 3


def test_a_reservation_is_charged_with_its_estimate_not_with_its_settlement(start_process: Build) -> None:
    process = start_process(failure="local")
    held = process.limiter.reserve("r", "s", limits=CHARGED, cost=9)
    process.limiter.settle(held.reservation_id or "", 2)
    assert used(process.store_after_charges(), CHARGED) == 9


def test_no_more_than_twice_the_limit_is_charged(start_process: Build) -> None:
    process = start_process(failure="open")
    ten = replace(CHARGED, limit=10)
    for cost in (15, 2**52 - 1, 3):
        process.check(ten, cost=cost)
    charges = process.resilience.record_success()
    assert list(costs_of(charges).values()) == [20]
    back = MemoryStore(clock=process.clock)
    for charge in charges:
        back.check(charge)
    assert used(back, replace(CHARGED, limit=100)) == 20
    assert not SyncLimiter(back).check("r", "s", limits=ten).allowed


@pytest.mark.parametrize("limit", [0, None], ids=["blocked", "unlimited"])
def test_where_there_is_nothing_to_count_nothing_is_charged(start_process: Build, limit: int | None) -> None:
    process = start_process(failure="open")
    process.check(replace(CHARGED, limit=limit), cost=7)
    assert used(process.store_after_charges(), CHARGED) == 0


def test_each_caller_and_each_tenant_is_charged_for_itself(start_process: Build) -> None:
    process = start_process(failure="open")
    who: list[tuple[str, str, int]] = [("s", "acme", 1), ("s", "globex", 2), ("other", "acme", 3)]
    for subject, tenant, cost in who:
        process.check(CHARGED, subject, tenant=tenant, cost=cost)
    back = process.store_after_charges()
    assert [used(back, CHARGED, subject, tenant=tenant) for subject, tenant, _ in who] == [1, 2, 3]


def test_a_bucket_of_all_tenants_is_charged_with_what_all_of_them_had(start_process: Build) -> None:
    process = start_process(failure="open")
    shared = replace(CHARGED, scope="global")
    for tenant in ("acme", "globex"):
        process.check(shared, tenant=tenant, cost=4)
    assert used(process.store_after_charges(), shared) == 8


def test_any_number_of_buckets_is_charged_in_checks_of_a_bounded_size(start_process: Build) -> None:
    process = start_process(failure="open")
    subjects = [str(n) for n in range(100)]
    for subject in subjects:
        process.check(CHARGED, subject)
    charges = process.resilience.record_success()
    assert all(len(charge.debits) <= 32 for charge in charges)
    assert all(charge.weight_us for charge in charges)
    back = MemoryStore(clock=process.clock)
    for charge in charges:
        assert back.check(charge).allowed
    assert [used(back, CHARGED, subject) for subject in subjects] == [1] * 100


def test_too_many_buckets_are_not_charged_and_logged(
    start_process: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outage_module, "MAX_CHARGED_BUCKETS", 2)
    process = start_process(failure="open")
    for subject in "abcab":
        process.check(CHARGED, subject, cost=2)
    back = process.store_after_charges()
    assert [used(back, CHARGED, subject) for subject in "abc"] == [4, 4, 0]
    assert lines(caplog)[-1].endswith(" unrecorded_cost=2")


def test_a_charge_that_fails_is_never_charged_again(start_process: Build) -> None:
    process = start_process(failure="open")
    process.check(CHARGED)
    (charge,) = process.resilience.record_success()
    assert process.resilience.decide_without_store(charge, process.store.error) is process.store.error
    assert process.resilience.record_success() == []
    assert process.resilience.degraded["open"] == 1


def test_a_charge_that_was_not_made_is_added_to_newer_ones(
    start_process: Build, caplog: pytest.LogCaptureFixture
) -> None:
    process = start_process(failure="open")
    process.check(CHARGED, cost=3)
    charges = process.resilience.record_success()
    process.check(CHARGED, cost=5)
    process.resilience.requeue_charges(charges)
    process.monotonic.advance_us(20 * SECOND_US)
    assert list(costs_of(process.resilience.record_success()).values()) == [8]
    process.resilience.requeue_charges(charges)
    before = len(lines(caplog))
    process.monotonic.advance_us(20 * SECOND_US)
    assert list(costs_of(process.resilience.record_success()).values()) == [3]
    assert len(lines(caplog)) == before  # it was logged before


def test_threads_may_be_decided_at_once(start_process: Build) -> None:
    process = start_process(failure="open")
    charges: list[Check] = []

    def call() -> None:
        for turn in range(200):
            process.check(CHARGED, str(turn % 3))
            if turn % 50 == 0:
                process.monotonic.advance_us(20 * SECOND_US)
                charges.extend(process.resilience.record_success())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.monotonic.advance_us(20 * SECOND_US)
    charges += process.resilience.record_success()
    assert process.resilience.degraded["open"] == 800
    assert sum(cost for charge in charges for _, _, cost, *_ in charge.debits) == 800


def test_a_full_store_does_not_open_the_breaker(start_process: Build) -> None:
    process = start_process(breaker_failures=1)
    assert not process.resilience.record_failure(StoreFull("no memory"), process.resilience.now_us())
    assert process.resilience.state == "closed"
    assert process.resilience.record_failure(StoreUnavailable("connection refused"), process.resilience.now_us())


def test_a_full_store_is_charged_later(start_process: Build) -> None:
    process = start_process(failure="local")
    process.check(CHARGED, cost=3)
    full = StoreFull("no memory")
    assert process.resilience.record_success([process.check(PLAIN, cost=0), full]) == []
    assert list(costs_of(process.resilience.record_success([process.check(PLAIN, cost=0)])).values()) == [3]


def test_a_charge_that_may_have_been_made_is_not_made_again(caplog: pytest.LogCaptureFixture) -> None:
    parts = RedisCore("redis://127.0.0.1:1", Keys(), None, StoreOptions(), lambda _: None)
    plan = Limits(CHARGED)
    checks = [build_check(Keys(), plan, "r", subject, 1, None, "t", "P0") for subject in ("lost", "sure", "made")]
    answers = [TIMED_OUT, StoreUnavailable("connection refused"), None]
    parts.record_charges([build_charge(check.debits) for check in checks], answers)
    assert parts.topology.only_server is not None
    assert list(costs_of(parts.topology.only_server.resilience.take_charges())) == [checks[1].debits[0][1]]
    (line,) = lines(caplog)
    assert line.startswith("store.charges_lost: ")
    assert " lost=1 total=3 " in line
