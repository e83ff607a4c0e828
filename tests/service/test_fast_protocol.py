"""The fast protocol and the ASGI app answer alike, and the fast protocol handles all of HTTP."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.program import HttpResponse, RunningService, read_response, run_demo

ONE, TWO = "/v1/check", "/v1/check?"  # a request with a query goes to ASGI
PEEK = {"resource": "GET:/orders", "subject": "user:1", "cost": 0}
MUCH = {"resource": "GET:/orders", "subject": "user:1", "cost": 11}  # above the limit of 10, so waiting never helps


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with run_demo() as running:
        yield running


def request(path: str, body: bytes, *headers: str, method: str = "POST", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "host: test", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def same(answer: HttpResponse) -> tuple[bytes, bytes]:
    """Return everything of an answer except its date."""
    lines = [line for line in answer.head.split(b"\r\n") if not line.lower().startswith(b"date:")]
    return b"\r\n".join(lines), answer.body


JSON = "content-type: application/json"
BODIES: dict[str, tuple[bytes, tuple[str, ...], int]] = {
    "a peek": (json.dumps(PEEK).encode(), (JSON,), 200),
    "too much": (json.dumps(MUCH).encode(), (JSON,), 429),
    "without a content type": (json.dumps(PEEK).encode(), (), 200),
    "another JSON type": (json.dumps(PEEK).encode(), ("content-type: application/vnd.x+json; charset=utf-8",), 200),
    "a form": (b"a=b", ("content-type: application/x-www-form-urlencoded",), 415),
    "compressed": (b"...", (JSON, "content-encoding: gzip"), 415),
    "no JSON": (b"{", (JSON,), 400),
    "nothing": (b"", (JSON,), 400),
    "bytes": (b"\xff\xfe\x00", (JSON,), 400),
    "a list": (b"[]", (JSON,), 422),
    "no subject": (b'{"resource": "GET:/orders"}', (JSON,), 422),
    "an unknown field": (json.dumps({**PEEK, "hits": 1}).encode(), (JSON,), 422),
    "an empty resource": (json.dumps({**PEEK, "resource": ""}).encode(), (JSON,), 422),
    "a subject of 513 bytes": (json.dumps({**PEEK, "subject": "x" * 513}).encode(), (JSON,), 422),
    "a negative cost": (json.dumps({**PEEK, "cost": -1}).encode(), (JSON,), 422),
    "a cost past 2^53": (json.dumps({**PEEK, "cost": 2**53}).encode(), (JSON,), 422),
    "a cost as text": (json.dumps({**PEEK, "cost": "1"}).encode(), (JSON,), 422),
    "an unknown priority": (json.dumps({**PEEK, "priority": "P9"}).encode(), (JSON,), 422),
    "an unknown limit": (json.dumps({**PEEK, "costs": {"x": 1}}).encode(), (JSON,), 422),
    "an unknown plan": (json.dumps({**PEEK, "plan_id": "pla_x"}).encode(), (JSON,), 404),
    "too large": (b" " * 65_537, (JSON,), 413),
}


@pytest.mark.parametrize("case", BODIES)
def test_both_front_ends_answer_alike(service: RunningService, case: str) -> None:
    body, headers, status = BODIES[case]
    key = f"x-api-key: {service.key}"
    first, second = (service.raw(request(path, body, key, "connection: close", *headers)) for path in (ONE, TWO))
    assert first.status == status
    assert same(first) == same(second)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("x-other: 1", 401),
        ("x-api-key: nonsense", 401),
        ("x-api-key: lf_live_" + "0" * 50, 401),
        ("authorization: Basic abc", 401),
        ("authorization: Bearer KEY", 200),
        ("Authorization: bearer KEY", 200),
        ("x-api-key: KEY\r\nauthorization: Bearer KEY", 200),
        ("x-api-key: KEY\r\nauthorization: Bearer other", 400),
        ("x-api-key: KEY\r\nx-api-key: other", 400),
    ],
)
def test_both_front_ends_accept_the_same_keys(service: RunningService, header: str, status: int) -> None:
    body = json.dumps(PEEK).encode()
    sent = header.replace("KEY", service.key)
    first, second = (service.raw(request(path, body, sent, JSON, "connection: close")) for path in (ONE, TWO))
    assert first.status == status
    assert same(first) == same(second)
    assert service.key.encode() not in first.head + first.body


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_another_method_gets_405_with_allow(service: RunningService, method: str) -> None:
    answer = service.request(method, ONE)
    assert answer.status == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json["code"] == "method_not_allowed"


def test_head_has_no_body(service: RunningService) -> None:
    with service.connection() as connection:
        connection.sendall(request(ONE, b"", "connection: close", method="HEAD"))
        head = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert head.startswith(b"HTTP/1.1 405 ")
    assert head.endswith(b"\r\n\r\n")


def test_an_unknown_path_is_a_problem_too(service: RunningService) -> None:
    answer = service.request("GET", "/v2/nothing")
    assert (answer.status, answer.headers["content-type"]) == (404, "application/problem+json")


def ask(subject: str, key: str, **more: Any) -> bytes:
    body = json.dumps({"resource": "GET:/orders", "subject": subject, **more}).encode()
    return request(ONE, body, f"x-api-key: {key}", JSON)


def test_pipelined_requests_are_answered_in_order_by_either_front_end(service: RunningService) -> None:
    ready = request("/v1/health", b"", method="GET")
    sent = []
    for number in range(12):
        sent += [ask("pipeline", service.key), ready, ask(f"other-{number}", service.key, cost=0), ready, ready]
    with service.connection() as connection:
        connection.sendall(b"".join(sent))
        buffered = bytearray()
        answers = [read_response(connection, buffered) for _ in sent]
    taken = [answer.status for answer in answers[::5]]
    assert taken == [200] * 10 + [429] * 2
    assert all("version" in answer.json for index, answer in enumerate(answers) if index % 5 in (1, 3, 4))
    assert all(answer.json["remaining"] == 10 for answer in answers[2::5])


def test_many_pipelined_checks_are_all_answered(service: RunningService) -> None:
    with service.connection() as connection:
        connection.sendall(b"".join(ask(f"many-{number % 7}", service.key, cost=0) for number in range(1_000)))
        buffered = bytearray()
        assert [read_response(connection, buffered).status for _ in range(1_000)] == [200] * 1_000


def test_a_request_may_come_in_single_bytes(service: RunningService) -> None:
    with service.connection() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in ask("bytes", service.key):
            connection.sendall(bytes([byte]))
        assert read_response(connection).status == 200


def test_a_client_that_expects_100_continue_receives_it(service: RunningService) -> None:
    body = json.dumps(PEEK).encode()
    head = request(ONE, body, f"x-api-key: {service.key}", JSON, "expect: 100-continue")[: -len(body)]
    with service.connection() as connection:
        connection.sendall(head)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_response(connection).status == 200


def test_a_body_that_is_announced_too_large_is_refused_before_it_is_sent(service: RunningService) -> None:
    head = f"POST {ONE} HTTP/1.1\r\nhost: test\r\nexpect: 100-continue\r\ncontent-length: 70000\r\n\r\n"
    with service.connection() as connection:
        connection.sendall(head.encode())
        answer = read_response(connection)
        assert (answer.status, answer.headers["connection"]) == (413, "close")


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[index : index + size] for index in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_body_may_come_in_chunks(service: RunningService, size: int) -> None:
    head = f"POST {ONE} HTTP/1.1\r\nhost: t\r\nx-api-key: {service.key}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    assert service.raw(head + chunked(json.dumps(PEEK).encode(), size)).json["remaining"] == 10


def test_a_body_in_chunks_is_bounded_too(service: RunningService) -> None:
    head = f"POST {ONE} HTTP/1.1\r\nhost: t\r\nx-api-key: {service.key}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    answer = service.raw(head + chunked(b" " * 66_000, 1_000)[:-5])
    assert (answer.status, answer.headers["connection"]) == (413, "close")


def closes(connection: socket.socket) -> bool:
    connection.settimeout(30)
    return connection.recv(1) == b""


@pytest.mark.parametrize(("version", "header"), [("1.0", "x: y"), ("1.1", "connection: close")])
def test_a_connection_is_closed_where_the_client_wants_it(service: RunningService, version: str, header: str) -> None:
    body = json.dumps(PEEK).encode()
    with service.connection() as connection:
        connection.sendall(request(ONE, body, f"x-api-key: {service.key}", header, version=version))
        answer = read_response(connection)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert closes(connection)


def test_a_connection_is_kept_otherwise(service: RunningService) -> None:
    with service.connection() as connection:
        for _ in range(3):
            connection.sendall(ask("kept", service.key, cost=0))
            assert "connection" not in read_response(connection).headers


SMUGGLED = {
    "two lengths": "content-length: 4\r\ncontent-length: 5\r\n",
    "length and chunks": "content-length: 4\r\ntransfer-encoding: chunked\r\n",
    "an odd encoding": "transfer-encoding: xchunked\r\n",
    "a length that is none": "content-length: +4\r\n",
    "a space before the colon": "content-length : 4\r\n",
    "a bare line feed": "x: y\nz: w\r\ncontent-length: 4\r\n",
    "a NUL": "x: a\0b\r\ncontent-length: 4\r\n",
}


@pytest.mark.parametrize("case", SMUGGLED)
def test_what_could_be_read_in_two_ways_is_refused(service: RunningService, case: str) -> None:
    head = f"POST {ONE} HTTP/1.1\r\nhost: t\r\nx-api-key: {service.key}\r\n{SMUGGLED[case]}\r\n"
    answer = service.raw(head.encode() + b"0\r\n\r\n")
    assert answer.status in (400, 413)


@pytest.mark.parametrize(
    "junk", [b"\r\n\r\n\r\n", b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_invalid_http_is_refused(service: RunningService, junk: bytes) -> None:
    with service.connection() as connection:
        connection.sendall(junk)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


def test_a_client_that_disconnects_before_its_answer_affects_no_other(service: RunningService) -> None:
    for _ in range(50):
        with service.connection() as connection:
            connection.sendall(ask("leaver", service.key))
    assert service.check(cost=0).status == 200


FIELDS = [f"x-{number}: a" for number in range(101)]


@pytest.mark.parametrize(
    ("lines", "status"),
    [(FIELDS[:96], 200), (FIELDS, 431), (["x: " + "a" * 32_000], 200), (["x: " + "a" * 33_000], 431)],
    ids=["many fields", "too many fields", "a long field", "a field that is too long"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_head_is_bounded(service: RunningService, method: str, lines: list[str], status: int) -> None:
    path, body = (ONE, json.dumps(PEEK).encode()) if method == "POST" else ("/v1/health", b"")
    with service.connection() as connection:
        connection.sendall(request(path, body, f"x-api-key: {service.key}", *lines, method=method))
        assert read_response(connection).status == status


def test_the_number_of_chunks_is_bounded(service: RunningService) -> None:
    head = f"POST {ONE} HTTP/1.1\r\nhost: test\r\nx-api-key: {service.key}\r\ntransfer-encoding: chunked\r\n\r\n"
    with service.connection() as connection:
        connection.sendall(head.encode() + b"1\r\n \r\n" * 2_049 + b"0\r\n\r\n")
        assert read_response(connection).json["code"] == "malformed_request"


@pytest.mark.slow
def test_a_client_that_never_ends_its_request_is_sent_away(service: RunningService) -> None:
    with service.connection() as slow, service.connection() as slower:
        slow.sendall(ask("slow", service.key)[:-5])
        slower.sendall(b"POST /v1/check HTTP/1.1\r\nhost:")
        assert read_response(slow).status == 408
        assert closes(slow)
        assert read_response(slower).status == 408
        assert closes(slower)


def test_what_is_in_flight_is_answered_before_the_end() -> None:
    with run_demo() as service, service.connection() as connection, service.connection() as idle:
        connection.sendall(ask("last", service.key)[:-1])
        time.sleep(0.2)
        service.process.terminate()
        time.sleep(0.2)
        connection.sendall(b"}")
        idle.sendall(ask("late", service.key))
        for each in (connection, idle):
            answer = read_response(each)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert service.process.wait(30) == 0
