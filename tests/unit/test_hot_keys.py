"""The hottest keys are found with bounded memory."""

import random

from limitforge import Limits, ManualClock
from limitforge.core.check import Check, build_check
from limitforge.core.keys import Keys
from limitforge.stores.redis.hot_keys import MAX_REPORTED, PRUNE_ABOVE, SAMPLE_EVERY, WINDOW_US, HotKeys

LIMITS = Limits.parse("100/minute")
KEYS = Keys()


def of(subject: str) -> Check:
    return build_check(KEYS, LIMITS, "r", subject, 1, None, "t", "P0")


def heated(counts: dict[str, int], clock: ManualClock) -> HotKeys:
    heat = HotKeys(clock)
    subjects = [subject for subject, count in counts.items() for _ in range(count)]
    random.Random(1).shuffle(subjects)
    for subject in subjects[::SAMPLE_EVERY]:
        heat.record(of(subject))
    clock.advance_us(1_000_000)
    return heat


def names(heat: HotKeys) -> list[str]:
    return [hot.key.split(":")[-3] for hot in heat.top()]


def test_nobody_asked_so_nothing_is_hot() -> None:
    assert HotKeys(ManualClock(0)).top() == []


def test_the_hottest_of_many_keys_are_found_whatever_their_number() -> None:
    counts = {f"cold{number}": 8 for number in range(5_000)} | {"hot": 8_000, "warm": 4_000}
    heat = heated(counts, ManualClock(0))
    assert names(heat)[:2] == ["hot", "warm"]
    assert len(heat._counts) <= PRUNE_ABOVE
    assert len(heat.top()) == MAX_REPORTED


def test_how_often_and_which_part_is_told_about_right() -> None:
    (hot, cold) = heated({"hot": 3_000 * SAMPLE_EVERY, "cold": 1_000 * SAMPLE_EVERY}, ManualClock(0)).top()
    assert 0.7 < hot.share < 0.8
    assert 0.2 < cold.share < 0.3
    assert 20_000 < hot.per_second < 28_000


def test_what_was_hot_a_while_ago_is_forgotten() -> None:
    clock = ManualClock(0)
    heat = heated({"hot": 800}, clock)
    clock.advance_us(WINDOW_US)
    assert names(heat) == ["hot"]
    clock.advance_us(WINDOW_US + 1)
    assert heat.top() == []


def test_a_turn_that_is_over_counts_with_its_time() -> None:
    clock = ManualClock(0)
    heat = heated({"hot": 100 * SAMPLE_EVERY}, clock)
    clock.advance_us(15_000_000)
    (hot,) = heat.top()
    assert hot.per_second == 100 * SAMPLE_EVERY / 16


def test_after_a_long_silence_counting_begins_anew() -> None:
    clock = ManualClock(0)
    heat = heated({"hot": 100 * SAMPLE_EVERY}, clock)
    clock.advance_us(2 * WINDOW_US)
    assert heat.top() == []
    for _ in range(10):
        heat.record(of("new"))
    clock.advance_us(2_000_000)
    (new,) = heat.top()
    assert (new.per_second, new.share) == (10 * SAMPLE_EVERY / 2, 1)
