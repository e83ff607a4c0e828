"""Parse and dump the text of a configuration file, such as:

operator: {plan: fleet, plans: [{name: fleet, limits: 10000/second}]}
tenants:
  - name: acme
    default_plan: free
    plans:
      - {name: free, limits: 100/minute}
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from limitforge.catalog.config import strict_yaml
from limitforge.catalog.config.diagnostics import Diagnostics, describe_value
from limitforge.catalog.config.specs import (
    ENTITY_TYPE_BY_SPEC,
    SECTIONS,
    SPEC_TYPES,
    ConfigDocument,
    OperatorSpec,
    PlanSpec,
    Spec,
    TenantSpec,
    entity_fields,
    operator_as_tenant,
    order_limit_fields,
    spec_to_dict,
)
from limitforge.catalog.config.strict_yaml import SourceFile
from limitforge.catalog.config.validation import validate
from limitforge.catalog.conversion import convert
from limitforge.catalog.model import OPERATOR, Tenant, build_entity
from limitforge.catalog.plan_limits import parse_plan_limits
from limitforge.errors import InvalidInput

AnySpec = TypeVar("AnySpec", bound=Spec)


def parse_document(content: bytes, name: str, now: datetime) -> tuple[ConfigDocument, SourceFile]:
    """Parse and validate the content of a file. Returns the document, and the positions of its fields.

    Raises `InvalidFile` with all errors that can be found without the database. `now` is the time: expired overrides
    are not validated.
    """
    source = strict_yaml.parse_yaml(content, name)
    diagnostics = Diagnostics(source)
    document = _parse_root(source.root.value, diagnostics)
    diagnostics.raise_if_any()
    validate(document, None, now, diagnostics)
    diagnostics.raise_if_any()
    return document, source


def dump_document(document: ConfigDocument) -> str:
    """Return the document as readable YAML. Parsing it returns an equal document."""
    return strict_yaml.dump_yaml(spec_to_dict(document))


def _parse_root(value: object, diagnostics: Diagnostics) -> ConfigDocument:
    if not isinstance(value, dict):
        diagnostics.add("", f"must be a mapping with `operator`, `tenants` or both, got {describe_value(value)}")
        return ConfigDocument()
    for name in value.keys() - {"operator", "tenants"}:
        diagnostics.add(str(name)[:64], "unknown field; the fields are operator and tenants")
    if not value:
        diagnostics.add("", "must hold `operator`, `tenants` or both")
    operator = _parse_operator(value["operator"], diagnostics) if "operator" in value else None
    if "tenants" not in value:
        return ConfigDocument(operator=operator)
    tenants = [
        _parse_tenant(each, path, diagnostics) for path, each in _list_items(value["tenants"], "tenants", diagnostics)
    ]
    return ConfigDocument(operator=operator, tenants=tuple(each for each in tenants if each is not None))


def _parse_operator(value: object, diagnostics: Diagnostics) -> OperatorSpec | None:
    own, sections = _split_sections(value, ("plans",))
    spec = _convert(OperatorSpec, own, "operator", diagnostics)
    plans = _parse_section("plans", sections, "operator", OPERATOR, diagnostics)
    if spec is None:
        return None
    with diagnostics.at("operator"):
        build_entity(Tenant, {"id": OPERATOR, **entity_fields(operator_as_tenant(spec), str)})
    return msgspec.structs.replace(spec, plans=plans)


def _parse_tenant(value: object, path: str, diagnostics: Diagnostics) -> TenantSpec | None:
    own, sections = _split_sections(value, SECTIONS)
    spec = _convert(TenantSpec, own, path, diagnostics)
    found = {name: _parse_section(name, sections, path, "tenant", diagnostics) for name in SECTIONS}
    if spec is None:
        return None
    with diagnostics.at(path):
        build_entity(Tenant, {"id": "tenant", **entity_fields(spec, str)})
        if spec.name == OPERATOR:
            raise InvalidInput("name", "operator is reserved: use the section `operator`")
    return msgspec.structs.replace(spec, **found)


def _split_sections(value: object, names: Iterable[str]) -> tuple[object, dict[str, Any]]:
    if not isinstance(value, dict):
        return value, {}
    sections = {name: value[name] for name in names if name in value}
    return {name: each for name, each in value.items() if name not in sections}, sections


def _parse_section(name: str, sections: Mapping[str, Any], path: str, tenant_id: str, diagnostics: Diagnostics) -> Any:
    if name not in sections:
        return None
    kind = SPEC_TYPES[name]
    found = []
    for item_path, each in _list_items(sections[name], f"{path}.{name}", diagnostics):
        spec = (
            _parse_plan(each, item_path, diagnostics)
            if kind is PlanSpec
            else _convert(kind, each, item_path, diagnostics)
        )
        if spec is not None:
            with diagnostics.at(item_path):
                build_entity(
                    ENTITY_TYPE_BY_SPEC[kind], {"id": "one", "tenant_id": tenant_id, **entity_fields(spec, str)}
                )
            found.append(spec)
    return tuple(found)


def _parse_plan(value: object, path: str, diagnostics: Diagnostics) -> PlanSpec | None:
    with diagnostics.at(path):
        if not isinstance(value, dict):
            raise InvalidInput("", f"must be a mapping with a name and limits, got {describe_value(value)}")
        if "name" not in value:
            raise InvalidInput("name", "is required")
        if not isinstance(value["name"], str):
            raise InvalidInput("name", f"must be text, got {describe_value(value['name'])}")
        if "tenant_id" in value:
            raise InvalidInput("tenant_id", "unknown field")
        if "limits" in value and (others := value.keys() - {"name", "limits"}):
            raise InvalidInput(min(others)[:64], "is not a field beside `limits`")
        limits = parse_plan_limits(value["name"], value)
        return PlanSpec(name=value["name"], limits=tuple(order_limit_fields(each) for each in limits))
    return None


def _convert(kind: type[AnySpec], value: object, path: str, diagnostics: Diagnostics) -> AnySpec | None:
    with diagnostics.at(path):
        if not isinstance(value, dict):
            raise InvalidInput("", f"must be a mapping, got {describe_value(value)}")
        return convert(kind, value)
    return None


def _list_items(value: object, path: str, diagnostics: Diagnostics) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        yield from ((f"{path}[{index}]", each) for index, each in enumerate(value))
    else:
        diagnostics.add(path, f"must be a list, got {describe_value(value)}")
