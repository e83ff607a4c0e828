"""Durations, times and other values of options, and lists of several pages."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import Plan, Tenant
from limitforge.cli.catalog import lookup
from limitforge.cli.catalog.values import given_fields, parse_duration, parse_time
from limitforge.errors import InvalidInput

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("250ms", 0.25),
        ("90s", 90),
        ("1.5s", 1.5),
        ("15m", 900),
        ("24h", 86_400),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("1h30m", 5_400),
    ],
)
def test_a_duration_is_the_sum_of_its_parts(text: str, expected: float) -> None:
    assert parse_duration("--for", text) == expected
    assert parse_time("--for", text, NOW) == NOW + timedelta(seconds=expected)


@pytest.mark.parametrize("text", ["", "5", "h", "5x", "-5s", "5s ", "1,5s", "1h 30m", "2026-01-01T00:00:00"])
def test_an_invalid_duration_or_time_is_refused_with_the_name_of_the_option(text: str) -> None:
    with pytest.raises(InvalidInput, match="--until: must be a time"):
        parse_time("--until", text, NOW)
    with pytest.raises(InvalidInput, match="--for: must be a duration"):
        parse_duration("--for", text)


def test_the_word_none_clears_a_field_and_absent_options_are_left_out() -> None:
    assert given_fields(plan="none", name="web", mode=None) == {"plan": None, "name": "web"}


async def test_a_list_of_several_pages_is_complete_and_of_one_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "PAGE_SIZE", 2)
    database = Database(f"sqlite:///{tmp_path}/catalog.db")
    try:
        await database.upgrade()
        catalog = Catalog(database)
        async with catalog.edit("test") as edit:
            tenants = [await edit.create(Tenant, {"name": f"t{at}"}) for at in range(5)]
            for tenant in tenants[:2]:
                for name in ("a", "b", "c"):
                    await edit.create(Plan, {"tenant_id": tenant.id, "name": name, "limits": "1/s"})
        assert [each.name for each in await lookup.list_entities(catalog, Tenant)] == [f"t{at}" for at in range(5)]
        found = await lookup.list_entities(catalog, Plan, "t1")
        assert [(each.tenant_id, each.name) for each in found] == [(tenants[1].id, name) for name in "abc"]
    finally:
        await database.close()
