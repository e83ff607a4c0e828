"""The budget of new buckets of a memory store."""

import pytest

from limitforge import FixedWindow, Limits
from limitforge.core.check import Check, build_check
from limitforge.core.keys import Keys, is_overflow
from limitforge.stores.memory import new_buckets as module
from limitforge.stores.memory.new_buckets import InProcessBucketBudget

LIMITS = Limits(FixedWindow(name="w", limit=5, window_seconds=60))


def of(subject: str, tenant: str = "t") -> Check:
    return build_check(Keys(), LIMITS, "r", subject, 1, None, tenant, "P0")


def test_only_one_bucket_of_a_check_becomes_the_overflow_bucket() -> None:
    """One overflow bucket can't count two subjects of one check: the second begins its own bucket."""
    budget = InProcessBucketBudget(1)
    budget.count_new([of("known").debits[0][1]], 0)
    check = Check([of("a").debits[0], of("b").debits[0]], ("a", "b"))
    assert budget.use_overflow_buckets(check, set(), 0) == [0]
    assert [is_overflow(key) for _, key, *_ in check.debits] == [True, False]


def test_counters_restart_when_there_are_too_many_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LANE_COUNTERS", 2)
    budget = InProcessBucketBudget(1)
    for tenant in ("first", "second", "third"):
        budget.count_new([of("s", tenant).debits[0][1]], 0)
    redirected = {
        tenant: budget.use_overflow_buckets(of("new", tenant), set(), 0) for tenant in ("first", "second", "third")
    }
    assert redirected == {"first": [], "second": [], "third": [0]}
