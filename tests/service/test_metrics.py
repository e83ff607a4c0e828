"""`/metrics`: right numbers in a format that Prometheus reads, for those who may see them; of all workers together, and
never lower than before.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from limitforge.service.counters.process_counters import MAX_NAMED_TENANTS, OTHER_TENANTS, ProcessCounters
from limitforge.service.counters.shared_counters import SharedCounters, Totals
from limitforge.service.demo_tenant import DemoTenant
from limitforge.service.http.metrics import exposition
from tests.cli.command import run_cli
from tests.servers import RedisServer, find_free_port
from tests.service.databases import seed_demo
from tests.service.live_service import PEPPERS, START_SECONDS, LiveService, TenantFixture
from tests.service.problems import assert_problem
from tests.service.program import RunningService, run_demo, run_service

GAUGES = {
    "rl_new_buckets_per_minute",
    "rl_catalog_revision",
    "rl_catalog_tenants",
    "rl_catalog_listening",
    "rl_redis_evicting",
}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Samples = dict[tuple[str, ...], float]


def read(text: str) -> Samples:
    """Return samples by name and label values, as Prometheus reads them."""
    families = list(text_string_to_metric_families(text))
    counters = ["rl_allowed", "rl_blocked", "rl_overflow", "requests", "overrides_restored"]
    assert [family.name for family in families if family.type == "counter"] == counters
    gauges = [family.name for family in families if family.type == "gauge"]
    assert set(gauges) <= GAUGES
    assert all(family.documentation for family in families)
    samples = {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}
    assert samples.pop(("overrides_restored_total",)) == 0  # it is always present
    assert samples.pop(("rl_new_buckets_per_minute",), 60_000) == 60_000
    for name in list(samples):
        if name[0] in gauges:
            del samples[name]
    overflows = [samples.pop(name) for name in list(samples) if name[0] == "rl_overflow_total"]
    assert not any(overflows)
    return samples


def scrape(service: RunningService, token: str) -> Samples:
    answer = service.request("GET", "/metrics", headers={"authorization": f"Bearer {token}"})
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == CONTENT_TYPE
    return read(answer.body.decode())


# --- The numbers, and who may see them -------------------------------------------------------------------------------


def test_the_numbers_are_those_of_what_was_answered() -> None:
    with run_demo() as service:
        for _ in range(13):  # of 10
            service.check(subject="user:1", cost=1)
        service.post("/v1/check/batch", {"checks": [{"resource": "GET:/x", "subject": "user:2"}] * 3})
        service.check(key="nonsense")
        service.request("GET", "/v1/admin/tenants")
        found = scrape(service, service.demo["admin_token"])
        again = scrape(service, service.demo["admin_token"])
    denied = found["rl_blocked_total", "demo"]
    assert denied in (2, 3)  # two tokens per second are refilled
    assert found == {
        ("rl_allowed_total", "demo"): 16 - denied,
        ("rl_blocked_total", "demo"): denied,
        ("requests_total", "check", "200"): 13 - denied,
        ("requests_total", "check", "429"): denied,
        ("requests_total", "check", "401"): 1,
        ("requests_total", "batch", "200"): 1,
        ("requests_total", "other", "401"): 1,
    }
    assert again == {**found, ("requests_total", "metrics", "200"): 1}


def test_it_takes_a_token_of_all_tenants_that_may_read(sqlite_service: LiveService, account: TenantFixture) -> None:
    assert_problem(sqlite_service.client().http.get("/metrics"), 401, "unknown_key")
    assert_problem(sqlite_service.client("lf_admin_wrong").http.get("/metrics"), 401, "unknown_key")
    assert_problem(sqlite_service.client(account.secret).http.get("/metrics"), 401, "unknown_key")
    assert_problem(sqlite_service.admin(scopes=["write"]).http.get("/metrics"), 403, "forbidden")
    assert_problem(account.tenant_admin().http.get("/metrics"), 403, "forbidden", "metrics")
    reader = sqlite_service.admin(scopes=["read"]).http
    assert reader.get("/metrics").status_code == 200
    assert reader.head("/metrics").headers["content-type"] == CONTENT_TYPE
    assert_problem(reader.post("/metrics"), 405, "method_not_allowed")


def test_the_service_works_under_a_root_path(tmp_path: Path) -> None:
    with LiveService(f"sqlite:///{tmp_path}/rooted.db", root_path="/limitforge-rls") as live:
        admin = live.admin()
        assert read(admin.http.get("/metrics").text) == {}
        elsewhere = httpx.get(f"{live.origin}/metrics", headers=admin.http.headers)
        assert_problem(elsewhere, 404, "unknown_path")


def test_a_tenant_that_gets_another_name_leaves_its_counts_under_the_old_one(account: TenantFixture) -> None:
    old, new = account.tenant["name"], f"{account.tenant['name']}-new"
    admin = account.admin

    def allowed(name: str) -> float:
        return read(admin.http.get("/metrics").text).get(("rl_allowed_total", name), 0)

    for index in range(3):
        assert account.check(f"user:{index}").status_code == 200
    assert allowed(old) == 3
    assert admin.patch(f"/tenants/{account.id}", {"name": new}).status_code == 200

    def is_heard() -> bool:
        assert account.check("user:9", cost=0).status_code == 200
        assert admin.get("/usage").status_code == 200  # it flushes the counts so far
        return allowed(new) > 0

    eventually(is_heard)
    assert allowed(old) >= 3


def test_the_state_of_the_catalog_is_in_the_metrics(account: TenantFixture) -> None:
    def gauges() -> Samples:
        families = text_string_to_metric_families(account.admin.http.get("/metrics").text)
        found = [each for family in families if family.type == "gauge" for each in family.samples]
        return {(each.name, *each.labels.values()): each.value for each in found}

    assert account.check().status_code == 200
    before = gauges()
    assert before["rl_catalog_revision",] > 0
    assert before["rl_catalog_tenants",] > 0
    assert (before["rl_catalog_listening", "postgres"], before["rl_catalog_listening", "redis"]) == (0, 0)
    assert not [name for name in before if name[0] == "rl_redis_evicting"]  # the store is in memory
    assert TenantFixture(account.admin).check().status_code == 200
    eventually(lambda: gauges()["rl_catalog_revision",] > before["rl_catalog_revision",])
    assert gauges()["rl_catalog_tenants",] == before["rl_catalog_tenants",] + 1


# --- The format ------------------------------------------------------------------------------------------------------

HOSTILE = ['a"b', "a\\", "a\nb 1", '"} 1\nrl_allowed_total{tenant="x', "# HELP x", "{}", "", " ", "é\u2028☃", '\\"\\n']


def test_no_name_can_break_the_format() -> None:
    rows = {name: [index, 0, 0, 0, 0] for index, name in enumerate(HOSTILE)}
    found = read(exposition(Totals(rows, {(name, 200): 1 for name in HOSTILE})).decode())
    for index, name in enumerate(HOSTILE):
        assert found["rl_allowed_total", name] == index
        assert found["requests_total", name, "200"] == 1
    assert len(found) == 3 * len(HOSTILE)


def test_no_tenant_can_have_a_hostile_name(sqlite_service: LiveService) -> None:
    admin = sqlite_service.admin()
    for name in HOSTILE:
        assert_problem(admin.post("/tenants", {"name": name}), 422, "invalid_field", "name")


# --- Sums ------------------------------------------------------------------------------------------------------------


def test_tenants_past_the_bound_are_counted_together_and_none_loses_its_name() -> None:
    whole = Totals()
    whole.add(Totals({f"first-{index}": [1, 0, 0, 0, 0] for index in range(MAX_NAMED_TENANTS)}))
    whole.add(Totals({f"late-{index}": [0, 2, 0, 0, 0] for index in range(MAX_NAMED_TENANTS)}))
    whole.add(Totals({"first-7": [5, 5, 0, 0, 0]}))
    assert len(whole.tenants) == MAX_NAMED_TENANTS + 1
    assert whole.tenants[OTHER_TENANTS] == [0, 2 * MAX_NAMED_TENANTS, 0, 0, 0]
    assert whole.tenants["first-7"] == [6, 5, 0, 0, 0]


async def test_totals_of_a_release_that_counted_fewer_things_are_read(tmp_path: Path) -> None:
    """The file survives an upgrade of the workers under one supervisor."""
    earlier = {"tenants": {"acme": [1, 2, 3, 4], "blue": [5, 6, 7, 8]}, "requests": {}}
    (tmp_path / "totals").write_bytes(msgspec.msgpack.encode(earlier))
    counters = ProcessCounters()
    sums = SharedCounters(counters, tmp_path)
    for _ in range(2):
        found = read(exposition(await sums.totals()).decode())
        assert (found["rl_allowed_total", "acme"], found["rl_blocked_total", "blue"]) == (1, 6)
        counters.count_response("check", 200)  # so that the file is rewritten
    assert read(exposition(Totals({"acme": [1, 2, 3, 4]})).decode())["rl_allowed_total", "acme"] == 1


async def test_counters_never_decrease_on_any_worker(tmp_path: Path) -> None:
    processes = [ProcessCounters() for _ in range(3)]
    sums = [SharedCounters(counters, tmp_path) for counters in processes]
    for index in range(30):
        processes[index % 3].count_response("check", 200)
        totals = await sums[(index + 1) % 3].totals()
        again = await sums[index % 3].totals()
        assert again.requests["check", 200] == index + 1
        assert totals.requests.get(("check", 200), 0) == index
    assert list(tmp_path.iterdir()) == [tmp_path / "totals"]  # noqa: ASYNC240 - blocking is fine here


async def test_what_could_not_be_added_is_added_later(tmp_path: Path) -> None:
    counters, folder = ProcessCounters(), tmp_path / "run"
    sums = SharedCounters(counters, folder)
    await sums.start()
    counters.count_response("check", 200)
    with pytest.raises(Exception, match="can't be read"):
        await sums.totals()
    folder.mkdir()
    assert (await sums.totals()).requests == {("check", 200): 1}
    counters.count_response("check", 200)
    await sums.close()
    assert (await SharedCounters(ProcessCounters(), folder).totals()).requests == {("check", 200): 2}


# --- Several workers, and a port of its own --------------------------------------------------------------------------


class TwoWorkers:
    """A service with two workers on one Redis, a key, and the metrics port."""

    def __init__(self, service: RunningService, made: DemoTenant, metrics: RunningService) -> None:
        self.service = service
        self.made = made
        self.metrics = metrics

    def workers(self) -> list[int]:
        pid = self.service.process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def check(self, times: int) -> None:
        for _ in range(times):
            assert self.service.check(key=self.made.keys["enterprise"]).status == 200

    def allowed(self) -> float:
        return self.scrape().get(("rl_allowed_total", "demo"), 0)

    def scrape(self) -> Samples:
        answer = self.metrics.request("GET", "/metrics")
        assert answer.status == 200, answer.body
        return read(answer.body.decode())

    @contextlib.contextmanager
    def only(self, worker: int) -> Iterator[None]:
        """Pause all other workers, so that this one answers."""
        others = [each for each in self.workers() if each != worker]
        for each in others:
            os.kill(each, signal.SIGSTOP)
        try:
            yield
        finally:
            for each in others:
                os.kill(each, signal.SIGCONT)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[TwoWorkers]:
    folder = tmp_path_factory.mktemp("two_workers")
    port, metrics_port = find_free_port(), find_free_port()
    environment = {
        "LIMITFORGE_PEPPERS": PEPPERS,
        "LIMITFORGE_DATABASE_URL": f"sqlite:///{folder}/two_workers.db",
        "LIMITFORGE_STORE_URL": redis_server.url,
        "LIMITFORGE_KEY_PREFIX": "two_workers",
        "LIMITFORGE_DEADLINE_MS": "5000",
        "LIMITFORGE_METRICS_PORT": str(metrics_port),
        "TMPDIR": str(folder),
    }
    made = seed_demo(environment["LIMITFORGE_DATABASE_URL"], PEPPERS)
    with run_service(port, "--workers", "2", environment=environment) as service:
        found = TwoWorkers(service, made, RunningService(service.process, {}, metrics_port))
        eventually(lambda: len(found.workers()) == 2)
        yield found
        assert service.stop() == 0
        assert list(folder.glob("limitforge-run-*")) == []


def test_any_worker_returns_the_sum(two_workers: TwoWorkers) -> None:
    before = two_workers.allowed()
    for worker, times in zip(two_workers.workers(), (3, 4), strict=True):
        with two_workers.only(worker):
            two_workers.check(times)
    eventually(lambda: two_workers.allowed() == before + 7)
    for worker in two_workers.workers():
        with two_workers.only(worker):
            assert two_workers.allowed() == before + 7
            assert scrape(two_workers.service, two_workers.made.admin_token)["rl_allowed_total", "demo"] == before + 7


def test_the_port_for_metrics_serves_nothing_else(two_workers: TwoWorkers) -> None:
    for method, path, status in (
        ("GET", "/v1/health", 404),
        ("POST", "/v1/check", 404),
        ("GET", "/v1/admin/tenants", 404),
        ("GET", "/", 404),
        ("POST", "/metrics", 405),
    ):
        answer = two_workers.metrics.request(method, path, b"{}" if method == "POST" else None)
        assert (answer.status, answer.json["status"]) == (status, status)
    assert two_workers.metrics.request("GET", "/metrics?x=1").headers["content-type"] == CONTENT_TYPE
    assert two_workers.service.request("GET", "/metrics").status == 401


def test_a_reload_loses_nothing_and_lowers_nothing(two_workers: TwoWorkers) -> None:
    before, old = two_workers.allowed(), set(two_workers.workers())
    with watching(two_workers) as seen:
        two_workers.check(5)
        two_workers.service.process.send_signal(signal.SIGHUP)
        for _ in range(20):
            two_workers.check(1)
            time.sleep(0.05)
        eventually(lambda: len(two_workers.workers()) == 2 and not old & set(two_workers.workers()))
        two_workers.check(5)
        eventually(lambda: two_workers.allowed() == before + 30)
        eventually(lambda: len(seen) > 10)
    assert_never_lower(seen)


def test_a_killed_worker_takes_at_most_its_last_second_with_it(two_workers: TwoWorkers) -> None:
    before = two_workers.allowed()
    two_workers.check(10)
    eventually(lambda: two_workers.allowed() == before + 10)
    with watching(two_workers) as seen:
        for worker in two_workers.workers():
            os.kill(worker, signal.SIGKILL)
            eventually(lambda: not {worker} & set(two_workers.workers()) and len(two_workers.workers()) == 2)  # noqa: B023 - called now
        eventually(lambda: two_workers.allowed() == before + 10)
        two_workers.check(5)
        eventually(lambda: two_workers.allowed() == before + 15)
    assert_never_lower(seen)


@contextlib.contextmanager
def watching(two_workers: TwoWorkers) -> Iterator[list[Samples]]:
    """Return the values that were scraped meanwhile. A connection to a killed worker may break."""
    seen: list[Samples] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            with contextlib.suppress(ConnectionError):
                seen.append(two_workers.scrape())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def assert_never_lower(seen: list[Samples]) -> None:
    for before, after in pairwise(seen):
        assert all(after[sample] >= number for sample, number in before.items())


def eventually(is_true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_service_with_a_file_serves_metrics_on_the_port_alone(tmp_path: Path) -> None:
    made = json.loads(run_cli("keys", "make", "--name", "web", "--json", LIMITFORGE_PEPPERS=PEPPERS).stdout)
    plan = {"name": "free", "limits": "a=5/minute"}
    tenant = {"name": "acme", "default_plan": "free", "plans": [plan], "keys": [made["entry"]]}
    file = tmp_path / "plans.yaml"
    file.write_text(json.dumps({"tenants": [tenant]}))
    port = find_free_port()
    environment = {"LIMITFORGE_PEPPERS": PEPPERS, "LIMITFORGE_METRICS_PORT": str(port)}
    with run_service(find_free_port(), "--config", str(file), environment=environment) as service:
        for _ in range(7):
            service.check(key=made["key"])
        found = read(RunningService(service.process, {}, port).request("GET", "/metrics").body.decode())
        assert (found["rl_allowed_total", "acme"], found["rl_blocked_total", "acme"]) == (5, 2)
        refusal = service.request("GET", "/metrics")
        assert refusal.status == 404
        assert "LIMITFORGE_METRICS_PORT" in refusal.json["detail"]


def test_a_metrics_port_in_use_is_reported(two_workers: TwoWorkers) -> None:
    taken = str(two_workers.metrics.port)
    done = run_cli("serve", "--port", "0", LIMITFORGE_PEPPERS=PEPPERS, LIMITFORGE_METRICS_PORT=taken)
    assert done.returncode != 0
    assert f"metrics_port: can't listen on 127.0.0.1:{taken}" in done.stderr
