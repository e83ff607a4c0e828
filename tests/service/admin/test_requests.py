"""Malformed requests. The response is always a problem document, and never a 500."""

import json
from typing import Any

import httpx
import pytest

from tests.service.live_service import AdminClient, TenantFixture
from tests.service.problems import assert_problem

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"nope",
        b'{"name": "x",}',
        b"{'name': 'x'}",
        b'{"name": NaN}',
        b'{"name": Infinity}',
        b'{"name": "\xff"}',
        b'{"name": "\xc3"}',
        b'{"name": "\\ud800"}',
        b'{"name": "x"} {}',
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"metadata": ' + b"[" * 40 + b"]" * 40 + b"}",
        b"\x00",
        b"\xef\xbb\xbf{}",
    ],
)
def test_a_body_that_is_not_json_is_refused(admin: AdminClient, raw: bytes) -> None:
    assert_problem(admin.call("POST", "/tenants", content=raw, headers=JSON), 400, "malformed_json")


def test_a_body_may_be_nested_32_deep_and_no_deeper(admin: AdminClient, account: TenantFixture) -> None:
    def created(depth: int) -> httpx.Response:
        value: Any = 1
        for _ in range(depth - 3):  # the body, its metadata, and the number are three
            value = [value]
        return admin.post("/keys", {"tenant_id": account.id, "name": f"deep-{depth}", "metadata": {"a": value}})

    assert created(32).status_code == 201
    assert_problem(refused := created(33), 400, "malformed_json")
    assert "nested deeper than 32" in refused.json()["detail"]


def test_numbers_that_a_response_could_not_repeat_are_refused(admin: AdminClient, account: TenantFixture) -> None:
    for number in ("1e400", "9" * 5_000):
        raw = f'{{"tenant_id": "{account.id}", "name": "x", "metadata": {{"a": {number}}}}}'
        assert admin.call("POST", "/keys", content=raw, headers=JSON).status_code == 400
    raw = f'{{"tenant_id": "{account.id}", "name": "x", "metadata": {{"a": [{2**64}]}}}}'
    answer = admin.call("POST", "/keys", content=raw, headers=JSON)
    assert_problem(answer, 422, "invalid_field", "metadata.a[0]")
    raw = raw.replace(str(2**64), str(2**64 - 1))
    assert admin.call("POST", "/keys", content=raw, headers=JSON).json()["metadata"] == {"a": [2**64 - 1]}


def test_a_body_has_at_most_64_kib(admin: AdminClient) -> None:
    large = json.dumps({"name": "x" * 65_536}).encode()
    assert_problem(admin.call("POST", "/tenants", content=large, headers=JSON), 413, "body_too_large")

    def parts() -> Any:
        for _ in range(100):
            yield b" " * 1_000

    assert_problem(admin.call("POST", "/tenants", content=parts(), headers=JSON), 413, "body_too_large")
    exact = json.dumps({"name": ""}).encode().ljust(65_536)
    assert_problem(admin.call("POST", "/tenants", content=exact, headers=JSON), 422, "invalid_field", "name")


def test_a_body_must_be_json(admin: AdminClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "nonsense"):
        answer = admin.call("POST", "/tenants", content=b'{"name":"x"}', headers={"content-type": kind})
        assert_problem(answer, 415, "not_json", "content-type")
    answer = admin.call("POST", "/tenants", content=b"x", headers={"content-encoding": "gzip", **JSON})
    assert_problem(answer, 415, "not_json", "content-encoding")
    for kind in ("application/json; charset=utf-8", "application/merge-patch+json"):
        answer = admin.call("POST", "/tenants", content=b'{"name":""}', headers={"content-type": kind})
        assert_problem(answer, 422, "invalid_field", "name")
    bare = admin.http.build_request("POST", "/v1/admin/tenants", content=b'{"name":""}')
    assert "content-type" not in bare.headers
    assert_problem(admin.http.send(bare), 422, "invalid_field", "name")


def test_a_body_may_not_be_missing(admin: AdminClient) -> None:
    assert_problem(admin.call("POST", "/tenants"), 422, "invalid_field", "body")
    assert_problem(admin.call("POST", "/tenants", content=b"null", headers=JSON), 422, "invalid_field")


def test_unknown_paths_and_wrong_methods_are_refused(admin: AdminClient, account: TenantFixture) -> None:
    for path in ("", "/", "/nope", "/tenants/", f"/tenants/{account.id}/", "/keys/a/b/c", "/tenants//x", "/../../etc"):
        for method in ("GET", "POST", "DELETE"):
            assert_problem(admin.call(method, path), 404, "unknown_path")
    for method, path, allowed in (
        ("DELETE", "/tenants", "GET, POST"),
        ("PUT", f"/tenants/{account.id}", "DELETE, GET, PATCH"),
        ("GET", "/reset", "POST"),
        ("POST", "/mode", "PUT"),
        ("HEAD", "/audit", "GET"),
        ("OPTIONS", "/plans", "GET, POST"),
    ):
        answer = admin.call(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert answer.headers["cache-control"] == "no-store"
        if method != "HEAD":
            assert_problem(answer, 405, "method_not_allowed")


def test_malformed_queries_are_refused(admin: AdminClient) -> None:
    for query in ("limit=1&limit=x", "limit=1e3", "limit=", "cursor=%00", "name=%00", "%00=1", "name[]=x", "limit=-1"):
        answer = admin.http.get(f"/v1/admin/tenants?{query}")
        assert answer.status_code == 422, (query, answer.text)
        assert_problem(answer, 422, "invalid_field")
    assert admin.http.get("/v1/admin/tenants?name=%ff%fe").status_code == 200


def test_unusual_text_is_returned_unchanged(admin: AdminClient, account: TenantFixture) -> None:
    for subject in ("ü", "日本語", "🙂", "a b", "'; DROP TABLE tenants; --", "%s", "\\", '"', "\u202e", "\x7f", "<b>"):
        body = {"tenant_id": account.id, "subject": subject, "limits": {"burst": "unlimited"}, "ttl_seconds": 60}
        created = admin.create("/overrides", {**body, "reason": subject})
        found = admin.get("/overrides", tenant_id=account.id, subject=subject).json()["items"]
        assert [(each["id"], each["subject"], each["reason"]) for each in found] == [(created["id"], subject, subject)]
