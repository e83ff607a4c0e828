"""Attacks with many connections, each of which stays within its own bounds."""

import contextlib
import json
import threading
import time

import pytest

from tests.hostile.attack import AttackTarget, Record, connect, measure, send_all

soak = pytest.mark.soak
BATCH = b"POST /v1/check/batch HTTP/1.1\r\nHost: a\r\nX-Api-Key: %b\r\nContent-Length: 1000000\r\n\r\n" + b" " * 900_000
RESERVE = b"POST /v1/reserve HTTP/1.1\r\nHost: a\r\nX-Api-Key: %b\r\nContent-Length: 60000\r\n\r\n" + b" " * 50_000
HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"x-%d: %b\r\n" % (index, b"a" * 300) for index in range(95))
CHUNKS = (
    b"POST /v1/check HTTP/1.1\r\nHost: a\r\nX-Api-Key: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"2\r\nab\r\n" * 2_000
)


@pytest.mark.parametrize(
    ("payload", "connections", "has_key"),
    [
        pytest.param(BATCH, 100, False, id="bodies of an unknown client"),
        pytest.param(BATCH, 100, True, id="bodies of a tenant"),
        pytest.param(RESERVE, 1_000, False, id="bodies for ASGI of an unknown client", marks=soak),
        pytest.param(RESERVE, 1_000, True, id="bodies for ASGI of a tenant"),
        pytest.param(HEAD, 1_500, False, id="heads"),
        pytest.param(
            CHUNKS, 1_500, True, id="chunks of a tenant"
        ),  # a client without a key gets 401 before any is read
        pytest.param(b"", 5_000, False, id="silent"),
        pytest.param(b"GET", 5_000, False, id="a few bytes", marks=soak),
    ],
)
def test_requests_that_never_end(
    target: AttackTarget, record_property: Record, payload: bytes, connections: int, has_key: bool
) -> None:
    payload = payload.replace(b"%b", target.attacker.key.encode() if has_key else b"none")
    measure(target, lambda victim: send_all(victim.port, payload, connections)).assert_within_bounds(record_property)


@pytest.mark.parametrize("path", [b"/openapi.json", pytest.param(b"/docs/swagger-ui-bundle.js", marks=soak)])
def test_unread_answers(target: AttackTarget, record_property: Record, path: bytes) -> None:
    payload = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path * 20
    attack = measure(target, lambda victim: send_all(victim.port, payload, 500, receive_buffer=4_096))
    attack.assert_within_bounds(record_property)


BODY = b"GET /v1/health HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n" + b" " * 60_000
CHECK = HEAD.replace(b"GET / ", b"POST /v1/check ") + b"Content-Length: 2\r\n\r\n{}"
LONG_KEY = b"POST /v1/check HTTP/1.1\r\nHost: a\r\nX-Api-Key: %b\r\nContent-Length: 2\r\n\r\n{}" % (b"a" * 30_000)


@pytest.mark.parametrize(
    ("payload", "is_split"),
    [
        pytest.param(BODY, False, id="body"),
        pytest.param(LONG_KEY, False, id="key"),
        pytest.param(HEAD + b"\r\n", True, id="head in two"),
        pytest.param(CHECK, True, id="check in two"),
        pytest.param(BODY, True, id="body in two", marks=soak),
        pytest.param(LONG_KEY, True, id="key in two", marks=soak),
        pytest.param(HEAD + b"\r\n", False, id="head", marks=soak),
        pytest.param(CHECK, False, id="check", marks=soak),
    ],
)
def test_connections_that_stay_open_after_their_answer(
    target: AttackTarget, record_property: Record, payload: bytes, is_split: bool
) -> None:
    def attack(victim: AttackTarget) -> int:
        with contextlib.ExitStack() as opened:
            clients = [opened.enter_context(connect(victim.port)) for _ in range(1_500)]
            for client in clients:
                client.settimeout(30)
                client.sendall(payload[:20] if is_split else payload)
            for client in clients:
                client.sendall(payload[20:] if is_split else b"")
            for client in clients:
                assert client.recv(65_536).startswith(b"HTTP/1.1 ")
        return len(payload) * len(clients)

    measure(target, attack).assert_within_bounds(record_property)


def test_one_tenant_does_not_close_the_connections_of_another(target: AttackTarget) -> None:
    head = f"POST /v1/check HTTP/1.1\r\nHost: a\r\nX-Api-Key: {target.other.key}\r\nContent-Length: "
    body = b'{"resource": "GET:/orders", "subject": "user:1"}'
    check = head.encode() + b"%d\r\n\r\n" % len(body) + body
    with contextlib.ExitStack() as opened:
        quiet = [opened.enter_context(connect(target.port)) for _ in range(20)]
        for client in quiet:
            client.settimeout(30)
            client.sendall(check)
            assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")
        greedy = check.replace(target.other.key.encode(), target.attacker.key.encode())
        send_all(target.port, greedy, 2_500)
        for client in quiet:
            client.sendall(check)
            assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_valid_batches_of_some_tenants_leave_room_for_small_checks_of_another(target: AttackTarget) -> None:
    """The check arrives in two packets, so that the service must hold the first."""
    tenants = [target.service.tenant() for _ in range(3)]
    checks = [{"resource": "GET:/orders" + "x" * 400, "subject": f"user:{index}" + "x" * 400} for index in range(1_000)]
    body = json.dumps({"checks": checks}).encode()
    head = f"POST /v1/check HTTP/1.1\r\nHost: a\r\nX-Api-Key: {target.other.key}\r\n"
    own = b'{"resource": "GET:/orders", "subject": "user:1"}'
    answers, attacks = [], []
    with contextlib.ExitStack() as opened:
        for tenant in tenants:
            assert tenant.check().status == 200
            request = f"POST /v1/check/batch HTTP/1.1\r\nHost: a\r\nX-Api-Key: {tenant.key}\r\n"
            whole = request.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
            attacks.append(threading.Thread(target=send_all, args=(target.port, whole * 4, 8)))
            attacks[-1].start()
            opened.callback(attacks[-1].join)
        client = opened.enter_context(connect(target.port))
        client.settimeout(30)
        while any(attack.is_alive() for attack in attacks):
            client.sendall(head.encode())
            time.sleep(0.05)
            client.sendall(b"Content-Length: %d\r\n\r\n" % len(own) + own)
            answers.append(client.recv(65_536)[:12])
    assert set(answers) == {b"HTTP/1.1 200"}


def test_a_url_that_can_not_be_parsed_behind_a_check_leaves_nothing_behind(target: AttackTarget) -> None:
    body = json.dumps({"checks": [{"resource": "GET:/orders", "subject": "user:1"}] * 1_000}).encode()
    head = f"POST /v1/check/batch HTTP/1.1\r\nHost: a\r\nX-Api-Key: {target.attacker.key}\r\n"
    batch = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    before = target.log.read_text().count("Traceback")
    with connect(target.port) as client:
        client.settimeout(30)
        client.sendall(batch + b"GET http://a:99999999/ HTTP/1.1\r\nHost: a\r\n\r\n")
        received = b""
        while b"malformed_request" not in received:
            received += client.recv(65_536)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert target.other.check().status == 200
    assert target.log.read_text().count("Traceback") == before
