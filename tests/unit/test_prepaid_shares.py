"""Prepaid shares on a manual clock: sized by demand, spent once, returned."""

import pytest

from limitforge import FixedWindow, InvalidLimit, Limits, ManualClock, Quota, SlidingWindow, TokenBucket
from limitforge.core.check import Debit, build_check
from limitforge.core.keys import Keys
from limitforge.stores.redis.denial_cache import Invalidation
from limitforge.stores.redis.prepaid.shares import PrepaidShare, PrepaidShares, TopUpReply, TopUpRequest

INTERVAL_US = 200_000
HOUR_US = 3_600_000_000
WINDOW = FixedWindow(name="window", limit=1_000_000, window_seconds=3_600, consistency="prepaid")
BUCKET = TokenBucket(name="bucket", bucket_capacity=1_000, refill_rate_per_sec=10, consistency="prepaid")


class PrepaidHarness:
    """The shares of one process, and a store that grants every request."""

    def __init__(self, limit: FixedWindow | TokenBucket = WINDOW) -> None:
        self.clock = ManualClock(0)
        self.shares = PrepaidShares(interval_us=INTERVAL_US, clock=self.clock, max_shares=3)
        self.limits = Limits(limit)
        self.ends_us = HOUR_US

    def take(self, cost: int = 1, subject: str = "s", resource: str = "r") -> Debit:
        return build_check(Keys(), self.limits, resource, subject, cost, None, "t", "P0").debits[0]

    def ask(self, times: int, cost: int = 1, subject: str = "s") -> int:
        """Return how many checks a share paid for."""
        return sum(self.shares.spend(self.take(cost, subject)) is not None for _ in range(times))

    def wait(self, intervals: float = 1) -> None:
        self.clock.advance_us(int(intervals * INTERVAL_US))

    def sync(self) -> list[TopUpRequest]:
        requests = self.shares.due_requests()
        for request in requests:
            self.grant(request, request.requested)
        return requests

    def grant(self, request: TopUpRequest, granted: int) -> None:
        reset_us = self.ends_us - self.clock.now_us()
        window = (0, 0) if request.share.rule.has_level else (self.ends_us - HOUR_US, self.ends_us)
        self.answer(request, TopUpReply(granted, 1_000_000, 500, reset_us, *window))

    def answer(self, request: TopUpRequest, grant: TopUpReply | None) -> None:
        self.shares.apply_replies([request], None if grant is None else [grant], self.clock.now_us())

    def share(self) -> PrepaidShare:
        return self.shares._shares[self.take()[1]]


def prepaid_harness(limit: FixedWindow | TokenBucket = WINDOW) -> PrepaidHarness:
    """Return a harness with a share of 200, after a demand of 100 in an interval."""
    harness = PrepaidHarness(limit)
    harness.ask(100)
    harness.wait()
    harness.sync()
    return harness


def test_nothing_is_prepaid_without_demand() -> None:
    assert PrepaidHarness().sync() == []


def test_a_share_covers_about_two_intervals_of_demand() -> None:
    harness = PrepaidHarness()
    harness.ask(100)
    harness.wait()
    (request,) = harness.sync()
    assert (request.requested, request.kept, request.returned) == (200, 0, 0)
    assert harness.ask(250) == 200


def test_a_limit_with_little_demand_stays_exact() -> None:
    harness = PrepaidHarness()
    for _ in range(10):
        harness.ask(1)
        harness.wait()
        assert harness.sync() == []


def test_a_share_is_synced_at_most_once_an_interval() -> None:
    harness = PrepaidHarness()
    harness.ask(100)
    harness.wait(0.99)
    assert harness.sync() == []
    harness.wait(0.02)
    assert len(harness.sync()) == 1
    harness.ask(1_000)
    assert harness.sync() == []


def test_a_share_is_topped_up_before_it_is_spent() -> None:
    harness = prepaid_harness()
    assert harness.ask(150) == 150
    harness.wait()
    (request,) = harness.sync()
    assert (request.kept, request.requested) == (50, 250)
    assert harness.ask(300) == 300


def test_while_a_wish_is_on_its_way_there_is_no_second_one() -> None:
    harness = PrepaidHarness()
    harness.ask(100)
    harness.wait()
    (request,) = harness.shares.due_requests()
    harness.ask(100)
    harness.wait()
    assert harness.shares.due_requests() == []
    harness.answer(request, None)
    harness.wait()
    assert len(harness.shares.due_requests()) == 1


def test_a_grant_whose_reply_was_lost_is_never_spent() -> None:
    harness = PrepaidHarness()
    harness.ask(100)
    harness.wait()
    (request,) = harness.shares.due_requests()
    harness.answer(request, None)
    assert harness.ask(1) == 0


