"""`limitforge replay`: the vectors, and everything that may be wrong with a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from limitforge.cli.replay.cases import MAX_BYTES, parse_cases
from limitforge.cli.replay.command import differences
from limitforge.errors import InvalidInput
from tests.cli.command import run_cli, run_installed_cli
from tests.servers import RedisServer

VECTORS = Path(__file__).parents[1] / "vectors" / "limits.json"

WINDOW = {"name": "w", "algorithm": "fixed_window", "limit": 2, "window_seconds": 60}
SLOTS = {"name": "s", "algorithm": "concurrency", "max_concurrent": 1, "lease_ttl_seconds": 30}


def case(*steps: Any, **fields: Any) -> dict[str, Any]:
    return {"name": "a case", "base_ms": 1_700_006_400_000, "limits": [WINDOW], "steps": list(steps)} | fields


def run_replay(*cases: Any, store: str = "memory") -> list[dict[str, Any]]:
    done = run_cli("replay", "-", "--store", store, stdin=json.dumps(cases).encode())
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- Decisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "memory://", "redis"])
def test_every_vector_is_decided_as_expected(kind: str, redis_url: str, redis_server: RedisServer) -> None:
    run = run_installed_cli if kind == "memory" else run_cli
    done = run("replay", str(VECTORS), "--store", redis_url if kind == "redis" else kind)
    decisions = [json.loads(line) for line in done.stdout.splitlines()]
    expected = [step["expect"] for case in json.loads(VECTORS.read_bytes()) for step in case["steps"]]
    assert len(decisions) == len(expected)
    wrong = [d for decision, expect in zip(decisions, expected, strict=True) for d in _unequal(expect, decision)]
    assert wrong == []
    assert (done.returncode, done.stderr) == (0, f"{len(expected)} steps, all as expected\n")
    assert redis_server.command("DBSIZE") == b":0\r\n"


def _unequal(expected: dict[str, Any], decision: dict[str, Any]) -> list[str]:
    """Compare independently of the command. A delay that is not expected must be absent."""
    wrong = [name for name, value in expected.items() if name != "limits" and decision.get(name, "nothing") != value]
    for limit, fields in expected.get("limits", {}).items():
        wrong += [f"{limit}.{name}" for name, value in fields.items() if decision["limits"][limit][name] != value]
    return [*wrong, *(decision.keys() & {"delay_ms"} - expected.keys())]


def test_a_decision_has_the_state_of_each_limit() -> None:
    assert run_replay(case({"at_ms": 1_000, "cost": 3})) == [
        {
            "allowed": False,
            "retry_after_ms": None,
            "binding": "w",
            "limit": 2,
            "remaining": 2,
            "reset_after_ms": 59_000,
            "would_deny": [],
            "limits": {
                "w": {
                    "limit": 2,
                    "remaining": 2,
                    "reset_after_ms": 59_000,
                    "retry_after_ms": None,
                    "allowed": False,
                    "monitored": False,
                }
            },
        }
    ]


def test_the_default_cost_of_a_step_is_one() -> None:
    decisions = run_replay(case({"at_ms": 0}, {"at_us": 1, "costs": {"w": 0}}, {"at_ms": 1, "cost": 1}))
    assert [decision["remaining"] for decision in decisions] == [1, 1, 0]


def test_each_case_starts_from_clean_state() -> None:
    decisions = run_replay(case({"at_ms": 0, "cost": 2}), case({"at_ms": 0, "cost": 2}))
    assert [decision["allowed"] for decision in decisions] == [True, True]


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_a_label_that_holds_nothing_may_be_released_and_renewed(kind: str, redis_url: str) -> None:
    steps = (
        {"at_ms": 0, "release": "never seen"},
        {"at_ms": 1, "renew": "never seen"},
        {"at_ms": 2, "lease": "a"},
        {"at_ms": 3, "lease": "denied"},
        {"at_ms": 4, "release": "denied"},
        {"at_ms": 5},
        {"at_ms": 6, "release": "a"},
        {"at_ms": 7, "release": "a"},
        {"at_ms": 8, "renew": "a"},
        {"at_ms": 9, "lease": "a"},
    )
    decisions = run_replay(case(*steps, limits=[SLOTS]), store=redis_url if kind == "redis" else kind)
    assert [decision.get("allowed") for decision in decisions] == [
        *(None, None, True, False, None, False, None, None, None, True)
    ]
    assert [decision for decision in decisions if "allowed" not in decision] == [{}] * 6


def test_other_keys_in_redis_are_kept(redis_url: str, redis_server: RedisServer) -> None:
    redis_server.command("SET lf:theirs 1")
    run_replay(case({"at_ms": 0}, limits=[WINDOW, SLOTS]), store=redis_url)
    assert redis_server.command("KEYS *") == b"*1\r\n$9\r\nlf:theirs\r\n"


# --- Expectations ----------------------------------------------------------------------------------------------------


def test_a_wrong_expectation_is_printed_to_stderr_and_changes_no_decision() -> None:
    wrong = {"allowed": False, "limits": {"w": {"remaining": 9}}, "nonsense": 1}
    steps = ({"at_ms": 0, "expect": {"allowed": True}}, {"at_ms": 0, "expect": wrong}, {"at_ms": 0})
    done = run_cli("replay", "-", stdin=json.dumps([case(*steps)]).encode())
    plain = run_cli("replay", "-", stdin=json.dumps([case({"at_ms": 0}, {"at_ms": 0}, {"at_ms": 0})]).encode())
    assert done.returncode == 1
    assert done.stdout == plain.stdout
    assert done.stderr.splitlines() == [
        "case 1 ('a case'), step 2: allowed: expected false, got true",
        "case 1 ('a case'), step 2: limits.w.remaining: expected 9, got 0",
        "case 1 ('a case'), step 2: nonsense: expected 1, got nothing",
        "3 steps, 2 with an expectation, 3 not as expected",
    ]
    assert (plain.returncode, plain.stderr) == (0, "")


def test_many_wrong_expectations_are_counted_not_listed() -> None:
    steps = [{"at_ms": 0, "expect": {"limit": 3}}] * 30
    done = run_cli("replay", "-", stdin=json.dumps([case(*steps)]).encode())
    assert done.stderr.splitlines()[-2:] == ["... and 10 more", "30 steps, 30 not as expected"]


def test_an_expectation_may_be_any_json_value() -> None:
    expect = {"binding": "\ud800", "limit": 10**30 - 1, "a\n": []}
    done = run_cli("replay", "-", stdin=json.dumps([case({"at_ms": 0, "expect": expect}, name="")]).encode())
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        'case 1, step 1: binding: expected "\\ud800", got "w"',
        f"case 1, step 1: limit: expected {'9' * 30}, got 2",
        "case 1, step 1: 'a\\n': expected [], got nothing",
        "1 step, 3 not as expected",
    ]


def test_true_is_not_one() -> None:
    assert list(differences({"allowed": 1, "delay_ms": None}, {"allowed": True, "delay_ms": None})) == [
        "allowed: expected 1, got true"
    ]


# --- Invalid files ---------------------------------------------------------------------------------------------------

BAD_FILES: dict[str, tuple[Any, str]] = {
    "object": ({"base_ms": 0}, "the file: must be a list of cases, got an object"),
    "case": ([case(), 7], "case 2: must be an object with base_ms, limits and steps, got 7"),
    "no base": ([{"name": "x", "limits": [], "steps": []}], "case 1 ('x'), base_ms: is required"),
    "base": ([case(base_ms="now")], "case 1 ('a case'), base_ms: must be an integer, got 'now'"),
    "no limits": ([{"base_ms": 0, "steps": []}], "case 1, limits: is required"),
    "limits": ([case(limits={})], "case 1 ('a case'), limits: must be a list, got an object"),
    "limit": ([case(limits=["1/minute"])], "case 1 ('a case'), limits[0]: must be an object with the fields of a"),
    "algorithm": ([case(limits=[{"algorithm": "x"}])], "case 1 ('a case'), limits[0], algorithm: must be one of"),
    "limit field": ([case(limits=[WINDOW | {"speed": 1}])], "limits[0], speed: is not a field of fixed_window"),
    "limit bound": ([case(limits=[SLOTS | {"max_concurrent": -1}])], "limits[0], max_concurrent: must be from 0 to"),
    "same name": ([case(limits=[WINDOW, WINDOW])], "case 1 ('a case'), limits: two limits are named 'w'"),
    "no steps": ([{"base_ms": 0, "limits": []}], "case 1, steps: is required"),
    "step": ([case({"at_ms": 0}, [])], "case 1 ('a case'), step 2: must be an object with at_ms or at_us, got a list"),
    "step field": (
        [case({"at_ms": 0, "costt": 2})],
        "step 1, 'costt': is not a field of a step; the fields are at_ms,",
    ),
    "no time": ([case({"cost": 1})], "step 1, at_ms: is required (or at_us)"),
    "two times": ([case({"at_ms": 0, "at_us": 0})], "step 1, at_ms: can't be combined with at_us"),
    "time": ([case({"at_us": 1.5})], "step 1, at_us: must be an integer, got 1.5"),
    "time is true": ([case({"at_ms": True})], "step 1, at_ms: must be an integer, got true"),
    "too early": (
        [case({"at_ms": -1}, base_ms=0)],
        "step 1, at_ms: is out of range: base_ms + at_ms must be between",
    ),
    "too late": (
        [case({"at_ms": 2**60})],
        "base_ms + at_ms must be between the years 1970 and 2200",
    ),
    "negative cost": ([case({"at_ms": 0, "cost": -1})], "step 1, cost: must be from 0 to"),
    "cost": ([case({"at_ms": 0, "cost": "1"})], "step 1, cost: must be an integer, got '1'"),
    "no cost": ([case({"at_ms": 0, "cost": None})], "step 1, cost: must be an integer, got None"),
    "costs": ([case({"at_ms": 0, "costs": 1})], "step 1, costs: must map names of limits to costs, got 1"),
    "costs name": ([case({"at_ms": 0, "costs": {"x": 1}})], "step 1, costs: unknown limit 'x'; the limits are w"),
    "costs cost": ([case({"at_ms": 0, "costs": {"w": -1}})], "step 1, costs.w: must be from 0 to"),
    "priority": ([case({"at_ms": 0, "priority": "P9"})], "step 1, priority: must be one of P0, P1, P2, P3, got 'P9'"),
    "priority kind": ([case({"at_ms": 0, "priority": []})], "step 1, priority: must be text such as 'P1', got a list"),
    "lease": ([case({"at_ms": 0, "lease": 1})], "step 1, lease: must be a label (text), got 1"),
    "release": ([case({"at_ms": 0, "release": None})], "step 1, release: must be a label (text), got null"),
    "both": ([case({"at_ms": 0, "release": "a", "renew": "a"})], "step 1, renew: can't be combined with release"),
    "cost of renew": ([case({"at_ms": 0, "renew": "a", "cost": 1})], "step 1, cost: can't be combined with renew"),
    "expect": ([case({"at_ms": 0, "expect": True})], "step 1, expect: must be an object, got true"),
}

BAD_TEXTS = {
    "empty": (b"", "the file: is not valid JSON: Expecting value: line 1 column 1"),
    "cut": (b'[{"base_ms": 1', "the file: is not valid JSON: Expecting ',' delimiter: line 1 column 15"),
    "nan": (b'[{"base_ms": NaN}]', "the file: is not valid JSON: NaN is not a JSON number"),
    "not text": (b"\xff\xfe[]\xff", "the file: is not valid JSON"),
    "huge number": (b"[" + b"9" * 5_000 + b"]", "the file: is not valid JSON"),
    "deep": (b"[" * 200_000, "the file: is nested too deeply"),
    "twice": (b'[{"base_ms": 1, "base_ms": 2}]', "the file: has an object with a duplicate field 'base_ms'"),
    "big": (b" " * (MAX_BYTES + 1), "the file: must be at most 64 MiB"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_an_error_in_a_file_names_its_location(content: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_cases(json.dumps(content).encode())
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_a_file_that_is_not_a_list_of_cases_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_cases(text)
    assert str(refused.value).startswith(message)


def test_an_invalid_file_stops_the_command_before_its_first_decision() -> None:
    done = run_cli("replay", "-", stdin=json.dumps([case({"at_ms": 0}), case({"at_ms": 0, "cost": -1})]).encode())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: case 2 ('a case'), step 1, cost: must be from 0 to")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("name", "reason"), [("missing.json", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_named(name: str, reason: str, tmp_path: Path) -> None:
    done = run_cli("replay", str(tmp_path / name))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {tmp_path / name}: can't be read: {reason}")


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("http://x", "Error: --store: must start with memory://"),
        ("redis://x:y", "Error: --store: "),
        ("redis://[::1", "Error: --store: "),
    ],
)
def test_an_invalid_store_is_refused(store: str, message: str) -> None:
    done = run_cli("replay", str(VECTORS), "--store", store)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)


def test_an_unavailable_store_has_an_exit_status_of_its_own(own_redis_server: RedisServer) -> None:
    own_redis_server.kill()
    done = run_cli("replay", str(VECTORS), "--store", own_redis_server.url)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("Error: Redis did not answer: ")
    assert done.stderr.count("\n") == 1
