"""The OpenAPI document, which the service must conform to, and the reference page."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from jsonschema import Draft202012Validator

from limitforge.catalog.fields import immutable_fields, settable_fields
from limitforge.catalog.model import Entity, Key, Override, Plan, Policy, Tenant, Token
from limitforge.service.admin import authentication
from limitforge.service.admin.openapi.document import REQUEST_PROBLEM_STATUSES
from limitforge.service.http.asgi import AsgiRouter
from limitforge.service.problems import ERROR_KINDS, HTTP_ERROR_TITLES, INTERNAL_ERROR
from tests.service.live_service import NO_TLS, AdminClient, LiveService, TenantFixture
from tests.service.problems import assert_problem

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


@pytest.fixture(scope="module")
def document(sqlite_service: LiveService) -> dict[str, Any]:
    answer = httpx.get(f"{sqlite_service.url}/openapi.json", verify=NO_TLS)
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
def rooted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    folder = tmp_path_factory.mktemp("rooted")
    with LiveService(f"sqlite:///{folder}/rooted.db", root_path="/limitforge-rls") as live:
        yield live


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, of_path in document["paths"].items():
        for method, operation in of_path.items():
            yield method.upper(), path, operation


# --- The document ----------------------------------------------------------------------------------------------------


def test_every_route_is_documented(sqlite_service: LiveService, document: dict[str, Any]) -> None:
    router: AsgiRouter = sqlite_service.service._router
    served = {(method, path) for path, (method, *_) in router._routes.items()}
    for context in iter_route_contexts(router._admin_app.routes):  # type: ignore[attr-defined]
        if context.path is not None and context.path.startswith("/v1/"):
            served |= {(method, context.path) for method in context.methods or ()}
    assert document["openapi"].startswith("3.1.")
    assert {(method, path) for method, path, _ in operations(document)} == served
    assert len(served) > 50


def test_every_problem_is_documented_with_an_example(document: dict[str, Any]) -> None:
    responses = document["components"]["responses"]
    codes = {code for each in responses.values() for code in each["content"]["application/problem+json"]["examples"]}
    assert REQUEST_PROBLEM_STATUSES.keys() == HTTP_ERROR_TITLES.keys()
    assert codes == {kind.code for _, kind in ERROR_KINDS} | HTTP_ERROR_TITLES.keys() | {INTERNAL_ERROR.code}
    for name, response in responses.items():
        content = response["content"]["application/problem+json"]
        for example in content["examples"].values():
            assert name == f"Problem{example['value']['status']}"
            validate(document, content["schema"], example["value"])


def test_every_operation_lists_its_credentials_and_problems(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for *_, operation in operations(document)]
    assert len(set(ids)) == len(ids)
    for _, path, operation in operations(document):
        schemes = {name for each in operation["security"] for name in each}
        is_admin = path.startswith("/v1/admin") or path == "/metrics"
        is_open = path in ("/v1/health", "/v1/ready")
        assert schemes == ({"adminToken"} if is_admin else set() if is_open else {"apiKey", "apiKeyAsBearer"})
        problems = {status for status in operation["responses"] if int(status) >= 400}
        assert problems >= ({"405"} if is_open else {"401", "403", "405", "429", "500", "503"}), path
        assert is_open or path == "/metrics" or "422" in problems, path
        assert operation["summary"]
        assert operation["description"]
        assert operation["tags"][0] in {tag["name"] for tag in document["tags"]}
    assert document["components"]["securitySchemes"]["apiKey"]["name"] == "x-api-key"


def test_every_reference_resolves_and_every_schema_is_valid(document: dict[str, Any]) -> None:
    text = str(document)
    for ref in set(re.findall(r"'\$ref': '([^']+)'", text)):
        found: Any = document
        for part in ref.removeprefix("#/").split("/"):
            found = found[part]
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for unused in ("HTTPValidationError", "x-problems", "x-schema", "$defs"):
        assert unused not in text


def test_every_example_is_valid(document: dict[str, Any]) -> None:
    count = 0
    for schema in document["components"]["schemas"].values():
        for example in schema.get("examples", ()):
            validate(document, schema, example)
            count += 1
    for *_, operation in operations(document):
        contents = [operation.get("requestBody", {}).get("content", {})]
        contents += [each.get("content", {}) for each in operation["responses"].values()]
        for content in contents:
            for media in content.values():
                examples = [each["value"] for each in media.get("examples", {}).values()]
                for example in [*examples, *([media["example"]] if "example" in media else [])]:
                    validate(document, media["schema"], example)
                    count += 1
    assert count > 30


def test_responses_match_their_schemas(document: dict[str, Any], account: TenantFixture) -> None:
    paths = {Tenant: "tenants", Plan: "plans", Policy: "policies", Key: "keys", Override: "overrides", Token: "tokens"}
    for kind, path in paths.items():
        schema = document["components"]["schemas"][kind.__name__]
        narrowed = {"name": account.tenant["name"]} if kind is Tenant else {"tenant_id": account.id}
        items = list(account.admin.list_all(f"/{path}", **narrowed))
        assert items, path
        for item in items:
            validate(document, schema, item)
            assert item.keys() == schema["properties"].keys(), path


BODIES = (
    (Tenant, "NewTenant", "TenantChanges"),
    (Plan, "NewPlan", "PlanChanges"),
    (Policy, "NewPolicy", "PolicyChanges"),
    (Key, "NewKey", "KeyChanges"),
    (Override, "NewOverride", "OverrideChanges"),
    (Token, "NewToken", "TokenChanges"),
)


@pytest.mark.parametrize(("entity", "new", "changes"), BODIES, ids=lambda each: getattr(each, "__name__", each))
def test_bodies_have_the_fields_of_their_entity_with_descriptions(
    document: dict[str, Any], entity: type[Entity], new: str, changes: str
) -> None:
    settable = set(settable_fields(entity))
    for name, fields in ((new, settable), (changes, settable - set(immutable_fields(entity)))):
        schema = document["components"]["schemas"][name]
        properties = schema["properties"] | {
            field: described
            for option in schema.get("anyOf", ())
            for field, described in option.get("properties", {}).items()
        }
        assert properties.keys() - {"ttl_seconds"} == fields
        for field in fields:
            assert "description" in properties[field], field


def test_every_field_is_described(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            assert described.get("description"), f"{name}.{field}"


def validate(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    whole = {**schema, "components": document["components"]}
    errors = [error.message for error in Draft202012Validator(whole).iter_errors(value)]
    assert errors == [], value


# --- The page and the root path---------------------------------------------------------------------------------------


def test_the_page_loads_nothing_from_other_origins(sqlite_service: LiveService) -> None:
    page = httpx.get(f"{sqlite_service.url}/docs", verify=NO_TLS)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert not re.search(r"https?:|\*|unsafe-eval", policy)
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    assert not re.search(r"https?://|//[a-z]", page.text)
    assert "<script>" not in page.text
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 4
    for address in loaded:
        asset = httpx.get(f"{sqlite_service.url}/{address}", verify=NO_TLS)
        assert asset.status_code == 200
        assert asset.headers["x-content-type-options"] == "nosniff"
        assert asset.content
    assert 'url: "openapi.json"' in httpx.get(f"{sqlite_service.url}/docs/start.js", verify=NO_TLS).text


def test_all_routes_are_under_the_root_path(rooted: LiveService) -> None:
    account = TenantFixture(rooted.admin(), over_http=True)
    assert account.admin.get("/tenants").status_code == 200
    assert account.check().status_code == 200
    document = httpx.get(f"{rooted.url}/openapi.json", verify=NO_TLS).json()
    assert document["servers"] == [{"url": "/limitforge-rls"}]
    assert "/v1/check" in document["paths"]
    for path in ("/docs", "/docs/swagger-ui.css", "/docs/start.js", "/v1/health"):
        assert httpx.get(f"{rooted.url}{path}", verify=NO_TLS).status_code == 200
    headers = {"authorization": f"Bearer {account.admin.token}"}
    for path in ("/v1/admin/tenants", "/openapi.json", "/docs", "/limitforge-rls2/v1/admin/tenants", "/", "/v1/check"):
        assert_problem(httpx.get(f"{rooted.origin}{path}", headers=headers, verify=NO_TLS), 404, "unknown_path")
    wrong = httpx.delete(f"{rooted.url}/v1/admin/tenants", headers=headers, verify=NO_TLS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, POST")


def test_other_paths_are_not_found(sqlite_service: LiveService, admin: AdminClient) -> None:
    for path in ("/redoc", "/docs/", "/docs/nope.js", "/docs/../secrets", "/docs/oauth2-redirect", "/", "/openapi"):
        assert_problem(httpx.get(f"{sqlite_service.url}{path}", verify=NO_TLS), 404, "unknown_path")


# --- Conformance -----------------------------------------------------------------------------------------------------


@pytest.fixture
def unlimited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveService]:
    """A service without a rate limit for admin requests."""
    monkeypatch.setattr(authentication, "BURST_LIMIT", "burst=token:100000/second")
    monkeypatch.setattr(authentication, "SUSTAINED_LIMIT", "sustained=counter:10000000/minute")
    with LiveService(f"sqlite:///{tmp_path}/contract.db") as live:
        yield live


RUNS = {
    "checks": ("--exclude-path-regex", "^/v1/admin"),
    "tokens": ("--include-path-regex", "^/v1/admin/tokens/"),  # which may delete the token of the request
    "administration": ("--include-path-regex", "^/v1/admin/(?!tokens/)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_the_service_conforms_to_its_document(unlimited: LiveService, tmp_path: Path, run: str) -> None:
    """The service accepts and answers as documented, refuses the rest, and never returns 500.

    Acceptance of all valid input is not tested: a schema can't express that a time zone or a plan exists.
    """
    account = TenantFixture(unlimited.admin())
    credential = account.secret if run == "checks" else account.admin.token
    is_long = os.environ.get("LIMITFORGE_TEST_PROFILE") == "soak"
    command = [
        *(SCHEMATHESIS, "run", f"{unlimited.url}/openapi.json"),
        *("--header", f"Authorization: Bearer {credential}"),
        *(("--header", f"x-api-key: {credential}") if run == "checks" else ()),
        *RUNS[run],
        *("--phases", "examples,coverage,fuzzing" if is_long else "examples,fuzzing"),
        *("--max-examples", "200" if is_long else "2"),
        *("--exclude-checks", "positive_data_acceptance"),
        *("--generation-database", "none", "--seed", "1", "--no-color"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
