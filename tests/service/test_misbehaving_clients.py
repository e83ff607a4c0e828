"""Clients that send requests in pieces or in masses, or do not read the answers."""

import base64
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.servers import find_free_port
from tests.service.program import HttpResponse, RunningService, read_response, run_demo, run_service

PEPPERS = {"LIMITFORGE_PEPPERS": "1:a pepper that the tests alone know"}
BODY = b'{"resource": "GET:/orders", "subject": "victim"}'
SMUGGLED = b'{"resource": "GET:/orders", "subject": "smuggled"}'
SILENCE_SECONDS = 0.3


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with run_demo() as running:
        yield running


def post(service: RunningService, body: bytes, *lines: str, path: str = "/v1/check") -> bytes:
    head = [f"POST {path} HTTP/1.1", "host: test", f"x-api-key: {service.key}", *lines, f"content-length: {len(body)}"]
    return "\r\n".join([*head, "", ""]).encode() + body


def answers(service: RunningService, *packets: bytes) -> list[HttpResponse]:
    """Return all answers until the service is silent or closes the connection."""
    found: list[HttpResponse] = []
    with service.connection() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENCE_SECONDS)
        with contextlib.suppress(OSError):
            for packet in packets:
                connection.sendall(packet)
                time.sleep(0.002)
        buffered = bytearray()
        with contextlib.suppress(OSError):
            while True:
                found.append(read_response(connection, buffered))
    return found


def counted(service: RunningService, subject: str) -> int:
    left: int = service.check(subject=subject, cost=0).json["remaining"]
    return 10 - left


# -- upgrades


@pytest.mark.parametrize("index", range(0, 190, 7))
def test_a_body_behind_an_upgrade_is_never_read_as_a_request(service: RunningService, index: int) -> None:
    inner = post(service, SMUGGLED, "connection: close")
    whole = post(
        service, inner, "connection: upgrade, http2-settings", "upgrade: h2c", "content-type: application/json"
    )
    received = answers(service, whole[:index], whole[index:]) if index else answers(service, whole)
    assert [answer.status for answer in received] == [400]
    assert counted(service, "smuggled") == 0


def test_an_upgrade_behind_another_request_is_refused_too(service: RunningService) -> None:
    inner = post(service, SMUGGLED)
    first = post(service, b'{"resource": "GET:/orders", "subject": "first", "cost": 0}')
    received = answers(service, first + post(service, inner, "connection: upgrade", "upgrade: h2c") + first)
    assert [answer.status for answer in received] == [200, 400]
    assert counted(service, "smuggled") == 0


@pytest.mark.parametrize("rest", [b"0\r\n\r\n", b"\r\n 0\r\n\r\n"])
def test_no_field_grows_by_what_stood_in_an_upgrade(service: RunningService, rest: bytes) -> None:
    head = post(service, b"", "connection: upgrade")[:-2]  # its length is 0, so the request ends here
    received = answers(service, head.removesuffix(b"\r\n") + b"\r\nUpgrade: 9", rest + BODY)
    assert 200 not in [answer.status for answer in received]
    assert counted(service, "victim") == 0


# -- masses


@pytest.mark.parametrize(("size", "expected"), [(2_000, [[200]]), (200_000, [[400], []])])
def test_a_body_in_single_bytes_delays_no_other_client(
    service: RunningService, size: int, expected: list[list[int]]
) -> None:
    body = json.dumps({"checks": [{"resource": "r", "subject": "s", "cost": 0}]}).encode().ljust(size)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = f"POST /v1/check/batch HTTP/1.1\r\nhost: test\r\nx-api-key: {service.key}\r\n"
    found = answers(service, head.encode() + b"transfer-encoding: chunked\r\n\r\n" + chunks)
    assert [answer.status for answer in found] in expected  # a connection that is closed too early may lose its answer


@pytest.mark.parametrize(
    ("path", "start", "pair", "end"),
    [
        ("/v1/check", b'{"resource": "r", "subject": "s", "costs": {', b'"%d": 1', b"}}"),
        ("/v1/check/batch", b'{"checks": [{', b'"%d": 1', b"}]}"),
    ],
)
def test_a_name_that_comes_twice_among_thousands_is_found_at_once(
    service: RunningService, path: str, start: bytes, pair: bytes, end: bytes
) -> None:
    names = [pair % number for number in range(5_000)]
    received = answers(
        service, post(service, start + b", ".join([*names, names[-1]]) + end, "connection: close", path=path)
    )
    assert [(answer.status, answer.json["code"]) for answer in received] == [(400, "malformed_json")]


DEPTHS = [100, 900, 960, 970, 972, 980, 1_000, 5_000]


@pytest.mark.parametrize(
    ("path", "depth"),
    [*product(("/v1/check/batch", "/v1/check", "/v1/reserve"), DEPTHS), ("/v1/check/batch", 100_000)],
)
def test_a_deeply_nested_body_is_answered(service: RunningService, path: str, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    with service.connection() as connection:
        connection.sendall(post(service, b'{"checks": [%b]}' % nested, path=path))
        assert read_response(connection).status in (200, 400, 422)


# -- who does not read


def send(connection: socket.socket, data: bytes, size: int) -> None:
    while size > 0:
        size -= connection.send(data)


def test_unread_bodies_are_not_received_forever(service: RunningService) -> None:
    wrong = post(service, b"{}") * 200  # answered at once, and each answer is larger than its request
    with service.connection() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        connection.settimeout(2)
        with pytest.raises(TimeoutError):
            send(connection, wrong, 64_000_000)
    assert service.check(cost=0).status == 200


# -- ids


def test_an_id_reveals_nothing(service: RunningService) -> None:
    body = {"resource": "GET:/secret", "subject": "user@example", "plan_id": service.demo["plans"]["concurrency"]}
    lease = service.post("/v1/check", body).json["lease_id"]
    held = service.post("/v1/reserve", {**body, "plan_id": service.demo["plans"]["quota"]}).json["reservation_id"]
    for sealed in (lease, held):
        inside = base64.urlsafe_b64decode(sealed + "=" * (-len(sealed) % 4))
        assert b"user" not in inside
        assert b"secret" not in inside
        changed = sealed[:20] + ("A" if sealed[20] != "A" else "B") + sealed[21:]
        for wrong in (changed, sealed[:-1], sealed[:16], "", "x" * 5_000, "ü"):
            call, field = ("release", "lease_id") if sealed is lease else ("settle", "reservation_id")
            answer = service.post(f"/v1/{call}", {field: wrong} | ({"cost": 1} if call == "settle" else {}))
            assert answer.status in (404, 422), answer
    assert service.post("/v1/release", {"lease_id": lease}).status == 200
    assert service.post("/v1/settle", {"reservation_id": held, "cost": 1}).status == 200


# -- processes


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    with run_service(find_free_port(), "--database", f"sqlite:///{tmp_path}/a.db", environment=PEPPERS) as service:
        children = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children").read_text().split()
        assert children
        os.kill(service.process.pid, signal.SIGKILL)
        service.process.wait()
        deadline = time.monotonic() + 30
        while any(_lives(int(pid)) for pid in children):
            assert time.monotonic() < deadline, "a worker is left"
            time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_store_that_was_never_reached_is_not_called_ok() -> None:
    with run_demo("--store", f"redis://127.0.0.1:{find_free_port()}/0") as service:
        ready = service.request("GET", "/v1/ready").json
        assert ready["status"] == "degraded"
        assert ready["store"]["state"] != "ok"
        assert ready["store"]["since"] > 1_700_000_000
