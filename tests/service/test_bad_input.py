"""Invalid input of all kinds: the answer is as documented, nothing is consumed, and no secret is logged."""

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.service.program import HttpResponse, RunningService, read_response
from tests.service.seeded_service import PEPPER, run_seeded_service

SUBJECT, RESOURCE = "user:42", "GET:/orders"
CAPACITY = 1_000

# Stand in a request for what is known only once the service runs.
KEY, ADMIN, MISTYPED, TESTING, RETIRED = b"@KEY@", b"@ADMIN@", b"@MISTYPED@", b"@TESTING@", b"@RETIRED@"

BY_KEY = b"x-api-key: " + KEY
BY_TOKEN = b"authorization: Bearer " + ADMIN
JSON = b"content-type: application/json"
CLOSE = b"connection: close"

GOOD = {"resource": RESOURCE, "subject": SUBJECT}
PEEK = {**GOOD, "cost": 0}
PEEK_BODY = json.dumps(PEEK).encode()

CHECK, BATCH = b"/v1/check", b"/v1/check/batch"
POSTS = (b"/v1/check", b"/v1/check/batch", b"/v1/release", b"/v1/renew", b"/v1/reserve", b"/v1/settle", b"/v1/explain")


@dataclass(frozen=True)
class Case:
    """One request, and the answers that HTTP and the contract allow."""

    name: str
    sent: bytes
    statuses: tuple[int, ...]
    names: str = ""
    """The field that the problem's detail must name."""
    is_problem: bool = True
    """True if the service itself refuses it, with a problem document."""
    may_hang_up: bool = False
    """True if closing the connection without an answer is fine, because this is not HTTP."""


@dataclass
class ServiceUnderTest:
    """The program under test, and the secrets that requests contain."""

    running: RunningService
    log: Path
    secrets: dict[bytes, bytes]

    def send(self, case: Case) -> list[HttpResponse]:
        """Return all answers, or none if the service closes the connection. Only the last one may announce that."""
        sent = case.sent
        for stands_for, secret in self.secrets.items():
            sent = sent.replace(stands_for, secret)
        answers: list[HttpResponse] = []
        with self.running.connection() as connection:
            buffered = bytearray()
            with contextlib.suppress(ConnectionError):
                _send_all(connection, sent)
                answers.append(read_response(connection, buffered))
                if answers[0].headers.get("connection") == "close":
                    while True:
                        answers.append(read_response(connection, buffered))
        return answers

    def remaining(self) -> int:
        """Return the remaining capacity of the subject's limit."""
        answer = self.running.check(self.secrets[KEY].decode(), cost=0)
        assert answer.status == 200, answer
        remaining: int = answer.json["remaining"]
        return remaining