def test_an_idle_share_goes_back_whole() -> None:
    harness = prepaid_harness()
    assert harness.ask(30) == 30
    returned = []
    for _ in range(7):
        harness.wait()
        returned += [(request.returned, request.requested) for request in harness.sync() if request.returned]
    assert returned == [(170, 0)]
    assert len(harness.shares) == 0


def test_a_share_ends_with_its_window() -> None:
    harness = PrepaidHarness()
    harness.ends_us = 3 * INTERVAL_US
    harness.ask(100)
    harness.wait()
    harness.sync()
    harness.wait(2)
    assert harness.ask(1) == 0


def test_a_share_that_was_granted_in_the_next_window_keeps_nothing_of_the_last_one() -> None:
    harness = prepaid_harness()
    harness.ask(150)
    harness.wait()
    (request,) = harness.shares.due_requests()
    harness.ends_us = 2 * HOUR_US
    harness.grant(request, 10)
    assert harness.ask(20) == 10


def test_a_share_that_was_granted_in_a_longer_window_of_the_same_end_keeps_nothing() -> None:
    """An override changes the window: a share of the shorter window is not part of the count of the longer one."""
    harness = prepaid_harness()
    harness.ask(150)
    harness.wait()
    (request,) = harness.shares.due_requests()
    longer = TopUpReply(10, 1_000_000, 500, HOUR_US - harness.clock.now_us(), -HOUR_US, HOUR_US)
    harness.answer(request, longer)
    assert harness.ask(20) == 10
    assert harness.share().window == (-HOUR_US, HOUR_US)


def test_a_share_of_a_bucket_lapses() -> None:
    harness = prepaid_harness(BUCKET)
    harness.clock.advance_us(harness.shares.lapse_us)
    assert harness.ask(1) == 0


@pytest.mark.parametrize("limit", [WINDOW, BUCKET], ids=["window", "bucket"])
def test_a_share_expires_counted_from_when_it_was_requested(limit: FixedWindow | TokenBucket) -> None:
    harness = PrepaidHarness(limit)
    harness.ask(100)
    harness.wait()
    (request,) = harness.shares.due_requests()
    sent_us = harness.clock.now_us()
    harness.clock.advance_us(50_000)  # in flight
    harness.shares.apply_replies([request], [TopUpReply(200, 1_000_000, 0, 1_000_000, 0, 1_000_000)], sent_us)
    harness.clock.set_us(sent_us + (harness.shares.lapse_us if limit is BUCKET else 1_000_000) - 1)
    assert harness.ask(1) == 1
    harness.clock.advance_us(1)
    assert harness.ask(1) == 0


def test_what_was_granted_before_a_reset_never_goes_back() -> None:
    for invalidation, returned in (
        (Invalidation(bucket_keys=(PrepaidHarness().take()[1],)), 0),
        (Invalidation(key_prefixes=(Keys().tenant_keys("t").tenant_prefix,)), 200),
    ):
        harness = PrepaidHarness()
        harness.ask(100)
        harness.wait()
        (request,) = harness.shares.due_requests()
        harness.shares.invalidate(invalidation)  # in the same microsecond as it was sent
        harness.grant(request, 200)
        assert harness.ask(1) == 0
        assert sum(request.returned for request in harness.shares.return_all()) == returned


def test_a_share_of_a_bucket_that_is_in_use_is_kept_from_lapsing() -> None:
    harness = prepaid_harness(BUCKET)
    for _ in range(40):  # slowly, so that no top-up is needed for long
        harness.wait()
        harness.ask(1)
        harness.sync()
    assert harness.ask(1) == 1


def test_what_was_kept_and_had_lapsed_in_the_store_is_spent_no_more() -> None:
    harness = prepaid_harness(BUCKET)
    harness.ask(150)
    harness.wait()
    (request,) = harness.shares.due_requests()
    harness.answer(request, TopUpReply(7, 1_000, 0, 0, 0, -1))
    assert harness.ask(10) == 7


def test_a_cost_above_the_balance_goes_to_the_store() -> None:
    harness = prepaid_harness()
    assert harness.ask(1, cost=201) == 0
    assert harness.ask(1, cost=200) == 1


def test_a_new_plan_spends_nothing_of_the_former_one() -> None:
    harness = prepaid_harness()
    harness.limits = Limits(FixedWindow(name="window", limit=5, window_seconds=3_600, consistency="prepaid"))
    assert harness.ask(1) == 0
    harness.wait()
    (request,) = harness.shares.due_requests()
    assert request.returned == 200


