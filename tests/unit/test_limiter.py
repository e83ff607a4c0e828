"""The limiter itself, on any store."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from limitforge import (
    Decision,
    FixedWindow,
    InvalidInput,
    Limiter,
    Limits,
    ManualClock,
    Request,
    SyncLimiter,
    UnknownReservation,
)
from limitforge.core.decision import CheckResult, Outcome

ROOT = Path(__file__).parents[2]


def methods_of(kind: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]


def test_the_limiter_for_threads_is_the_one_that_the_script_generates() -> None:
    pytest.importorskip("ruff")
    subprocess.run([sys.executable, ROOT / "scripts/generate_sync.py", "--check"], check=True)


@pytest.mark.parametrize("name", methods_of(SyncLimiter))
def test_both_limiters_have_the_same_methods(name: str) -> None:
    sync, asynchronous = getattr(SyncLimiter, name), getattr(Limiter, name)
    assert inspect.iscoroutinefunction(asynchronous) == (name not in ("status", "set_lanes"))
    assert inspect.signature(sync) == inspect.signature(asynchronous)
    assert inspect.getdoc(sync) == inspect.getdoc(asynchronous)


def test_only_an_event_loop_has_callbacks_and_prepared_checks() -> None:
    of_the_event_loop = ["prepare", "set_server_memory", "submit", "submit_prepared"]
    assert sorted(methods_of(SyncLimiter) + of_the_event_loop) == methods_of(Limiter)


async def test_an_event_loop_gets_the_same_answers() -> None:
    async with Limiter.connect("memory://", clock=ManualClock()) as limiter:
        with SyncLimiter.connect("memory://", clock=ManualClock()) as sync:
            for cost in (3, 3, 0, 2):
                decision = await limiter.check("r", "s", limits="5/minute", cost=cost)
                assert decision == sync.check("r", "s", limits="5/minute", cost=cost)


async def test_a_prepared_check_decides_like_any_other() -> None:
    results: list[CheckResult] = []
    async with Limiter.connect("memory://", clock=ManualClock()) as limiter:
        prepared = limiter.prepare("r", limits="5/minute")
        for cost in (3, 3):
            limiter.submit_prepared(prepared.bind("s", cost), results.append)
        assert (await limiter.check("r", "s", limits="5/minute", cost=0)).remaining == 2
    first, second = results
    assert isinstance(first, Outcome)
    assert isinstance(second, Outcome)
    assert (first.allowed, second.allowed) == (True, False)
    assert first.rows[0][1] == 2


async def test_a_prepared_check_is_current_until_lanes_change() -> None:
    async with Limiter.connect("memory://") as limiter:
        prepared = limiter.prepare("r", limits="5/minute", tenant="acme")
        assert prepared.is_current
        limiter.set_lanes("acme", 4)
        assert not prepared.is_current
        assert limiter.prepare("r", limits="5/minute", tenant="acme").is_current


@pytest.mark.parametrize("url", ["", "memory", "http://localhost", "postgres://x", None, 5])
def test_a_url_of_no_known_store_is_refused(url: Any) -> None:
    for kind in (Limiter, SyncLimiter):
        with pytest.raises(InvalidInput) as refused:
            kind.connect(url)
        assert refused.value.field == "url"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", "P9"),
        ("priority", None),
        ("priority", []),
        ("limits", None),
        ("limits", 5),
        ("limits", b"5/minute"),
        ("limits", ["5/minute"]),
        ("costs", 5),
        ("costs", ["5/minute"]),
    ],
)
def test_a_wrong_argument_is_refused_by_name(field: str, value: Any, limiter: SyncLimiter) -> None:
    with pytest.raises(InvalidInput) as refused:
        limiter.check(**{"resource": "r", "subject": "s", "limits": "5/minute", field: value})
    assert refused.value.field == field


def test_a_wrong_check_in_a_batch_has_its_error_in_its_place(limiter: SyncLimiter) -> None:
    requests = [
        Request(resource="r", subject="s", limits="5/minute"),
        Request(resource="r", subject="s", limits="5/minute", cost=-1),
        Request(resource="r", subject="x" * 513, limits="5/minute"),
        Request(resource="r", subject="s", limits="5/minute"),
    ]
    first, second, third, fourth = limiter.check_many(requests)
    assert isinstance(first, Decision)
    assert isinstance(second, InvalidInput)
    assert isinstance(third, InvalidInput)
    assert isinstance(fourth, Decision)
    assert (first.remaining, second.field, third.field, fourth.remaining) == (4, "cost", "subject", 3)


@pytest.mark.parametrize("request_", [None, "5/minute", {"resource": "r"}])
def test_what_is_no_request_is_refused_in_its_place(request_: Any, limiter: SyncLimiter) -> None:
    first, second = limiter.check_many([request_, Request(resource="r", subject="s", limits="5/minute")])
    assert isinstance(first, InvalidInput)
    assert isinstance(second, Decision)


def test_an_empty_batch_has_no_answers(limiter: SyncLimiter) -> None:
    assert limiter.check_many([]) == []


@pytest.mark.parametrize("ticket", ["", "x", "é", "AAAA", "a" * 100_000, None, 5, b"x"])
def test_an_id_that_was_never_handed_out_is_refused(ticket: Any, limiter: SyncLimiter) -> None:
    for field, call in (("lease_id", limiter.release), ("lease_id", limiter.renew)):
        with pytest.raises(InvalidInput) as refused:
            call(ticket)
        assert refused.value.field == field
    with pytest.raises(InvalidInput) as refused:
        limiter.settle(ticket, 1)
    assert refused.value.field == "reservation_id"


def test_an_id_of_a_store_with_another_prefix_is_refused(limiter: SyncLimiter) -> None:
    reserved = limiter.reserve("r", "s", limits="5/minute", cost=1)
    assert reserved.reservation_id is not None
    other = SyncLimiter.connect("memory://", key_prefix="other")
    with pytest.raises(InvalidInput, match="prefix"):
        other.settle(reserved.reservation_id, 1)
    same = SyncLimiter.connect("memory://")
    with pytest.raises(UnknownReservation):
        same.settle(reserved.reservation_id, 1)


def test_settling_names_only_what_was_reserved(limiter: SyncLimiter) -> None:
    reserved = limiter.reserve("r", "s", limits="a=5/minute; b=5/hour", cost=1)
    assert reserved.reservation_id is not None
    with pytest.raises(InvalidInput) as refused:
        limiter.settle(reserved.reservation_id, 1, costs={"c": 1})
    assert refused.value.field == "costs.c"
    with pytest.raises(InvalidInput) as refused:
        limiter.settle(reserved.reservation_id, -1)
    assert refused.value.field == "cost"


@pytest.mark.parametrize(
    ("field", "value"), [("on_lapse", "forget"), ("on_lapse", None), ("ttl_seconds", 0), ("ttl_seconds", None)]
)
def test_a_reservation_has_a_ttl_and_a_known_end(field: str, value: Any, limiter: SyncLimiter) -> None:
    with pytest.raises(InvalidInput) as refused:
        limiter.reserve("r", "s", limits="5/minute", cost=1, **{field: value})
    assert refused.value.field == field


def test_what_was_refunded_is_not_settled_as_if_it_were_held(limiter: SyncLimiter, clock: ManualClock) -> None:
    """The bucket saw the lapse, then the clock stepped back before it."""
    limit = FixedWindow(limit=100, window_seconds=86_400)
    reserved = limiter.reserve("r", "s", limits=limit, cost=50, ttl_seconds=10, on_lapse="refund")
    clock.advance_us(11_000_000)
    limiter.check("r", "s", limits=limit, cost=1)
    clock.advance_us(-5_000_000)
    assert reserved.reservation_id is not None
    settlement = limiter.settle(reserved.reservation_id, 50)
    counted = 100 - (limiter.check("r", "s", limits=limit, cost=0).remaining or 0)
    assert (settlement.outcome, counted) in [("lapsed", 1), ("settled", 51)]


def test_open_reservations_of_a_monitored_limit_deny_nothing(limiter: SyncLimiter) -> None:
    """A bucket holds 1,000 open reservations; a limit that only watches must not refuse the next one."""
    watched = FixedWindow(name="watched", limit=10_000, window_seconds=86_400, scope="tenant", mode="monitor")
    enforced = FixedWindow(name="enforced", limit=10, window_seconds=86_400)
    limits = Limits(watched, enforced)
    for n in range(1_001):
        assert limiter.reserve("r", f"user {n}", limits=limits, cost=1).allowed


def test_resetting_forgets_what_these_limits_have_counted_and_nothing_else(limiter: SyncLimiter) -> None:
    limits = Limits.parse("a=5/minute; b=5/hour")
    for subject in ("s", "t"):
        limiter.check("r", subject, limits=limits, cost=2)
    limiter.reset("r", "s", limits=limits["a"])
    peek = limiter.check("r", "s", limits=limits, cost=0)
    assert {name: state.remaining for name, state in peek.limits.items()} == {"a": 5, "b": 3}
    assert limiter.check("r", "t", limits=limits, cost=0).remaining == 3
