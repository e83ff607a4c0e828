"""The JSON Schema of the file: it accepts what can be parsed, refuses what can't, and describes every field."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator, FormatChecker

from limitforge.catalog.config import document, strict_yaml
from limitforge.catalog.config.apply import apply_document
from limitforge.catalog.config.export import export_document
from limitforge.catalog.config.json_schema import json_schema
from limitforge.catalog.config.specs import (
    ConfigDocument,
    KeySpec,
    OperatorSpec,
    OverrideSpec,
    PolicySpec,
    SecretSpec,
    TenantSpec,
)
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.model import to_datetime
from limitforge.core.limits import LIMIT_TYPES
from limitforge.errors import InvalidInput
from tests.catalog.config.test_document import NOW, SAMPLE
from tests.catalog.factories import new_customer

VALIDATOR = Draft202012Validator(json_schema(), format_checker=FormatChecker())


def schema_errors(text: str) -> list[str]:
    value = strict_yaml.parse_yaml(text.encode(), "plans.yaml").root.value
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in VALIDATOR.iter_errors(value)]


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(json_schema())
    assert json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_it_takes_one_of_everything() -> None:
    assert schema_errors(SAMPLE.read_text()) == []


def test_it_takes_what_is_dumped() -> None:
    found, _ = document.parse_document(SAMPLE.read_bytes(), "sample.yaml", NOW)
    assert schema_errors(document.dump_document(found)) == []


async def test_it_takes_what_is_exported(catalog: Catalog) -> None:
    found, source = document.parse_document(SAMPLE.read_bytes(), "sample.yaml", to_datetime(catalog.clock.now_us()))
    await apply_document(catalog, found, "test", source=source)
    await new_customer(catalog, "other")
    assert schema_errors(document.dump_document(await export_document(catalog))) == []


@pytest.mark.parametrize(
    "fields",
    [
        "mode: maybe",
        "mode: true",
        "failure: raise",
        "priority: P9",
        "lanes: {count: 0}",
        "unknown: 1",
        "plans: {}",
        "plans: null",
        "plans: [{name: a b, limits: 1/s}]",
        "plans: [{name: a}]",
        "plans: [{name: a, limits: 5}]",
        "plans: [{name: a, limits: [{algorithm: magic}]}]",
        "plans: [{name: a, limits: [{algorithm: token_bucket, refill_rate_per_sec: 5}]}]",
        "plans: [{name: a, limits: [{algorithm: fixed_window, bucket_capacity: 5}]}]",
        "plans: [{name: a, limits: [{algorithm: fixed_window, limit: -5, window_seconds: 1}]}]",
        "plans: [{name: a, algorithm: concurrency, max_concurrent: 5, lease_ttl_seconds: 1, consistency: local}]",
        "plans: [{name: a, limits: [{algorithm: quota, limit: 5, period: eon}]}]",
        "plans: [{name: a, limits: [{algorithm: quota, limit: 5, period: day, shares: {P0: 50}}]}]",
        "plans: [{name: a, algorithm: quota, limit: 5, period: day, limits: 1/s}]",
        "policies: [{resource: '*'}]",
        "keys: [{id: web, name: a}]",
        "keys: [{id: key_0123456789abcdef, name: a, scopes: []}]",
        "keys: [{id: key_0123456789abcdef, name: a, scopes: [check, check]}]",
        "keys: [{id: key_0123456789abcdef, name: a, scopes: [plans]}]",
        "keys: [{id: key_0123456789abcdef, name: a, secrets: [{hash: x, pepper: 1}]}]",
        "overrides: [{subject: a, limits: {x: free}, expires_at: 2030-01-01T00:00:00Z}]",
        "overrides: [{subject: a, limits: {x: {limt: 1}}, expires_at: 2030-01-01T00:00:00Z}]",
        "overrides: [{subject: a, limits: {x: blocked}}]",
    ],
)
def test_it_refuses_what_a_reader_refuses(fields: str) -> None:
    text = f"tenants: [{{name: acme, {fields}}}]"
    assert schema_errors(text)
    if "x: free" not in fields and "limt" not in fields:  # only the plans show these errors
        with pytest.raises(InvalidInput):
            document.parse_document(text.encode(), "plans.yaml", NOW)


def test_it_knows_every_field_of_every_limit_and_spec() -> None:
    definitions = json_schema()["$defs"]
    for algorithm, kind in LIMIT_TYPES.items():
        known = set(definitions[f"limit.{algorithm}"]["properties"])
        assert known >= {"algorithm", *(field.name for field in fields(kind) if field.init)}
    for spec, name in (
        (TenantSpec, "tenant"),
        (OperatorSpec, "operator"),
        (PolicySpec, "policy"),
        (KeySpec, "key"),
        (SecretSpec, "secret"),
        (OverrideSpec, "override"),
    ):
        assert set(definitions[name]["properties"]) == {field.name for field in msgspec.structs.fields(spec)}
    assert set(json_schema()["properties"]) == set(ConfigDocument.__struct_fields__)


def test_every_field_has_a_description() -> None:
    def undescribed(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict):
            for name, each in value.get("properties", {}).items():
                if "description" not in each and "shares" not in path:
                    yield f"{path}.{name}"
            for name, each in value.items():
                yield from undescribed(each, f"{path}.{name}")
        elif isinstance(value, list):
            for each in value:
                yield from undescribed(each, path)

    assert list(undescribed(json_schema(), "")) == []


def test_every_reference_in_it_resolves() -> None:
    text = msgspec.json.encode(json_schema()).decode()
    names = set(json_schema()["$defs"])
    assert {part.partition('"')[0] for part in text.split('"$ref":"#/$defs/')[1:]} <= names
