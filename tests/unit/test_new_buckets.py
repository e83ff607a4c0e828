"""How many buckets a tenant may begin in a memory store."""

import pytest

from limitforge import FixedWindow, Limits
from limitforge.core.check import Check, check_of
from limitforge.core.keys import Keys, is_overflow
from limitforge.stores import new_buckets as module
from limitforge.stores.new_buckets import MemoryBudget

LIMITS = Limits(FixedWindow(name="w", limit=5, window_seconds=60))


def of(subject: str, tenant: str = "t") -> Check:
    return check_of(Keys(), LIMITS, "r", subject, 1, None, tenant, "P0")


def test_only_one_bucket_of_a_check_becomes_the_overflow_bucket() -> None:
    """Two subjects of one limit can't be counted in it at once: the second begins a bucket of its own."""
    budget = MemoryBudget(1)
    budget.begin([of("known").takes[0][1]], 0)
    check = Check([of("a").takes[0], of("b").takes[0]], ("a", "b"))
    assert budget.redirect(check, set(), 0) == [0]
    assert [is_overflow(key) for _, key, *_ in check.takes] == [True, False]


def test_what_tenants_began_is_forgotten_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LANES", 2)
    budget = MemoryBudget(1)
    for tenant in ("first", "second", "third"):
        budget.begin([of("s", tenant).takes[0][1]], 0)
    redirected = {tenant: budget.redirect(of("new", tenant), set(), 0) for tenant in ("first", "second", "third")}
    assert redirected == {"first": [], "second": [], "third": [0]}
