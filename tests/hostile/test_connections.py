"""Attacks by a client without a key, with connections, pipelines and framing."""

import contextlib
import itertools

import pytest

from tests.catalog.replicas import wrong_key
from tests.hostile.attack import AttackTarget, Record, connect, measure, send_all

OPENAPI = b"GET /openapi.json HTTP/1.1\r\nHost:\r\n\r\n"
MIB = 1_048_576
soak = pytest.mark.soak


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(OPENAPI, id="openapi"),
        pytest.param(b"GET /v1/health HTTP/1.1\r\nHost:\r\n\r\n", id="health", marks=soak),
        pytest.param(b"GET /nothing HTTP/1.1\r\nHost:\r\n\r\n", id="unknown path", marks=soak),
        pytest.param(b"POST /v1/admin/tenants HTTP/1.1\r\nHost:\r\nContent-Length: 0\r\n\r\n", id="admin", marks=soak),
        pytest.param(
            b"POST /v1/check HTTP/1.1\r\nHost:\r\nX-Api-Key: no\r\nContent-Length: 2\r\n\r\n{}",
            id="check without a key",
        ),
    ],
)
def test_pipelined_requests_take_little_memory(target: AttackTarget, record_property: Record, request_: bytes) -> None:
    payload = request_ * (255 * 1_024 // len(request_))
    measure(target, lambda victim: send_all(victim.port, payload, 70)).assert_within_bounds(record_property)


# With a known key: without one, a body in chunks is refused before any of it is read.
CHUNKED = b"POST /v1/check HTTP/1.1\r\nHost: a\r\nX-Api-Key: %b\r\nTransfer-Encoding: chunked\r\n\r\n"


ENDLESS = {
    "trailer": (CHUNKED + b"0\r\nA: ", b"x" * 65_536),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * 10_000),
    "chunk extension": (CHUNKED + b"1;a=", b"x" * 65_536),
    "chunk extensions": (CHUNKED + b"1;", b"a=b;" * 16_384),
    "field": (b"GET / HTTP/1.1\r\nHost: a\r\nA: ", b"x" * 65_536),
    "fields": (b"GET / HTTP/1.1\r\nHost: a\r\n", b"a: b\r\n" * 10_000),
    "path": (b"GET /", b"x" * 65_536),
    "blank lines": (b"", b"\r\n" * 32_768),
    "body that is not wanted": (
        b"GET /v1/health HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n",
        b"x" * 65_536,
    ),
    "chunks that are not wanted": (
        b"GET /v1/health HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"1\r\nx\r\n" * 10_000,
    ),
    "chunks": (CHUNKED, b"1\r\nx\r\n" * 10_000),
}
ON_THE_METRICS_PORT_TOO = {"fields", "chunks that are not wanted"}


@pytest.mark.parametrize(
    ("port", "kind"),
    [
        *(("service", kind) for kind in ENDLESS),
        *(pytest.param("metrics", kind, marks=() if kind in ON_THE_METRICS_PORT_TOO else soak) for kind in ENDLESS),
    ],
)
def test_an_endless_message_is_cut_off(target: AttackTarget, record_property: Record, port: str, kind: str) -> None:
    start, endless = ENDLESS[kind]
    start = start.replace(b"%b", target.attacker.key.encode())
    number = target.port if port == "service" else target.metrics_port
    figures = measure(target, lambda _: send_all(number, start, 8, endless=endless, most=65 * MIB))
    figures.assert_within_bounds(record_property)
    assert figures.sent_mib < 64, "it was read without end"


FORMS = [
    b"/v1/check/batch",
    b"/v1/check/batch?x",
    b"/v1/check/batch#x",
    b"/v1/%63heck/batch",
    b"http://a/v1/check/batch",
]


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=soak)])
@pytest.mark.parametrize("path", FORMS)
def test_bodies_whose_keys_are_looked_up_take_little_memory(
    target: AttackTarget, record_property: Record, path: bytes, rounds: int
) -> None:
    """Keys of the old format may have been issued, so bodies with them are received."""
    numbers = itertools.count()

    def attack(victim: AttackTarget) -> int:
        sent = 0
        for _ in range(rounds):
            with contextlib.ExitStack() as opened:
                for _ in range(60):
                    key = wrong_key(index=next(numbers)).encode()
                    head = b"POST %b HTTP/1.1\r\nHost: a\r\nX-Api-Key: %b\r\nContent-Length: 1000000\r\n\r\n" % (
                        path,
                        key,
                    )
                    client = opened.enter_context(connect(victim.port))
                    client.settimeout(30)
                    with contextlib.suppress(ConnectionError):
                        client.sendall(head + b" " * 1_000_000)
                        sent += 1_000_000
        return sent

    measure(target, attack).assert_within_bounds(record_property)


@pytest.mark.parametrize("framing", [b"Content-Length: 1000000", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("path", [*FORMS, b"/v1/reserve"])
@pytest.mark.parametrize("key", [b"", b"X-Api-Key: lf_live_made-up\r\n"], ids=["no key", "made-up key"])
def test_a_large_body_of_an_unknown_client_is_not_waited_for(
    target: AttackTarget, framing: bytes, path: bytes, key: bytes
) -> None:
    if path == b"/v1/reserve" and framing.startswith(b"Content"):
        framing = b"Content-Length: 60000"
    with connect(target.port) as client:
        client.settimeout(30)
        client.sendall(b"POST %b HTTP/1.1\r\nHost: a\r\n%b%b\r\n\r\n" % (path, key, framing))
        assert client.recv(65_536).startswith(b"HTTP/1.1 401 ")
