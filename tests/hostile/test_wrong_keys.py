"""Floods of invalid keys and tokens do not keep out a valid one that the process has not cached."""

import asyncio
import contextlib
import http.client
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import httpx
import pytest

from limitforge.catalog.credentials import PREFIXES, Peppers, new_id
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from tests.catalog.replicas import add_old_keys, old_credential
from tests.service.live_service import CALL_SECONDS, NO_TLS, PEPPERS, LiveService, TenantFixture

RIGHT_KEYS = 6
ATTACKERS = [f"203.0.113.{number}" for number in range(20)]
HONEST = "198.51.100.7"
BODY = b'{"resource": "GET:/orders/7", "subject": "user:1", "cost": 0}'
PAUSE_SECONDS = 0.002  # between two invalid keys, for hundreds per second


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveService]:
    with LiveService(f"sqlite:///{tmp_path}/service.db", trusted_proxies="127.0.0.1") as live:
        yield live


class Flood:
    """A thread that sends invalid keys, always new ones, from these addresses in turn until it is stopped."""

    def __init__(self, live: LiveService, sources: list[str], kind: str, path: str) -> None:
        self._address = live.origin.removeprefix("http://")
        self._sources, self._prefix, self._path = sources, PREFIXES[kind], path
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.answers: Counter[tuple[str, int]] = Counter()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=CALL_SECONDS)
        for source in cycle(self._sources):
            if self._stopped.wait(PAUSE_SECONDS):
                break
            key = old_credential(self._prefix, new_id("x").removeprefix("x_")).text
            method, body = request_for(self._path)
            connection.request(method, self._path, body, headers(key, source))
            answer = connection.getresponse()
            answer.read()
            self.answers[source, answer.status] += 1
        connection.close()

    def refused(self) -> int:
        return min(self.answers[source, 429] for source in self._sources)

    def start(self) -> None:
        """Start, and wait until every source had a key looked up and was then refused."""
        self._thread.start()
        deadline = time.monotonic() + CALL_SECONDS
        while self.refused() < 10 or any(not self.answers[source, 401] for source in self._sources):
            assert time.monotonic() < deadline, self.answers
            time.sleep(0.01)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(CALL_SECONDS)


@contextlib.contextmanager
def flood(live: LiveService, sources: list[str], kind: str = "live", path: str = "/v1/check") -> Iterator[Flood]:
    running = Flood(live, sources, kind, path)
    running.start()
    try:
        yield running
    finally:
        running.stop()
    assert {status for _, status in running.answers} == {401, 429}


def request_for(path: str) -> tuple[str, bytes | None]:
    return ("POST", BODY) if path == "/v1/check" else ("GET", None)


def headers(key: str, source: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "x-forwarded-for": source, "content-type": "application/json"}


def present(live: LiveService, keys: list[str], source: str = HONEST, path: str = "/v1/check") -> list[int]:
    """Send one request with each key, all at once, and return the statuses."""

    async def all_at_once() -> list[int]:
        method, body = request_for(path)
        async with httpx.AsyncClient(base_url=live.url, timeout=CALL_SECONDS, verify=NO_TLS) as client:
            calls = [client.request(method, path, content=body, headers=headers(key, source)) for key in keys]
            return [answer.status_code for answer in await asyncio.gather(*calls)]

    return asyncio.run(all_at_once())


def assert_all_come_in(live: LiveService, keys: list[str], path: str = "/v1/check") -> None:
    """Present half of the keys at once, and the other half one by one."""
    half = len(keys) // 2
    assert present(live, keys[:half], path=path) == [200] * half
    one_by_one = [present(live, [key], path=path)[0] for key in keys[half:]]
    assert one_by_one == [200] * (len(keys) - half), one_by_one


def old_keys(live: LiveService, tenant_id: str, number: int) -> list[str]:
    async def add() -> list[str]:
        database = Database(live.settings.database_url)
        try:
            return await add_old_keys(Catalog(database, peppers=Peppers.parse(PEPPERS)), tenant_id, number)
        finally:
            await database.close()

    return asyncio.run(add())


@pytest.mark.parametrize("sources", [[HONEST], ATTACKERS], ids=["the same source", "20 other sources"])
def test_new_keys_come_in_while_made_up_ones_flood_in(live: LiveService, sources: list[str]) -> None:
    admin = live.admin()
    tenant_id = TenantFixture(admin).id
    keys = [
        admin.create("/keys", {"tenant_id": tenant_id, "name": f"k{index}"})["key"] for index in range(2 * RIGHT_KEYS)
    ]
    with flood(live, sources):
        assert_all_come_in(live, keys)


def test_old_keys_of_a_source_without_failures_come_in_while_others_flood(live: LiveService) -> None:
    tenant_id = TenantFixture(live.admin()).id
    keys = old_keys(live, tenant_id, 2 * RIGHT_KEYS)
    with flood(live, ATTACKERS):
        assert_all_come_in(live, keys)


def test_old_keys_that_the_node_knows_come_in_from_a_source_that_floods(live: LiveService) -> None:
    tenant_id = TenantFixture(live.admin()).id
    keys = old_keys(live, tenant_id, RIGHT_KEYS)
    assert present(live, keys) == [200] * RIGHT_KEYS
    with flood(live, [HONEST]):
        assert present(live, keys) == [200] * RIGHT_KEYS


def test_made_up_keys_cost_the_database_a_bounded_number_of_look_ups(live: LiveService) -> None:
    """Each look-up that finds nothing is one 401 of the flood. All others are refused without a look-up."""
    started = time.monotonic()
    with flood(live, ATTACKERS) as running:
        pass  # started once each of them was refused ten times
    seconds = time.monotonic() - started
    looked_up = sum(number for (_, status), number in running.answers.items() if status == 401)
    assert looked_up <= 40 + 20 * seconds


@pytest.mark.parametrize(
    ("path", "sources"),
    [
        pytest.param("/v1/admin/tenants", [HONEST], id="tenants, the same source"),
        pytest.param("/metrics", ATTACKERS, id="metrics, 20 other sources"),
        pytest.param("/metrics", [HONEST], id="metrics, the same source", marks=pytest.mark.soak),
        pytest.param("/v1/admin/tenants", ATTACKERS, id="tenants, 20 other sources", marks=pytest.mark.soak),
    ],
)
def test_new_tokens_come_in_while_made_up_ones_flood_in(live: LiveService, path: str, sources: list[str]) -> None:
    tokens = [live.admin().token for _ in range(2 * RIGHT_KEYS)]
    with flood(live, sources, "admin", path):
        assert_all_come_in(live, tokens, path)


def test_a_token_that_was_deleted_does_not_reach_the_database_often(live: LiveService) -> None:
    """The deleted token has a valid keyed checksum, so it is looked up once."""
    admin = live.admin()
    gone = admin.create("/tokens", {"name": "gone", "scopes": ["read"]})
    admin.delete(f"/tokens/{gone['id']}")
    caller = live.client(gone["token"])
    assert {caller.get("/tenants").status_code for _ in range(100)} == {401, 429}
    assert present(live, [live.admin().token], path="/v1/admin/tenants") == [200]
