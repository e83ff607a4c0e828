"""The sketch of who is throttled: right about the heavy ones, bounded whatever comes."""

import random

from limitforge.service.admin.throttled import KEPT, WINDOW_US, Throttled, subject_hash

NOW = 1_700_000_000_000_000


def test_few_subjects_are_counted_exactly() -> None:
    sketch = Throttled()
    for at in range(30):
        sketch.denied("ten_a", f"user:{at % 3}", NOW + at)
    top = sketch.top(10, NOW + 30)
    assert [(each.subject_hash, each.denied) for each in top] == [
        (subject_hash(f"user:{number}"), 10) for number in range(3)
    ]
    assert top[0].last_denied_at.timestamp() * 1_000_000 >= NOW


def test_one_subject_of_two_tenants_is_two() -> None:
    sketch = Throttled()
    sketch.denied("ten_a", "user:1", NOW)
    sketch.denied("ten_b", "user:1", NOW)
    sketch.denied("ten_b", "user:1", NOW)
    assert [(each.tenant_id, each.denied) for each in sketch.top(10, NOW)] == [("ten_b", 2), ("ten_a", 1)]
    assert [each.denied for each in sketch.top(10, NOW, tenant_id="ten_a")] == [1]
    assert sketch.top(10, NOW, tenant_id="ten_c") == []
    assert len(sketch.top(1, NOW)) == 1


def test_what_was_denied_long_ago_is_forgotten() -> None:
    sketch = Throttled()
    begin = NOW - NOW % WINDOW_US
    sketch.denied("ten_a", "user:1", begin)
    assert len(sketch.top(10, begin + WINDOW_US)) == 1
    sketch.denied("ten_a", "user:2", begin + WINDOW_US)
    assert [each.denied for each in sketch.top(10, begin + WINDOW_US + 1)] == [1, 1]
    assert len(sketch.top(10, begin + 2 * WINDOW_US)) == 1
    assert sketch.top(10, begin + 4 * WINDOW_US) == []


def test_a_flood_of_distinct_subjects_hides_nobody_who_is_denied_all_the_time() -> None:
    sketch = Throttled()
    seeded = random.Random(1)
    heavy = 0
    for at in range(200_000):
        if seeded.random() < 0.02:
            sketch.denied("ten_a", "heavy", NOW)
            heavy += 1
        else:
            sketch.denied("ten_a", f"user:{at}", NOW)
        assert len(sketch._now) <= 2 * KEPT
    first = sketch.top(1, NOW)[0]
    assert first.subject_hash == subject_hash("heavy")
    assert heavy - 200_000 / KEPT <= first.denied <= heavy
