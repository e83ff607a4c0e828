"""Shares of prepaid limits on a manual clock: sized by need, spent once, given back."""

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
    """Shares of one process, and a store that grants whatever is asked for."""

    def __init__(self, limit: FixedWindow | TokenBucket = WINDOW) -> None:
        self.clock = ManualClock(0)
        self.shares = PrepaidShares(interval_us=INTERVAL_US, clock=self.clock, max_shares=3)
        self.limits = Limits(limit)
        self.ends_us = HOUR_US

    def take(self, cost: int = 1, subject: str = "s", resource: str = "r") -> Debit:
        return build_check(Keys(), self.limits, resource, subject, cost, None, "t", "P0").debits[0]

    def ask(self, times: int, cost: int = 1, subject: str = "s") -> int:
        """How many were paid for in advance."""
        return sum(self.shares.spend(self.take(cost, subject)) is not None for _ in range(times))

    def wait(self, intervals: float = 1) -> None:
        self.clock.advance_us(int(intervals * INTERVAL_US))

    def sync(self) -> list[TopUpRequest]:
        wishes = self.shares.due_requests()
        for wish in wishes:
            self.grant(wish, wish.requested)
        return wishes

    def grant(self, wish: TopUpRequest, granted: int) -> None:
        reset_us = self.ends_us - self.clock.now_us()
        window = (0, 0) if wish.share.rule.is_bucket else (self.ends_us - HOUR_US, self.ends_us)
        self.answer(wish, TopUpReply(granted, 1_000_000, 500, reset_us, *window))

    def answer(self, wish: TopUpRequest, grant: TopUpReply | None) -> None:
        self.shares.apply_replies([wish], None if grant is None else [grant], self.clock.now_us())

    def share(self) -> PrepaidShare:
        return self.shares._shares[self.take()[1]]


def prepaid_harness(limit: FixedWindow | TokenBucket = WINDOW) -> PrepaidHarness:
    """One that has paid for 200, having asked for 100 in an interval."""
    desk = PrepaidHarness(limit)
    desk.ask(100)
    desk.wait()
    desk.sync()
    return desk


def test_nothing_is_paid_for_before_anybody_asked() -> None:
    assert PrepaidHarness().sync() == []


def test_a_share_is_about_two_intervals_of_what_was_asked_for() -> None:
    desk = PrepaidHarness()
    desk.ask(100)
    desk.wait()
    (wish,) = desk.sync()
    assert (wish.requested, wish.kept, wish.returned) == (200, 0, 0)
    assert desk.ask(250) == 200


def test_what_is_asked_for_slowly_stays_exact() -> None:
    desk = PrepaidHarness()
    for _ in range(10):
        desk.ask(1)
        desk.wait()
        assert desk.sync() == []


def test_a_share_is_synced_at_most_once_an_interval() -> None:
    desk = PrepaidHarness()
    desk.ask(100)
    desk.wait(0.99)
    assert desk.sync() == []
    desk.wait(0.02)
    assert len(desk.sync()) == 1
    desk.ask(1_000)
    assert desk.sync() == []


def test_a_share_is_topped_up_before_it_is_spent() -> None:
    desk = prepaid_harness()
    assert desk.ask(150) == 150
    desk.wait()
    (wish,) = desk.sync()
    assert (wish.kept, wish.requested) == (50, 250)
    assert desk.ask(300) == 300


def test_while_a_wish_is_on_its_way_there_is_no_second_one() -> None:
    desk = PrepaidHarness()
    desk.ask(100)
    desk.wait()
    (wish,) = desk.shares.due_requests()
    desk.ask(100)
    desk.wait()
    assert desk.shares.due_requests() == []
    desk.answer(wish, None)
    desk.wait()
    assert len(desk.shares.due_requests()) == 1


def test_what_may_have_been_granted_and_was_not_heard_is_never_spent() -> None:
    desk = PrepaidHarness()
    desk.ask(100)
    desk.wait()
    (wish,) = desk.shares.due_requests()
    desk.answer(wish, None)
    assert desk.ask(1) == 0