def test_an_override_ends_a_share_and_what_is_left_goes_back() -> None:
    harness = prepaid_harness()
    harness.shares.invalidate(
        Invalidation(override_keys=(Keys.overrides_key(Keys().tenant_keys("t").tenant_prefix, "s"),))
    )
    assert harness.ask(1) == 0
    harness.wait()
    (request,) = harness.shares.due_requests()
    assert request.returned == 200


def test_a_reset_ends_a_share_and_nothing_goes_back() -> None:
    harness = prepaid_harness()
    harness.shares.invalidate(Invalidation(bucket_keys=(harness.take()[1],)))
    assert harness.ask(1) == 0
    harness.wait()
    assert [request.returned for request in harness.shares.due_requests()] == [0]


def test_what_was_spent_for_a_check_that_was_denied_after_all_comes_back() -> None:
    harness = prepaid_harness()
    _, balance_id = harness.shares.spend(harness.take(5)) or ((), 0)
    assert harness.ask(200) == 195
    harness.shares.refund(harness.take(5), balance_id)
    assert harness.ask(6) == 5


def test_what_was_spent_in_one_window_does_not_come_back_in_the_next() -> None:
    harness = prepaid_harness()
    _, balance_id = harness.shares.spend(harness.take(10)) or ((), 0)
    harness.ask(140)
    harness.wait()
    (request,) = harness.shares.due_requests()
    harness.ends_us = 2 * HOUR_US
    harness.grant(request, 20)
    harness.shares.refund(harness.take(10), balance_id)
    assert harness.ask(30) == 20


def test_an_answer_that_a_reset_has_overtaken_is_worth_nothing() -> None:
    harness = PrepaidHarness()
    harness.ask(100)
    harness.wait()
    (request,) = harness.shares.due_requests()
    sent_us = harness.clock.now_us()
    harness.clock.advance_us(1)
    harness.shares.invalidate(Invalidation(bucket_keys=(harness.take()[1],)))
    harness.shares.apply_replies([request], [TopUpReply(200, 1_000_000, 0, HOUR_US, 0, HOUR_US)], sent_us)
    assert harness.ask(1) == 0


def test_what_could_not_be_brought_back_is_brought_back_later_unless_it_was_reset_meanwhile() -> None:
    for is_reset, returned in ((False, 200), (True, 0)):
        harness = prepaid_harness()
        harness.shares.invalidate(
            Invalidation(override_keys=(Keys.overrides_key(Keys().tenant_keys("t").tenant_prefix, "s"),))
        )
        harness.ask(100)
        harness.wait()
        (request,) = harness.shares.due_requests()
        sent_us = harness.clock.now_us()
        harness.clock.advance_us(1)
        if is_reset:
            harness.shares.invalidate(Invalidation(bucket_keys=(harness.take()[1],)))
        harness.shares.apply_replies([request], [None], sent_us)
        harness.wait()
        harness.ask(100)
        assert [request.returned for request in harness.shares.due_requests()] == [returned]


def test_the_first_subscription_keeps_shares_and_a_later_one_forfeits_them() -> None:
    harness = prepaid_harness()
    harness.shares.invalidate_all(messages_missed=False)
    assert harness.ask(1) == 1
    harness.shares.invalidate_all(messages_missed=True)
    assert harness.ask(1) == 0


def test_a_decision_tells_what_this_process_and_the_store_have_left() -> None:
    harness = prepaid_harness()
    row, _ = harness.shares.spend(harness.take()) or ((), 0)
    assert row == (1_000_000, 199 + 500, HOUR_US - INTERVAL_US, 0, 0)


def test_the_number_of_shares_is_bounded() -> None:
    harness = PrepaidHarness()
    for subject in "abcdef":
        harness.ask(100, subject=subject)
    assert len(harness.shares) == 3


def test_on_leaving_everything_goes_back() -> None:
    harness = prepaid_harness()
    harness.ask(50)
    assert [(request.returned, request.kept, request.requested) for request in harness.shares.return_all()] == [
        (150, 0, 0)
    ]
    assert harness.ask(1) == 0


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("consistency", {"consistency": "prepaid", "count_denied": True}),
        ("consistency", {"consistency": "prepaid", "shares": {"P2": 50}}),
        ("consistency", {"consistency": "sloppy"}),
        ("consistency", {"consistency": None}),
    ],
)
def test_what_can_not_be_leased_is_refused(field: str, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidLimit) as refused:
        FixedWindow(name="f", limit=5, window_seconds=60, **fields)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_a_share_of_a_sliding_window_would_pass_its_limit_so_there_is_none() -> None:
    with pytest.raises(InvalidLimit, match="exact or local"):
        SlidingWindow(name="s", limit=5, window_seconds=60, consistency="prepaid")
    assert Quota(name="q", limit=5, period="day", consistency="prepaid").consistency == "prepaid"
