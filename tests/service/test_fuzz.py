"""Valid requests with random mutations are answered or their connection is closed, and never cause a 5xx."""

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.program import HttpResponse, RunningService, read_response
from tests.service.seeded_service import run_seeded_service

MOMENT = 0.02  # seconds in which an answer may come before the client closes its side
PLACES = 1 << 16  # a position is drawn before the length of the request is known
KEY, ADMIN = "K" * 58, "A" * 58  # placeholders of the real ones, with the same length

CHECK = {"resource": "GET:/orders", "subject": "user:42", "cost": 1, "priority": "P1"}
LIMITS: list[dict[str, Any]] = [
    {"name": "free", "algorithm": "fixed_window", "limit": None, "window_seconds": 60},
    {"name": "wide", "algorithm": "sliding_window_counter", "limit": 2**40, "window_seconds": 3_600},
]


@dataclass(frozen=True)
class FuzzedService:
    """The program under test, with limits too large to reach."""

    running: RunningService
    key: str
    token: str
    log: Path

    def real(self, request: bytes) -> bytes:
        return request.replace(KEY.encode(), self.key.encode()).replace(ADMIN.encode(), self.token.encode())

    @contextlib.contextmanager
    def staying_well(self) -> Iterator[None]:
        """Assert at the end that the service still answers a valid check, and has logged no unexpected error."""
        before = self.log.stat().st_size
        yield
        assert self.running.process.poll() is None
        answer = self.running.check(self.key, cost=0)
        assert (answer.status, answer.json["allowed"]) == (200, True)
        with self.log.open("rb") as log:
            log.seek(before)
            lines = log.read()
        assert b"Traceback" not in lines, lines.decode()


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedService]:
    folder = tmp_path_factory.mktemp("fuzz")
    with run_seeded_service(f"sqlite:///{folder}/fuzz.db", log=folder / "log") as service:
        tenant = service.tenant(*LIMITS)
        yield FuzzedService(service.running, tenant.key, service.demo["admin_token"], folder / "log")


# --- Requests, and what may happen to them ---------------------------------------------------------------------------


def request(path: str, body: Any = None, method: str = "POST", **headers: str) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    sent = {"host": "test", "x-api-key": KEY, "content-type": "application/json", **headers}
    if body is not None and "transfer-encoding" not in sent:
        sent["content-length"] = str(len(content))
    elif body is not None:
        content = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (content[:9], content[9:])) + b"0\r\n\r\n"
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + content


