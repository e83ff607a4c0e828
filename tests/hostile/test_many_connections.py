"""What a client can do with many connections, each of which keeps to its own bounds."""

import pytest

from tests.hostile.attack import Record, Victim, measure, send_all

SECONDS = 4.0
BATCH = b"POST /v1/check/batch HTTP/1.1\r\nHost: a\r\nX-Api-Key: %b\r\nContent-Length: 1000000\r\n\r\n" + b" " * 900_000
RESERVE = b"POST /v1/reserve HTTP/1.1\r\nHost: a\r\nX-Api-Key: %b\r\nContent-Length: 60000\r\n\r\n" + b" " * 50_000
HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"x-%d: %b\r\n" % (at, b"a" * 300) for at in range(95))
CHUNKS = b"POST /v1/check HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"2\r\nab\r\n" * 2_000


@pytest.mark.parametrize("has_key", [False, True], ids=["stranger", "tenant"])
@pytest.mark.parametrize(
    ("payload", "connections"),
    [(BATCH, 100), (RESERVE, 1_000), (HEAD, 1_500), (CHUNKS, 1_500), (b"", 5_000), (b"GET", 5_000)],
    ids=["bodies", "bodies for ASGI", "heads", "chunks", "silent", "a few bytes"],
)
def test_requests_that_never_end(
    target: Victim, record_property: Record, payload: bytes, connections: int, has_key: bool
) -> None:
    payload = payload.replace(b"%b", target.attacker.key.encode() if has_key else b"none")
    measure(target, lambda victim: send_all(victim.port, payload, connections, SECONDS)).judge(record_property)


@pytest.mark.parametrize("path", [b"/openapi.json", b"/docs/swagger-ui-bundle.js"])
def test_answers_that_nobody_reads(target: Victim, record_property: Record, path: bytes) -> None:
    payload = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path * 20
    attack = measure(target, lambda victim: send_all(victim.port, payload, 500, SECONDS, receive_buffer=4_096))
    attack.judge(record_property)
