"""HotKeys finds the most frequently checked buckets with bounded memory."""

import random
import threading

from limitforge import Limits, ManualClock
from limitforge.core.check import Check, build_check
from limitforge.core.keys import Keys
from limitforge.stores.redis.hot_keys import CAPACITY, MAX_REPORTED, SAMPLE_EVERY, WINDOW_US, HotKeys

LIMITS = Limits.parse("100/minute")
KEYS = Keys()


def check_of(subject: str) -> Check:
    return build_check(KEYS, LIMITS, "r", subject, 1, None, "t", "P0")


def recorded(checks: dict[str, int], clock: ManualClock) -> HotKeys:
    """Record so many checks by subject, shuffled and sampled, and let a second pass."""
    hot_keys = HotKeys(clock)
    subjects = [subject for subject, count in checks.items() for _ in range(count)]
    random.Random(1).shuffle(subjects)
    for subject in subjects[::SAMPLE_EVERY]:
        hot_keys.record(check_of(subject))
    clock.advance_us(1_000_000)
    return hot_keys


def subjects_of(hot_keys: HotKeys) -> list[str]:
    return [hot.key.split(":")[-3] for hot in hot_keys.top()]


def test_without_checks_no_key_is_hot() -> None:
    assert HotKeys(ManualClock(0)).top() == []


def test_the_hottest_of_many_keys_are_found_in_bounded_memory() -> None:
    checks = {f"cold{number}": 8 for number in range(5_000)} | {"hot": 8_000, "warm": 4_000}
    hot_keys = recorded(checks, ManualClock(0))
    assert subjects_of(hot_keys)[:2] == ["hot", "warm"]
    assert sum(map(len, hot_keys._current.keys.groups.values())) <= CAPACITY
    assert len(hot_keys.top()) == MAX_REPORTED


def test_rates_and_shares_are_about_right() -> None:
    (hot, cold) = recorded({"hot": 3_000 * SAMPLE_EVERY, "cold": 1_000 * SAMPLE_EVERY}, ManualClock(0)).top()
    assert 0.7 < hot.share < 0.8
    assert 0.2 < cold.share < 0.3
    assert 20_000 < hot.per_second < 28_000


def test_keys_are_forgotten_after_two_windows() -> None:
    clock = ManualClock(0)
    hot_keys = recorded({"hot": 800}, clock)
    clock.advance_us(WINDOW_US)
    assert subjects_of(hot_keys) == ["hot"]
    clock.advance_us(WINDOW_US + 1)
    assert hot_keys.top() == []


def test_the_rate_covers_the_time_of_both_windows() -> None:
    clock = ManualClock(0)
    hot_keys = recorded({"hot": 100 * SAMPLE_EVERY}, clock)
    clock.advance_us(15_000_000)
    (hot,) = hot_keys.top()
    assert hot.per_second == 100 * SAMPLE_EVERY / 16


def test_after_a_long_silence_counting_begins_anew() -> None:
    clock = ManualClock(0)
    hot_keys = recorded({"hot": 100 * SAMPLE_EVERY}, clock)
    clock.advance_us(2 * WINDOW_US)
    assert hot_keys.top() == []
    for _ in range(10):
        hot_keys.record(check_of("new"))
    clock.advance_us(2_000_000)
    (new,) = hot_keys.top()
    assert (new.per_second, new.share) == (10 * SAMPLE_EVERY / 2, 1)


def test_threads_share_an_instance_without_a_lock() -> None:
    hot_keys = HotKeys(ManualClock(0))
    failures: list[BaseException] = []

    def record(thread: int) -> None:
        try:
            for number in range(3 * CAPACITY):
                hot_keys.record(check_of(f"cold{thread}-{number}"))
                hot_keys.record(check_of("hot"))
                if number % 200 == 0:
                    hot_keys.top()
        except BaseException as error:  # noqa: BLE001 - the test shows it
            failures.append(error)

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert subjects_of(hot_keys)[0] == "hot"
