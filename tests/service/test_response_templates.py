"""A template renders the same bytes as the general code, or nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitforge import Concurrency, FixedWindow, LeakyBucket, Limit, TokenBucket
from limitforge.catalog.snapshot import Selection
from limitforge.core.check import Check, build_check
from limitforge.core.decision import LimitRow, Outcome, build_decision
from limitforge.core.headers import DEFAULT_STYLES, HeaderStyle, HeaderTemplate, ResetUnit
from limitforge.core.keys import Keys
from limitforge.core.limits import Mode
from limitforge.core.plan import Limits
from limitforge.service.checks.response_templates import MAX_DENIAL_FORMATS, ResponseTemplate, TemplateCache
from limitforge.service.checks.responses import Response, decision_response

KEYS = Keys()
NOW_US = 1_794_766_741_000_000


def selection_of(
    *limits: Limit, reset: ResetUnit = ResetUnit.EPOCH, styles: frozenset[HeaderStyle] = DEFAULT_STYLES
) -> Selection:
    plan = Limits(*limits)
    return Selection(
        limits=plan,
        shadow=None,
        failure=None,
        priority=None,
        mode=Mode.ON,
        counted_resource=None,
        headers=HeaderTemplate.compile(plan, styles, reset),
        policy=None,
        plans=(),
    )


def check_by(selection: Selection) -> Check:
    return build_check(KEYS, selection.limits, "r", "s", 1, None, "t", "P0")


def at_length(selection: Selection, outcome: Outcome) -> Response:
    return decision_response(build_decision(check_by(selection), outcome), selection, None, None)


names = st.lists(st.from_regex(r"\A[a-z][a-z0-9_.-]{0,20}\Z"), min_size=1, max_size=5, unique=True)
spans = st.one_of(st.integers(0, 3), st.integers(0, 10_000), st.integers(0, 10**14))


@st.composite
def judged(draw: st.DrawFn) -> tuple[Selection, Outcome]:
    sizes = {name: draw(st.integers(1, 5_000_000)) for name in draw(names)}
    limits = [FixedWindow(name=name, limit=size, window_seconds=60) for name, size in sizes.items()]
    selection = selection_of(*limits, reset=draw(st.sampled_from(ResetUnit)))
    allowed = draw(st.booleans())
    rows: list[LimitRow] = []
    for planned in sizes.values():
        size = draw(st.integers(1, 9)) if draw(st.integers(0, 9)) == 9 else planned
        wait_us = -1 if draw(st.integers(0, 19)) == 19 else draw(spans) * draw(st.booleans())
        rows.append((size, draw(st.integers(0, size)), draw(spans), wait_us, 0))
    delay_us = draw(spans) if allowed and draw(st.booleans()) else -1
    return selection, Outcome(NOW_US + draw(spans), allowed, delay_us, rows)


@given(judged())
def test_any_outcome_is_answered_as_it_is_at_length(case: tuple[Selection, Outcome]) -> None:
    selection, outcome = case
    template = ResponseTemplate.compile(selection)
    assert template is not None
    answer = template.render(outcome)
    if answer is not None:
        assert answer == at_length(selection, outcome)


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(NOW_US, True, -1, [(100, 99, 60_000_000, 0, 0), (10, 9, 1, 0, 0)]),
        Outcome(NOW_US, True, 1_001, [(100, 9, 60_000_000, 0, 0), (10, 9, 1, 0, 0)]),
        Outcome(NOW_US, False, -1, [(100, 50, 60_000_000, 0, 0), (10, 0, 1, 1, 0)]),
        Outcome(NOW_US, False, -1, [(100, 0, 60_000_000, 7_000_001, 0), (10, 0, 1, 7_000_001, 0)]),
    ],
    ids=["admitted", "delayed", "denied by one", "denied by both"],
)
def test_what_is_usual_is_answered_by_a_template(outcome: Outcome) -> None:
    selection = selection_of(
        FixedWindow(name="minute", limit=100, window_seconds=60), FixedWindow(name="second", limit=10, window_seconds=1)
    )
    template = ResponseTemplate.compile(selection)
    assert template is not None
    assert template.render(outcome) == at_length(selection, outcome)


@pytest.mark.parametrize(
    "limits",
    [
        (),
        (FixedWindow(limit=10, window_seconds=1, mode=Mode.MONITOR),),
        (FixedWindow(limit=None, window_seconds=1),),
        (FixedWindow(limit=2**52 - 1, window_seconds=1),),
        (TokenBucket(bucket_capacity=1, refill_rate_per_sec=1), Concurrency(max_concurrent=1, lease_ttl_seconds=1)),
    ],
    ids=["no limit", "monitored", "unlimited", "larger than a field can say", "with a lease"],
)
def test_limits_that_have_more_to_say_have_no_template(limits: tuple[Limit, ...]) -> None:
    assert ResponseTemplate.compile(selection_of(*limits)) is None


def test_other_header_styles_have_no_template() -> None:
    styles = frozenset({HeaderStyle.DRAFT_06})
    assert ResponseTemplate.compile(selection_of(FixedWindow(limit=1, window_seconds=1), styles=styles)) is None


def test_many_patterns_of_denial_are_answered_and_not_all_of_them_kept() -> None:
    limits = [LeakyBucket(name=f"l{index}", bucket_capacity=9, leak_rate_per_sec=1) for index in range(8)]
    selection = selection_of(*limits)
    template = ResponseTemplate.compile(selection)
    assert template is not None
    for shut in range(1, 256):
        rows = [(9, 9 - 9 * (shut >> index & 1), 5_000, 4_000 * (shut >> index & 1), 0) for index in range(8)]
        outcome = Outcome(NOW_US, False, -1, rows)
        assert template.render(outcome) == at_length(selection, outcome)
    assert len(template._denied) == MAX_DENIAL_FORMATS


def test_plans_that_are_compiled_together_share_a_template() -> None:
    templates = TemplateCache()
    selection = selection_of(FixedWindow(limit=1, window_seconds=1))
    assert templates.get(selection) is templates.get(selection) is not None
