"""The entities of the catalog: valid once built, and refused with the name of the wrong field."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from limitforge.catalog.conversion import convert
from limitforge.catalog.fields import immutable_fields, settable_fields
from limitforge.catalog.model import (
    ENTITY_TYPES,
    Entity,
    Key,
    KeyType,
    Override,
    Plan,
    Policy,
    Tenant,
    Token,
    build_entity,
    require_settable,
    to_datetime,
    to_public_dict,
    with_changes,
)
from limitforge.catalog.plan_limits import normalize_limits, parse_plan_limits
from limitforge.core.limits import limit_from_fields
from limitforge.errors import InvalidInput

ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./")
SOME = [*range(0x250), 0x300, 0x660, 0x2170, 0x3042, 0xD800, 0xDFFF, 0xFE0F, 0xFF21, 0xFFFF, 0x1F642, 0x10FFFF]
WINDOW = {"algorithm": "fixed_window", "limit": 5, "window_seconds": 60}

SMALLEST: dict[type[Entity], dict[str, Any]] = {
    Tenant: {"id": "ten_1", "name": "acme"},
    Plan: {"id": "pla_1", "tenant_id": "ten_1", "name": "free", "limits": [WINDOW]},
    Policy: {"id": "pol_1", "tenant_id": "ten_1", "resource": "*", "plan_id": "pla_1"},
    Key: {"id": "key_1", "tenant_id": "ten_1", "name": "web"},
    Override: {
        "id": "ovr_1",
        "tenant_id": "ten_1",
        "subject": "s",
        "limits": {"burst": "blocked"},
        "expires_at": "2030-01-01T00:00:00Z",
    },
    Token: {"id": "tok_1", "name": "ci"},
}


def is_refused(kind: type[Entity], **fields: Any) -> bool:
    """Return True if exactly these fields are refused."""
    try:
        build_entity(kind, {**SMALLEST[kind], **fields})
    except InvalidInput as refused:
        if refused.field in fields:
            return True
        raise
    return False


@pytest.mark.parametrize("kind", [Tenant, Plan, Key, Token])
def test_a_name_has_letters_digits_and_four_more_characters(kind: type[Entity]) -> None:
    for number in SOME:
        character = chr(number)
        for name in (character, f"a{character}", f"{character}a", f"a{character}a"):
            assert is_refused(kind, name=name) == (character not in ALLOWED), ascii(name)


@pytest.mark.parametrize("kind", [Tenant, Plan, Key, Token])
def test_a_name_has_1_to_64_characters(kind: type[Entity]) -> None:
    assert [is_refused(kind, name="a" * length) for length in (0, 1, 64, 65, 10_000)] == [
        True,
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("kind", SMALLEST)
def test_what_is_required_is_asked_for_by_name(kind: type[Entity]) -> None:
    build_entity(kind, SMALLEST[kind])
    for field in SMALLEST[kind]:
        fields = {name: value for name, value in SMALLEST[kind].items() if name != field}
        with pytest.raises(InvalidInput) as refused:
            build_entity(kind, fields)
        assert refused.value.field == field


@pytest.mark.parametrize("kind", SMALLEST)
def test_an_unknown_field_is_refused_by_name(kind: type[Entity]) -> None:
    with pytest.raises(InvalidInput) as refused:
        build_entity(kind, {**SMALLEST[kind], "bogus": 1})
    assert refused.value.field == "bogus"
    wrong: list[dict[Any, Any]] = [{"bogus": 1}, {"id": "x"}, {"version": 2}, {"x" * 1_000: 1}, {5: 1}]
    for fields in wrong:
        with pytest.raises(InvalidInput) as refused:
            require_settable(kind, fields)
        assert refused.value.field == str(next(iter(fields)))[:64]
        with pytest.raises(InvalidInput):
            with_changes(build_entity(kind, SMALLEST[kind]), fields)


@pytest.mark.parametrize("kind", SMALLEST)
def test_what_can_be_set_is_a_field_and_what_is_fixed_can_be_set(kind: type[Entity]) -> None:
    assert set(immutable_fields(kind)) <= set(settable_fields(kind)) <= set(kind.__struct_fields__)
    assert not {"id", "version", "created_at", "updated_at", "secrets", "revision", "last_used_at"} & set(
        settable_fields(kind)
    )
    assert ENTITY_TYPES[kind.kind] is kind


@pytest.mark.parametrize("kind", SMALLEST)
def test_an_entity_survives_serialization(kind: type[Entity]) -> None:
    entity = build_entity(kind, SMALLEST[kind])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(entity), type=kind) == entity
    assert msgspec.json.decode(msgspec.json.encode(entity), type=kind) == entity
    assert convert(kind, to_public_dict(entity)) == entity
    with pytest.raises(AttributeError):
        entity.id = "another"  # type: ignore[misc]


def test_the_smallest_things_have_their_defaults() -> None:
    key = build_entity(Key, SMALLEST[Key])
    assert (key.type, key.scopes, key.metadata, key.disabled) == (
        KeyType.LIVE,
        ("check", "usage", "plans"),
        {},
        False,
    )
    assert build_entity(Token, SMALLEST[Token]).scopes == ("read",)
    override = build_entity(Override, SMALLEST[Override])
    assert (override.resource, override.reason, override.set_by) == ("*", "", "")
    assert override.expires_at == datetime(2030, 1, 1, tzinfo=UTC)


def test_the_metadata_of_two_keys_are_two() -> None:
    one, other = build_entity(Key, SMALLEST[Key]), build_entity(Key, SMALLEST[Key])
    one.metadata["a"] = 1
    assert other.metadata == {}


def test_a_moment_is_exact_to_the_microsecond() -> None:
    for now_us in (0, 1, 1_700_006_400_123_457, 4_102_444_799_999_999):
        moment = to_datetime(now_us)
        assert round((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1_000_000) == now_us
        assert moment.microsecond == now_us % 1_000_000


# -- the shapes of a plan


def test_both_shapes_of_a_plan_are_one() -> None:
    flat = {"tenant_id": "ten_1", "name": "gold", **WINDOW, "mode": "monitor"}
    full = {"tenant_id": "ten_1", "name": "gold", "limits": [{**WINDOW, "name": "gold", "mode": "monitor"}]}
    assert parse_plan_limits("gold", flat) == parse_plan_limits("gold", full)


def test_limits_are_kept_as_plain_values_without_defaults() -> None:
    (kept,) = normalize_limits([{**WINDOW, "mode": "on", "scope": "subject", "shares": {}, "align": "clock"}])
    assert kept == {**WINDOW, "name": "minute"}
    assert normalize_limits([limit_from_fields(kept)]) == (kept,)
    assert normalize_limits([kept]) == (kept,)


def test_a_named_time_zone_is_kept_and_a_missing_one_is_not_made_up() -> None:
    quota = {"algorithm": "quota", "limit": 5, "period": "day"}
    assert "time_zone" not in normalize_limits([quota])[0]
    assert normalize_limits([{**quota, "time_zone": "UTC"}])[0]["time_zone"] == "UTC"
    assert normalize_limits(normalize_limits([{**quota, "time_zone": "UTC"}]))[0]["time_zone"] == "UTC"


def test_a_rate_without_a_decimal_form_is_kept_exactly() -> None:
    (kept,) = normalize_limits("token:100/minute")
    assert limit_from_fields(kept).compiled == limit_from_fields({**kept, "refill_rate_per_sec": 100 / 60}).compiled


def test_equal_plans_of_many_tenants_share_what_was_compiled() -> None:
    plans = [build_entity(Plan, {**SMALLEST[Plan], "id": f"pla_{number}"}) for number in range(2)]
    assert plans[0].compile("UTC") is plans[1].compile("UTC")


def test_a_plan_compiled_for_two_zones_is_two() -> None:
    quota = {"algorithm": "quota", "limit": 5, "period": "day"}
    plan = build_entity(Plan, {**SMALLEST[Plan], "limits": [quota]})
    assert [limit.time_zone for zone in ("UTC", "Asia/Tokyo") for limit in plan.compile(zone)] == ["UTC", "Asia/Tokyo"]  # type: ignore[attr-defined]
