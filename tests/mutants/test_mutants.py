"""Test `make mutants` on a project of five lines, and check the list of bugs."""

import functools
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import BUG_LIST, ROOT, group_test_arguments, main
from tests.mutants.bugs import PACKAGE, Bug, read_bugs

BUGS = read_bugs(ROOT / BUG_LIST)

SOURCE = """
from time import sleep

def larger(a, b):
    while a is None:
        sleep(1)
    return a if a > b else b
"""
TESTS = """
from limitforge.numbers import larger

def test_the_larger_is_first(): assert larger(2, 1) == 2
def test_the_larger_is_last(): assert larger(1, 2) == 2
"""
KILLED = "{ file = 'numbers.py', old = 'a > b', new = 'a < b', tests = 'tests/test_it.py' }"
SURVIVES = "{ file = 'numbers.py', old = 'a > b', new = 'a > b - 1', tests = 'tests/test_it.py -k first' }"
EQUIVALENT = "{ file = 'numbers.py', old = 'a > b', new = 'a >= b', tests = 'tests', equivalent = 'they are equal' }"
HANGS = "{ file = 'numbers.py', old = 'a is None', new = 'a', tests = 'tests/test_it.py' }"
HANGS_AT_IMPORT = '{ file = "numbers.py", old = "\\ndef", new = "\\nsleep(600)\\ndef", tests = "tests" }'
NOT_THERE = "{ file = 'numbers.py', old = 'a == b', new = 'a', tests = 'tests/test_it.py' }"
TWICE = "{ file = 'numbers.py', old = 'b', new = 'a', tests = 'tests/test_it.py' }"
NO_FILE = "{ file = 'letters.py', old = 'b', new = 'a', tests = 'tests/test_it.py' }"
NO_TEST = "{ file = 'numbers.py', old = 'a > b', new = 'a < b', tests = 'tests/test_it.py -k nothing' }"


of_the_harness = pytest.mark.soak  # rarely changes: `make test` runs only some of its tests


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one module and two tests, and a pytest that starts quickly."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    files = {
        "pytest.ini": "[pytest]\naddopts = -p xdist -p pytest_timeout\ntimeout = 3\n",
        "src/limitforge/__init__.py": "",
        "src/limitforge/numbers.py": SOURCE,
        "tests/test_it.py": TESTS,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / BUG_LIST).parent.mkdir()
    return tmp_path


def run(project: Path, *bugs: str, options: tuple[str, ...] = ()) -> int:
    (project / BUG_LIST).write_text(f"bugs = [{', '.join(bugs)}]")
    return main(["--root", str(project), *options])


def test_each_bug_is_killed_or_survives_or_hangs_or_is_equivalent_or_broken(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bugs = [KILLED, SURVIVES, HANGS, EQUIVALENT, NOT_THERE, TWICE, NO_FILE]
    assert run(project, *bugs) == 1
    printed = capsys.readouterr().out
    for outcome in (
        r"killed     numbers.py: `a > b` -> `a < b` .*\n +tests/test_it.py::test_the_larger_is_first",
        r"survived   numbers.py: `a > b` -> `a > b - 1`",
        r"killed     numbers.py: `a is None` -> `a` .*\n +hung: tests/test_it.py::test_the_larger_is_first",
        r"equivalent numbers.py: `a > b` -> `a >= b`\n +they are equal",
        r"broken     numbers.py: `a == b` -> `a`\n +the text to replace occurs 0 times, not once",
        r"broken     numbers.py: `b` -> `a`\n +the text to replace occurs 3 times, not once",
        r"broken     letters.py: `b` -> `a`\n +there is no such file",
    ):
        assert re.search(outcome, printed)
    assert "2 killed (1 by a time-out), 1 survived, 3 broken, 1 equivalent, of 7 bugs" in printed
    assert (project / "src/limitforge/numbers.py").read_text() == SOURCE


@of_the_harness
def test_words_select_files_and_all_killed_is_success(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(project, NO_FILE, KILLED, options=("umber",)) == 0
    assert "1 killed (0 by a time-out), 0 survived, 0 broken, 0 equivalent, of 1 bugs" in capsys.readouterr().out
    assert run(project, NO_FILE, KILLED, options=("colours",)) == 1


@pytest.mark.parametrize("bug", [SURVIVES, NOT_THERE])
def test_a_bug_that_survives_or_cannot_be_planted_fails_the_run(project: Path, bug: str) -> None:
    assert run(project, KILLED, bug) == 1


@of_the_harness
def test_a_hang_is_stopped_at_the_time_limit_of_a_bug(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(project, HANGS_AT_IMPORT, options=("--timeout", "3")) == 0
    assert "hung: no end after 3 s" in capsys.readouterr().out


@of_the_harness
def test_nothing_is_planted_while_tests_fail_without_a_bug(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (project / "tests/test_it.py").open("a") as tests:
        tests.write("def test_nonsense(): assert larger(1, 1) == 2\n")
    assert run(project, KILLED, NO_TEST) == 1
    printed = capsys.readouterr().out
    assert "FAILED tests/test_it.py::test_nonsense" in printed
    assert "3 deselected" in printed
    assert "killed" not in printed


@of_the_harness
def test_an_interrupt_reports_the_results_so_far(project: Path) -> None:
    slow = "def test_slow():\n    import time\n    time.sleep(0 if larger(1, 2) == 2 else 600)\n"
    (project / "tests/test_slow.py").write_text(f"from limitforge.numbers import larger\n\n{slow}")
    (project / "pytest.ini").write_text("[pytest]\naddopts = -p xdist\n")
    waits = KILLED.replace("test_it", "test_slow")
    (project / BUG_LIST).write_text(f"bugs = [{KILLED}, {waits}]")
    command = [sys.executable, "-m", "tests.mutants", "--root", str(project)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if "killed" in line:
                program.send_signal(signal.SIGINT)
                break
        rest = program.stdout.read()
    assert "Interrupted after 1 of 2 bugs" in rest
    assert "1 killed (0 by a time-out), 0 survived" in rest
    assert program.returncode == 130


def test_all_tests_of_all_bugs_run_in_few_groups() -> None:
    lines = ["a.py b.py::one", "a.py::two", "b.py::one", "c.py -k word", "d.py"]
    assert group_test_arguments(lines) == ["a.py d.py", "b.py::one", "c.py -k word"]


# -- the list


text_of = functools.cache(Path.read_text)


@pytest.mark.parametrize("file", sorted({bug.file for bug in BUGS}))
def test_every_bug_of_the_list_can_be_planted(file: str) -> None:
    wrong = {}
    for bug in BUGS:
        if bug.file == file:
            try:
                plant(bug)
            except (AssertionError, SyntaxError, ValueError) as error:
                wrong[str(bug)] = error
    assert wrong == {}


def plant(bug: Bug) -> None:
    planted = bug.apply_to(text_of(ROOT / PACKAGE / bug.file))
    if bug.file.endswith(".py"):
        compile(planted, bug.file, "exec")
    for word in bug.tests.split():
        if word.startswith("tests/"):
            path, _, test = word.partition("::")
            assert (ROOT / path).exists(), f"there is no {path}"
            if test:
                assert test.partition("[")[0].rpartition("::")[2] in text_of(ROOT / path), f"there is no {word}"


def test_no_bug_is_listed_twice() -> None:
    assert len({(bug.file, bug.old, bug.new) for bug in BUGS}) == len(BUGS)
