"""The real program behind a real nginx with the deployed configuration, under a prefix, and with its own TLS."""

import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin
from uuid import uuid4

import httpx
import pytest

from limitforge.catalog.credentials import new_id
from tests.catalog.replicas import old_credential
from tests.cli.command import RunningCommand, run_cli
from tests.nginx import Nginx, make_certificate
from tests.proxy import Proxy
from tests.servers import find_free_port
from tests.service.problems import assert_problem
from tests.service.program import START_SECONDS
from tests.service.seeded_service import SETTINGS, SeededService, TenantClient, run_seeded_service

PREFIX = "/limitforge-rls"
SECONDS = 60.0  # generous, because the machine may be busy
HOURLY = {"name": "hourly", "algorithm": "fixed_window", "limit": 2, "window_seconds": 3_600}
# Of the connection, not of the answer; and nginx tells its own time and name.
OF_EACH_HOP = {"connection", "keep-alive", "date", "server", "transfer-encoding", "strict-transport-security"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeededService]:
    with run_seeded_service(f"sqlite:///{tmp_path_factory.mktemp('behind')}/behind.db", root_path=PREFIX) as service:
        yield service


@pytest.fixture(scope="module")
def nginx(service: SeededService) -> Iterator[Nginx]:
    with Nginx(service.running.port) as nginx:
        yield nginx


@pytest.fixture
def outside(nginx: Nginx) -> Iterator[httpx.Client]:
    """A client that calls over HTTPS. Its URLs are relative to the prefix."""
    with httpx.Client(base_url=f"{nginx.url}{PREFIX}", verify=nginx.ssl_context, timeout=SECONDS) as client:
        yield client


@pytest.fixture
def tenant(service: SeededService) -> TenantClient:
    return service.tenant(HOURLY)


def check(outside: httpx.Client, tenant: TenantClient, **fields: Any) -> httpx.Response:
    body = {"resource": "GET:/orders", "subject": f"user:{uuid4().hex}", **fields}
    return outside.post("/v1/check", json=body, headers={"x-api-key": tenant.key})


# --- Behind nginx ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("already", [0, 2], ids=["allowed", "denied"])
def test_a_decision_and_all_its_headers_come_through(outside: httpx.Client, tenant: TenantClient, already: int) -> None:
    for subject in ("near", "far"):
        for _ in range(already):
            assert tenant.check(subject=subject).status == 200
    near, far = tenant.check(subject="near"), check(outside, tenant, subject="far")
    assert far.status_code == near.status == (200 if already == 0 else 429)
    own_headers = {name: value for name, value in near.headers.items() if name not in OF_EACH_HOP}
    assert {name for name in far.headers if name not in OF_EACH_HOP} == own_headers.keys()
    assert {"x-ratelimit-limit", "x-ratelimit-remaining", "ratelimit", "ratelimit-policy"} <= own_headers.keys()
    for name in ("content-type", "x-ratelimit-limit", "x-ratelimit-remaining", "ratelimit-policy"):
        assert far.headers[name] == own_headers[name]
    assert far.json()["remaining"] == near.json["remaining"]
    assert (int(far.headers["retry-after"]) > 0) == (already > 0)
    assert far.headers["strict-transport-security"].startswith("max-age=")


def test_a_batch_comes_through(outside: httpx.Client, tenant: TenantClient) -> None:
    one = {"resource": "GET:/orders", "subject": "user:42"}
    answer = outside.post("/v1/check/batch", json={"checks": [one] * 3}, headers={"x-api-key": tenant.key})
    assert answer.status_code == 200, answer.text
    assert [each["allowed"] for each in answer.json()["decisions"]] == [True, True, False]


def test_a_batch_as_large_as_the_service_takes_is_not_too_large_for_nginx(
    outside: httpx.Client, tenant: TenantClient
) -> None:
    body = b"x" * 1_048_576
    headers = {"x-api-key": tenant.key, "content-type": "application/json"}
    answer = outside.post("/v1/check/batch", content=body, headers=headers)
    assert_problem(answer, 400, "malformed_json")


