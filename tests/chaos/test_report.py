"""A stopped run of `make chaos` or `make soak` reports what it did, and shows a failure only if there is one."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 45.0
FEW = [word for name in ("asyncio", "schemathesis", "xdist", "anyio") for word in ("-p", f"no:{name}")]  # to start soon

BEGINNING = """
import pathlib, time
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests import run_report
from tests.state_machines import run_machine

def ready():
    pathlib.Path("ready").touch()
"""
SEARCH = """
class Machine(RuleBasedStateMachine):
    @rule(number=st.integers())
    def step(self, number):
        ready()

def test_search():
    run_machine(Machine, 10**9, None)
"""
FAULTS = """
def test_faults():
    run_report.record_fault("killed")
    run_report.record_checks(1_234, 0.25)
    run_report.record_admitted(99, 100)
"""
CLEANS_UP = """
def test_cleans_up():
    try:
        ready()
        time.sleep(100)
    finally:
        assert False, "of the cleaning up"
"""
SHRINKS = """
failures = []

@settings(max_examples=10**6, database=None, deadline=None)
@given(st.lists(st.integers(), min_size=5))
def test_shrinks(numbers):
    if sum(numbers) > 1_000:
        failures.append(numbers)
        if len(failures) > 2:
            ready()
            time.sleep(100)
        raise ValueError(numbers)
"""
FAILS = """
def test_fails():
    assert 1 == 2
"""


def start(folder: Path, *parts: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "test_it.py").write_text(BEGINNING + "".join(parts))
    (folder / "conftest.py").write_text("")
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.run_report",
            "-p",
            "no:cacheprovider",
            *FEW,
            "--rootdir=.",
            "test_it.py",
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "LIMITFORGE_TEST_PROFILE": "soak",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def stopped(folder: Path, number: signal.Signals, *parts: str) -> tuple[int, str]:
    """Return the exit code and the output of a run that gets a signal in the middle of a test."""
    process = start(folder, *parts)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (folder / "ready").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, output


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGTERM])
def test_a_run_that_is_stopped_ends_with_what_it_did(tmp_path: Path, number: signal.Signals) -> None:
    code, output = stopped(tmp_path, number, FAULTS, SEARCH)
    assert code == 130
    assert f"by {number.name}; no finding" in output
    assert "test_faults: 1,234 checks, 1 faults, admitted 99 of 100 allowed, slowest wait 250 ms" in output
    assert "test_search (stopped): " in output
    assert "faults: 1 killed" in output
    assert "seed: " in output
    for word in ("Traceback", "KeyboardInterrupt", "FAILED", "Falsifying"):
        assert word not in output


@pytest.mark.soak
def test_an_error_that_the_stop_has_caused_is_not_shown_as_a_finding(tmp_path: Path) -> None:
    code, output = stopped(tmp_path, signal.SIGTERM, CLEANS_UP)
    assert code == 130
    assert "no finding" in output
    assert "raised while it was stopped: test_it.py::test_cleans_up: AssertionError('of the cleaning up" in output
    assert "FAILED" not in output


@pytest.mark.soak
def test_a_finding_before_the_stop_is_shown(tmp_path: Path) -> None:
    code, output = stopped(tmp_path, signal.SIGINT, FAILS, SEARCH)
    assert code == 1
    assert "1 finding: see above" in output
    assert "assert 1 == 2" in output


@pytest.mark.soak
def test_a_finding_that_was_still_being_shrunk_is_shown(tmp_path: Path) -> None:
    code, output = stopped(tmp_path, signal.SIGINT, SHRINKS)
    assert code == 1
    assert "test_it.py::test_shrinks: ValueError at " in output
    assert "1 finding: see above" in output


@pytest.mark.soak
def test_a_run_ends_by_itself_and_each_search_has_a_share_of_its_time(tmp_path: Path) -> None:
    more = SEARCH.replace("test_search", "test_another")
    process = start(tmp_path, SEARCH, more, LIMITFORGE_TEST_MINUTES="0.3", LIMITFORGE_TEST_SEED="7")
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert "test_search: " in output
    assert "seed: 7 " in output
    assert "finding" not in output or "no finding" in output


@pytest.mark.soak
def test_the_same_seed_draws_the_same_again(tmp_path: Path) -> None:
    part = "\ndef test_draw():\n    assert False, f'drew: {run_report.seeded_random().random()}.'\n"
    outputs = [start(tmp_path, part, LIMITFORGE_TEST_SEED=seed).communicate()[0] for seed in ("7", "7", "8")]
    first, second, other = (re.findall(r"drew: (0\.\d+)", output)[0] for output in outputs)
    assert first == second != other
