"""The schedule of a burst, on a fake clock."""

import pytest

from limitforge.cli.burst.schedule import FRAME_SECONDS, RequestRate, send_times
from limitforge.errors import InvalidInput


class FakeTime:
    """`time.monotonic` and `time.sleep`, without waiting."""

    def __init__(self) -> None:
        self.seconds = 1_000.0
        self.frames: list[float] = []

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.seconds += max(seconds, 1e-7)  # a real sleep is at least as long

    def send_times(self, rate: str, requests: int, taking: dict[int, float] | None = None) -> list[float]:
        """Return when each request was sent; `taking` maps some of them to their duration."""
        times = []
        for request, at in enumerate(
            send_times(RequestRate.parse(rate), requests, self.frames.append, now=self.now, sleep=self.sleep)
        ):
            times.append(round(at, 3))
            self.seconds += (taking or {}).get(request, 0.0)
        return times


@pytest.mark.parametrize(
    ("text", "interval_s"),
    [
        ("50/s", 0.02),
        ("50/second", 0.02),
        ("4 per sec", 0.25),
        ("20/minute", 3.0),
        ("30/Min", 2.0),
        ("3600/hour", 1.0),
        ("0.5/s", 2.0),
        ("max", 0.0),
        ("MAX", 0.0),
    ],
)
def test_a_rate_is_a_number_per_unit_of_time(text: str, interval_s: float) -> None:
    assert RequestRate.parse(text).interval_s == interval_s


@pytest.mark.parametrize("text", ["", "50", "50/", "/s", "50/day", "-1/s", "0/s", "1e3/s", "2000000/s", "50/s x"])
def test_an_invalid_rate_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^--rate: "):
        RequestRate.parse(text)


def test_requests_are_sent_at_equal_intervals() -> None:
    assert FakeTime().send_times("10/s", 5) == [0.0, 0.1, 0.2, 0.3, 0.4]


def test_a_slow_request_delays_only_requests_scheduled_meanwhile() -> None:
    assert FakeTime().send_times("10/s", 6, taking={1: 0.25}) == [0.0, 0.1, 0.35, 0.35, 0.4, 0.5]


def test_at_full_speed_each_request_follows_the_previous_one() -> None:
    assert FakeTime().send_times("max", 4, taking={0: 0.5, 1: 0.25, 2: 0.25}) == [0.0, 0.5, 0.75, 1.0]


def test_frames_continue_between_requests_that_are_far_apart() -> None:
    time = FakeTime()
    time.send_times("1/s", 3)
    assert time.frames[0] == 0.0
    assert len(time.frames) == pytest.approx(2 / FRAME_SECONDS, abs=3)


def test_full_speed_does_not_draw_more_frames() -> None:
    time = FakeTime()
    time.send_times("max", 1_000, taking=dict.fromkeys(range(1_000), 0.001))
    assert len(time.frames) == pytest.approx(1 / FRAME_SECONDS, abs=1)