RIGHT = [
    request("/v1/check", CHECK),
    request("/v1/check?", CHECK),  # a request with a query goes to ASGI
    request("/v1/check", CHECK, **{"transfer-encoding": "chunked"}),
    request("/v1/check?", CHECK, **{"transfer-encoding": "chunked"}),
    request("/v1/check", {**CHECK, "costs": {"wide": 7}}, expect="100-continue"),
    request("/v1/check/batch", {"checks": [CHECK, {**CHECK, "cost": 2}]}),
    request("/v1/reserve", {**CHECK, "ttl_seconds": 60, "on_lapse": "refund"}),
    request("/v1/settle", {"reservation_id": "x" * 40, "cost": 1}),
    request("/v1/release", {"lease_id": "x" * 40}),
    request("/v1/explain", CHECK),
    request("/v1/usage?resource=GET:/orders&subject=user:42", method="GET"),
    request("/v1/health", method="GET", connection="close"),
    request("/v1/admin/tenants?limit=2", method="GET", authorization=f"Bearer {ADMIN}"),
    request("/v1/check", CHECK) + request("/v1/health", method="GET") + request("/v1/check", CHECK),
]
WORDS = [
    *(b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\0", b" ", b"\t", b":", b",", b";", b'"', b"\\", b"{", b"}", b"[", b"]"),
    *(b"%00", b"%2f", b"%", b"?", b"#", b"/../", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\ud800"),
    *(
        b"-1",
        b"0",
        b"1e999",
        b"NaN",
        b"null",
        b"true",
        b"18446744073709551616",
        b"9" * 40,
        b"0x7fffffff",
        b"ffffffffff",
    ),
    *(b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n", b"transfer-encoding: identity\r\n"),
    *(
        b"expect: 100-continue\r\n",
        b"connection: close\r\n",
        b"connection: upgrade\r\nupgrade: h2c\r\n",
        b"x: y\r\n z\r\n",
    ),
    *(b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HEAD", b"OPTIONS", b"CONNECT", b"0\r\n\r\n", b"5;a=b\r\n", b"x" * 3_000),
]


@dataclass(frozen=True)
class Mutation:
    """One mutation of a request."""

    kind: str
    position: int
    length: int
    content: bytes

    def __call__(self, sent: bytes) -> bytes:
        index = self.position * len(sent) // PLACES
        end = index + self.length
        if self.kind == "flip":
            return (
                sent[:index]
                + bytes(byte ^ (1 << self.length % 8) for byte in sent[index : index + 1])
                + sent[index + 1 :]
            )
        return {
            "insert": sent[:index] + self.content + sent[index:],
            "replace": sent[:index] + self.content + sent[end:],
            "delete": sent[:index] + sent[end:],
            "repeat": sent[:end] + sent[index:],
            "cut": sent[:index],
            "append": sent + self.content,
        }[self.kind]


changes = st.builds(
    Mutation,
    kind=st.sampled_from(["flip", "insert", "replace", "delete", "repeat", "cut", "append"]),
    position=st.integers(0, PLACES - 1),
    length=st.integers(0, 40),
    content=st.one_of(st.sampled_from(WORDS), st.binary(max_size=8), st.sampled_from(RIGHT)),
)


@st.composite
def mutated_requests(draw: st.DrawFn) -> list[bytes]:
    """A valid request with mutations, split into packets."""
    sent = reduce(
        lambda so_far, change: change(so_far), draw(st.lists(changes, max_size=6)), draw(st.sampled_from(RIGHT))
    )
    cuts = sorted(place * len(sent) // PLACES for place in draw(st.lists(st.integers(0, PLACES - 1), max_size=4)))
    return [sent[start:end] for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True) if start < end]


# --- Answers ---------------------------------------------------------------------------------------------------------


def exchange(service: FuzzedService, packets: list[bytes], *, is_right: bool = False) -> bytes:
    """All that comes back until the service closes the connection; that it does so is what the time-out is for.

    What is right gets an answer, however long a busy machine takes for it.
    """
    came = bytearray()
    with service.running.connection() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        patience = connection.gettimeout()
        with contextlib.suppress(ConnectionError):
            for packet in packets:
                connection.sendall(service.real(packet))
            if is_right:
                came += connection.recv(65_536)
            connection.settimeout(MOMENT)
            with contextlib.suppress(TimeoutError):
                while chunk := connection.recv(65_536):
                    came += chunk
            connection.settimeout(patience)
            with contextlib.suppress(OSError):  # it may be closed already
                connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65_536):
                came += chunk
    return bytes(came)


def statuses(came: bytes) -> list[int]:
    """Return the statuses of all responses. There must be nothing else between or behind them."""
    found = []
    while came:
        head, end, came = came.partition(b"\r\n\r\n")
        assert end, head
        assert head.startswith(b"HTTP/1.1 "), head
        found.append(int(head[9:12]))
        lines = [line.partition(b":") for line in head.lower().split(b"\r\n")[1:]]
        length = next((int(value) for name, _, value in lines if name == b"content-length"), 0)
        if not came.startswith(b"HTTP/1.1 "):  # the response to a HEAD has no body
            assert len(came) in (0, *range(length, len(came) + 1)), came
            came = came[length:]
    return found


# --- Any bytes -------------------------------------------------------------------------------------------------------


def answered_or_closed(service: FuzzedService, packets: list[bytes]) -> None:
    with service.staying_well():
        found = statuses(exchange(service, packets))
    assert all(100 <= status < 500 for status in found), found


@pytest.mark.parametrize("is_key_known", [True, False])
def test_a_malformed_request_behind_a_refused_check_is_not_logged_as_an_error(
    fuzzed: FuzzedService, is_key_known: bool
) -> None:
    refused = request("/v1/check", {"resource": 1})
    with fuzzed.staying_well():
        if is_key_known:
            refused = fuzzed.real(refused)
        assert fuzzed.running.raw(refused + b"no HTTP at all\r\n\r\n").status == (422 if is_key_known else 401)


@given(packets=mutated_requests())
def test_a_mutated_request_is_answered_or_its_connection_closed(fuzzed: FuzzedService, packets: list[bytes]) -> None:
    answered_or_closed(fuzzed, packets)


@given(packets=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=4))
def test_so_are_bytes_that_never_were_a_request(fuzzed: FuzzedService, packets: list[bytes]) -> None:
    answered_or_closed(fuzzed, packets)


@pytest.mark.parametrize("number", range(len(RIGHT)))
def test_the_request_before_mutation_is_valid(fuzzed: FuzzedService, number: int) -> None:
    found = statuses(exchange(fuzzed, [RIGHT[number]], is_right=True))
    assert found
    assert set(found) <= ({404, 422} if b"xxxx" in RIGHT[number] else {100, 200})


# --- Both front ends -------------------------------------------------------------------------------------------------

numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.sampled_from([2**52, 2**53, 2**63, 2**64]))
plain = st.recursive(
    st.one_of(numbers, st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=5,
)
names = st.sampled_from(["resource", "subject", "cost", "costs", "priority", "plan_id", "checks", "hits", ""])
odd_checks = st.dictionaries(names, plain, max_size=4).map(lambda odd: json.dumps({**CHECK, **odd}).encode())
mutated_checks = st.lists(changes, min_size=1, max_size=3).map(
    lambda all_of_them: reduce(lambda so_far, change: change(so_far), all_of_them, json.dumps(CHECK).encode())
)
bodies = st.one_of(
    odd_checks, mutated_checks, plain.map(lambda value: json.dumps(value).encode()), st.binary(max_size=60)
)
heads = st.lists(
    st.tuples(
        st.sampled_from(
            ["x-api-key", "authorization", "content-type", "content-encoding", "accept", "x-forwarded-for", "expect"]
        ),
        st.one_of(
            st.text(st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=30),
            st.sampled_from(["application/json", "text/json", "identity", "gzip", "Bearer x", f"Bearer {KEY}", KEY]),
        ),
    ),
    max_size=3,
)


def send_to(service: FuzzedService, path: str, head: list[tuple[str, str]], body: bytes) -> HttpResponse:
    own = [("host", "test"), ("connection", "close"), ("x-api-key", KEY), ("content-length", str(len(body)))]
    lines = "".join(f"{name}: {value}\r\n" for name, value in [*own, *head])
    with service.running.connection() as connection:
        connection.sendall(service.real(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")) + body)
        return read_response(connection)


def summary(answer: HttpResponse) -> tuple[int, str, Any]:
    """Return what two answers to the same request have in common: the shape of a decision, or a whole problem."""
    is_decision = answer.status in (200, 429) and "limits" in answer.json
    details = sorted(answer.json["limits"]) if is_decision else answer.json if answer.status >= 400 else None
    return answer.status, answer.headers["content-type"], details


@given(call=st.sampled_from(["/v1/check", "/v1/check/batch"]), head=heads, body=bodies)
def test_both_front_ends_answer_any_request_alike(
    fuzzed: FuzzedService, call: str, head: list[tuple[str, str]], body: bytes
) -> None:
    compare_front_ends(fuzzed, call, head, body)


def compare_front_ends(service: FuzzedService, call: str, head: list[tuple[str, str]], body: bytes) -> None:
    with service.staying_well():
        first, second = (send_to(service, path, head, body) for path in (call, f"{call}?"))
    assert first.status < 500, first
    assert summary(first) == summary(second)


# --- For as long as you like -----------------------------------------------------------------------------------------


@pytest.mark.soak
@given(packets=mutated_requests())
def test_random_mutated_requests(fuzzed: FuzzedService, packets: list[bytes]) -> None:
    answered_or_closed(fuzzed, packets)


@pytest.mark.soak
@given(call=st.sampled_from(["/v1/check", "/v1/check/batch"]), head=heads, body=bodies)
def test_both_front_ends_with_random_requests(
    fuzzed: FuzzedService, call: str, head: list[tuple[str, str]], body: bytes
) -> None:
    compare_front_ends(fuzzed, call, head, body)
