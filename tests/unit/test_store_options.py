"""The options of a store: values out of bounds are refused by name before anything is opened."""

from collections.abc import Callable
from typing import Any

import pytest

from limitforge import (
    Entry,
    Failure,
    FixedWindow,
    InvalidInput,
    Limiter,
    ManualClock,
    Request,
    StoreOptions,
    SyncLimiter,
)

LIMIT = FixedWindow(name="hour", limit=5, window_seconds=3_600)
NONSENSE: tuple[object, ...] = (None, True, "many", "", [], {}, float("nan"), float("inf"), -1)
WRONG_NAMES: tuple[object, ...] = (None, True, "", "opened", "OPEN", 0, [], {})


def test_the_defaults_are_those_that_are_promised() -> None:
    options = StoreOptions()
    assert options.failure is Failure.OPEN
    assert options.deadline_ms == 50
    assert (options.breaker_failures, options.breaker_seconds) == (3, 30)
    assert options.denial_cache_ms == 1_000
    assert options.processes == 1


@pytest.mark.parametrize(
    ("field", "bounds"),
    {
        "deadline_ms": (1, 60_000),
        "breaker_seconds": (0.001, 3_600),
        "denial_cache_ms": (0, 60_000),
        "processes": (1, 100_000),
        "breaker_failures": (1, 100_000),
        "denial_cache_size": (1, 10_000_000),
        "max_waiting": (1, 10_000_000),
    }.items(),
)
def test_both_ends_of_a_range_are_within_it(field: str, bounds: tuple[float, float]) -> None:
    for value in bounds:
        assert getattr(StoreOptions(**{field: value}), field) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("deadline_ms", value) for value in (*NONSENSE, 0, 0.999, 60_000.001, "50")],
        *[("breaker_seconds", value) for value in (*NONSENSE, 0, 0.0009, 3_600.1, "30")],
        *[("denial_cache_ms", value) for value in (*NONSENSE, -0.001, 60_001, "1000")],
        *[("processes", value) for value in (*NONSENSE, 0, 1.5, 2**60)],
        *[("breaker_failures", value) for value in (*NONSENSE, 0, 2.5, 2**60)],
        *[("denial_cache_size", value) for value in (*NONSENSE, 0, 0.1, 2**60)],
        *[("max_waiting", value) for value in (*NONSENSE, 0, 0.1, 2**60)],
        *[("failure", value) for value in WRONG_NAMES],
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=rf"^{field}: must ") as refused:
        StoreOptions(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="deadline"):
        StoreOptions(deadline=5)  # type: ignore[call-arg]


def test_settings_do_not_change_under_a_store() -> None:
    with pytest.raises(AttributeError):
        StoreOptions().processes = 2  # type: ignore[misc]


@pytest.mark.parametrize("failure", Failure)
def test_a_failure_behaviour_may_be_named_by_its_text(failure: Failure) -> None:
    assert StoreOptions(failure=failure.value).failure is failure
    assert StoreOptions(failure=failure).failure is failure


def test_how_to_fail_is_said_in_full_when_it_is_refused() -> None:
    with pytest.raises(InvalidInput, match="open, closed, local, raise"):
        StoreOptions(failure="ajar")  # type: ignore[arg-type]


WRONG: Any = "ajar"


@pytest.mark.parametrize(
    "ask",
    [
        lambda limiter: limiter.check("r", "s", limits=LIMIT, failure=WRONG),
        lambda limiter: limiter.check_entries([Entry(LIMIT, "r", "s")], failure=WRONG),
        lambda limiter: limiter.reserve("r", "s", limits=LIMIT, cost=1, failure=WRONG),
    ],
    ids=["check", "check_entries", "reserve"],
)
def test_a_checks_own_failure_behaviour_is_refused_by_name(ask: Callable[[SyncLimiter], object]) -> None:
    limiter = SyncLimiter.connect("memory://", clock=ManualClock())
    with pytest.raises(InvalidInput, match=r"^failure: must be one of open, closed, local, raise, got 'ajar'"):
        ask(limiter)
    assert limiter.check("r", "s", limits=LIMIT, cost=0).remaining == 5


async def test_the_same_holds_on_an_event_loop() -> None:
    limiter = Limiter.connect("memory://", clock=ManualClock())
    with pytest.raises(InvalidInput, match=r"^failure: "):
        await limiter.check("r", "s", limits=LIMIT, failure=WRONG)
    with pytest.raises(InvalidInput, match=r"^failure: "):
        await limiter.check_entries([Entry(LIMIT, "r", "s")], failure=WRONG)
    with pytest.raises(InvalidInput, match=r"^failure: "):
        limiter.submit(lambda _: pytest.fail("it was refused"), "r", "s", limits=LIMIT, failure=WRONG)
    assert (await limiter.check("r", "s", limits=LIMIT, cost=0)).remaining == 5


def test_in_a_batch_the_refusal_stands_in_the_place_of_its_check() -> None:
    limiter = SyncLimiter.connect("memory://", clock=ManualClock())
    good = Request(resource="r", subject="s", limits=LIMIT)
    wrong = Request(resource="r", subject="s", limits=LIMIT, failure=WRONG)
    first, refused, last = limiter.check_many([good, wrong, good])
    assert isinstance(refused, InvalidInput)
    assert refused.field == "failure"
    assert [getattr(decision, "remaining", None) for decision in (first, last)] == [4, 3]


@pytest.mark.parametrize("failure", [None, *Failure])
def test_a_store_that_can_decide_does_so_with_any_failure_behaviour(failure: Failure | None) -> None:
    limiter = SyncLimiter.connect("memory://", clock=ManualClock())
    decision = limiter.check("r", "s", limits=LIMIT, failure=failure)
    assert (decision.remaining, decision.degraded) == (4, None)
