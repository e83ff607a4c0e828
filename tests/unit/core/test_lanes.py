"""Lanes: which keys of a tenant share a slot, and what a changed number of lanes does."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitforge import InvalidInput, Lanes, Limits, ManualClock, MemoryStore, SyncLimiter, limit_from_fields
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


def lanes_in_use(keys: Keys, resource: str, subject: str, tenant: str = "acme") -> dict[str, str]:
    """Return the lane of each scope's bucket, and of the subject's overrides."""
    check = build_check(keys, PLAN, resource, subject, 1, None, tenant, "P0")
    found = {scope: lane_prefix_of(key) for scope, (_, key, *_) in zip(SCOPES, check.debits, strict=True)}
    (overrides,) = {overrides for *_, overrides in check.debits if overrides is not None}
    return found | {"overrides": lane_prefix_of(overrides)}


def test_without_lanes_a_tenant_is_in_one_place_and_what_is_global_in_another() -> None:
    found = lanes_in_use(Keys(), "r", "s")
    assert found.pop("global") == "lf:{%}:"
    assert set(found.values()) == {"lf:{acme}:"}


@given(resource=st.text(max_size=20), subject=st.text(max_size=20), lanes=st.integers(2, MAX_LANES))
def test_all_of_one_subject_is_in_one_lane(resource: str, subject: str, lanes: int) -> None:
    found = lanes_in_use(Keys(lanes={"acme": lanes}), resource, subject)
    assert found["subject"] == found["caller"] == found["overrides"]
    assert found["tenant"] == "lf:{acme}:"
    assert len({found["subject"], found["resource"], found["tenant"], found["global"]}) == 4


def test_subjects_are_spread_evenly() -> None:
    keys = Keys(lanes={"acme": 8})
    found = [lanes_in_use(keys, "r", f"user:{number}")["subject"] for number in range(800)]
    assert {found.count(lane) > 50 for lane in set(found)} == {True}
    assert len(set(found)) == 8


def test_tenants_keep_their_own_lanes() -> None:
    keys = Keys(lanes={"acme": 8})
    assert lanes_in_use(keys, "r", "s", tenant="other")["subject"] == "lf:{other}:"
    assert lanes_in_use(keys, "r", "s", tenant="acme/1")["subject"] == "lf:{acme%2F1}:"


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
def test_invalid_lanes_are_refused_by_name(lanes: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        SyncLimiter.connect("memory://", lanes=lanes)
    assert refused.value.field == field


@pytest.mark.parametrize("change", [{"then": 5}, {"at": 5}, {"then": 0, "at": 5}, {"then": 5, "at": "noon"}])
def test_a_change_needs_a_number_and_a_moment(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        Lanes(1, **change)
    assert refused.value.field.startswith("lanes")


def test_a_scheduled_change_takes_effect_at_its_moment_and_starts_counters_afresh() -> None:
    clock = ManualClock(1_000_000_000)
    keys = Keys(lanes={"acme": Lanes(1, then=16, at=2_000), "other": Lanes(1, then=16, at=1_000)}, clock=clock)
    assert len(keys.tenant_keys("acme").lane_prefixes) == 1
    assert len(keys.tenant_keys("other").lane_prefixes) == 16
    with SyncLimiter(MemoryStore(keys=keys)) as limiter:
        assert limiter.check("r", "s", limits="5/minute", tenant="acme").remaining == 4
        clock.set_us(1_999_999_999)
        assert limiter.check("r", "s", limits="5/minute", tenant="acme").remaining == 3
        clock.advance_us(1)
        assert limiter.check("r", "s", limits="5/minute", tenant="acme").remaining == 4


def test_a_scheduled_change_is_logged_once_when_it_takes_effect(caplog: pytest.LogCaptureFixture) -> None:
    with SyncLimiter.connect("memory://", lanes={"acme": Lanes(1, then=16, at=time.time() - 1)}) as limiter:
        assert not caplog.records
        for _ in range(2):
            limiter.check("r", "s", limits="5/minute", tenant="acme")
    (record,) = caplog.records
    assert record.getMessage().startswith("store.lanes_changed: ")
    assert "start afresh" in record.getMessage()
    assert record.getMessage().endswith("key_prefix=lf:{acme}: lanes=16 lanes_before=1")


def test_what_was_reserved_before_a_change_can_be_settled_after_it() -> None:
    clock = ManualClock(1_000_000_000)
    with SyncLimiter(MemoryStore(keys=Keys(lanes={"acme": Lanes(1, then=4, at=2_000)}, clock=clock))) as limiter:
        reserved = limiter.reserve("r", "s", limits="5/minute", cost=3, tenant="acme")
        clock.set_us(2_000_000_000)
        assert limiter.settle(reserved.reservation_id or "", 1).outcome == "settled"


def test_lanes_that_are_set_later_hold_from_the_next_check_on() -> None:
    keys = Keys()
    assert len(keys.tenant_keys("acme").lane_prefixes) == 1
    keys.set_lanes("acme", Lanes(4))
    assert len(keys.tenant_keys("acme").lane_prefixes) == 4
    keys.set_lanes("acme", Lanes(1))
    assert len(keys.tenant_keys("acme").lane_prefixes) == 1


def test_a_cached_prepared_check_follows_its_tenant_to_other_lanes() -> None:
    keys = Keys()
    assert lanes_in_use(keys, "r", "s")["subject"] == "lf:{acme}:"
    keys.set_lanes("acme", Lanes(8))
    assert lanes_in_use(keys, "r", "s")["subject"].startswith("lf:{acme/")
    keys.set_lanes("acme", Lanes(1))
    assert lanes_in_use(keys, "r", "s")["subject"] == "lf:{acme}:"
