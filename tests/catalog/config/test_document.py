"""The configuration file: what it may contain, and that every error is named by line and field."""

import pickle
from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent

import pytest

from limitforge.catalog.config import document
from limitforge.catalog.config.specs import ConfigDocument
from limitforge.errors import InvalidFile, InvalidInput

NOW = datetime(2026, 6, 1, tzinfo=UTC)
SAMPLE = Path(__file__).with_name("sample.yaml")


def parse(text: str) -> ConfigDocument:
    found, _ = document.parse_document(dedent(text).encode(), "plans.yaml", NOW)
    return found


def parse_errors(text: str) -> list[str]:
    with pytest.raises(InvalidFile) as refused:
        parse(text)
    return str(refused.value).splitlines()


def test_all_shapes_of_a_file_are_parsed_alike() -> None:
    found = parse(SAMPLE.read_text())
    assert found.operator is not None
    assert (found.operator.mode, found.operator.plan) == ("on", "fleet")
    acme, empty, left_alone = found.tenants or ()
    assert acme.plans is not None
    assert [limit["name"] for limit in acme.plans[0].limits] == ["minute", "hour"]
    assert acme.plans[1].limits == (
        {"name": "flat", "algorithm": "token_bucket", "bucket_capacity": 100, "refill_rate_per_sec": 20},
    )
    assert (empty.plans, empty.policies, empty.keys, empty.overrides) == ((), (), (), ())
    assert (left_alone.plans, left_alone.policies, left_alone.keys, left_alone.overrides) == (None,) * 4


def test_what_is_dumped_is_read_as_the_same() -> None:
    found = parse(SAMPLE.read_text())
    text = document.dump_document(found)
    assert parse(text) == found
    assert document.dump_document(parse(text)) == text


def test_a_dump_leaves_out_what_is_the_default() -> None:
    text = document.dump_document(
        parse("tenants: [{name: a, mode: on, time_zone: UTC, lanes: {count: 1}, suspended: false}]")
    )
    assert text == "tenants:\n  - name: a\n"


