"""Batches that are expensive to parse or to answer, valid or not, do not delay another tenant."""

import contextlib
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.hostile.attack import AttackTarget, Record, connect, measure, send_all

MIB = 1_048_576
SECONDS = 1.0
PATIENCE_SECONDS = 30.0
GARBAGE_CPU_SECONDS_PER_MIB = 0.1
"""Generous: receiving a MiB and refusing it unread takes 0.01. Building all of it took more in most of these cases."""


def repeated(start: bytes, unit: bytes, end: bytes) -> bytes:
    return start + b",".join([unit] * ((MIB - len(start) - len(end)) // (len(unit) + 1))) + end


def names(count: int) -> bytes:
    return b",".join(b'"%d":1' % number for number in range(count))


GARBAGE: dict[str, bytes] = {
    "100,000 names in one object": b'{"checks":[{%b}]}' % names(100_000),
    "100,000 names beside the checks": b'{"checks":[],%b}' % names(100_000),
    "small objects with many names": b'{"checks":[%b]}' % b",".join([b'{"costs":{%b}}' % names(100)] * 900),
    "empty lists": repeated(b'{"checks":[', b"[]", b"]}"),
    "empty objects": repeated(b'{"checks":[', b"{}", b"]}"),
    "numbers": repeated(b'{"checks":[', b"0", b"]}"),
    "deep lists": repeated(b'{"checks":[', b"[" * 900 + b"]" * 900, b"]}"),
    "the checks again and again": repeated(b"{", b'"checks":[]', b"}"),
}


def request(target: AttackTarget, body: bytes) -> bytes:
    head = f"POST /v1/check/batch HTTP/1.1\r\nhost: test\r\nx-api-key: {target.attacker.key}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def valid(padding: int = 0) -> bytes:
    """Return a batch of 1,000 checks whose resources and subjects are longer by `padding`."""
    more = "x" * padding
    checks = [{"resource": f"GET:/orders{more}", "subject": f"user:{index}{more}"} for index in range(1_000)]
    return json.dumps({"checks": checks}).encode()


class Clients:
    """Clients that send one body repeatedly on several connections and read each answer, until `is_enough`."""

    def __init__(
        self, body: bytes, connections: int, is_enough: Callable[[Counter[int]], bool] | None = None, pause: float = 0.0
    ) -> None:
        """Stop after a second, or earlier when `is_enough` accepts the statuses so far."""
        self._body, self._connections, self._pause = body, connections, pause
        self._is_enough = is_enough
        self.statuses: Counter[int] = Counter()
        self.decisions: set[int] = set()
        self._lock = threading.Lock()

    def __call__(self, target: AttackTarget) -> int:
        deadline = time.monotonic() + (PATIENCE_SECONDS if self._is_enough else SECONDS)
        clients = [threading.Thread(target=self._run, args=(target, deadline)) for _ in range(self._connections)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        return self.statuses.total() * len(self._body)

    def _run(self, target: AttackTarget, deadline: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=60)
        headers = {"x-api-key": target.attacker.key, "content-type": "application/json"}
        with contextlib.closing(connection):
            while time.monotonic() < deadline and not (self._is_enough and self._is_enough(self.statuses)):
                try:
                    connection.request("POST", "/v1/check/batch", self._body, headers)
                    answer = connection.getresponse()
                    content = answer.read()
                except OSError:  # refused before all of it was sent
                    connection.close()
                    continue
                with self._lock:
                    self.statuses[answer.status] += 1
                    if answer.status == 200:
                        self.decisions.add(content.count(b'"allowed":true'))
                time.sleep(self._pause)


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_costs_another_tenant_nothing(target: AttackTarget, kind: str, record_property: Record) -> None:
    attack = Clients(GARBAGE[kind], 1, lambda statuses: statuses.total() >= 5, pause=0.1)
    figures = measure(target, attack)
    figures.assert_within_bounds(record_property)
    assert figures.cpu_seconds / figures.sent_mib < GARBAGE_CPU_SECONDS_PER_MIB
    assert set(attack.statuses) <= {200, 400, 413, 422, 429}


def is_mostly_refused(statuses: Counter[int]) -> bool:
    return statuses[429] > max(statuses.total() / 2, 20)


def test_endless_garbage_is_soon_refused_unread(target: AttackTarget, record_property: Record) -> None:
    attack = Clients(GARBAGE["deep lists"], 4, is_mostly_refused)
    figures = measure(target, attack)
    figures.assert_within_bounds(record_property)
    assert is_mostly_refused(attack.statuses), attack.statuses
    assert target.attacker.check().status == 200


@pytest.mark.parametrize(
    ("connections", "padding"), [(20, 0), pytest.param(100, 0, marks=pytest.mark.soak), (100, 450)]
)
def test_valid_batches_of_many_connections_leave_room_for_others(
    target: AttackTarget, connections: int, padding: int, record_property: Record
) -> None:
    let_budget_recover(target)
    attack = Clients(valid(padding), connections)
    figures = measure(target, attack)
    figures.assert_within_bounds(record_property)
    record_property("statuses", dict(attack.statuses))
    assert attack.decisions == {2_000}  # of each check, and of its only limit
    assert attack.statuses[200] > 0, attack.statuses
    assert set(attack.statuses) <= {200, 429, 503}


def test_unread_answers_to_pipelined_batches_take_little_memory(target: AttackTarget, record_property: Record) -> None:
    let_budget_recover(target)
    payload = request(target, valid()) * 8
    figures = measure(target, lambda victim: send_all(victim.port, payload, 20, receive_buffer=4_096))
    figures.assert_within_bounds(record_property)


def let_budget_recover(target: AttackTarget) -> None:
    for _ in range(600):
        if target.attacker.post("check/batch", checks=[]).status == 200:
            return
        time.sleep(0.1)
    raise AssertionError("batches are still refused")


def test_batches_of_clients_that_have_gone_are_not_decided(target: AttackTarget) -> None:
    subject = "user:gone"
    checks = [{"resource": "GET:/gone", "subject": subject}] * 1_000
    batch = request(target, json.dumps({"checks": checks}).encode())
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(connect(target.port)) for _ in range(30)]
        for client in clients:
            client.settimeout(30)
            client.sendall(batch)
    deadline = time.monotonic() + 30
    counted = -1
    while (now := used(target, subject)) != counted and time.monotonic() < deadline:
        counted = now
        time.sleep(0.5)
    assert counted < 20_000


def used(target: AttackTarget, subject: str) -> int:
    usage = target.attacker.usage(f"resource=GET:/gone&subject={subject}").json
    number: int = usage["limit"] - usage["remaining"]
    return number
