"""Bodies that are expensive to parse are rejected before they are parsed, and charged to their key."""

import asyncio
import json
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from limitforge.core.clock import ManualClock
from limitforge.service.checks.batches import SLICE_CHECKS
from limitforge.service.checks.body_sizes import SMALL_BODY_BYTES
from limitforge.service.checks.invalid_bodies import BURST_BYTES, InvalidBodyBudget
from limitforge.service.checks.request_bodies import MAX_BATCH, MAX_COSTS
from limitforge.service.checks.request_credentials import Credentials
from tests.service.live_service import LiveService, TenantFixture

PEEK = {"resource": "GET:/orders/7", "subject": "user:1", "cost": 0}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """A service whose budgets are never refilled, so that a slow test does not give the attacker time."""
    folder: Path = tmp_path_factory.mktemp("batches")
    with LiveService(f"sqlite:///{folder}/service.db") as found:
        found.service.checks.invalid_bodies = InvalidBodyBudget(ManualClock())
        yield found


@pytest.fixture(scope="module")
def tenant(live: LiveService) -> TenantFixture:
    return TenantFixture(live.admin())


@pytest.fixture(scope="module")
def other(live: LiveService) -> TenantFixture:
    return TenantFixture(live.admin())


@pytest.fixture
def account(tenant: TenantFixture) -> TenantFixture:
    """The tenant with a new key for each test, because invalid bodies are charged to the key."""
    found = copy(tenant)
    found.key = tenant.admin.create("/keys", {"tenant_id": tenant.id, "name": f"k-{uuid4().hex[:12]}"})
    found.secret = found.key["key"]
    return found


def post(account: TenantFixture, path: str, body: bytes | dict[str, Any]) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return account.admin.http.post(path, content=content, headers={"authorization": f"Bearer {account.secret}", **JSON})


def batch(account: TenantFixture, body: bytes | dict[str, Any]) -> httpx.Response:
    return post(account, "/v1/check/batch", body)


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def with_names(count: int, *more: str) -> dict[str, Any]:
    return {**PEEK, "costs": dict.fromkeys([*(f"limit-{index}" for index in range(count)), *more], 1)}


# --- What is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "element",
    [b"0", b"[]", b"{}", b'""', b"1e9", json.dumps(PEEK).encode()],
)
def test_a_batch_of_too_many_is_refused_before_the_rest_is_parsed(account: TenantFixture, element: bytes) -> None:
    answer = batch(account, b'{"checks": [' + (element + b",") * (MAX_BATCH + 1) + b" this is never reached")
    assert refused(answer) == (400, "malformed_json")  # it does not end like a batch
    answer = batch(account, b'{"checks": [' + (element + b",") * (MAX_BATCH + 1) + b" this is never reached}")
    assert refused(answer) == (422, "invalid_field")
    assert answer.json()["field"] == "checks"
    assert answer.json()["detail"] == f"checks: at most {MAX_BATCH} in one batch"


@pytest.mark.parametrize(
    "body",
    [
        b'{"checks": [], "checks": []}',
        b'{"checks": [], "\\u0063hecks": []}',
        b'{"checks": [{"resource": "r", "subject": "s", "subject": "t"}]}',
        b'{"checks": [{"resource": "r", "subject": "s", "costs": {"a": 1, "\\u0061": 1}}]}',
        b'{"checks": [{"resource": "r", "subject": "s"}, {"resource": "r", "subject": "s", "cost": 0, "cost": 0}]}',
    ],
)
def test_a_name_that_comes_twice_anywhere_in_a_batch_is_refused(account: TenantFixture, body: bytes) -> None:
    answer = batch(account, body)
    assert refused(answer) == (400, "malformed_json")
    assert "duplicate name" in answer.json()["detail"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"checks":[%b]}',
        b' \r\n\t{ \n"checks"\t:\r [ %b ] \n} \n',
        b'{"\\u0063heck\\u0073": [%b]}',
    ],
)
def test_a_batch_is_read_however_it_is_written(account: TenantFixture, body: bytes) -> None:
    answer = batch(account, body % json.dumps(PEEK).encode())
    assert answer.status_code == 200
    assert [each["allowed"] for each in answer.json()["decisions"]] == [True]


@pytest.mark.parametrize("path", ["/v1/check", "/v1/check/batch", "/v1/reserve", "/v1/settle", "/v1/explain"])
def test_an_object_with_more_names_than_limits_can_have_is_refused_by_a_clear_error(
    account: TenantFixture, path: str
) -> None:
    body = with_names(1_000)
    answer = post(account, path, {"checks": [body]} if path.endswith("batch") else body)
    assert refused(answer) == (400, "malformed_json")
    assert f"costs: at most {MAX_COSTS} names" in answer.json()["detail"]


def test_the_largest_number_of_names_is_read_escaped_or_not(account: TenantFixture) -> None:
    quotes = {**with_names(MAX_COSTS), "subject": '"' * 500, "resource": "\\" * 100 + '"' * 300}
    for path, body in (("/v1/check", quotes), ("/v1/check/batch", {"checks": [quotes]})):
        answer = post(account, path, body).json()
        problem = answer["decisions"][0] if "decisions" in answer else answer
        assert problem["field"] == "costs.limit-0", problem  # it was parsed, and no limit has that name


def test_a_check_in_a_batch_may_be_as_large_as_one_alone(account: TenantFixture) -> None:
    large = json.dumps(PEEK).encode()[:-1].ljust(65_535) + b"}"
    assert batch(account, b'{"checks": [%b]}' % large).status_code == 200
    answer = batch(account, b'{"checks": [0, %b ]}' % large.replace(b" }", b"  }"))
    assert refused(answer) == (413, "body_too_large")
    assert answer.json()["detail"] == "checks[1]: at most 65536 bytes, got 65537"