def test_one_byte_more_is_refused_by_nginx(outside: httpx.Client, tenant: TenantClient) -> None:
    headers = {"x-api-key": tenant.key, "content-type": "application/json"}
    answer = outside.post("/v1/check/batch", content=b"x" * 1_048_577, headers=headers)
    assert_problem(answer, 413, "body_too_large")


def test_a_check_that_is_too_large_is_refused_by_the_service_and_its_words_come_through(
    outside: httpx.Client, tenant: TenantClient
) -> None:
    headers = {"x-api-key": tenant.key, "content-type": "application/json"}
    for size in (65_537, 500_000, 1_048_576):
        answer = outside.post("/v1/check", content=b"x" * size, headers=headers)
        assert_problem(answer, 413, "body_too_large")


def test_the_admin_api_works(service: SeededService, outside: httpx.Client) -> None:
    headers = {"authorization": f"Bearer {service.demo['admin_token']}"}
    made = outside.post("/v1/admin/tenants", json={"name": f"n-{uuid4().hex[:12]}"}, headers=headers)
    assert made.status_code == 201, made.text
    path = f"/v1/admin/tenants/{made.json()['id']}"
    found = outside.get(path, headers=headers)
    assert found.json() | {"revision": 0} == made.json() | {"revision": 0}
    known = headers | {"if-match": found.headers["etag"]}
    for status in (200, 412):  # its own first change has outdated the version
        changed = outside.patch(path, json={"name": f"n-{uuid4().hex[:12]}"}, headers=known)
        assert changed.status_code == status, changed.text
    gone = outside.delete(path, headers=headers)
    assert (gone.status_code, gone.content) == (204, b"")
    assert outside.get(path, headers=headers).status_code == 404
    assert outside.get(path).status_code == 401
    if "location" in made.headers:
        assert urljoin(f"{outside.base_url}v1/admin/tenants", made.headers["location"]).endswith(f"{PREFIX}{path}")


def test_the_reference_and_everything_that_it_names_are_found_under_the_prefix(outside: httpx.Client) -> None:
    page = outside.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) >= 4
    for name in named:
        asset = outside.get(urljoin(str(page.url), name))
        assert asset.status_code == 200, name
        assert asset.content, name
    script = next(name for name in named if name.endswith("start.js"))
    (where,) = re.findall(r'url: "([^"]+)"', outside.get(urljoin(str(page.url), script)).text)
    assert outside.get(urljoin(str(page.url), where)).json()["openapi"].startswith("3.1.")


def test_the_paths_of_the_reference_are_those_that_answer(outside: httpx.Client) -> None:
    found = outside.get("/openapi.json")
    document = found.json()
    (server,) = document["servers"]
    base = urljoin(str(found.url), server["url"])
    requests = 0
    for path, operations in document["paths"].items():
        if "get" in operations and "{" not in path:
            requests += 1
            assert outside.get(f"{base}{path}").status_code in (200, 401), path
    assert requests > 8


def test_only_health_is_served_outside_of_the_prefix(nginx: Nginx, outside: httpx.Client) -> None:
    for path in ("/v1/health", "/v1/ready"):
        assert outside.get(path).json()["status"] == "ok"
    for path in ("/", "/v1/health", "/v1/check", "/docs", "/openapi.json", f"{PREFIX}2/v1/health", PREFIX):
        answer = outside.get(f"{nginx.url}{path}")
        assert_problem(answer, 404, "unknown_path")


def test_nginx_keeps_its_connections_to_the_service_open(service: SeededService, tenant: TenantClient) -> None:
    with Proxy(service.running.port) as between, Nginx(between.port) as nginx:
        for _ in range(20):  # each on a new connection
            with httpx.Client(base_url=f"{nginx.url}{PREFIX}", verify=nginx.ssl_context, timeout=SECONDS) as client:
                assert client.get("/v1/health").status_code == 200
                assert check(client, tenant).status_code == 200
        assert between.accepted == 1


