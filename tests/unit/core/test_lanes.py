"""Lanes: what of a tenant lies together, and what it means to change their number."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitforge import InvalidInput, Lanes, Limits, SyncLimiter, limit_from_fields
from limitforge.core.check import build_check
from limitforge.core.keys import Keys, lane_prefix_of
from limitforge.core.lanes import MAX_LANES

SCOPES = ("subject", "caller", "resource", "tenant", "global")
PLAN = Limits(
    *(
        limit_from_fields(
            {"algorithm": "fixed_window", "name": scope, "scope": scope, "limit": 5, "window_seconds": 60}
        )
        for scope in SCOPES
    )
)


def places(keys: Keys, resource: str, subject: str, tenant: str = "acme") -> dict[str, str]:
    """Where each scope's bucket is, and the overrides of the subject."""
    check = build_check(keys, PLAN, resource, subject, 1, None, tenant, "P0")
    found = {scope: lane_prefix_of(key) for scope, (_, key, *_) in zip(SCOPES, check.debits, strict=True)}
    (overrides,) = {overrides for *_, overrides in check.debits if overrides is not None}
    return found | {"overrides": lane_prefix_of(overrides)}


def test_without_lanes_a_tenant_is_in_one_place_and_what_is_global_in_another() -> None:
    found = places(Keys(), "r", "s")
    assert found.pop("global") == "lf:{%}:"
    assert set(found.values()) == {"lf:{acme}:"}


@given(resource=st.text(max_size=20), subject=st.text(max_size=20), lanes=st.integers(2, MAX_LANES))
def test_all_of_one_subject_is_in_one_lane(resource: str, subject: str, lanes: int) -> None:
    found = places(Keys(lanes={"acme": lanes}), resource, subject)
    assert found["subject"] == found["caller"] == found["overrides"]
    assert found["tenant"] == "lf:{acme}:"
    assert len({found["subject"], found["resource"], found["tenant"], found["global"]}) == 4


def test_subjects_are_spread_evenly() -> None:
    keys = Keys(lanes={"acme": 8})
    found = [places(keys, "r", f"user:{number}")["subject"] for number in range(800)]
    assert {found.count(lane) > 50 for lane in set(found)} == {True}
    assert len(set(found)) == 8


def test_tenants_keep_their_own_lanes() -> None:
    keys = Keys(lanes={"acme": 8})
    assert places(keys, "r", "s", tenant="other")["subject"] == "lf:{other}:"
    assert places(keys, "r", "s", tenant="acme/1")["subject"] == "lf:{acme%2F1}:"


@pytest.mark.parametrize(
    ("lanes", "field"),
    [
        ({"acme": 0}, "lanes.acme"),
        ({"acme": MAX_LANES + 1}, "lanes.acme"),
        ({"acme": "many"}, "lanes.acme"),
        ({5: 5}, "lanes"),
        (5, "lanes"),
    ],
)
def test_lanes_that_make_no_sense_are_refused_by_name(lanes: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        SyncLimiter.connect("memory://", lanes=lanes)
    assert refused.value.field == field


@pytest.mark.parametrize("change", [{"then": 5}, {"at": 5}, {"then": 0, "at": 5}, {"then": 5, "at": "noon"}])
def test_a_change_needs_a_number_and_a_moment(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        Lanes(1, **change)
    assert refused.value.field.startswith("lanes")


def test_a_change_happens_at_its_moment_says_what_it_costs_and_starts_counters_afresh(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lanes = {"acme": Lanes(1, then=16, at=time.time() + 3_600), "other": Lanes(1, then=16, at=time.time() - 1)}
    with SyncLimiter.connect("memory://", lanes=lanes) as limiter:
        home = limiter._keys.scheduled_tenant_keys("other")
        assert len(limiter._keys.tenant_keys("acme").lane_prefixes) == 1
        assert len(limiter._keys.tenant_keys("other").lane_prefixes) == 16
        home.scheduled_change = (
            int(1e6 * (time.time() + 3_600)),
            home.scheduled_change[1] if home.scheduled_change else home,
        )
        assert limiter.check("r", "s", limits="5/minute", tenant="other").remaining == 4
        assert limiter.check("r", "s", limits="5/minute", tenant="other").remaining == 3
        home.scheduled_change = (0, home.scheduled_change[1])  # the moment has come
        assert limiter.check("r", "s", limits="5/minute", tenant="other").remaining == 4
    (said,) = [record.getMessage() for record in caplog.records]
    assert "16 lanes from now on, not 1" in said
    assert "start afresh" in said


def test_what_was_reserved_before_a_change_can_be_settled_after_it() -> None:
    with SyncLimiter.connect("memory://", lanes={"acme": Lanes(1, then=4, at=time.time() + 3_600)}) as limiter:
        held = limiter.reserve("r", "s", limits="5/minute", cost=3, tenant="acme")
        home = limiter._keys.scheduled_tenant_keys("acme")
        home.scheduled_change = (0, home.scheduled_change[1] if home.scheduled_change else home)
        assert limiter.settle(held.reservation_id or "", 1).outcome == "settled"


def test_lanes_that_are_told_later_hold_from_the_next_check_on() -> None:
    keys = Keys()
    assert len(keys.tenant_keys("acme").lane_prefixes) == 1
    keys.set_lanes("acme", Lanes(4))
    assert len(keys.tenant_keys("acme").lane_prefixes) == 4
    keys.set_lanes("acme", Lanes(1))
    assert len(keys.tenant_keys("acme").lane_prefixes) == 1


def test_a_question_that_is_known_follows_its_tenant_to_other_lanes() -> None:
    keys = Keys()
    assert places(keys, "r", "s")["subject"] == "lf:{acme}:"
    keys.set_lanes("acme", Lanes(8))
    assert places(keys, "r", "s")["subject"].startswith("lf:{acme/")
    keys.set_lanes("acme", Lanes(1))
    assert places(keys, "r", "s")["subject"] == "lf:{acme}:"
