"""The circuit breaker: three consecutive failures, thirty seconds open, one probe at a time."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from limitforge.stores.resilience.breaker import BreakerState, CircuitBreaker

FAILURES = 3
OPEN_US = 30_000_000
PROBE_US = 1_000_000


@pytest.fixture
def breaker() -> CircuitBreaker:
    return CircuitBreaker(FAILURES, OPEN_US, PROBE_US)


def fail(breaker: CircuitBreaker, times: int, at_us: int = 0) -> list[bool]:
    """Record failures of calls that each began after the one before had failed."""
    return [breaker.record_failure(at_us, at_us) for _ in range(times)]


def test_a_new_breaker_lets_everybody_in(breaker: CircuitBreaker) -> None:
    assert breaker.state is BreakerState.CLOSED
    assert breaker.retry_after_us(0) == 0
    assert all(breaker.allows_call(0) for _ in range(10))


def test_failures_in_a_row_open_it_and_the_last_one_says_so(breaker: CircuitBreaker) -> None:
    assert fail(breaker, 3) == [False, False, True]
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows_call(0)


def test_a_success_in_between_starts_the_row_anew(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    assert not breaker.record_success()  # it was closed all the time
    assert fail(breaker, 2) == [False, False]
    assert breaker.allows_call(0)


def test_an_open_breaker_allows_no_call_until_its_time_is_over(breaker: CircuitBreaker) -> None:
    fail(breaker, 3, at_us=1_000)
    assert breaker.retry_after_us(1_000) == OPEN_US
    assert not breaker.allows_call(1_000 + OPEN_US - 1)
    assert breaker.retry_after_us(1_000 + OPEN_US - 1) == 1
    assert breaker.allows_call(1_000 + OPEN_US)


def test_failures_that_come_in_late_do_not_keep_it_open_for_longer(breaker: CircuitBreaker) -> None:
    fail(breaker, 3)
    assert not breaker.record_failure(OPEN_US - 1, 1)
    assert breaker.allows_call(OPEN_US)


def test_one_probe_at_a_time_is_let_in(breaker: CircuitBreaker) -> None:
    fail(breaker, 3)
    assert [breaker.allows_call(OPEN_US) for _ in range(3)] == [True, False, False]
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_probe_that_succeeds_closes_it(breaker: CircuitBreaker) -> None:
    fail(breaker, 3)
    breaker.allows_call(OPEN_US)
    assert breaker.record_success()
    assert breaker.state is BreakerState.CLOSED
    assert all(breaker.allows_call(OPEN_US) for _ in range(10))
    assert fail(breaker, 3) == [False, False, True]


def test_a_probe_that_fails_opens_it_again_for_the_whole_time(breaker: CircuitBreaker) -> None:
    fail(breaker, 3)
    assert breaker.allows_call(OPEN_US)
    assert breaker.record_failure(OPEN_US + 500, OPEN_US)
    assert breaker.retry_after_us(OPEN_US + 500) == OPEN_US
    assert not breaker.allows_call(2 * OPEN_US + 499)
    assert breaker.allows_call(2 * OPEN_US + 500)


def test_a_probe_that_never_reports_is_given_up_and_the_next_caller_probes(breaker: CircuitBreaker) -> None:
    fail(breaker, 3)
    assert breaker.allows_call(OPEN_US)
    assert not breaker.allows_call(OPEN_US + PROBE_US - 1)
    assert breaker.allows_call(OPEN_US + PROBE_US)
    assert not breaker.allows_call(OPEN_US + PROBE_US)


def test_one_failure_is_enough_where_one_is_said_to_be() -> None:
    breaker = CircuitBreaker(1, OPEN_US, PROBE_US)
    assert breaker.record_failure(0, 0)
    assert not breaker.allows_call(OPEN_US - 1)


def test_calls_that_were_under_way_together_fail_as_one(breaker: CircuitBreaker) -> None:
    assert [breaker.record_failure(50 + n, n) for n in range(20)] == [False] * 20
    assert breaker.allows_call(100)
    assert [breaker.record_failure(200, 100), breaker.record_failure(300, 200)] == [False, True]


def test_a_call_from_before_the_last_failure_says_nothing_about_the_probe(breaker: CircuitBreaker) -> None:
    fail(breaker, 3, at_us=1_000)
    assert breaker.allows_call(1_000 + OPEN_US)
    assert not breaker.record_failure(1_001 + OPEN_US, 999)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.record_failure(1_002 + OPEN_US, 1_000 + OPEN_US)


def test_a_straggler_that_succeeds_closes_it(breaker: CircuitBreaker) -> None:
    fail(breaker, 3)
    assert breaker.record_success()
    assert breaker.allows_call(1)


class BreakerModel(RuleBasedStateMachine):
    """The breaker beside a naive model that computes everything from its whole history."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(FAILURES, OPEN_US, PROBE_US)
        self.now_us = 10 * OPEN_US
        self.row = 0  # failures since the last success
        self.failed_us = -1  # the last failure that counted
        self.opened_us: int | None = None  # the last time it was opened, while it is not closed
        self.probed_us: int | None = None  # when the probe began that has not reported yet

    def is_call_allowed(self) -> bool:
        if self.opened_us is None:
            return True
        if self.probed_us is not None:
            return self.now_us >= self.probed_us + PROBE_US
        return self.now_us >= self.opened_us + OPEN_US

    @rule(by_us=st.one_of(st.sampled_from([1, PROBE_US - 1, PROBE_US, OPEN_US - 1, OPEN_US]), st.integers(0, OPEN_US)))
    def let_time_pass(self, by_us: int) -> None:
        self.now_us += by_us

    @rule()
    def wait_until_a_call_is_allowed(self) -> None:
        self.now_us += self.breaker.retry_after_us(self.now_us)
        assert self.is_call_allowed()

    @rule()
    def ask(self) -> None:
        expected = self.is_call_allowed()
        assert self.breaker.allows_call(self.now_us) is expected
        if expected and self.opened_us is not None:
            self.probed_us = self.now_us

    @rule()
    def succeed(self) -> None:
        assert self.breaker.record_success() is (self.opened_us is not None)
        self.row, self.opened_us, self.probed_us = 0, None, None

    @rule(lasted_us=st.one_of(st.sampled_from([0, 1, 50_000]), st.integers(0, 2 * OPEN_US)))
    def fail(self, lasted_us: int) -> None:
        began_us = self.now_us - lasted_us
        if began_us < self.failed_us:
            assert not self.breaker.record_failure(self.now_us, began_us)
            return
        self.row, self.failed_us = self.row + 1, self.now_us
        opens = self.row >= FAILURES if self.opened_us is None else self.probed_us is not None
        assert self.breaker.record_failure(self.now_us, began_us) is opens
        if opens:
            self.opened_us, self.probed_us = self.now_us, None

    @precondition(lambda self: self.opened_us is not None)
    @rule()
    def many_callers_come_and_at_most_one_is_allowed(self) -> None:
        expected = self.is_call_allowed()
        assert sum(self.breaker.allows_call(self.now_us) for _ in range(5)) == int(expected)
        if expected:
            self.probed_us = self.now_us

    @invariant()
    def state_and_wait_agree_with_the_model(self) -> None:
        if self.opened_us is None:
            state = BreakerState.CLOSED
        else:
            state = BreakerState.OPEN if self.probed_us is None else BreakerState.HALF_OPEN
        assert self.breaker.state is state
        assert (self.breaker.retry_after_us(self.now_us) == 0) is self.is_call_allowed()


TestTheBreakerKeepsItsPromise = BreakerModel.TestCase