def test_neither_keys_nor_queries_stand_in_the_log_of_nginx(
    outside: httpx.Client, nginx: Nginx, tenant: TenantClient
) -> None:
    query = {"resource": "GET:/orders", "subject": "a-subject-that-nobody-should-read"}
    assert outside.get("/v1/usage", params=query, headers={"x-api-key": tenant.key}).status_code == 200
    deadline = time.monotonic() + SECONDS
    while "/v1/usage" not in nginx.access_log:  # nginx writes it after the answer
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "a-subject-that-nobody-should-read" not in nginx.access_log
    assert tenant.key not in nginx.access_log


def test_a_service_that_is_away_is_a_problem_too() -> None:
    with Nginx(find_free_port()) as nginx:
        answer = httpx.get(f"{nginx.url}{PREFIX}/v1/health", verify=nginx.ssl_context, timeout=SECONDS)
    assert answer.status_code == answer.json()["status"] == 502
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_versions_of_tls_that_are_still_good_are_spoken(nginx: Nginx, version: ssl.TLSVersion) -> None:
    trust = nginx.ssl_context
    trust.minimum_version = trust.maximum_version = version
    assert httpx.get(f"{nginx.url}{PREFIX}/v1/health", verify=trust, timeout=SECONDS).status_code == 200


def test_an_older_one_is_refused(nginx: Nginx) -> None:
    trust = nginx.ssl_context
    trust.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        trust.minimum_version = trust.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", nginx.port), timeout=SECONDS) as connection,
        pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
    ):
        trust.wrap_socket(connection, server_hostname="127.0.0.1")


@pytest.mark.slow
def test_wrong_keys_of_one_address_do_not_keep_out_the_right_ones_of_another(tmp_path: Path) -> None:
    """On its own service, because its later clients with new keys would be refused too."""
    with (
        run_seeded_service(f"sqlite:///{tmp_path}/keys.db", root_path=PREFIX, trusted_proxies="127.0.0.1") as service,
        Nginx(service.running.port) as nginx,
    ):
        tenant = service.tenant({**HOURLY, "limit": 1_000})
        right = [tenant.create("keys", name=f"k-{number}")["key"] for number in range(5)]

        def asking(address: str, keys: list[str]) -> list[int]:
            transport = httpx.HTTPTransport(verify=nginx.ssl_context, local_address=address)
            with httpx.Client(transport=transport, base_url=f"{nginx.url}{PREFIX}", timeout=SECONDS) as client:
                body = {"resource": "GET:/orders", "subject": "user:42"}
                return [client.post("/v1/check", json=body, headers={"x-api-key": key}).status_code for key in keys]

        statuses: list[int] = []
        for key in right:  # several, because on a slow machine the budget may be refilled before the valid key is used
            wrong = [old_credential("lf_live_", new_id("key").removeprefix("key_")).text for _ in range(20)]
            if 429 not in asking("127.0.0.2", wrong):
                pytest.fail("twenty wrong keys at once are too few to be statuses to wait")
            statuses += asking("127.0.0.1", [key])
        assert statuses == [200] * len(right)


