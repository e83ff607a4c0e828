"""`scripts/choose-python` finds the fastest suitable interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHOOSE = ROOT / "scripts" / "choose-python"

# Answers the queries of the script with a claimed speed, so that the test does not depend on the machine.
FAKE = """#!/bin/sh
case "$*" in
*ensurepip*) exit {without_venv} ;;
*python_speed.py) echo {seconds} ;;
*realpath*) echo "{version} $0" ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The first folder of the PATH. The system's own interpreters are on it too, and take some milliseconds."""
    return tmp_path


def place(file: Path, version: str = "3.12.9", seconds: str = "0.000001", *, without_venv: int = 0) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(FAKE.format(version=version, seconds=seconds, without_venv=without_venv))
    file.chmod(0o755)
    return file


def choose(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "PYENV_ROOT": str(folder / "pyenv")}
    return subprocess.run([CHOOSE, *given], env=environment, capture_output=True, text=True, check=False)


def test_the_fastest_is_chosen_and_the_reason_is_printed(folder: Path) -> None:
    place(folder / "python3", seconds="30")
    place(folder / "python3.11", "3.11.1", seconds="20")
    fastest = place(folder / "pyenv" / "versions" / "3.12.9" / "bin" / "python3.12")
    done = choose(folder)
    assert done.stdout == f"{fastest}\n", done.stderr
    assert f"Python 3.12.9 ({fastest}): the fastest of " in done.stderr


def test_an_unusable_interpreter_is_skipped_even_if_it_is_the_fastest(folder: Path) -> None:
    usable = place(folder / "python3.11", "3.11.1", seconds="0.000002")
    place(folder / "python3", "3.9.18")
    place(folder / "python3.12", without_venv=1)
    (folder / "python3.13").write_text("#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    (folder / "python3.13").chmod(0o755)
    place(folder / "pyenv" / "versions" / "3.99.0" / "bin" / "python3", "3.99.0")
    done = choose(folder)
    assert done.stdout == f"{usable}\n", done.stderr


def test_a_named_interpreter_is_used_unless_it_is_too_old(folder: Path) -> None:
    place(folder / "python3")
    named = folder / "named"
    named.write_text("#!/bin/sh\nexit 0\n")
    named.chmod(0o755)
    assert choose(folder, str(named)).stdout == f"{named}\n"
    named.write_text("#!/bin/sh\nexit 1\n")
    done = choose(folder, str(named))
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr


def test_the_measured_work_runs_and_prints_its_cpu_time() -> None:
    work = [sys.executable, "-I", str(ROOT / "scripts" / "python_speed.py")]
    assert float(subprocess.run(work, capture_output=True, text=True, check=True).stdout) > 0