@pytest.mark.parametrize("wrong", [b'"\xff"', b'{"resource": "\\ud800"}', b"01", b'{"subject": "\xc3("}'])
def test_a_body_that_is_not_json_at_its_end_takes_nothing(account: TenantFixture, wrong: bytes) -> None:
    taking = json.dumps({**PEEK, "cost": 1}).encode()
    body = b'{"checks": [' + (taking + b",") * 200 + wrong + b"]}"
    assert refused(batch(account, body)) == (400, "malformed_json")
    assert account.check(cost=0).json()["remaining"] == 3


def test_the_answers_of_many_slices_stand_in_the_order_of_their_checks(account: TenantFixture) -> None:
    checks: list[Any] = [
        {**PEEK, "subject": f"user:{index}", "cost": index % 5} for index in range(10, 10 + 3 * SLICE_CHECKS)
    ]
    checks[1] = checks[SLICE_CHECKS] = 0
    checks[-1] = {**PEEK, "plan_id": "pln_unknown"}
    decisions = batch(account, {"checks": checks}).json()["decisions"]
    assert len(decisions) == len(checks)
    for index, (check, decision) in enumerate(zip(checks, decisions, strict=True)):
        if index in (1, SLICE_CHECKS):
            assert decision["status"] == 422
        elif index == len(checks) - 1:
            assert decision["status"] == 404
        else:
            assert decision["allowed"] is (check["cost"] <= 3), (index, decision)


def test_an_empty_batch_has_no_decisions(account: TenantFixture) -> None:
    assert batch(account, b'{"checks": []}').json() == {"decisions": []}


# --- What it holds up ------------------------------------------------------------------------------------------------


def test_another_check_is_answered_long_before_a_batch_that_came_first(
    live: LiveService, account: TenantFixture
) -> None:
    """Count iterations of the event loop. A batch that is decided in one go would take only a few."""
    service = live.service
    credentials = Credentials.from_key(account.secret, "127.0.0.1")
    body = json.dumps({"checks": [PEEK] * MAX_BATCH}).encode()
    assert account.check(cost=0).status_code == 200
    order: list[int] = []

    async def both() -> None:
        loop = asyncio.get_running_loop()
        answered = loop.create_future()
        service.batches.handle(credentials, body, answered.set_result)
        while not answered.done():
            service.checks.handle(
                credentials, json.dumps(PEEK).encode(), lambda response: order.append(response.status)
            )
            await asyncio.sleep(0)
        assert answered.result().status == 200

    asyncio.run_coroutine_threadsafe(both(), loop_of(live)).result(60)
    assert len(order) > 2 * MAX_BATCH // SLICE_CHECKS
    assert set(order) == {200}


def loop_of(live: LiveService) -> asyncio.AbstractEventLoop:
    (server,) = live._server.servers
    return server.get_loop()


# --- What it costs ---------------------------------------------------------------------------------------------------


def spend(account: TenantFixture, path: str, body: bytes) -> httpx.Response:
    """Send a body until it is answered unread."""
    for _ in range(BURST_BYTES // len(body) + 10):
        answer = post(account, path, body)
        if answer.status_code == 429:
            return answer
        assert answer.status_code in (200, 400, 413, 422), answer.text
    raise AssertionError(f"{path} was read on and on")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/check/batch", b'{"checks": [' + b"[]," * 300_000 + b"[]]}", id="too many checks"),
        pytest.param("/v1/check/batch", b"[" * 1_000_000, id="not JSON"),
        pytest.param("/v1/check/batch", b'{"checks": [%b]}' % b",".join([b"[" * 900 + b"]" * 900] * 500), id="deep"),
        pytest.param("/v1/check/batch", b'{"checks": [%b]}' % b",".join([b"0"] * 1_000), id="wrong checks"),
        pytest.param("/v1/check", b'{"resource": 1, "subject": "%b"}' % (b"x" * 60_000), id="a large check"),
        pytest.param("/v1/reserve", b"[" + b"[]," * 20_000 + b"[]]", id="a large reservation"),
        pytest.param("/v1/explain", b"{" + b"1" * 60_000, id="a large explanation"),
        pytest.param("/v1/release", b'{"lease": "%b"}' % (b"x" * 60_000), id="a large lease"),
    ],
)
def test_a_key_with_many_invalid_bodies_is_no_longer_read(
    account: TenantFixture, other: TenantFixture, path: str, body: bytes
) -> None:
    answer = spend(account, path, body)
    assert refused(answer) == (429, "too_many_refusals")
    assert int(answer.headers["retry-after"]) >= 1
    good = {"checks": [PEEK]}
    assert refused(batch(account, good)) == (429, "too_many_refusals")
    large = json.dumps(PEEK).encode()[:-1].ljust(SMALL_BODY_BYTES) + b"}"
    assert refused(post(account, "/v1/reserve", large)) == (429, "too_many_refusals")
    assert account.check(cost=0).status_code == 200
    assert account.check(cost=0, priority="P1", costs={"burst": 0}).status_code == 200
    assert refused(post(account, "/v1/check", b"{}")) == (422, "invalid_field")
    assert batch(other, good).status_code == 200


def test_small_mistakes_are_never_charged(account: TenantFixture) -> None:
    wrong = b'{"resource": 1, "subject": "%b"}' % (b"x" * 4_000)
    for _ in range(BURST_BYTES // len(wrong) + 10):
        assert post(account, "/v1/check", wrong).status_code == 422
    assert batch(account, {"checks": [PEEK]}).status_code == 200
