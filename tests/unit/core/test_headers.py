"""Header fields of a decision: the legacy fields, and those of the IETF drafts."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitforge import (
    Concurrency,
    Decision,
    FixedWindow,
    InvalidInput,
    Layer,
    LeakyBucket,
    Limit,
    Limits,
    LimitState,
    ManualClock,
    MemoryStore,
    Quota,
    SlidingWindow,
    SlidingWindowCounter,
    SyncLimiter,
    TokenBucket,
)
from limitforge.core.check import build_check
from limitforge.core.decision import fail_closed_decision, fail_open_decision
from limitforge.core.headers import (
    DEFAULT_STYLES,
    HeaderStyle,
    HeaderTemplate,
    ResetUnit,
    encode_block,
    encode_lines,
    parse_block,
)
from limitforge.core.join import PlanPart, join_limits
from limitforge.core.keys import Keys
from tests.contract.strategies import limits as any_limit

BURST = TokenBucket(name="burst", bucket_capacity=100, refill_rate_per_sec=100 / 60)
DAILY = Quota(name="daily", limit=1_000, period="day")
PLAN = Limits(BURST, DAILY)
DAY_US = 86_400_000_000
LEGACY, DRAFT_06, DRAFT_11 = HeaderStyle

_KINDS = ("limit", "remaining", "reset")

# A list of strings with parameters, as RFC 9651 has it; the numbers have at most 15 digits.
_STRING = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
_ITEM = re.compile(rf"({_STRING})((?:;[a-z]+=(?:[0-9]{{1,15}}|{_STRING}))*)(?:,|$)")


def parsed(text: str) -> dict[str, dict[str, int | str]]:
    """The items of a field by name, each with its parameters; refuses what is no structured field."""
    found: dict[str, dict[str, int | str]] = {}
    while text:
        item = _ITEM.match(text)
        assert item, text
        pairs = (pair.split("=", 1) for pair in item[2].split(";")[1:])
        found[item[1][1:-1]] = {key: value[1:-1] if value[0] == '"' else int(value) for key, value in pairs}
        text = text[item.end() :]
    return found


def header_fields(
    limits: Any, decision: Decision, *styles: HeaderStyle, reset: ResetUnit = ResetUnit.EPOCH, clock: Any = None
) -> dict[str, str]:
    template = HeaderTemplate.compile(limits, styles or DEFAULT_STYLES, reset, clock)
    headers = template.fields(decision)
    assert len({name for name, _ in headers}) == len(headers)
    assert template.block(decision) == encode_block(headers)
    assert parse_block(encode_block(headers)) == headers
    return {name.decode(): value.decode() for name, value in headers}


def policies(limits: Any, decision: Decision) -> dict[str, dict[str, int | str]]:
    return parsed(header_fields(limits, decision, DRAFT_11).get("ratelimit-policy", ""))


def states(limits: Any, decision: Decision) -> dict[str, dict[str, int | str]]:
    return parsed(header_fields(limits, decision, DRAFT_11).get("ratelimit", ""))


def window(name: str = "a", limit: int | None = 10, **fields: Any) -> Limit:
    return FixedWindow(name=name, limit=limit, window_seconds=60, **fields)


@pytest.fixture
def afternoon(clock: ManualClock) -> int:
    """Seconds since 1970, 40,000 before midnight."""
    clock.set_us((clock.now_us() // DAY_US + 1) * DAY_US - 40_000_000_000)
    return clock.now_us() // 1_000_000


# -- as the design has it


def test_the_fields_are_those_of_the_design(limiter: SyncLimiter, afternoon: int) -> None:
    decision = limiter.check("r", "s", limits=PLAN, cost=50, costs={"daily": 20})
    assert encode_lines(HeaderTemplate.compile(PLAN).fields(decision)).decode().split("\r\n") == [
        "X-RateLimit-Limit: 100",
        "X-RateLimit-Remaining: 50",
        f"X-RateLimit-Reset: {afternoon + 30}",
        'RateLimit-Policy: "burst";q=100;w=60,"daily";q=1000;w=86400',
        'RateLimit: "burst";r=50;t=30,"daily";r=980;t=40000',
        "Retry-After: 0",
        "",
    ]


def test_a_denial_says_when_to_retry(limiter: SyncLimiter, afternoon: int) -> None:
    limiter.check("r", "s", limits=PLAN, cost=100)
    assert header_fields(PLAN, limiter.check("r", "s", limits=PLAN)) == {
        "x-ratelimit-limit": "100",
        "x-ratelimit-remaining": "0",
        "x-ratelimit-reset": str(afternoon + 60),
        "ratelimit-policy": '"burst";q=100;w=60,"daily";q=1000;w=86400',
        "ratelimit": '"burst";r=0;t=1,"daily";r=900;t=40000',
        "retry-after": "1",
    }


def test_draft_06_counts_seconds_from_now(limiter: SyncLimiter, afternoon: int) -> None:
    decision = limiter.check("r", "s", limits=PLAN, cost=50)
    assert header_fields(PLAN, decision, DRAFT_06) == {
        "ratelimit-limit": "100",
        "ratelimit-remaining": "50",
        "ratelimit-reset": "30",
        "retry-after": "0",
    }


def test_the_legacy_reset_counts_seconds_from_now_by_an_option(limiter: SyncLimiter, afternoon: int) -> None:
    decision = limiter.check("r", "s", limits=PLAN, cost=50)
    assert header_fields(PLAN, decision, LEGACY, reset=ResetUnit.DELTA)["x-ratelimit-reset"] == "30"
    assert header_fields(PLAN, decision, LEGACY)["x-ratelimit-reset"] == str(afternoon + 30)


@pytest.mark.parametrize(
    ("styles", "names"),
    [
        ([LEGACY], [f"x-ratelimit-{kind}" for kind in _KINDS]),
        ([DRAFT_06], [f"ratelimit-{kind}" for kind in _KINDS]),
        ([DRAFT_11], ["ratelimit-policy", "ratelimit"]),
        ([DRAFT_11, LEGACY], [f"x-ratelimit-{kind}" for kind in _KINDS] + ["ratelimit-policy", "ratelimit"]),
    ],
)
def test_a_style_has_its_own_fields_and_each_has_retry_after(
    styles: list[HeaderStyle], names: list[str], limiter: SyncLimiter
) -> None:
    assert list(header_fields(PLAN, limiter.check("r", "s", limits=PLAN), *styles)) == [*names, "retry-after"]


def test_styles_have_the_names_of_the_design() -> None:
    assert list(HeaderStyle) == ["legacy", "draft-06", "draft-11"]
    assert {"legacy", "draft-11"} == DEFAULT_STYLES


# -- Retry-After


@pytest.mark.parametrize(("wait_ms", "seconds"), [(1, "1"), (1_000, "1"), (1_001, "2"), (59_999, "60"), (0, "1")])
def test_retry_after_is_rounded_up_and_at_least_1(wait_ms: int, seconds: str, limiter: SyncLimiter) -> None:
    decision = limiter.check("r", "s", limits=window(limit=0))
    waiting = msgspec.structs.replace(decision, retry_after_ms=wait_ms)
    assert header_fields(window(limit=0), waiting)["retry-after"] == seconds


def test_what_can_never_be_allowed_has_no_retry_after_and_no_t(limiter: SyncLimiter) -> None:
    limits = Limits(window("a", 0), window("b"))
    denied = header_fields(limits, limiter.check("r", "s", limits=limits))
    assert "retry-after" not in denied
    assert "t" not in parsed(denied["ratelimit"])["a"]
    assert parsed(denied["ratelimit"])["b"] == {"r": 10, "t": 60}
    assert (denied["x-ratelimit-limit"], denied["x-ratelimit-remaining"]) == ("0", "0")


@given(st.lists(any_limit(), max_size=3, unique_by=lambda limit: limit.name), st.lists(st.integers(0, 8), min_size=1))
def test_fields_are_well_formed_and_waiting_for_retry_after_is_enough(plan: list[Limit], costs: list[int]) -> None:
    clock = ManualClock()
    limiter = SyncLimiter(MemoryStore(clock=clock))
    for cost in costs:
        decision = limiter.check("r", "s", limits=plan, cost=cost)
        headers = header_fields(plan, decision, *HeaderStyle, clock=clock)
        header_fields(plan, decision, reset=ResetUnit.DELTA, clock=clock)
        finite = {name for name, state in decision.limits.items() if state.limit is not None}
        assert parsed(headers.get("ratelimit", "")).keys() == finite
        assert parsed(headers.get("ratelimit-policy", "")).keys() == finite
        assert ("x-ratelimit-limit" in headers) is bool(finite)
        if decision.allowed:
            assert headers.get("retry-after") == ("0" if decision.limits else None)
        elif decision.retry_after_ms is not None:
            clock.advance_us(int(headers["retry-after"]) * 1_000_000)
            if not any(limit.count_denied for limit in plan):  # those were charged for asking
                assert limiter.check("r", "s", limits=plan, cost=cost).allowed


def test_retry_after_is_no_earlier_than_the_t_of_any_limit_that_denies(limiter: SyncLimiter) -> None:
    limits = Limits(window("minute"), FixedWindow(name="hour", limit=10, window_seconds=3_600))
    limiter.check("r", "s", limits=limits, cost=10)
    denied = header_fields(limits, limiter.check("r", "s", limits=limits))
    waits = [item["t"] for item in parsed(denied["ratelimit"]).values()]
    assert int(denied["retry-after"]) == max(int(wait) for wait in waits)


# -- items


@pytest.mark.parametrize(
    ("limit", "policy"),
    [
        (TokenBucket(name="x", bucket_capacity=100, refill_rate_per_sec=20), "q=100;w=5"),
        (TokenBucket(name="x", bucket_capacity=10, refill_rate_per_sec=3), "q=10;w=4"),
        (TokenBucket(name="x", bucket_capacity=1, refill_rate_per_sec=1_000), "q=1;w=1"),
        (LeakyBucket(name="x", bucket_capacity=7, leak_rate_per_sec="0.5"), "q=7;w=14"),
        (FixedWindow(name="x", limit=5, window_seconds=60), "q=5;w=60"),
        (FixedWindow(name="x", limit=5, window_seconds="0.001"), "q=5;w=1"),
        (FixedWindow(name="x", limit=0, window_seconds=60), "q=0;w=60"),
        (SlidingWindow(name="x", limit=5, window_seconds="1.000001"), "q=5;w=2"),
        (SlidingWindowCounter(name="x", limit=5, window_seconds=3_600), "q=5;w=3600"),
        (Concurrency(name="x", max_concurrent=5, lease_ttl_seconds=60), 'q=5;qu="concurrent-requests"'),
        (Quota(name="x", limit=5, period="day"), "q=5;w=86400"),
        (Quota(name="x", limit=5, period="week"), "q=5;w=604800"),
        (Quota(name="x", limit=5, period="month"), "q=5;w=2678400"),
        (Quota(name="x", limit=5, period="year"), "q=5;w=31622400"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.algorithm,
)
def test_a_policy_has_the_size_and_the_window(limit: Limit, policy: str, limiter: SyncLimiter) -> None:
    decision = limiter.check("r", "s", limits=limit, cost=0)
    assert header_fields(limit, decision)["ratelimit-policy"] == f'"x";{policy}'


def test_integers_have_at_most_15_digits(limiter: SyncLimiter) -> None:
    huge = FixedWindow(name="huge", limit=2**52 - 1, window_seconds=60)
    headers = header_fields(huge, limiter.check("r", "s", limits=huge), *HeaderStyle)
    assert headers["ratelimit-policy"] == '"huge";q=999999999999999;w=60'
    assert headers["ratelimit"] == '"huge";r=999999999999999;t=60'
    assert headers["ratelimit-limit"] == headers["ratelimit-remaining"] == "999999999999999"
    assert headers["x-ratelimit-limit"] == str(2**52 - 1)


def test_a_limit_that_is_unlimited_is_left_out(limiter: SyncLimiter) -> None:
    limits = Limits(window("a"), window("b", None))
    assert policies(limits, limiter.check("r", "s", limits=limits)).keys() == {"a"}
    assert states(limits, limiter.check("r", "s", limits=limits)).keys() == {"a"}
    alone = window("b", None)
    assert header_fields(alone, limiter.check("r", "s", limits=alone), *HeaderStyle) == {"retry-after": "0"}


def test_limits_that_are_off_are_left_out(limiter: SyncLimiter) -> None:
    limits = Limits(window("a"), window("b", mode="off"))
    assert policies(limits, limiter.check("r", "s", limits=limits)).keys() == {"a"}


def test_joined_limits_have_the_names_of_the_decision(limiter: SyncLimiter) -> None:
    limits = join_limits(PlanPart(window("a", 5), Layer.TENANT), PlanPart(window("a", 7), Layer.POLICY))
    headers = header_fields(limits, limiter.check("r", "s", limits=limits))
    assert headers["ratelimit-policy"] == '"tenant:a";q=5;w=60,"policy:a";q=7;w=60'
    assert headers["ratelimit"] == '"tenant:a";r=4;t=60,"policy:a";r=6;t=60'


def test_a_compiled_plan_does_as_well_as_its_limits(limiter: SyncLimiter) -> None:
    decision = limiter.check("r", "s", limits=PLAN)
    assert (
        header_fields(PLAN.plan("P2"), decision)
        == header_fields(PLAN, decision)
        == header_fields([BURST, DAILY], decision)
    )


# -- overrides


def test_the_numbers_of_an_override_replace_those_of_the_plan(limiter: SyncLimiter) -> None:
    limiter.set_override("r", "s", {"burst": {"limit": 500}}, limits=PLAN, ttl_seconds=60)
    template = HeaderTemplate.compile(PLAN, [DRAFT_11])
    for subject, policy in (
        ("s", '"burst";q=500;w=300'),
        ("other", '"burst";q=100;w=60'),
        ("s", '"burst";q=500;w=300'),
    ):
        decision = limiter.check("r", subject, limits=PLAN)
        headers = dict(template.fields(decision))
        assert template.block(decision) == encode_block(headers.items())
        assert headers[b"ratelimit-policy"].decode() == policy + ',"daily";q=1000;w=86400'


@pytest.mark.parametrize(("word", "reported"), [("unlimited", {"daily"}), ("blocked", {"burst", "daily"})])
def test_an_override_may_lift_or_block_a_limit(word: str, reported: set[str], limiter: SyncLimiter) -> None:
    limiter.set_override("r", "s", {"burst": word}, limits=PLAN, ttl_seconds=60)
    decision = limiter.check("r", "s", limits=PLAN)
    assert policies(PLAN, decision).keys() == states(PLAN, decision).keys() == reported
    assert policies(PLAN, decision).get("burst", {"q": 0})["q"] == 0


def test_an_override_may_limit_what_was_unlimited(limiter: SyncLimiter) -> None:
    limits = Limits(TokenBucket(name="a", bucket_capacity=None), window("b", None))
    limiter.set_override(
        "r", "s", {"a": {"limit": 5, "refill_rate_per_sec": 1}, "b": {"limit": 5}}, limits=limits, ttl_seconds=60
    )
    assert policies(limits, limiter.check("r", "s", limits=limits)) == {"a": {"q": 5}, "b": {"q": 5, "w": 60}}


def test_a_decision_of_other_limits_has_no_windows(limiter: SyncLimiter) -> None:
    decision = limiter.check("r", "s", limits=[window("a"), window("b")])
    assert policies(window("a"), decision) == {"a": {"q": 10, "w": 60}, "b": {"q": 10}}
    assert states(window("c"), decision).keys() == {"a", "b"}
    assert policies([window("c", None), window("a")], decision).keys() == {"a", "b"}


# -- monitored limits


def test_monitored_limits_beside_an_enforced_one_do_not_bind(limiter: SyncLimiter) -> None:
    limits = Limits(window("a", 0, mode="monitor"), window("b"))
    headers = header_fields(limits, limiter.check("r", "s", limits=limits))
    assert (headers["x-ratelimit-limit"], headers["retry-after"]) == ("10", "0")
    assert parsed(headers["ratelimit"]) == {"a": {"r": 0}, "b": {"r": 9, "t": 60}}


def monitored(limiter: SyncLimiter, clock: ManualClock, *limits: Limit, cost: int = 1) -> tuple[str, ...]:
    headers = header_fields(limits, limiter.check("r", "s", limits=limits, cost=cost), *HeaderStyle, clock=clock)
    assert headers["retry-after"] == "0"
    for kind in ("limit", "remaining"):
        assert headers[f"ratelimit-{kind}"] == headers[f"x-ratelimit-{kind}"]
    assert int(headers["x-ratelimit-reset"]) == clock.now_us() // 1_000_000 + int(headers["ratelimit-reset"])
    return headers["x-ratelimit-limit"], headers["x-ratelimit-remaining"], headers["ratelimit-reset"]


def test_with_monitored_limits_only_the_one_that_would_bind_is_reported(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    least = window("least", 5, mode="monitor")
    most = window("most", 9, mode="monitor")
    assert monitored(limiter, clock, window("none", None, mode="monitor"), most, least) == ("5", "4", "60")


def test_of_monitored_limits_with_equal_remains_the_later_reset_would_bind(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    hour = FixedWindow(name="hour", limit=5, window_seconds=3_600, mode="monitor")
    seconds = str(3_600 - clock.now_us() // 1_000_000 % 3_600)
    assert monitored(limiter, clock, window("minute", 5, mode="monitor"), hour) == ("5", "4", seconds)


def test_of_monitored_limits_without_room_the_longest_wait_would_bind(limiter: SyncLimiter, clock: ManualClock) -> None:
    bucket = TokenBucket(name="bucket", bucket_capacity=5, refill_rate_per_sec=1, mode="monitor")
    wide = window("wide", 100, mode="monitor")
    minute = window("minute", 6, mode="monitor")
    monitored(limiter, clock, bucket, minute, wide, cost=4)
    assert monitored(limiter, clock, bucket, minute, wide, cost=4)[:2] == ("6", "0")
    assert monitored(limiter, clock, bucket, minute, wide, cost=6)[:2] == ("5", "0")  # never, by the bucket


# -- nothing to tell


def test_without_limits_there_are_no_fields(limiter: SyncLimiter) -> None:
    assert header_fields([], limiter.check("r", "s", limits=[]), *HeaderStyle) == {}
    off = window(mode="off")
    assert header_fields(off, limiter.check("r", "s", limits=off), *HeaderStyle) == {}


def test_what_was_let_pass_without_the_store_has_no_fields() -> None:
    assert header_fields(PLAN, fail_open_decision(_check_of(PLAN)), *HeaderStyle) == {}


def test_what_was_denied_without_the_store_has_its_wait() -> None:
    assert header_fields(PLAN, fail_closed_decision(_check_of(PLAN), 1_500), *HeaderStyle) == {"retry-after": "2"}


def _check_of(limits: Limits) -> Any:
    return build_check(Keys("lf"), limits, "r", "s", 1, None, "acme", "P0")


# -- injection


@given(st.from_regex(r"[A-Za-z0-9_./-]{1,64}", fullmatch=True))
def test_a_name_is_sent_unchanged(name: str) -> None:
    limiter = SyncLimiter(MemoryStore(clock=ManualClock()))
    limits = join_limits(PlanPart(window(name), Layer.TENANT), PlanPart(window(name), Layer.POLICY))
    decision = limiter.check("r", "s", limits=limits)
    assert states(limits, decision).keys() == {f"tenant:{name}", f"policy:{name}"}


def names_of(pairs: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    return [name for name, _ in pairs]


@given(st.text(max_size=20))
def test_no_name_can_end_a_line_or_a_string(name: str) -> None:
    """No limit has such a name; but should one ever slip in, it is escaped or refused."""
    state = LimitState(5, 4, 1_000, 0, True, False)
    decision = Decision(True, 5, 4, 1_000, 1, 0, None, {name: state}, name)
    template = HeaderTemplate.compile([])
    if name.isascii() and name.isprintable():
        headers = template.fields(decision)
        escaped = name.replace("\\", "\\\\").replace('"', '\\"')
        assert parsed(dict(headers)[b"ratelimit"].decode()) == {escaped: {"r": 4, "t": 1}}
        assert encode_lines(headers).count(b"\n") == len(headers)
    else:
        with pytest.raises(InvalidInput):
            template.fields(decision)


@pytest.mark.parametrize("name", ["a\r\nSet-Cookie: x", 'a"', "a;b", "a,b", "ä", "a b"])
def test_a_limit_with_a_name_that_would_need_escaping_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        window(name)


def test_every_field_has_a_line_of_its_own(limiter: SyncLimiter) -> None:
    headers = HeaderTemplate.compile(PLAN, tuple(HeaderStyle)).fields(limiter.check("r", "s", limits=PLAN))
    sent = encode_lines(headers).split(b"\r\n")
    assert [line.partition(b": ")[0].lower() for line in sent[:-1]] == names_of(headers)
    assert all(name == name.lower() for name in names_of(headers))