def test_an_idle_share_goes_back_whole() -> None:
    desk = prepaid_harness()
    assert desk.ask(30) == 30
    returned = []
    for _ in range(7):
        desk.wait()
        returned += [(wish.returned, wish.requested) for wish in desk.sync() if wish.returned]
    assert returned == [(170, 0)]
    assert len(desk.shares) == 0


def test_a_share_ends_with_its_window() -> None:
    desk = PrepaidHarness()
    desk.ends_us = 3 * INTERVAL_US
    desk.ask(100)
    desk.wait()
    desk.sync()
    desk.wait(2)
    assert desk.ask(1) == 0


def test_a_share_that_was_granted_in_the_next_window_keeps_nothing_of_the_last_one() -> None:
    desk = prepaid_harness()
    desk.ask(150)
    desk.wait()
    (wish,) = desk.shares.due_requests()
    desk.ends_us = 2 * HOUR_US
    desk.grant(wish, 10)
    assert desk.ask(20) == 10


def test_a_share_that_was_granted_in_a_longer_window_of_the_same_end_keeps_nothing() -> None:
    """An override that changes the window: what was bought in the shorter one is not part of the longer one's count."""
    desk = prepaid_harness()
    desk.ask(150)
    desk.wait()
    (wish,) = desk.shares.due_requests()
    longer = TopUpReply(10, 1_000_000, 500, HOUR_US - desk.clock.now_us(), -HOUR_US, HOUR_US)
    desk.answer(wish, longer)
    assert desk.ask(20) == 10
    assert desk.share().window == (-HOUR_US, HOUR_US)


def test_a_share_of_a_bucket_lapses() -> None:
    desk = prepaid_harness(BUCKET)
    desk.clock.advance_us(desk.shares.lapse_us)
    assert desk.ask(1) == 0


@pytest.mark.parametrize("limit", [WINDOW, BUCKET], ids=["window", "bucket"])
def test_a_share_ends_counted_from_when_it_was_asked_for(limit: FixedWindow | TokenBucket) -> None:
    desk = PrepaidHarness(limit)
    desk.ask(100)
    desk.wait()
    (wish,) = desk.shares.due_requests()
    sent_us = desk.clock.now_us()
    desk.clock.advance_us(50_000)  # on its way
    desk.shares.apply_replies([wish], [TopUpReply(200, 1_000_000, 0, 1_000_000, 0, 1_000_000)], sent_us)
    desk.clock.set_us(sent_us + (desk.shares.lapse_us if limit is BUCKET else 1_000_000) - 1)
    assert desk.ask(1) == 1
    desk.clock.advance_us(1)
    assert desk.ask(1) == 0


def test_what_was_granted_before_a_reset_never_goes_back() -> None:
    for drop, returned in (
        (Invalidation(keys=(PrepaidHarness().take()[1],)), 0),
        (Invalidation(tenants=(Keys().tenant_keys("t").tenant_prefix,)), 200),
    ):
        desk = PrepaidHarness()
        desk.ask(100)
        desk.wait()
        (wish,) = desk.shares.due_requests()
        desk.shares.invalidate(drop)  # in the same microsecond as it was sent
        desk.grant(wish, 200)
        assert desk.ask(1) == 0
        assert sum(wish.returned for wish in desk.shares.return_all()) == returned


def test_a_share_of_a_bucket_that_is_in_use_is_kept_from_lapsing() -> None:
    desk = prepaid_harness(BUCKET)
    for _ in range(40):  # slowly, so that nothing need be added for long
        desk.wait()
        desk.ask(1)
        desk.sync()
    assert desk.ask(1) == 1


def test_what_was_kept_and_had_lapsed_in_the_store_is_spent_no_more() -> None:
    desk = prepaid_harness(BUCKET)
    desk.ask(150)
    desk.wait()
    (wish,) = desk.shares.due_requests()
    desk.answer(wish, TopUpReply(7, 1_000, 0, 0, 0, -1))
    assert desk.ask(10) == 7


def test_a_cost_above_what_is_left_is_asked_for_in_the_store() -> None:
    desk = prepaid_harness()
    assert desk.ask(1, cost=201) == 0
    assert desk.ask(1, cost=200) == 1


