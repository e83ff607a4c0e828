"""The configuration file as text: read with everything that is wrong with it, and written for people.

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

from limitforge.catalog import markup
from limitforge.catalog.consistency import check
from limitforge.catalog.markup import Source
from limitforge.catalog.model import OPERATOR, Tenant, build, converted, limits_given
from limitforge.catalog.problems import Problems, kind_of
from limitforge.catalog.specs import (
    ENTITY_OF,
    SECTIONS,
    SPEC_OF,
    Document,
    OperatorSpec,
    PlanSpec,
    Spec,
    TenantSpec,
    as_tenant,
    entity_fields,
    ordered_limit,
    plain,
)
from limitforge.errors import InvalidInput

AnySpec = TypeVar("AnySpec", bound=Spec)


def read(content: bytes, name: str, now: datetime) -> tuple[Document, Source]:
    """A file's content, and where its parts stand. Everything that it alone can tell to be wrong is refused at once.
    `now` is the time: overrides that have expired may say what they like.
    """
    source = markup.read(content, name)
    problems = Problems(source)
    document = _document(source.root.value, problems)
    problems.stop()
    check(document, None, now, problems)
    problems.stop()
    return document, source


def dump(document: Document) -> str:
    """The document as text that people like to read; reading it again gives the same."""
    return markup.write(plain(document))


def _document(value: object, problems: Problems) -> Document:
    if not isinstance(value, dict):
        problems.add("", f"must be a mapping with `operator`, `tenants` or both, got {kind_of(value)}")
        return Document()
    for name in value.keys() - {"operator", "tenants"}:
        problems.add(str(name)[:64], "is not a field here; those are operator and tenants")
    if not value:
        problems.add("", "must hold `operator`, `tenants` or both")
    operator = _operator(value["operator"], problems) if "operator" in value else None
    if "tenants" not in value:
        return Document(operator=operator)
    tenants = [_tenant(each, path, problems) for path, each in _listed(value["tenants"], "tenants", problems)]
    return Document(operator=operator, tenants=tuple(each for each in tenants if each is not None))


def _operator(value: object, problems: Problems) -> OperatorSpec | None:
    own, sections = _split(value, ("plans",))
    spec = _converted(OperatorSpec, own, "operator", problems)
    plans = _section("plans", sections, "operator", OPERATOR, problems)
    if spec is None:
        return None
    with problems.inside("operator"):
        build(Tenant, {"id": OPERATOR, **entity_fields(as_tenant(spec), str)})
    return msgspec.structs.replace(spec, plans=plans)


def _tenant(value: object, path: str, problems: Problems) -> TenantSpec | None:
    own, sections = _split(value, SECTIONS)
    spec = _converted(TenantSpec, own, path, problems)
    found = {name: _section(name, sections, path, "tenant", problems) for name in SECTIONS}
    if spec is None:
        return None
    with problems.inside(path):
        build(Tenant, {"id": "tenant", **entity_fields(spec, str)})
        if spec.name == OPERATOR:
            raise InvalidInput("name", "operator is the one above all tenants: it has a section of its own")
    return msgspec.structs.replace(spec, **found)


def _split(value: object, names: Iterable[str]) -> tuple[object, dict[str, Any]]:
    if not isinstance(value, dict):
        return value, {}
    sections = {name: value[name] for name in names if name in value}
    return {name: each for name, each in value.items() if name not in sections}, sections


def _section(name: str, sections: Mapping[str, Any], path: str, tenant_id: str, problems: Problems) -> Any:
    if name not in sections:
        return None
    kind = SPEC_OF[name]
    found = []
    for at, each in _listed(sections[name], f"{path}.{name}", problems):
        spec = _plan(each, at, problems) if kind is PlanSpec else _converted(kind, each, at, problems)
        if spec is not None:
            with problems.inside(at):
                build(ENTITY_OF[kind], {"id": "one", "tenant_id": tenant_id, **entity_fields(spec, str)})
            found.append(spec)
    return tuple(found)


def _plan(value: object, path: str, problems: Problems) -> PlanSpec | None:
    with problems.inside(path):
        if not isinstance(value, dict):
            raise InvalidInput("", f"must be a mapping with a name and limits, got {kind_of(value)}")
        if "name" not in value:
            raise InvalidInput("name", "is required")
        if not isinstance(value["name"], str):
            raise InvalidInput("name", f"must be text, got {kind_of(value['name'])}")
        if "tenant_id" in value:
            raise InvalidInput("tenant_id", "is not a field here")
        if "limits" in value and (others := value.keys() - {"name", "limits"}):
            raise InvalidInput(min(others)[:64], "is not a field beside `limits`")
        limits = limits_given(value["name"], value)
        return PlanSpec(name=value["name"], limits=tuple(ordered_limit(each) for each in limits))
    return None


def _converted(kind: type[AnySpec], value: object, path: str, problems: Problems) -> AnySpec | None:
    with problems.inside(path):
        if not isinstance(value, dict):
            raise InvalidInput("", f"must be a mapping, got {kind_of(value)}")
        return converted(kind, value)
    return None


def _listed(value: object, path: str, problems: Problems) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        yield from ((f"{path}[{at}]", each) for at, each in enumerate(value))
    else:
        problems.add(path, f"must be a list, got {kind_of(value)}")