def reload(process: subprocess.Popen[bytes] | RunningCommand) -> None:
    """Send SIGHUP, and wait until all old workers have ended."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    old = set(children.read_text().split())
    process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + SECONDS
    while not (now := set(children.read_text().split())) or now & old:
        assert time.monotonic() < deadline, "the old workers are still there"
        time.sleep(0.05)


def wait_for_more(answers: list[int], count: int) -> None:
    wanted, deadline = len(answers) + count, time.monotonic() + SECONDS
    while len(answers) < wanted:
        assert time.monotonic() < deadline, f"{len(answers)} of {wanted} answers came"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_reload_behind_nginx_loses_no_check(tmp_path: Path) -> None:
    """Each on a persistent connection, which must not be closed while a request is in flight."""
    with (
        run_seeded_service(f"sqlite:///{tmp_path}/reload.db", root_path=PREFIX) as service,
        Nginx(service.running.port) as nginx,
    ):
        tenant = service.tenant({**HOURLY, "limit": 1_000_000})
        answers: list[int] = []
        is_over = threading.Event()

        def ask() -> None:
            with httpx.Client(base_url=f"{nginx.url}{PREFIX}", verify=nginx.ssl_context, timeout=SECONDS) as client:
                while not is_over.is_set():
                    answers.append(check(client, tenant).status_code)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_for_more(answers, 50)
            reload(service.running.process)
            wait_for_more(answers, 50)
        finally:
            is_over.set()
            for thread in threads:
                thread.join(SECONDS)
        assert {status: answers.count(status) for status in set(answers)} == {200: len(answers)}


# --- Its own TLS -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificate(folder)
    return folder


@pytest.fixture(scope="module")
def encrypted(certificates: Path) -> Iterator[int]:
    """The port of a service with its own TLS."""
    port = find_free_port()
    own = {
        "LIMITFORGE_TLS_CERT": str(certificates / "tls.crt"),
        "LIMITFORGE_TLS_KEY": str(certificates / "tls.key"),
        "LIMITFORGE_DATABASE_URL": f"sqlite:///{certificates}/tls.db",
    }
    read, write = os.pipe()
    with os.fdopen(read) as said, Path(os.devnull).open("rb") as nothing:
        files = (nothing.fileno(), write, write)
        with RunningCommand("serve", "--port", str(port), files=files, environment=SETTINGS | own) as process:
            os.close(write)
            assert said.readline() == f"limitforge is ready at https://127.0.0.1:{port}\n"
            yield port
            process.terminate()
            process.wait(START_SECONDS)


def test_the_service_speaks_https_by_itself(encrypted: int, certificates: Path) -> None:
    trust = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    with httpx.Client(base_url=f"https://127.0.0.1:{encrypted}", verify=trust, timeout=SECONDS) as client:
        for _ in range(3):
            assert client.get("/v1/health").json()["status"] == "ok"
        refused = client.post("/v1/check", json={"resource": "GET:/orders", "subject": "user:42"})
        assert_problem(refused, 401, "unknown_key")
        assert client.get("/docs").status_code == 200


def test_plain_http_on_the_tls_port_is_closed(encrypted: int, certificates: Path) -> None:
    with socket.create_connection(("127.0.0.1", encrypted), timeout=SECONDS) as connection:
        connection.sendall(b"GET /v1/health HTTP/1.1\r\nhost: test\r\n\r\n")
        received = b""
        try:
            while chunk := connection.recv(4_096):
                received += chunk
        except ConnectionResetError:
            pass
    assert b"HTTP" not in received
    trust = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    assert httpx.get(f"https://127.0.0.1:{encrypted}/v1/health", verify=trust, timeout=SECONDS).status_code == 200


@pytest.mark.parametrize("wrong", ["missing", "no certificate", "the key of another"])
def test_an_invalid_certificate_is_a_clear_error_at_start(wrong: str, certificates: Path, tmp_path: Path) -> None:
    chain, key = certificates / "tls.crt", certificates / "tls.key"
    match wrong:
        case "missing":
            chain = tmp_path / "nowhere.crt"
        case "no certificate":
            chain = tmp_path / "wrong.crt"
            chain.write_text("hello")
        case _:
            key = certificates / "ca.key"
    done = run_cli(
        "serve",
        "--port",
        str(find_free_port()),
        LIMITFORGE_TLS_CERT=str(chain),
        LIMITFORGE_TLS_KEY=str(key),
        LIMITFORGE_DATABASE_URL=f"sqlite:///{tmp_path}/tls.db",
        LIMITFORGE_PEPPERS=SETTINGS["LIMITFORGE_PEPPERS"],
    )
    assert done.returncode == 2
    assert "tls_cert" in done.stderr
    if wrong == "missing":
        assert "nowhere.crt" in done.stderr


def test_a_certificate_without_a_key_is_a_clear_error_at_start(certificates: Path) -> None:
    done = run_cli(
        "serve", LIMITFORGE_TLS_CERT=str(certificates / "tls.crt"), LIMITFORGE_PEPPERS=SETTINGS["LIMITFORGE_PEPPERS"]
    )
    assert done.returncode == 2
    assert "tls_key" in done.stderr
