"""Two limiters on one manual clock, one with a denial cache: they must return the same.

Only waits may differ, and only downwards: other checks may have taken since the cached denial.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from limitforge import Decision, Entry, Limit, LimitforgeError, Limits, ManualClock, SyncLimiter
from limitforge.core.keys import Layer
from tests.contract.strategies import ALGORITHMS, PRIORITIES, TENANTS, limits
from tests.state_machines import comparable

NAMES = ("a", "b", "c")
RESOURCES = ("GET:/orders", "GET:/orders", "GET:/orders", "POST:/orders")
SUBJECTS = ("user:1", "user:1", "user:1", "user:2")
YEARS_IN_SECONDS = 1e8  # longer than any trace: an override that expires gives room without an invalidation
CHANGES = ["unlimited", "blocked", {"limit": 7}, {"limit": 1}, {"window_seconds": 5}, {"refill_rate_per_sec": 3}]

names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)


def time_steps_us() -> st.SearchStrategy[int]:
    """Draw how far time moves: never back, since then a limit may have room early."""
    hairs = [1, 999, 1_000, 333_333, 999_999, 1_000_000]
    return st.one_of(st.sampled_from([*hairs * 2, 10_000_000, 3_600_000_000]), st.integers(0, 5_000_000))


def costs() -> st.SearchStrategy[int]:
    return st.sampled_from([1, 1, 1, 1, 2, 2, 3, 0, 5, 8])


@st.composite
def tight_limits(draw: st.DrawFn, name: str) -> Limit:
    """Limits that are soon reached, and stay so for a while."""
    algorithm = draw(st.sampled_from(ALGORITHMS))
    limit = draw(
        limits(name=name, algorithm=algorithm, scope=draw(st.sampled_from(["subject", "subject", "caller", "tenant"])))
    )
    fields: dict[str, Any] = {
        type(limit).size_field: draw(st.sampled_from([1, 2, 3, 5, 0, None] if limit.mode == "on" else [1, 3])),
    }
    if algorithm.endswith("bucket"):
        fields["refill_rate_per_sec" if algorithm == "token_bucket" else "leak_rate_per_sec"] = draw(
            st.sampled_from([1, "0.3", 1 / 3, "0.01"])
        )
    elif algorithm == "concurrency":
        fields["lease_ttl_seconds"] = draw(st.sampled_from([5, 60, 3_600]))
    elif algorithm != "quota":
        fields["window_seconds"] = draw(st.sampled_from([5, 60, 3_600]))
    return replace(limit, **fields)


def wait_ms(decision: Decision) -> float:
    return inf if decision.retry_after_ms is None else decision.retry_after_ms


class CachedAndPlain(RuleBasedStateMachine):
    """A plan with constant numbers. Subclasses set `clock`, `cached` and `plain`."""

    clock: ManualClock
    cached: SyncLimiter
    plain: SyncLimiter

    def __init__(self) -> None:
        super().__init__()
        self.plan: dict[str, Limit] = {}
        self.reservation_ids: list[tuple[str, str]] = []
        self.lease_ids: list[tuple[str, str]] = []
        self.last: Decision | None = None
        self.last_action: Callable[[SyncLimiter], Any] = lambda limiter: limiter.check("r", "s", limits=Limits())
        self.arguments: dict[str, Any] = {}

    def hits(self) -> int:
        """Return how many denials came from the cache so far."""
        raise NotImplementedError

    def on_cached_denial(self, mine: Decision, theirs: Decision) -> None:
        """Check more of a denial that came from the cache."""

    def on_change(self) -> None:
        """Called after everything that is not a check."""

    def run_on_both(self, act: Callable[[SyncLimiter], Any]) -> None:
        hits = self.hits()
        mine, theirs = (self.answer(act, limiter) for limiter in (self.cached, self.plain))
        if self.hits() > hits:
            assert not mine.allowed
            assert not theirs.allowed
            assert wait_ms(mine) <= wait_ms(theirs)
            self.on_cached_denial(mine, theirs)
        else:
            assert comparable(mine) == comparable(theirs)
        if isinstance(mine, Decision):
            self.remember(mine, theirs)
        else:
            self.on_change()
            self.repeat_now_and_later()

    def repeat_now_and_later(self) -> None:
        """A denial in the microsecond of a change is not cached."""
        self.run_on_both(self.last_action)
        self.clock.advance_us(1)
        self.run_on_both(self.last_action)

    def remember(self, mine: Decision, theirs: Decision) -> None:
        self.last = theirs
        if mine.reservation_id:
            self.reservation_ids.append((mine.reservation_id, theirs.reservation_id or ""))
        if mine.lease_id:
            self.lease_ids.append((mine.lease_id, theirs.lease_id or ""))

    def answer(self, act: Callable[[SyncLimiter], Any], limiter: SyncLimiter) -> Any:
        try:
            return act(limiter)
        except LimitforgeError as error:
            return error

    def limits(self, chosen: list[str]) -> Limits:
        return Limits(*(self.plan[name] for name in chosen))

    @initialize(first=st.tuples(*(tight_limits(name=name) for name in NAMES)))
    def start(self, first: tuple[Limit, ...]) -> None:
        self.plan = {limit.name: limit for limit in first}

    @rule(by_us=time_steps_us())
    def let_time_pass(self, by_us: int) -> None:
        self.clock.advance_us(by_us)
        self.run_on_both(self.last_action)

    @precondition(lambda self: self.last is not None)
    @rule(eighths=st.sampled_from([1, 4, 7, 8, 8]))
    def wait_for_the_last_decision(self, eighths: int) -> None:
        self.clock.advance_us((cast("Decision", self.last).retry_after_ms or 0) * 1_000 * eighths // 8)
        self.run_on_both(self.last_action)


class AnyChecksCachedAndPlain(CachedAndPlain):
    """The plan is checked in every way, while overrides are set and deleted."""

    @rule(
        chosen=names,
        resource=st.sampled_from(RESOURCES),
        subject=st.sampled_from(SUBJECTS),
        tenant=st.sampled_from(TENANTS),
        priority=st.sampled_from(PRIORITIES),
        cost=costs(),
        times=st.integers(1, 8),
    )
    def check(self, chosen: list[str], times: int, **arguments: Any) -> None:
        self.arguments = {"limits": self.limits(chosen), **arguments}
        self.repeat(times)

    def repeat(self, times: int) -> None:
        arguments = dict(self.arguments)
        self.last_action = lambda limiter: limiter.check(**arguments)
        self.check_the_same_again(times)

    @precondition(lambda self: self.arguments)
    @rule(
        other=st.one_of(
            st.tuples(st.just("cost"), costs()),
            st.tuples(st.just("priority"), st.sampled_from(PRIORITIES)),
            st.tuples(st.just("resource"), st.sampled_from(RESOURCES)),
        )
    )
    def check_nearly_the_same(self, other: tuple[str, Any]) -> None:
        self.arguments |= dict([other])
        self.repeat(2)

    @rule(
        drawn=st.lists(
            st.tuples(st.sampled_from(NAMES), st.sampled_from(SUBJECTS), costs(), st.sampled_from(Layer)),
            min_size=1,
            max_size=4,
        ),
        times=st.integers(1, 3),
    )
    def check_entries(self, drawn: list[tuple[str, str, int, Layer]], times: int) -> None:
        entries = [Entry(self.plan[name], RESOURCES[0], subject, cost, layer) for name, subject, cost, layer in drawn]
        self.last_action = lambda limiter: limiter.check_entries(entries)
        self.check_the_same_again(times)

    @rule(times=st.integers(1, 3))
    def check_the_same_again(self, times: int) -> None:
        for _ in range(times):
            self.run_on_both(self.last_action)

    @rule(chosen=names, candidate=names, subject=st.sampled_from(SUBJECTS), cost=costs())
    def check_beside_a_shadow_plan(self, chosen: list[str], candidate: list[str], subject: str, cost: int) -> None:
        plan, shadow = self.limits(chosen), self.limits(candidate)
        self.run_on_both(lambda limiter: limiter.check(RESOURCES[0], subject, limits=plan, cost=cost, shadow=shadow))

    @precondition(lambda self: self.arguments)
    @rule(cost=costs(), ttl_seconds=st.sampled_from([1, 1, 30, 86_400]), on_lapse=st.sampled_from(["keep", "refund"]))
    def reserve(self, cost: int, ttl_seconds: float, on_lapse: str) -> None:
        arguments = self.arguments | {"cost": cost, "ttl_seconds": ttl_seconds, "on_lapse": on_lapse}
        self.run_on_both(lambda limiter: limiter.reserve(**arguments))
        self.run_on_both(self.last_action)

    @precondition(lambda self: self.reservation_ids)
    @rule(data=st.data(), cost=costs())
    def settle(self, data: st.DataObject, cost: int) -> None:
        ids = data.draw(st.sampled_from(self.reservation_ids))
        self.run_on_both(lambda limiter: limiter.settle(ids[limiter is self.plain], cost))

    @precondition(lambda self: self.lease_ids)
    @rule(back=st.integers(1, 3), renewing=st.sampled_from([False, False, True]))
    def release_or_renew(self, back: int, renewing: bool) -> None:
        ids = self.lease_ids[-min(back, len(self.lease_ids))]
        self.run_on_both(lambda limiter: (limiter.renew if renewing else limiter.release)(ids[limiter is self.plain]))

    @rule(chosen=names, subject=st.sampled_from(SUBJECTS))
    def reset(self, chosen: list[str], subject: str) -> None:
        self.run_on_both(lambda limiter: limiter.reset(RESOURCES[0], subject, limits=self.limits(chosen)))

    @rule(name=st.sampled_from(NAMES), subject=st.sampled_from(SUBJECTS), change=st.sampled_from(CHANGES))
    def set_an_override(self, name: str, subject: str, change: Any) -> None:
        plan = self.limits([name])
        self.run_on_both(
            lambda limiter: limiter.set_override(
                "*", subject, {name: change}, limits=plan, ttl_seconds=YEARS_IN_SECONDS
            )
        )

    @rule(subject=st.sampled_from(SUBJECTS))
    def delete_an_override(self, subject: str) -> None:
        self.run_on_both(lambda limiter: limiter.delete_override("*", subject))

    @rule()
    def clear_the_overrides(self) -> None:
        self.run_on_both(lambda limiter: limiter.clear_overrides())
