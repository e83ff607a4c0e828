"""The heavy-hitters sketch is bounded and fair to each tenant, and its counts are never too high."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitforge.core.heavy_hitters import HeavyHitters

ROOM = 2_048
EVENTS = 50_000


def size(sketch: HeavyHitters[str]) -> int:
    return sum(len(names) for names in sketch.groups.values())


def counts(sketch: HeavyHitters[str], tenant: str) -> dict[str, int]:
    return {name: seen.count for name, seen in sketch.groups.get(tenant, {}).items()}


@given(
    room=st.integers(2, 40),
    # few tenants with many names, and many tenants with few
    events=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12) | st.integers(0, 200)), max_size=400),
)
def test_counts_are_never_too_high_and_a_tenant_with_few_names_loses_none(
    room: int, events: list[tuple[int, int]]
) -> None:
    sketch: HeavyHitters[str] = HeavyHitters(room)
    true: dict[str, Counter[str]] = {}
    for index, (tenant, name) in enumerate(events):
        sketch.add(f"t{tenant}", f"n{name}", 1, index)
        true.setdefault(f"t{tenant}", Counter())[f"n{name}"] += 1
        assert size(sketch) <= room
        for owner, names in true.items():
            found = counts(sketch, owner)
            assert all(1 <= count <= names[each] for each, count in found.items())
            if len(names) <= room // 2 // len(true):
                assert found == names
    for tenant_names in sketch.groups.values():
        assert tenant_names


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12), count=st.integers(1, 60))
def test_a_list_is_full_and_gives_each_tenant_a_fair_share(sizes: list[int], count: int) -> None:
    sketch: HeavyHitters[str] = HeavyHitters(10_000)
    for tenant, number in enumerate(sizes):
        for name in range(number):
            sketch.add(f"t{tenant}", f"n{name}", 1 + tenant * 100 + name, 0)
    top = sketch.top(count)
    assert len(top) == min(count, sum(sizes))
    listed = Counter(tenant_id for tenant_id, _, _ in top)
    shares = [listed[f"t{tenant}"] for tenant in range(len(sizes))]
    largest = max(shares)
    assert all(share == number or share >= largest - 1 for share, number in zip(shares, sizes, strict=True))
    assert [seen.count for _, _, seen in top] == sorted((seen.count for _, _, seen in top), reverse=True)
    for tenant, share in enumerate(shares):  # the most frequent ones of each tenant
        assert {name for owner, name, _ in top if owner == f"t{tenant}"} == {
            f"n{name}" for name in range(sizes[tenant] - share, sizes[tenant])
        }


def test_a_tenant_with_a_hundred_thousand_names_pushes_out_none_of_another() -> None:
    sketch: HeavyHitters[str] = HeavyHitters(ROOM)
    for index in range(5):
        sketch.add("small", f"user:{index}", 1, 0)
    for index in range(100_000):
        sketch.add("large", f"user:{index}", 1, index)
    assert counts(sketch, "small") == {f"user:{index}": 1 for index in range(5)}
    assert size(sketch) <= ROOM


@pytest.mark.parametrize("others", [1, 10])
def test_a_name_that_comes_all_the_time_is_found_in_a_flood(others: int) -> None:
    sketch: HeavyHitters[str] = HeavyHitters(ROOM)
    seeded = random.Random(1)
    heavy = 0
    for index in range(EVENTS):
        for other in range(others - 1):
            sketch.add(f"other:{other}", f"user:{index % 20}", 1, index)
        if seeded.random() < 0.02:
            sketch.add("ten_a", "heavy", 1, index)
            heavy += 1
        else:
            sketch.add("ten_a", f"user:{index}", 1, index)
    found = counts(sketch, "ten_a")
    assert max(found, key=lambda name: found[name]) == "heavy"
    assert heavy - 3 * EVENTS / (ROOM // 2 - 20 * others) <= found["heavy"] <= heavy


def test_a_name_that_comes_late_takes_the_place_of_early_ones() -> None:
    """Without the subtraction of what was dropped, names with ten counts would keep out one that comes forever."""
    sketch: HeavyHitters[str] = HeavyHitters(16)
    for name in range(8):
        sketch.add("ten_a", f"early:{name}", 10, 0)
    for index in range(400):
        sketch.add("ten_a", "late", 1, index)
        sketch.add("ten_a", f"once:{index}", 1, index)
    assert next(name for _, name, _ in sketch.top(1)) == "late"


def test_with_more_tenants_than_capacity_those_with_the_lowest_counts_are_dropped() -> None:
    sketch: HeavyHitters[str] = HeavyHitters(ROOM)
    for tenant in range(500):
        sketch.add(f"loud:{tenant}", "user:1", 50, 0)
    for tenant in range(10_000):
        sketch.add(f"quiet:{tenant}", "user:1", 1, 1)
        assert size(sketch) <= ROOM
    assert all(f"loud:{tenant}" in sketch.groups for tenant in range(500))
    assert {seen.count for owner, _, seen in sketch.top(500) if owner.startswith("loud:")} == {50}