def test_another_plan_spends_nothing_of_the_former_one() -> None:
    desk = prepaid_harness()
    desk.limits = Limits(FixedWindow(name="window", limit=5, window_seconds=3_600, consistency="prepaid"))
    assert desk.ask(1) == 0
    desk.wait()
    (wish,) = desk.shares.due_requests()
    assert wish.returned == 200


def test_an_override_ends_a_share_and_what_is_left_goes_back() -> None:
    desk = prepaid_harness()
    desk.shares.invalidate(Invalidation(subjects=(Keys.overrides(Keys().tenant_keys("t").tenant_prefix, "s"),)))
    assert desk.ask(1) == 0
    desk.wait()
    (wish,) = desk.shares.due_requests()
    assert wish.returned == 200


def test_a_reset_ends_a_share_and_nothing_goes_back() -> None:
    desk = prepaid_harness()
    desk.shares.invalidate(Invalidation(keys=(desk.take()[1],)))
    assert desk.ask(1) == 0
    desk.wait()
    assert [wish.returned for wish in desk.shares.due_requests()] == [0]


def test_what_was_spent_for_a_check_that_was_denied_after_all_comes_back() -> None:
    desk = prepaid_harness()
    _, epoch = desk.shares.spend(desk.take(5)) or ((), 0)
    assert desk.ask(200) == 195
    desk.shares.refund(desk.take(5), epoch)
    assert desk.ask(6) == 5


def test_what_was_spent_in_one_window_does_not_come_back_in_the_next() -> None:
    desk = prepaid_harness()
    _, epoch = desk.shares.spend(desk.take(10)) or ((), 0)
    desk.ask(140)
    desk.wait()
    (wish,) = desk.shares.due_requests()
    desk.ends_us = 2 * HOUR_US
    desk.grant(wish, 20)
    desk.shares.refund(desk.take(10), epoch)
    assert desk.ask(30) == 20


def test_an_answer_that_a_reset_has_overtaken_is_worth_nothing() -> None:
    desk = PrepaidHarness()
    desk.ask(100)
    desk.wait()
    (wish,) = desk.shares.due_requests()
    sent_us = desk.clock.now_us()
    desk.clock.advance_us(1)
    desk.shares.invalidate(Invalidation(keys=(desk.take()[1],)))
    desk.shares.apply_replies([wish], [TopUpReply(200, 1_000_000, 0, HOUR_US, 0, HOUR_US)], sent_us)
    assert desk.ask(1) == 0


def test_what_could_not_be_brought_back_is_brought_back_later_unless_it_was_reset_meanwhile() -> None:
    for is_reset, returned in ((False, 200), (True, 0)):
        desk = prepaid_harness()
        desk.shares.invalidate(Invalidation(subjects=(Keys.overrides(Keys().tenant_keys("t").tenant_prefix, "s"),)))
        desk.ask(100)
        desk.wait()
        (wish,) = desk.shares.due_requests()
        sent_us = desk.clock.now_us()
        desk.clock.advance_us(1)
        if is_reset:
            desk.shares.invalidate(Invalidation(keys=(desk.take()[1],)))
        desk.shares.apply_replies([wish], [None], sent_us)
        desk.wait()
        desk.ask(100)
        assert [wish.returned for wish in desk.shares.due_requests()] == [returned]


def test_who_begins_to_listen_loses_nothing_and_who_listens_again_all() -> None:
    desk = prepaid_harness()
    desk.shares.invalidate_all(messages_missed=False)
    assert desk.ask(1) == 1
    desk.shares.invalidate_all(messages_missed=True)
    assert desk.ask(1) == 0


def test_a_decision_tells_what_this_process_and_the_store_have_left() -> None:
    desk = prepaid_harness()
    row, _ = desk.shares.spend(desk.take()) or ((), 0)
    assert row == (1_000_000, 199 + 500, HOUR_US - INTERVAL_US, 0, 0)


def test_the_number_of_shares_is_bounded() -> None:
    desk = PrepaidHarness()
    for subject in "abcdef":
        desk.ask(100, subject=subject)
    assert len(desk.shares) == 3


def test_on_leaving_everything_goes_back() -> None:
    desk = prepaid_harness()
    desk.ask(50)
    assert [(wish.returned, wish.kept, wish.requested) for wish in desk.shares.return_all()] == [(150, 0, 0)]
    assert desk.ask(1) == 0


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