def test_a_dump_is_text_that_people_would_write() -> None:
    given = dedent("""\
        operator:
          mode: "off"
          plans: []
        tenants:
          - name: "no"
            default_plan: free
            plans:
              - name: free
                limits:
                  - name: burst
                    algorithm: token_bucket
                    bucket_capacity: 100
                    refill_rate_per_sec: 20
                    shares:
                      P2: 80
            policies:
              - resource: GET:/orders/{id}
                plan: free
              - resource: "*"
                plan: free
            overrides:
              - subject: user:42
                limits:
                  burst:
                    limit: 500
                expires_at: 2031-12-31T00:00:00Z
                reason: "it asked: twice"
    """)
    assert document.dump_document(parse(given)) == given


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a", "plans.yaml:1: must be a mapping with `operator`, `tenants` or both, got a list"),
        ("{}", "plans.yaml:1: must hold `operator`, `tenants` or both"),
        ("tenants: []\ntenant: []", "plans.yaml:2: tenant: unknown field; the fields are operator and tenants"),
        ("tenants:", "plans.yaml:1: tenants: must be a list, got nothing"),
        ("tenants:\n- acme", "plans.yaml:2: tenants[0]: must be a mapping, got 'acme'"),
        ("operator: 5", "plans.yaml:1: operator: must be a mapping, got 5"),
        ("operator:\n  policies: []", "plans.yaml:2: operator.policies: unknown field"),
        ("operator:\n  plans:\n    - name: a", "plans.yaml:3: operator.plans[0].limits: is required"),
        ("operator:\n  plan: a\n  plans: []", "plans.yaml:2: operator.plan: unknown plan 'a'; known plans: none"),
    ],
)
def test_an_invalid_configuration_is_refused(text: str, expected: str) -> None:
    assert parse_errors(text)[0].startswith(expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("mode: true", "mode: must be one of on, monitor, off, got true"),
        ("mode: maybe", "mode: must be one of on, monitor, off, got 'maybe'"),
        ("failure: raise", "failure: must be one of open, closed, local; raise exists only in the library"),
        ("failure: 5", "failure: must be one of open, closed, local, got 5"),
        ("priority: P9", "priority: must be one of P0, P1, P2, P3, got 'P9'"),
        ("time_zone: Berlin", "time_zone: unknown time zone: 'Berlin'"),
        ("lanes: 0", "lanes: must be from 1 to 1024, got 0"),
        ("lanes: {count: 2, then: 4}", "lanes: a scheduled change needs both"),
        ("suspended: yes", "suspended: must be true or false, got text"),
        ("id: ten_1", "id: unknown field"),
        ("plans: {free: 1/second}", "plans: must be a list, got a mapping"),
        ("plans: [{limits: 1/second}]", "plans[0].name: is required"),
        ("plans: [{name: 12, limits: 1/second}]", "plans[0].name: must be text, got 12: put it in quotes"),
        ("plans: [{name: a b, limits: 1/second}]", "plans[0].name: must be 1 to 64 letters"),
        ("plans: [{name: a, limits: 1/s, algorithm: quota}]", "plans[0].algorithm: is not a field beside `limits`"),
        ("plans: [{name: a, limits: 1/second, tenant_id: b}]", "plans[0].tenant_id: unknown field"),
        ("plans: [{name: a, limits: 5}]", "plans[0].limits: must be a list of limits, or their text, got 5"),
        ("plans: [{name: a, limits: 1/fortnight}]", "plans[0].limits: expected a unit"),
        ("plans: [{name: a, limits: [{algorithm: magic}]}]", "plans[0].limits[0].algorithm: must be one of"),
        (
            "plans: [{name: a, limits: [{algorithm: token_bucket, bucket_capacity: -1, refill_rate_per_sec: 1}]}]",
            "plans[0].limits[0].bucket_capacity: must be from 0 to",
        ),
        ("plans: [{name: a, algorithm: quota, limit: 5, period: eon}]", "plans[0].period: must be one of"),
        (
            "plans: [{name: a, limits: [{algorithm: fixed_window, limit: 5, window_seconds: 1, scope: global}]}]",
            "plans[0].limits[0].scope: only the operator's plan may have global limits",
        ),
        ("plans: [{name: a, limits: 1/s}, {name: a, limits: 2/s}]", "plans[1].name: duplicates tenants[0].plans[0]"),
        ("policies: [{resource: '*'}]", "policies[0].plan: is required"),
        ("policies: [{resource: 'a*', plan: a}]", "policies[0].resource: a star must be the whole"),
        ("plans: []\n    policies: [{resource: '*', plan: a}]", "policies[0].plan: unknown plan 'a'"),
        (
            "policies: [{resource: 'GET:/{a}', plan: a}, {resource: 'GET:/{b}', plan: a}]",
            "policies[1].resource: duplicates tenants[0].policies[0]",
        ),
        ("default_plan: b\n    plans: [{name: a, limits: 1/s}]", "default_plan: unknown plan 'b'"),
        ("keys: [{id: web, name: web}]", "keys[0].id: must be key_ and 16 letters or digits, got 'web'"),
        (
            "keys: [{id: key_0123456789abcdef, name: a, secrets: [{hash: x, pepper: 1}]}]",
            "keys[0].secrets[0].hash: must be 64 hexadecimal digits",
        ),
        ("keys: [{id: key_0123456789abcdef, name: a, scopes: [all]}]", "keys[0].scopes[0]: must be one of check"),
        ("keys: [{id: key_0123456789abcdef, name: a, scopes: []}]", "keys[0].scopes: must be one or more of check"),
        (
            "keys: [{id: key_0123456789abcdef, name: a, expires_at: tomorrow}]",
            "keys[0].expires_at: must be a time such as 2026-12-31T00:00:00Z, got 'tomorrow'",
        ),
        (
            "keys: [{id: key_0123456789abcdef, name: a, expires_at: 2026-12-31T00:00:00}]",
            "keys[0].expires_at: must have a time zone",
        ),
        (
            "keys: [{id: key_0123456789abcdef, name: a, expires_at: 9999-12-31T23:59:59-09:00}]",
            "keys[0].expires_at: must be in the years 1 to 9999",
        ),
        (
            "keys: [{id: key_0123456789abcdef, name: a}, {id: key_0123456789abcdef, name: b}]",
            "keys[1].id: is the same as that of tenants[0].keys[0]",
        ),
        ("overrides: [{subject: a, limits: {}, expires_at: 2030-01-01T00:00:00Z}]", "overrides[0].limits: must map"),
        ("overrides: [{subject: '', limits: {a: blocked}, expires_at: 2030-01-01T00:00:00Z}]", "overrides[0].subject"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_tenant_is_named(fields: str, expected: str) -> None:
    assert (
        parse_errors(f"tenants:\n  - name: acme\n    {fields}\n")[0].partition(": tenants[0].")[2].startswith(expected)
    )


def test_all_errors_are_reported_at_once_with_their_lines() -> None:
    errors = parse_errors("""\
        tenants:
          - name: acme
            mode: true
            plans:
              - name: free
                limits: 100/minut
              - name: pro
                limits:
                  - name: burst
                    algorithm: token_bucket
                    refill_rate_per_sec: 20
                    bucket_capacity: lots
            policies:
              - {resource: "GET:/{id", plan: x}
          - name: operator
    """)
    assert errors == [
        "plans.yaml:3: tenants[0].mode: must be one of on, monitor, off, got true",
        (
            "plans.yaml:6: tenants[0].plans[0].limits: expected a unit: second, minute, hour or day, "
            "got 'minut' at character 5"
        ),
        "  100/minut",
        "      ^^^^^",
        "plans.yaml:12: tenants[0].plans[1].limits[0].bucket_capacity: must be a plain decimal number, got 'lots'",
        "plans.yaml:14: tenants[0].policies[0].resource: the braces in '{id' are not balanced",
        "plans.yaml:15: tenants[1].name: operator is reserved: use the section `operator`",
    ]


def test_overrides_must_change_an_existing_limit() -> None:
    errors = parse_errors("""\
        tenants:
          - name: acme
            plans:
              - {name: free, limits: burst=100/minute; all=5/minute}
              - name: wide
                limits: [{name: wide, algorithm: fixed_window, limit: 1, window_seconds: 1, scope: tenant}]
            policies: []
            overrides:
              - {subject: a, limits: {burst: {limit: 500}}, expires_at: 2030-01-01T00:00:00Z}
              - {subject: b, limits: {brust: {limit: 500}}, expires_at: 2030-01-01T00:00:00Z}
              - {subject: c, limits: {burst: {limt: 500}}, expires_at: 2030-01-01T00:00:00Z}
              - {subject: d, limits: {burst: {limit: -1}}, expires_at: 2030-01-01T00:00:00Z}
              - {subject: e, limits: {wide: blocked}, expires_at: 2030-01-01T00:00:00Z}
              - {subject: a, limits: {burst: blocked}, expires_at: 2030-01-01T00:00:00Z}
    """)
    assert [line.partition(": ")[2].partition(": ")[0] for line in errors] == [
        "tenants[0].overrides[1].limits.brust",
        "tenants[0].overrides[2].limits.burst.limt",
        "tenants[0].overrides[3].limits.burst.limit",
        "tenants[0].overrides[4].limits.wide",
        "tenants[0].overrides[5].subject",
    ]


def test_an_expired_override_is_not_validated() -> None:
    parse("""\
        tenants:
          - name: acme
            plans: []
            policies: []
            overrides: [{subject: a, limits: {gone: blocked}, expires_at: 2026-01-01T00:00:00Z}]
    """)


def test_sections_that_a_file_omits_are_not_required() -> None:
    parse("""\
        tenants:
          - name: acme
            default_plan: in-the-database
            policies: [{resource: "*", plan: in-the-database}]
            overrides: [{subject: a, limits: {there: blocked}, expires_at: 2030-01-01T00:00:00Z}]
    """)


def test_an_override_ends_within_ten_years() -> None:
    one = "{subject: a, limits: {x: blocked}, expires_at: 2036-06-01T00:00:00Z}"
    assert parse_errors(f"tenants: [{{name: acme, overrides: [{one}]}}]") == [
        "plans.yaml:1: tenants[0].overrides[0].expires_at: must lie at most ten years from now"
    ]


def test_one_subject_has_at_most_64_overrides() -> None:
    one = "{subject: a, resource: r%d, limits: {x: blocked}, expires_at: 2030-01-01T00:00:00Z}"
    overrides = ", ".join(one % at for at in range(65))
    (error,) = parse_errors(f"tenants: [{{name: acme, overrides: [{overrides}]}}]")
    assert "one subject may have at most 64, and 'a' has 65" in error


def test_an_error_is_an_invalid_input_that_survives_pickling() -> None:
    with pytest.raises(InvalidInput) as refused:
        parse("tenants: [{name: a, mode: x}]")
    assert isinstance(refused.value, InvalidFile)
    again = pickle.loads(pickle.dumps(refused.value))  # noqa: S301 - our own
    assert isinstance(again, InvalidFile)
    assert (again.field, str(again), again.problems) == (
        refused.value.field,
        str(refused.value),
        refused.value.problems,
    )
    assert again.field == "tenants[0].mode"


def test_a_thousand_errors_are_counted_rather_than_shown() -> None:
    errors = parse_errors("tenants:\n" + "- {name: a b}\n" * 1_000)
    assert len(errors) == 21
    assert errors[-1] == "... and 980 more"
