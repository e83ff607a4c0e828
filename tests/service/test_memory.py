"""The memory of a worker at its start, and after floods of subjects and keys that never come again."""

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from limitforge.catalog.credentials import PREFIXES, new_id
from tests.catalog.replicas import old_credential
from tests.servers import RedisServer
from tests.service.program import RunningService, run_demo

MIB = 1_024
START_MIB = 120
FLAT_MIB = 24  # growth that a flood may leave behind: full caches, and memory of the allocator
BATCH = 1_000

Record = Callable[[str, object], None]


@pytest.fixture
def service(own_redis_server: RedisServer) -> Iterator[RunningService]:
    with run_demo("--store", own_redis_server.url) as running:
        yield running


def resident(service: RunningService) -> int:
    """Return the memory of the worker in KiB."""
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def test_a_worker_starts_small(redis_url: str, record_property: Record) -> None:
    with run_demo("--store", redis_url, is_installed=True) as service:
        record_property("start_mib", resident(service) // MIB)
        assert resident(service) < START_MIB * MIB


def flood(service: RunningService, subjects: int, keys: int) -> None:
    """Send batches of new subjects, and well-formed but unknown keys, on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    for first in range(0, subjects, BATCH):
        checks = [
            {"resource": f"GET:/{index % 7_919}", "subject": f"flood:{index}"} for index in range(first, first + BATCH)
        ]
        _post(connection, "/v1/check/batch", {"checks": checks}, service.key, 200)
    for _ in range(keys):
        _post(connection, "/v1/check", {"resource": "a", "subject": "b"}, wrong_key(), 401, 429)
    connection.close()


def wrong_key() -> str:
    """Return a well-formed key that was never issued."""
    return old_credential(PREFIXES["live"], new_id("key").removeprefix("key_")).text


def _post(connection: http.client.HTTPConnection, path: str, body: object, key: str, *statuses: int) -> None:
    connection.request("POST", path, json.dumps(body), {"x-api-key": key, "content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    assert answer.status in statuses


@pytest.mark.slow
def test_floods_leave_nothing_behind(service: RunningService, record_property: Record) -> None:
    _stays_flat(service, record_property, subjects=60_000, keys=2_000)


@pytest.mark.soak
def test_long_floods_leave_nothing_behind(service: RunningService, record_property: Record) -> None:
    _stays_flat(service, record_property, subjects=2_000_000, keys=100_000)


def _stays_flat(service: RunningService, record_property: Record, *, subjects: int, keys: int) -> None:
    flood(service, 10_000, 500)
    before = resident(service)
    flood(service, subjects, keys)
    grown = resident(service) - before
    record_property("before_mib", before // MIB)
    record_property("grown_mib", round(grown / MIB, 1))
    assert grown < FLAT_MIB * MIB