def _send_all(connection: socket.socket, sent: bytes) -> None:
    """Send everything, unless the service stops reading: then it has already answered."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(sent)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceUnderTest]:
    """With debug logging, and a limit that refills too slowly to hide that something was taken."""
    folder = tmp_path_factory.mktemp("bad-input")
    slow = {"algorithm": "token_bucket", "bucket_capacity": CAPACITY, "refill_rate_per_sec": 0.0001}
    with run_seeded_service(f"sqlite:///{folder}/service.db", log=folder / "log", log_level="debug") as service:
        tenant = service.tenant({"name": "slow", **slow})
        retired = tenant.create("keys", name="retired")
        assert service.admin("DELETE", f"keys/{retired['id']}").status == 204
        key = tenant.key
        texts = {
            KEY: key,
            ADMIN: service.demo["admin_token"],
            MISTYPED: key[:-1] + ("1" if key[-1] == "0" else "0"),
            TESTING: key.replace("lf_live_", "lf_test_"),
            RETIRED: retired["key"],
        }
        yield ServiceUnderTest(service.running, folder / "log", {name: text.encode() for name, text in texts.items()})


# --- Requests --------------------------------------------------------------------------------------------------------


def head(first: bytes, *lines: bytes) -> bytes:
    return b"\r\n".join([first, *lines, b"", b""])


def ask(body: bytes, *lines: bytes, path: bytes = CHECK, method: bytes = b"POST", by: bytes = BY_KEY) -> bytes:
    """Return a request with valid framing."""
    length = b"content-length: %d" % len(body)
    return head(b"%b %b HTTP/1.1" % (method, path), b"host: test", CLOSE, by, *(lines or (JSON,)), length) + body


def bare(body: bytes, *lines: bytes, path: bytes = CHECK, version: bytes = b"HTTP/1.1") -> bytes:
    """Return a request with the framing of `lines`."""
    return head(b"POST %b %b" % (path, version), b"host: test", CLOSE, BY_KEY, JSON, *lines) + body


def peek(*lines: bytes, path: bytes = CHECK, by: bytes = BY_KEY) -> bytes:
    """Return a check of cost 0 that is valid except for `lines`."""
    return ask(PEEK_BODY, JSON, *lines, path=path, by=by)


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def without(field: str, **more: Any) -> bytes:
    return json.dumps({name: value for name, value in ({**GOOD, **more}).items() if name != field}).encode()


def raw_check(**fields: str) -> bytes:
    """Return a check with fields as raw text, which need not be valid JSON."""
    texts = {name: json.dumps(value) for name, value in GOOD.items()} | fields
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}").encode()


# --- Invalid JSON ----------------------------------------------------------------------------------------------------

NO_JSON: dict[str, bytes] = {
    "an open object": b"{",
    "a closing brace": b"}",
    "nothing but space": b"  \r\n\t ",
    "a word": b"nonsense",
    "single quotes": b"{'resource': 'r', 'subject': 's'}",
    "a comma at the end": PEEK_BODY[:-1] + b",}",
    "no commas": b'{"resource": "r" "subject": "s"}',
    "two commas": b'{"resource": "r",, "subject": "s"}',
    "no colon": b'{"resource" "r", "subject": "s"}',
    "a comment": b'{"resource": "r", /* x */ "subject": "s"}',
    "a line comment": b'{"resource": "r", // x\n "subject": "s"}',
    "two documents": PEEK_BODY + PEEK_BODY,
    "something after it": PEEK_BODY + b"x",
    "a NUL after it": PEEK_BODY + b"\0",
    "a NUL before it": b"\0" + PEEK_BODY,
    "cut in a string": PEEK_BODY[:20],
    "cut before its end": PEEK_BODY[:-1],
    "names without quotes": b'{resource: "r", subject: "s"}',
    "NaN": raw_check(cost="NaN"),
    "Infinity": raw_check(cost="Infinity"),
    "minus Infinity": raw_check(cost="-Infinity"),
    "True of Python": raw_check(cost="True"),
    "undefined": raw_check(cost="undefined"),
    "a leading zero": raw_check(cost="01"),
    "a leading plus": raw_check(cost="+1"),
    "hexadecimal": raw_check(cost="0x10"),
    "a point at the end": raw_check(cost="1."),
    "a point at the start": raw_check(cost=".5"),
    "an empty exponent": raw_check(cost="1e"),
    "a lonely minus": raw_check(cost="-"),
    "underscores": raw_check(cost="1_000"),
    "an unknown escape": raw_check(subject='"\\x41"'),
    "half an escape": raw_check(subject='"\\u12"'),
    "a lone high surrogate": raw_check(subject='"\\ud800"'),
    "a lone low surrogate": raw_check(subject='"\\udc00"'),
    "surrogates the wrong way round": raw_check(subject='"\\udc00\\ud800"'),
    "a lone surrogate as resource": raw_check(resource='"\\ud800"'),
    "a lone surrogate as a name": b'{"\\ud800": 1, ' + PEEK_BODY[1:],
    "a line feed in a string": b'{"resource": "a\nb", "subject": "s"}',
    "a tab in a string": b'{"resource": "a\tb", "subject": "s"}',
    "a NUL in a string": b'{"resource": "a\0b", "subject": "s"}',
    "an escape character in a string": b'{"resource": "a\x1bb", "subject": "s"}',
    "a byte that UTF-8 has not": b'{"resource": "\xff", "subject": "s"}',
    "Latin-1": '{"resource": "ü", "subject": "s"}'.encode("latin-1"),
    "an overlong slash": b'{"resource": "\xc0\xaf", "subject": "s"}',
    "an overlong NUL": b'{"resource": "\xc0\x80", "subject": "s"}',
    "a surrogate in UTF-8": b'{"resource": "\xed\xa0\x80", "subject": "s"}',
    "past the last code point": b'{"resource": "\xf4\x90\x80\x80", "subject": "s"}',
    "a continuation without a start": b'{"resource": "\x80", "subject": "s"}',
    "a cut sequence": b'{"resource": "\xe2\x82", "subject": "s"}',
    "a byte-order mark": b"\xef\xbb\xbf" + PEEK_BODY,
    "UTF-16": PEEK_BODY.decode().encode("utf-16"),
    "UTF-16 without a mark": PEEK_BODY.decode().encode("utf-16-le"),
    "UTF-32": PEEK_BODY.decode().encode("utf-32"),
    "UTF-7": b"+AHs-+ACI-resource+ACI-:1+AH0-",
    "XML": b"<?xml version='1.0'?><check/>",
    "a form": b"resource=r&subject=s",
    "a form with fields": b'--x\r\ncontent-disposition: form-data; name="resource"\r\n\r\nr\r\n--x--\r\n',
    "MessagePack": b"\x82\xa8resource\xa1r\xa7subject\xa1s",
    "gzip that is not announced": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
    "brackets without end": b"[" * 60_000,
    "objects without end": b'{"resource":' * 5_000,
    "brackets in a string's place": b'{"resource": ' + b"[" * 60_000,
    "random bytes": bytes(range(256)),
}

# --- JSON that makes no sense ----------------------------------------------------------------------------------------

TWICE = {
    "resource": b', "resource": "GET:/other"',
    "subject": b', "subject": "user:43"',
    "cost": b', "cost": 0',
    "a limit's cost": b', "costs": {"slow": 0, "slow": 0}',
    "a name that is escaped": b', "\\u0063ost": 0',
}
LONG = json.dumps("x" * 513)
TYPES = {"a number": "7", "a list": "[]", "an object": "{}", "true": "true", "null": "null"}
NUMBERS = {
    "negative": "-1",
    "very negative": "-9223372036854775809",
    "2^52": str(2**52),
    "2^53": str(2**53),
    "2^63": str(2**63),
    "2^64": str(2**64),
    "of 400 digits": "9" * 400,
    "of 5,000 digits": "9" * 5_000,
    "a fraction": "1.5",
    "a tiny fraction": "1e-300",
    "a huge exponent": "1e400",
    "a huge negative": "-1e400",
    "text": '"1"',
    "true": "true",
    "false": "false",
    "null": "null",
    "a list": "[1]",
    "an object": '{"n": 1}',
}
NO_SENSE: dict[str, tuple[bytes, str]] = {
    "no resource": (without("resource"), "resource"),
    "no subject": (without("subject"), "subject"),
    "an empty object": (b"{}", "resource"),
    "an unknown field": (without("", hits=1), "hits"),
    "a field in capitals": (without("", Cost=1), "Cost"),
    "a field with a space": (without("", **{"cost ": 1}), "cost "),
    "an empty name": (json.dumps(GOOD | {"": 1}).encode(), ""),
    "a tenant": (without("", tenant_id="ten_x"), "tenant_id"),
    "__proto__": (without("", __proto__={"cost": 0}), "__proto__"),
    "an unknown field of 60,000 bytes": (without("", **{"x" * 60_000: 1}), "x"),
    "an unknown field with line breaks": (without("", **{"a\r\nx-evil: 1": 1}), ""),
    **{f"resource is {name}": (raw_check(resource=text), "resource") for name, text in TYPES.items()},
    **{f"subject is {name}": (raw_check(subject=text), "subject") for name, text in TYPES.items()},
    "an empty resource": (raw_check(resource='""'), "resource"),
    "an empty subject": (raw_check(subject='""'), "subject"),
    "a resource of 513 bytes": (raw_check(resource=LONG), "resource"),
    "a subject of 513 bytes": (raw_check(subject=LONG), "subject"),
    "a subject of 171 characters and 513 bytes": (raw_check(subject=json.dumps("€" * 171)), "subject"),
    "a subject of 60,000 bytes": (raw_check(subject=json.dumps("x" * 60_000)), "subject"),
    "a nested subject": (raw_check(subject="[" * 500 + "]" * 500), "subject"),
    "priority is a number": (raw_check(priority="1"), "priority"),
    "priority is unknown": (raw_check(priority='"P4"'), "priority"),
    "priority is in lower case": (raw_check(priority='"p1"'), "priority"),
    "priority is empty": (raw_check(priority='""'), "priority"),
    "priority has line breaks": (raw_check(priority='"P1\\r\\nx-evil: 1"'), "priority"),
    "plan_id is a number": (raw_check(plan_id="1"), "plan_id"),
    "plan_id is a list": (raw_check(plan_id='["x"]'), "plan_id"),
    "costs is a list": (raw_check(costs="[1]"), "costs"),
    "costs is a number": (raw_check(costs="1"), "costs"),
    "costs is text": (raw_check(costs='"slow"'), "costs"),
    "costs of a limit that is not there": (raw_check(costs='{"fast": 1}'), "fast"),
    "costs of a nameless limit": (raw_check(costs='{"": 1}'), "costs"),
    "costs of a limit with line breaks": (raw_check(costs='{"slow\\r\\nx-evil: 1": 1}'), "costs"),
}

# --- Batches and the other calls -------------------------------------------------------------------------------------

TICKET = "A" * 100
OTHER_CALLS: dict[str, tuple[bytes, bytes, tuple[int, ...], str]] = {
    "batch: no checks": (BATCH, b"{}", (422,), "checks"),
    "batch: a check": (BATCH, PEEK_BODY, (422,), ""),
    "batch: a list": (BATCH, b"[]", (422,), ""),
    "batch: null": (BATCH, b'{"checks": null}', (422,), "checks"),
    "batch: an object": (BATCH, b'{"checks": {}}', (422,), "checks"),
    "batch: text": (BATCH, b'{"checks": "all"}', (422,), "checks"),
    "batch: an unknown field": (BATCH, b'{"checks": [], "atomic": true}', (422,), "atomic"),
    "batch: 1,001 checks": (BATCH, b'{"checks": [%b]}' % b",".join([PEEK_BODY] * 1_001), (422,), "checks"),
    "batch: nested": (BATCH, b'{"checks": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", (400, 422), ""),
    "batch: not closed": (BATCH, b'{"checks": [' + PEEK_BODY, (400,), ""),
    "batch: a lone surrogate": (BATCH, b'{"checks": [' + raw_check(subject='"\\ud800"') + b"]}", (400,), ""),
    "batch: a byte that UTF-8 has not": (BATCH, b'{"checks": ["\xff"]}', (400,), ""),
    "batch: over 1 MiB": (BATCH, b'{"checks": []}' + b" " * 1_048_576, (413,), ""),
    **{
        f"{call}: {name}": (f"/v1/{call}".encode(), body, (422,), names)
        for call in ("release", "renew")
        for name, body, names in (
            ("nothing", b"{}", "lease_id"),
            ("a number", b'{"lease_id": 1}', "lease_id"),
            ("null", b'{"lease_id": null}', "lease_id"),
            ("a list of them", b'{"lease_id": ["x"]}', "lease_id"),
            ("an unknown field", b'{"lease_id": "x", "force": true}', "force"),
            ("a list", b"[]", ""),
        )
    },
    **{
        f"{call}: a lease that is {name}": (
            f"/v1/{call}".encode(),
            json.dumps({"lease_id": lease_id}).encode(),
            (404, 422),
            "lease_id",
        )
        for call in ("release", "renew")
        for name, lease_id in (
            ("empty", ""),
            ("a word", "nonsense"),
            ("made up", TICKET),
            ("not ASCII", "ü" * 40),
            ("a NUL", "\0"),
            ("of 60,000 bytes", "A" * 60_000),
            ("a path", "../../etc/passwd"),
            ("line breaks", "a\r\nx-evil: 1"),
            ("padding", "===="),
        )
    },
    "settle: nothing": (b"/v1/settle", b"{}", (422,), "reservation_id"),
    "settle: no cost": (b"/v1/settle", b'{"reservation_id": "x"}', (422,), "cost"),
    "settle: a negative cost": (b"/v1/settle", b'{"reservation_id": "x", "cost": -1}', (404, 422), ""),
    "settle: a cost that is text": (b"/v1/settle", b'{"reservation_id": "x", "cost": "1"}', (422,), "cost"),
    "settle: a cost of 2^64": (b"/v1/settle", b'{"reservation_id": "x", "cost": 18446744073709551616}', (404, 422), ""),
    "settle: a fraction": (b"/v1/settle", b'{"reservation_id": "x", "cost": 0.5}', (422,), "cost"),
    "settle: costs is a list": (b"/v1/settle", b'{"reservation_id": "x", "cost": 1, "costs": []}', (422,), "costs"),
    "settle: an unknown field": (b"/v1/settle", b'{"reservation_id": "x", "cost": 1, "all": 1}', (422,), "all"),
    "settle: a made-up reservation": (
        b"/v1/settle",
        json.dumps({"reservation_id": TICKET, "cost": 1}).encode(),
        (404, 422),
        "reservation_id",
    ),
    "settle: a reservation that is not ASCII": (
        b"/v1/settle",
        '{"reservation_id": "日本", "cost": 1}'.encode(),
        (404, 422),
        "reservation_id",
    ),
    **{
        f"reserve: ttl_seconds is {name}": (b"/v1/reserve", raw_check(ttl_seconds=text), (422,), "ttl_seconds")
        for name, text in {
            "0": "0",
            "negative": "-1",
            "text": '"60"',
            "true": "true",
            "null": "null",
            "over 10 years": "315360001",
            "under 1 ms": "0.0009",
            "of 7 decimals": "1.0000001",
            "huge": "1e300",
        }.items()
    },
    "reserve: ttl_seconds past all bounds": (b"/v1/reserve", raw_check(ttl_seconds="1e400"), (400, 422), ""),
    "reserve: ttl_seconds is NaN": (b"/v1/reserve", raw_check(ttl_seconds="NaN"), (400,), ""),
    "reserve: on_lapse is unknown": (b"/v1/reserve", raw_check(on_lapse='"drop"'), (422,), "on_lapse"),
    "reserve: on_lapse is true": (b"/v1/reserve", raw_check(on_lapse="true"), (422,), "on_lapse"),
    "reserve: a negative cost": (b"/v1/reserve", raw_check(cost="-1"), (422,), "cost"),
    "reserve: no subject": (b"/v1/reserve", without("subject"), (422,), "subject"),
    "explain: no subject": (b"/v1/explain", without("subject"), (422,), "subject"),
    "explain: an unknown field": (b"/v1/explain", without("", ttl_seconds=1), (422,), "ttl_seconds"),
    "explain: an unknown priority": (b"/v1/explain", raw_check(priority='"P7"'), (422,), "priority"),
    "explain: a negative cost": (b"/v1/explain", raw_check(cost="-1"), (422,), "cost"),
    "explain: a cost of a limit that is not there": (b"/v1/explain", raw_check(costs='{"x": 1}'), (422,), "x"),
}
UNKNOWN_PLANS = {
    "a word": "nonsense",
    "empty": "",
    "line breaks": "pla_x\r\nx-evil: 1",
    "a NUL": "\0",
    "of 60,000 bytes": "p" * 60_000,
    "SQL": "' OR 1=1 --",
    "not ASCII": "plän",
}
QUERIES: dict[str, tuple[bytes, tuple[int, ...], str]] = {
    "nothing": (b"", (422,), "resource"),
    "no subject": (b"?resource=r", (422,), "subject"),
    "an empty subject": (b"?resource=r&subject=", (422,), "subject"),
    "an unknown field": (b"?resource=r&subject=s&cost=1", (422,), "cost"),
    "a field twice": (b"?resource=r&subject=s&subject=t", (422,), ""),
    "a subject of 513 bytes": (b"?resource=r&subject=" + b"x" * 513, (422,), "subject"),
    "a byte that UTF-8 has not": (b"?resource=r&subject=%ff", (422,), ""),
    "no equals sign": (b"?resource&subject", (422,), ""),
    "ampersands": (b"?&&&&", (422,), ""),
    "an unknown plan": (b"?resource=r&subject=s&plan_id=x", (404,), ""),
    "a byte past ASCII": (b"?resource=r&subject=\xc3\xbc", (200, 400, 422), ""),
    "line breaks as a name": (b"?resource=r&subject=s&%0d%0ax-evil:=1", (422,), ""),
    "10,000 bytes": (b"?resource=r&subject=s&x=" + b"x" * 10_000, (414, 422), ""),
}

# --- Admin -----------------------------------------------------------------------------------------------------------

BROKEN_NAMES = ("x\r\nx-evil: 1", "x\n", "x\0", "", "x" * 65, "ü", "a b", "<script>", "x\x7f", "x\u2028")
ADMIN_BODIES: dict[str, tuple[bytes, bytes, bytes, tuple[int, ...], str]] = {
    **{
        f"a tenant's name {name!r:.20}": (b"POST", b"tenants", json.dumps({"name": name}).encode(), (422,), "name")
        for name in BROKEN_NAMES
    },
    **{
        f"a limit's name {name!r:.20}": (
            b"POST",
            b"plans",
            json.dumps(
                {
                    "tenant_id": "operator",
                    "name": "p",
                    "limits": [{"name": name, "algorithm": "fixed_window", "limit": 1, "window_seconds": 1}],
                }
            ).encode(),
            (422,),
            "name",
        )
        for name in BROKEN_NAMES
    },
    "a token with line breaks": (b"POST", b"tokens", b'{"name": "a\\r\\nb", "scopes": ["read"]}', (422,), "name"),
    "a plan without limits": (b"POST", b"plans", b'{"name": "p"}', (422,), ""),
    "a plan of NaN": (b"POST", b"plans", b'{"name": "p", "limits": [{"limit": NaN}]}', (400,), ""),
    "a plan that is a list": (b"POST", b"plans", b"[]", (422,), ""),
    "an unknown algorithm": (
        b"POST",
        b"plans",
        b'{"tenant_id": "operator", "name": "p", "algorithm": "gcra"}',
        (422,),
        "algorithm",
    ),
    "an unknown mode": (b"PUT", b"mode", b'{"mode": "maybe"}', (422,), "mode"),
    "a mode that is true": (b"PUT", b"mode", b'{"mode": true}', (422,), "mode"),
    "no mode": (b"PUT", b"mode", b"{}", (422,), "mode"),
    "a reset without a subject": (b"POST", b"reset", b"{}", (422,), ""),
    "a reset of an unknown tenant": (
        b"POST",
        b"reset",
        b'{"tenant_id": "ten_x", "resource": "r", "subject": "s"}',
        (404, 422),
        "",
    ),
    "an operator without a plan": (b"PUT", b"operator", b"{}", (422,), "plan_id"),
    "an operator of an unknown plan": (b"PUT", b"operator", b'{"plan_id": "pla_x"}', (404, 422), ""),
    "a change of an unknown tenant": (b"PATCH", b"tenants/ten_x", b'{"name": "x"}', (404,), ""),
    "a rotation of an unknown key": (b"POST", b"keys/key_x/rotate", b'{"grace_seconds": 1}', (404,), ""),
    "JSON that is cut": (b"POST", b"tenants", b'{"name": "x', (400,), ""),
    "UTF-16": (b"POST", b"tenants", '{"name": "x"}'.encode("utf-16"), (400,), ""),
    "a body over 64 KiB": (b"POST", b"tenants", b'{"name": "x"}' + b" " * 65_536, (413,), ""),
}

# --- Keys ------------------------------------------------------------------------------------------------------------

BAD_KEYS: dict[str, bytes] = {
    "none": b"x-other: 1",
    "an empty one": b"x-api-key:",
    "a word": b"x-api-key: nonsense",
    "a mistyped one": b"x-api-key: " + MISTYPED,
    "one of the other kind": b"x-api-key: " + TESTING,
    "one that was deleted": b"x-api-key: " + RETIRED,
    "half of one": b"x-api-key: lf_live_",
    "another prefix": b"x-api-key: sk_live_0123456789abcdefghijklmnopqrstuvwxyz",
    "capitals": b"x-api-key: LF_LIVE_0123456789",
    "a key with something after it": b"x-api-key: " + KEY + b"x",
    "a key with something before it": b"x-api-key: x" + KEY,
    "a key twice in one field": b"x-api-key: " + KEY + b", " + KEY,
    "a key in quotes": b'x-api-key: "' + KEY + b'"',
    "UTF-8": "x-api-key: lf_live_schlüssel".encode(),
    "Latin-1": "x-api-key: lf_live_schlüssel".encode("latin-1"),
    "bytes of no charset": b"x-api-key: lf_live_\xff\xfe\x80",
    "spaces inside": b"x-api-key: lf_live_a b c",
    "a tab inside": b"x-api-key: lf_live_\tabc",
    "6,000 bytes": b"x-api-key: lf_live_" + b"0" * 6_000,
    "SQL": b"x-api-key: lf_live_' OR '1'='1",
    "an admin token": b"x-api-key: " + ADMIN,
    "an admin token as bearer": BY_TOKEN,
    "Basic": b"authorization: Basic bGZfbGl2ZV94Og==",
    "Basic with the key itself": b"authorization: Basic " + KEY,
    "another scheme": b"authorization: Token " + KEY,
    "no scheme": b"authorization: " + KEY,
    "a bearer of nothing": b"authorization: Bearer",
    "a bearer of space": b"authorization: Bearer   ",
    "a bearer and more": b"authorization: Bearer " + KEY + b" x",
    "a mistyped bearer": b"authorization: Bearer " + MISTYPED,
    "a bearer with a comma": b"authorization: Bearer, " + KEY,
    "a cookie": b"cookie: x-api-key=" + KEY,
    "a field of another name": b"x-api-key-: " + KEY,
    "an underscored field": b"x_api_key: " + KEY,
}
SECOND_KEYS = {
    "two keys": BY_KEY + b"\r\nx-api-key: " + MISTYPED,
    "two keys the other way round": b"x-api-key: " + MISTYPED + b"\r\n" + BY_KEY,
    "a key and another bearer": BY_KEY + b"\r\nauthorization: Bearer " + MISTYPED,
    "a key and an empty one": BY_KEY + b"\r\nx-api-key:",
    "a key and an admin token": BY_KEY + b"\r\n" + BY_TOKEN,
}

# --- Methods and paths -----------------------------------------------------------------------------------------------

WRONG_METHODS = [
    *((method, path) for path in POSTS for method in (b"GET", b"PUT", b"DELETE", b"PATCH", b"OPTIONS")),
    *(
        (method, path)
        for path in (b"/v1/usage", b"/v1/health", b"/v1/ready")
        for method in (b"POST", b"PUT", b"DELETE")
    ),
    (b"TRACE", CHECK),
    (b"PROPFIND", CHECK),
]
UNKNOWN_PATHS = [
    b"/",
    b"/v1",
    b"/v1/",
    b"/v2/check",
    b"/v1/check/",
    b"//v1/check",
    b"/v1//check",
    b"/v1/./check",
    b"/v1/x/../check",
    b"/V1/CHECK",
    b"/v1/check/batch/",
    b"/v1/check%00",
    b"/v1/check%20",
    b"/v1/check%0d%0ax-evil:%201",
    b"/v1/check;a=b",
    b"/v1/check.json",
    b"/v1/checks",
    b"/v1/..%2f..%2fetc%2fpasswd",
    b"/v1/%2e%2e/%2e%2e/etc/passwd",
    b"/../../etc/passwd",
    b"/v1/check\\",
    b"/%",
    b"/%zz",
    b"/%ff%fe",
    b"/x?" + b"q" * 5_000,
    b"/v1/admin",
    b"/v1/admin/nothing",
    b"/.env",
    b"/openapi.yaml",
]

# --- Framing ---------------------------------------------------------------------------------------------------------

SMUGGLED = ask(json.dumps(GOOD).encode())
"""A complete check with a cost. It is answered only by a parser that misreads the bytes before it."""


def _framed(name: str, sent: bytes, *statuses: int) -> Case:
    return Case(f"framing: {name}", sent, statuses or (400,), may_hang_up=True)


LENGTH = b"content-length: %d" % len(PEEK_BODY)
CHUNKED = b"transfer-encoding: chunked"
FRAMING = [
    _framed("a negative length", bare(PEEK_BODY, b"content-length: -1")),
    _framed("a length with a plus", bare(PEEK_BODY, b"content-length: +%d" % len(PEEK_BODY))),
    _framed("a hexadecimal length", bare(PEEK_BODY, b"content-length: 0x10")),
    _framed("a length with a fraction", bare(PEEK_BODY, LENGTH + b".0")),
    _framed("an empty length", bare(PEEK_BODY, b"content-length:")),
    _framed("a length in words", bare(PEEK_BODY, b"content-length: many")),
    _framed("a length in Arabic digits", bare(PEEK_BODY, "content-length: ٤".encode())),
    _framed("a length with a space inside", bare(PEEK_BODY, b"content-length: 4 4")),
    _framed("two lengths", bare(PEEK_BODY, LENGTH, b"content-length: 0")),
    _framed("two lengths in one field", bare(PEEK_BODY, b"content-length: 4, 5")),
    _framed("one length twice", bare(PEEK_BODY, LENGTH, LENGTH), 200, 400),
    _framed("a length of 2^64", bare(PEEK_BODY, b"content-length: 18446744073709551616"), 400, 413),
    _framed("a length of 2^64 and a little", bare(PEEK_BODY, b"content-length: 18446744073709551660"), 400, 413),
    _framed("a length of 400 digits", bare(PEEK_BODY, b"content-length: " + b"9" * 400), 400, 413),
    _framed("a length of 10 GB", bare(PEEK_BODY, b"content-length: 10000000000"), 413),
    _framed("a space before the colon", bare(PEEK_BODY, b"content-length : %d" % len(PEEK_BODY))),
    _framed("a length and chunks", bare(chunks(PEEK_BODY), LENGTH, CHUNKED) + SMUGGLED),
    _framed("chunks and a length", bare(chunks(PEEK_BODY), CHUNKED, LENGTH) + SMUGGLED),
    _framed("a length of 0 and chunks", bare(chunks(PEEK_BODY), b"content-length: 0", CHUNKED) + SMUGGLED),
    _framed("a length and chunks that end at once", bare(b"0\r\n\r\n" + SMUGGLED, b"content-length: 5", CHUNKED)),
    _framed("an unknown coding", bare(chunks(PEEK_BODY), b"transfer-encoding: xchunked"), 400, 501),
    _framed("identity", bare(PEEK_BODY, b"transfer-encoding: identity"), 400, 501),
    _framed("chunked is not last", bare(chunks(PEEK_BODY), b"transfer-encoding: chunked, gzip"), 400, 501),
    _framed("chunked is not last, in two fields", bare(chunks(PEEK_BODY), CHUNKED, b"transfer-encoding: x"), 400, 501),
    _framed("gzip in chunks", bare(chunks(PEEK_BODY), b"transfer-encoding: gzip, chunked"), 400, 415, 501),
    _framed("chunks twice", bare(chunks(chunks(PEEK_BODY)), b"transfer-encoding: chunked, chunked"), 400, 501),
    _framed("chunks twice, in two fields", bare(chunks(chunks(PEEK_BODY)), CHUNKED, CHUNKED), 400, 501),
    _framed("a tab in the coding", bare(chunks(PEEK_BODY), b"transfer-encoding: chun\tked"), 400, 501),
    _framed("a vertical tab before the coding", bare(chunks(PEEK_BODY), b"transfer-encoding: \x0bchunked"), 400, 501),
    _framed("an empty coding", bare(PEEK_BODY, b"transfer-encoding:", LENGTH), 400, 501),
    _framed("a coding in quotes", bare(chunks(PEEK_BODY), b'transfer-encoding: "chunked"'), 400, 501),
    _framed(
        "a coding with a length behind a fold", bare(chunks(PEEK_BODY), b"transfer-encoding:\r\n chunked"), 200, 400
    ),
    _framed("a field that is folded", bare(PEEK_BODY, b"x: a\r\n b", LENGTH), 200, 400),
    _framed("a fold before the first field", b"POST /v1/check HTTP/1.1\r\n x: y\r\nhost: t\r\n\r\n"),
    _framed("a bare line feed in the head", bare(PEEK_BODY, b"x: y\nz: w", LENGTH), 200, 400),
    _framed("a bare carriage return in the head", bare(PEEK_BODY, b"x: y\rz: w", LENGTH)),
    _framed("a NUL in a field", bare(PEEK_BODY, b"x: a\0b", LENGTH)),
    _framed("a NUL in a field's name", bare(PEEK_BODY, b"x\0y: a", LENGTH)),
    _framed("a field without a colon", bare(PEEK_BODY, b"nonsense", LENGTH)),
    _framed("a field without a name", bare(PEEK_BODY, b": nonsense", LENGTH)),
    _framed("a name with a space", bare(PEEK_BODY, b"x y: z", LENGTH)),
    _framed("a name past ASCII", bare(PEEK_BODY, "ü: z".encode(), LENGTH)),
    _framed("a name in brackets", bare(PEEK_BODY, b"(x): z", LENGTH)),
    _framed("a chunk's size with 0x", bare(b"0x5\r\nhello\r\n0\r\n\r\n", CHUNKED)),
    _framed("a negative chunk", bare(b"-5\r\nhello\r\n0\r\n\r\n", CHUNKED)),
    _framed("a chunk with a plus", bare(b"+5\r\nhello\r\n0\r\n\r\n", CHUNKED)),
    _framed("a chunk with a space before it", bare(b" 5\r\nhello\r\n0\r\n\r\n", CHUNKED)),
    _framed("a chunk of letters", bare(b"zz\r\nhello\r\n0\r\n\r\n", CHUNKED)),
    _framed("an empty chunk size", bare(b"\r\nhello\r\n0\r\n\r\n", CHUNKED)),
    _framed("an overlong chunk", bare(b"10000000000000000\r\nhello\r\n0\r\n\r\n", CHUNKED), 400, 413),
    _framed("an overlong chunk that wraps to 5", bare(b"10000000000000005\r\nhello\r\n0\r\n\r\n", CHUNKED), 400, 413),
    _framed("a chunk size of 400 digits", bare(b"f" * 400 + b"\r\nhello\r\n0\r\n\r\n", CHUNKED), 400, 413),
    _framed("a chunk that is longer than it says", bare(b"3\r\nhello\r\n0\r\n\r\n", CHUNKED)),
    _framed("a chunk that ends in a line feed", bare(b"2\r\n{}\n0\r\n\r\n", CHUNKED)),
    _framed("a chunk size that ends in a line feed", bare(b"2\n{}\r\n0\r\n\r\n", CHUNKED)),
    _framed("chunks that begin with a line feed", bare(b"\n2\r\n{}\r\n0\r\n\r\n", CHUNKED)),
    _framed("an extension with a line feed", bare(b"2;a\n{}\r\n0\r\n\r\n", CHUNKED)),
    _framed("an extension with a NUL", bare(b"2;a=\0\r\n{}\r\n0\r\n\r\n", CHUNKED)),
    _framed("chunks of 1 MiB that nobody announced", bare(chunks(*[b" " * 65_000] * 16), CHUNKED), 413),
    _framed("a trailer that is broken", bare(b"2\r\n{}\r\n0\r\nnonsense\r\n\r\n", CHUNKED)),
    _framed("chunks in HTTP/1.0", bare(chunks(PEEK_BODY), CHUNKED, version=b"HTTP/1.0") + SMUGGLED, 200, 400),
    _framed("no Host", head(b"POST /v1/check HTTP/1.1", BY_KEY, JSON, CLOSE, LENGTH) + PEEK_BODY),
    _framed("two Hosts", bare(PEEK_BODY, b"host: other", LENGTH)),
    _framed("a Host with a space", head(b"POST /v1/check HTTP/1.1", b"host: a b", BY_KEY, CLOSE, LENGTH) + PEEK_BODY),
    _framed("a version from the future", bare(PEEK_BODY, LENGTH, version=b"HTTP/9.9"), 400, 505),
    _framed("a version that is none", bare(PEEK_BODY, LENGTH, version=b"HTTP/1"), 400, 505),
    _framed("a version in lower case", bare(PEEK_BODY, LENGTH, version=b"http/1.1")),
    _framed("another protocol", bare(PEEK_BODY, LENGTH, version=b"RTSP/1.0"), 400, 505),
    _framed("two spaces", head(b"POST  /v1/check HTTP/1.1", b"host: t", CLOSE, LENGTH) + PEEK_BODY, 400, 401),
    _framed("a path with a space", head(b"POST /v1/ check HTTP/1.1", b"host: t", CLOSE, LENGTH) + PEEK_BODY),
    _framed("a path with a NUL", head(b"POST /v1/check\0 HTTP/1.1", b"host: t", CLOSE, LENGTH) + PEEK_BODY),
    _framed("a path without a slash", head(b"POST v1/check HTTP/1.1", b"host: t", CLOSE, LENGTH) + PEEK_BODY, 400, 404),
    _framed("a path of a fragment", head(b"GET /v1/usage#x HTTP/1.1", b"host: t", CLOSE, BY_KEY), 400, 404, 422),
    _framed("no path", head(b"POST HTTP/1.1", b"host: t", CLOSE)),
    _framed("a method in lower case", head(b"post /v1/check HTTP/1.1", b"host: t", CLOSE), 400, 405, 501),
    _framed("a method that is none", head(b"BREW /v1/check HTTP/1.1", b"host: t", CLOSE), 400, 405, 501),
    _framed("a method of a kilobyte", head(b"A" * 1_024 + b" /v1/check HTTP/1.1", b"host: t", CLOSE), 400, 405, 501),
    _framed("CONNECT", head(b"CONNECT test:443 HTTP/1.1", b"host: test:443", CLOSE), 400, 404, 405, 501),
    _framed("an absolute URI of nothing", head(b"GET http:// HTTP/1.1", b"host: t", CLOSE), 400, 404),
    _framed(
        "an absolute URI of another scheme", head(b"GET ftp://t/v1/health HTTP/1.1", b"host: t", CLOSE), 200, 400, 404
    ),
    _framed("HTTP/0.9", b"GET /v1/health\r\n\r\n"),
    _framed("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", 400, 505),
    _framed("a hello of TLS", b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(160)),
    _framed("a greeting of SSH", b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    _framed("a command of Redis", b"*1\r\n$4\r\nPING\r\n"),
    _framed("zeros", bytes(1_000)),
    _framed("high bytes", b"\xff" * 1_000),
    _framed("a field of 1 MiB", peek(b"x-large: " + b"x" * 1_048_576), 400, 431),
    _framed("20,000 fields", peek(*(b"x-%d: y" % number for number in range(20_000))), 400, 431),
    _framed("a field's name of 1 MiB", peek(b"x" * 1_048_576 + b": y"), 400, 431),
    _framed("a path of 1 MiB", peek(path=b"/" + b"x" * 1_048_576), 400, 404, 414, 431),
]

BROKEN_CHUNKS = {
    "a chunk that is longer than it says": b"3\r\nhello\r\n0\r\n\r\n",
    "a chunk of letters": b"zz\r\nhello\r\n0\r\n\r\n",
    "an overlong chunk": b"2\r\n{}\r\n10000000000000005\r\nhello\r\n0\r\n\r\n",
}
"""For calls through ASGI, which wait for the rest of a body that turns out to be invalid."""

# --- The table -------------------------------------------------------------------------------------------------------


def bodies() -> Iterator[Case]:
    """Cases of invalid JSON in a check."""
    for name, body in NO_JSON.items():
        yield Case(f"no JSON: {name}", ask(body), (400,))
    for name, again in TWICE.items():  # RFC 8259, 4: parsers differ on the result
        yield Case(f"twice: {name}", ask(PEEK_BODY[:-1] + again + b"}"), (400,))
    for name, (body, field) in NO_SENSE.items():
        yield Case(f"no sense: {name}", ask(body), (422,), names=field)
    for name, text in NUMBERS.items():  # a number beyond all bounds may be reported as malformed too
        yield Case(f"a cost that is {name}", ask(raw_check(cost=text)), (400, 422), names="cost")
        sent = ask(raw_check(costs=f'{{"slow": {text}}}'))
        yield Case(f"a cost of a limit that is {name}", sent, (400, 422), names="costs")
    for name, plan_id in UNKNOWN_PLANS.items():
        sent = ask(json.dumps({**GOOD, "plan_id": plan_id}).encode())
        yield Case(f"a plan that is {name}", sent, (404, 422))


def every_call() -> Iterator[Case]:
    """Bodies that every call rejects."""
    for path in POSTS:
        call = path.decode().removeprefix("/v1/")
        for name in ("an open object", "a byte that UTF-8 has not", "UTF-16", "brackets without end"):
            yield Case(f"no JSON for {call}: {name}", ask(NO_JSON[name], path=path), (400,))
        yield Case(f"nothing for {call}", ask(b"", path=path), (400, 422))
        for name, plain in {"null": b"null", "text": b'"x"', "a number": b"1", "a list": b"[]"}.items():
            yield Case(f"{name} for {call}", ask(plain, path=path), (422,))
        for kind in (b"text/plain", b"application/x-www-form-urlencoded", b"application/jsonx", b"json", b"text/json,"):
            sent = ask(PEEK_BODY, b"content-type: " + kind, path=path)
            yield Case(f"{kind.decode()} for {call}", sent, (415,), names="content-type")
        for coding in (b"gzip", b"deflate, gzip"):
            sent = ask(PEEK_BODY, JSON, b"content-encoding: " + coding, path=path)
            yield Case(f"{coding.decode()} for {call}", sent, (415,), names="content-encoding")
        yield Case(f"too large for {call}", ask(b" " * 1_048_577, path=path), (413,))
        yield Case(f"no key for {call}", peek(path=path, by=b"x: y"), (401,))
        yield Case(f"a mistyped key for {call}", peek(path=path, by=b"x-api-key: " + MISTYPED), (401,))


def other_calls() -> Iterator[Case]:
    for name, (path, body, statuses, field) in OTHER_CALLS.items():
        yield Case(name, ask(body, path=path), statuses, names=field)
    for name, (query, statuses, field) in QUERIES.items():
        sent = head(b"GET /v1/usage%b HTTP/1.1" % query, b"host: test", CLOSE, BY_KEY)
        yield Case(f"usage: {name}", sent, statuses, names=field, is_problem=statuses != (200, 400, 422))
    for name, (method, place, body, statuses, field) in ADMIN_BODIES.items():
        sent = ask(body, path=b"/v1/admin/" + place, method=method, by=BY_TOKEN)
        yield Case(f"admin: {name}", sent, statuses, names=field)


def keys() -> Iterator[Case]:
    for name, line in BAD_KEYS.items():
        yield Case(f"a key that is {name}", ask(json.dumps(GOOD).encode(), by=line), (401,))
    for name, line in SECOND_KEYS.items():
        yield Case(name, ask(json.dumps(GOOD).encode(), by=line), (400,), names="x-api-key")
    yield Case("a key in the query", peek(path=b"/v1/check?x-api-key=" + KEY, by=b"x: y"), (401,))
    yield Case("an API key for admin", ask(b'{"name": "x"}', path=b"/v1/admin/tenants"), (401,))
    yield Case("a key in a trailer", in_trailer(BY_KEY, CHECK), (401,))
    yield Case("a key in a trailer, by the ASGI app", in_trailer(BY_KEY, CHECK + b"?"), (401,))
    yield Case("a key in a trailer of reserve", in_trailer(BY_KEY, b"/v1/reserve"), (401,))
    yield Case("an admin token in a trailer", in_trailer(BY_TOKEN, b"/v1/admin/reset"), (401,))


def paths_and_chunks() -> Iterator[Case]:
    for method, path in WRONG_METHODS:
        yield Case(f"{method.decode()} {path.decode()}", ask(b"", method=method, path=path), (405,))
    for path in UNKNOWN_PATHS:
        yield Case(f"unknown path {path[:40]!r}", peek(path=path), (404,))
    yield Case("a path of 60,000 bytes", peek(path=b"/" + b"a" * 60_000), (404, 414, 431))
    for path, (name, body) in zip((CHECK + b"?", b"/v1/reserve", b"/v1/explain"), BROKEN_CHUNKS.items(), strict=True):
        yield _framed(f"{name} for {path.decode()}", bare(body, CHUNKED, path=path))
    yield Case("an encoded slash", peek(path=b"/v1/check%2Fbatch"), (404,))


def in_trailer(line: bytes, path: bytes) -> bytes:
    """Return a request that lacks a field which is only in its trailer. A trailer must not be read as the head."""
    body = chunks(json.dumps(GOOD).encode())[:-2] + line + b"\r\n\r\n"
    return head(b"POST %b HTTP/1.1" % path, b"host: test", CLOSE, JSON, CHUNKED) + body


CASES = [*bodies(), *every_call(), *other_calls(), *keys(), *paths_and_chunks(), *FRAMING]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_it_is_refused_as_documented_and_takes_nothing(subject: ServiceUnderTest, case: Case) -> None:
    before = subject.remaining()
    answers = subject.send(case)
    assert subject.remaining() == before
    if not answers:
        assert case.may_hang_up, "no answer"
        return
    assert len(answers) == 1, answers
    answer = answers[0]
    assert answer.status in case.statuses, answer
    assert "x-evil" not in answer.headers
    for secret in subject.secrets.values():
        assert secret not in answer.head + answer.body
    if case.is_problem and answer.status >= 400:
        assert_problem(answer, case.names)


def assert_problem(answer: HttpResponse, names: str) -> None:
    assert answer.headers["content-type"] == "application/problem+json", answer
    problem = answer.json
    assert problem["status"] == answer.status
    for member in ("type", "title", "detail", "code"):
        assert isinstance(problem[member], str), problem
        assert problem[member], problem
    assert problem["type"] == "about:blank" or ":" in problem["type"]
    if answer.status != 400 or "malformed" not in problem["code"] or names == "x-api-key":
        assert names in problem["detail"], problem
    if answer.status == 401:
        assert "www-authenticate" in answer.headers
    if answer.status == 405:
        assert answer.headers["allow"]


def test_after_all_of_it_the_service_answers_and_its_log_has_no_secret(subject: ServiceUnderTest) -> None:
    before, logged = subject.remaining(), len(subject.log.read_bytes())
    for case in CASES:
        assert all(answer.status < 500 or answer.status in case.statuses for answer in subject.send(case)), case
    assert subject.remaining() == before
    assert subject.running.process.poll() is None
    log = subject.log.read_bytes()
    assert b"Traceback" not in log[logged:]
    for secret in (PEPPER.encode(), *subject.secrets.values()):
        assert secret not in log
        assert secret.removeprefix(b"lf_live_")[12:] not in log


# --- After the last answer -------------------------------------------------------------------------------------------


def kept(sent: bytes) -> bytes:
    """Return the same request on a connection that stays open."""
    return sent.replace(CLOSE + b"\r\n", b"")


TAKES = json.dumps(GOOD).encode()
ENDINGS: dict[str, bytes] = {
    "a check that says so": peek(),
    "a health request that says so": head(b"GET /v1/health HTTP/1.1", b"host: test", CLOSE),
    "a check of HTTP/1.0": kept(bare(PEEK_BODY, LENGTH, version=b"HTTP/1.0")),
    "no HTTP": b"nonsense\r\n\r\n",
    "two keys": kept(peek(b"x-api-key: other")),
    "a body that is compressed": kept(peek(b"content-encoding: gzip")),
    "a body that is too large": kept(ask(b" " * 70_000)),
}
SECONDS: dict[str, bytes] = {
    "a check": kept(ask(TAKES)),
    "a batch": kept(ask(b'{"checks": [%b]}' % TAKES, path=BATCH)),
    "a reservation": kept(ask(TAKES, path=b"/v1/reserve")),
    "a health request and a check": head(b"GET /v1/health HTTP/1.1", b"host: test") + kept(ask(TAKES)),
}


@pytest.mark.parametrize("second", SECONDS)
@pytest.mark.parametrize("first", ENDINGS)
def test_nothing_is_done_after_the_answer_that_ends_a_connection(
    subject: ServiceUnderTest, first: str, second: str
) -> None:
    before, logged = subject.remaining(), len(subject.log.read_bytes())
    answers = subject.send(Case("", ENDINGS[first] + SECONDS[second], ()))
    assert [answer.headers.get("connection") for answer in answers] == ["close"]
    assert subject.remaining() == before
    assert b"Traceback" not in subject.log.read_bytes()[logged:]


# --- What looks odd and is right -------------------------------------------------------------------------------------


def legal_check(**fields: str) -> bytes:
    return ask(raw_check(**{"cost": "0", **fields}))


LEGAL: dict[str, bytes] = {
    "a subject of 512 bytes": legal_check(subject=json.dumps("x" * 512)),
    "a subject of 512 bytes and 256 characters": legal_check(subject=json.dumps("ü" * 256, ensure_ascii=False)),
    "a resource of 512 bytes": legal_check(resource=json.dumps("x" * 512)),
    "an escaped NUL": legal_check(subject='"a\\u0000b"'),
    "escaped line breaks": legal_check(subject='"a\\r\\nx-evil: 1"'),
    "line breaks as resource": legal_check(resource='"a\\r\\nx-evil: 1"'),
    "a pair of surrogates": legal_check(subject='"\\ud83d\\ude42"'),
    "a direction mark": legal_check(subject='"\\u202e"'),
    "a code point that is not a character": legal_check(subject='"\\ufeff\\uffff"'),
    "minus zero": legal_check(cost="-0"),
    "no costs": legal_check(costs="null"),
    "empty costs": legal_check(costs="{}"),
    "no priority": legal_check(priority="null"),
    "no plan": legal_check(plan_id="null"),
    "space around it": ask(b" \r\n\t" + PEEK_BODY + b"\n "),
    "exactly 64 KiB": ask(PEEK_BODY.ljust(65_536)),
    "no content type": ask(PEEK_BODY, b"x: y"),
    "a charset": ask(PEEK_BODY, JSON + b"; charset=utf-8"),
    "capitals": ask(PEEK_BODY, b"CONTENT-TYPE: APPLICATION/JSON"),
    "another type of JSON": ask(PEEK_BODY, b"content-type: application/problem+json"),
    "no coding": ask(PEEK_BODY, JSON, b"content-encoding: identity"),
    "spaces around the key": peek(by=b"x-api-key:   " + KEY + b"   "),
    "a tab before the key": peek(by=b"x-api-key:\t" + KEY),
    "a tab after the key": peek(by=b"x-api-key: " + KEY + b"\t"),
    "the same key twice": peek(by=BY_KEY + b"\r\n" + BY_KEY),
    "the same key as bearer too": peek(by=BY_KEY + b"\r\nauthorization: Bearer " + KEY),
    "a bearer in capitals": peek(by=b"AUTHORIZATION: BEARER " + KEY),
    "a bearer with two spaces": peek(by=b"authorization: Bearer  " + KEY),
    "an absolute URI": peek(path=b"http://test/v1/check"),
    "an absolute URI of another host": peek(path=b"http://example.com:8000/v1/check"),
    "an absolute URI in capitals": peek(path=b"HTTP://TEST/v1/check"),
    "an encoded letter": peek(path=b"/v1/chec%6B"),
    "a query": peek(path=b"/v1/check?a=b"),
    "an empty line before it": b"\r\n" + peek(),
    "no reason to continue": peek(b"expect: 100-continue"),
    "an upgrade that is not offered": peek(
        b"upgrade: h2c", b"connection: upgrade, http2-settings", b"http2-settings: x"
    ),
    "a web socket that is not offered": peek(b"upgrade: websocket", b"connection: upgrade"),
    "90 fields": peek(*(b"x-%d: y" % number for number in range(90))),
    "a field of 7,000 bytes": peek(b"x-large: " + b"x" * 7_000),
    "bytes past ASCII in a field": peek("x-name: Müller".encode("latin-1")),
    "a tab in a field": peek(b"x: a\tb"),
    "an empty field": peek(b"x:"),
    "chunks of one byte": bare(chunks(*[PEEK_BODY[index : index + 1] for index in range(len(PEEK_BODY))]), CHUNKED),
    "a chunk's size in capitals": bare(b"%X\r\n%b\r\n0\r\n\r\n" % (len(PEEK_BODY), PEEK_BODY), CHUNKED),
    "a chunk's size with zeros": bare(b"000%x\r\n%b\r\n0\r\n\r\n" % (len(PEEK_BODY), PEEK_BODY), CHUNKED),
    "the last chunk of many zeros": bare(b"%x\r\n%b\r\n0000\r\n\r\n" % (len(PEEK_BODY), PEEK_BODY), CHUNKED),
    "an extension of a chunk": bare(b"%x;a=b;c\r\n%b\r\n0\r\n\r\n" % (len(PEEK_BODY), PEEK_BODY), CHUNKED),
    "an extension in quotes": bare(b'%x;a="b c"\r\n%b\r\n0\r\n\r\n' % (len(PEEK_BODY), PEEK_BODY), CHUNKED),
    "a coding in capitals": bare(chunks(PEEK_BODY), b"Transfer-Encoding: CHUNKED"),
    "a trailer": bare(chunks(PEEK_BODY)[:-2] + b"x-sum: 1\r\n\r\n", CHUNKED, b"trailer: x-sum"),
    "HTTP/1.0": bare(PEEK_BODY, LENGTH, version=b"HTTP/1.0"),
}


@pytest.mark.parametrize("name", LEGAL)
def test_an_unusual_but_valid_request_is_answered(subject: ServiceUnderTest, name: str) -> None:
    answers = subject.send(Case(name, LEGAL[name], (200,)))
    assert [answer.status for answer in answers] == [200], answers
    assert answers[0].json["allowed"] is True
    assert "x-evil" not in answers[0].headers


def test_the_table_has_the_documented_size() -> None:
    names = [case.name for case in CASES]
    assert len(names) > 220
    assert len(set(names)) == len(names)
