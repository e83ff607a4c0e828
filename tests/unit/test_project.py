"""Check the rules of the project: linters, import layers, and no machine-specific text in the tree."""

import ast
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RANDOM_SEARCHES, SECOND_TIMEOUT_SECONDS, SLOW_PLACES

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

LINTERS = {
    "formatting": ["ruff", "format", "--check", "."],
    "lint": ["ruff", "check", "."],
    "types": ["mypy"],
    "layers": ["lint-imports"],
}

# A path of one machine, or the host of a package index.
MACHINE_SPECIFIC = re.compile(rb"(?<![\w.-])/(?:root|work|home)/|pypi\.org|files\.pythonhosted")


@pytest.mark.lint
@pytest.mark.slow
@pytest.mark.timeout(600)  # mypy without its cache takes 30 s of CPU time
@pytest.mark.parametrize("command", LINTERS.values(), ids=LINTERS)
def test_the_linters_find_nothing(command: list[str]) -> None:
    done = subprocess.run([BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_second_time_out_follows() -> None:
    """The first time-out may be caught, as Hypothesis does."""
    left, again = signal.getitimer(signal.ITIMER_REAL)
    assert left > 0
    assert again == SECOND_TIMEOUT_SECONDS


def test_the_listed_test_files_exist() -> None:
    assert [place for place in sorted(SLOW_PLACES | RANDOM_SEARCHES) if not (ROOT / "tests" / place).exists()] == []


def test_the_small_suite_names_existing_files_and_tests() -> None:
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / "scripts" / "test-versions").read_text())
    assert [name for name, _ in named if not (ROOT / name).exists()] == []
    assert [test for name, test in named if test and f"def {test}(" not in (ROOT / name).read_text()] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{number}: {line.decode(errors='replace').strip()}"
        for path in _files_of_the_project()
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
        if path != Path(__file__) and MACHINE_SPECIFIC.search(line)
    ]
    assert offences == []


def test_the_core_imports_the_standard_library_and_msgspec_only() -> None:
    allowed = sys.stdlib_module_names | {"limitforge", "msgspec"}
    core = ROOT / "src" / "limitforge" / "core"
    strangers = {
        f"{path.relative_to(ROOT)}: {name}" for path in core.rglob("*.py") for name in _imports(path) - allowed
    }
    assert strangers == set()


def _files_of_the_project() -> list[Path]:
    """Return the files that git tracks, or would track once added."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def _imports(path: Path) -> set[str]:
    """Return the top-level packages that a module imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}
