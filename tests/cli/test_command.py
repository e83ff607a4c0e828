"""The command itself: its help, its version, and its message without the extra packages."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.cli.command import ENVIRONMENT, SECONDS, run_cli, run_installed_cli


def test_the_version_is_that_of_the_package() -> None:
    done = run_installed_cli("--version")
    assert (done.returncode, done.stdout) == (0, f"limitforge {version('limitforge')}\n")


@pytest.mark.parametrize(
    ("arguments", "examples"),
    [
        ((), ['limitforge burst "100/minute" --requests 150 --rate 50/s', "limitforge replay limits.json --store"]),
        (("burst",), ['limitforge burst "100/minute; 10/second" --rate 25/s', "--algorithm leaky_bucket", "--json"]),
        (("replay",), ["limitforge replay limits.json --store redis://localhost:6379/0", '"bucket_capacity": 10']),
    ],
    ids=["limitforge", "burst", "replay"],
)
def test_help_shows_examples_on_lines_of_their_own(arguments: tuple[str, ...], examples: list[str]) -> None:
    done = run_cli(*arguments, "--help")
    assert done.returncode == 0
    lines = [line.strip() for line in done.stdout.splitlines()]
    for example in examples:
        assert any(example in line for line in lines)
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_without_arguments_it_shows_its_help() -> None:
    done = run_cli()
    assert "burst" in done.stdout + done.stderr
    assert "replay" in done.stdout + done.stderr


def test_a_misspelt_command_is_refused_with_the_nearest_one() -> None:
    done = run_installed_cli("bust")
    assert done.returncode == 2
    assert "burst" in done.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_it_prints_how_to_install_it(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from limitforge.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "pip install 'limitforge[cli]'" in done.stderr


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "limitforge.cli", "--version"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=SECONDS,
        check=True,
    )
    assert done.stdout.startswith("limitforge ")
