"""Run the fenced code blocks of a Markdown file, as a reader would."""

import ast
import asyncio
import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests import fork_server
from tests.cli.command import forking_socket

ROOT = Path(__file__).parents[2]
SHELL_SECONDS = 120.0

# The kinds of blocks, by the first word after the fence.
EXECUTED = ("python", "sh", "bash", "console")
PARSED = ("json", "toml")
DISPLAYED = ("text", "lua", "yaml")
ALLOWED = ", ".join((*EXECUTED, *PARSED, *DISPLAYED))

DOCUMENTED_REDIS = "redis://localhost:6379/0"

# The documented deadlines are for a quiet machine.
DOCUMENTED_DEADLINE = re.compile(r"deadline_ms=\d+")
TEST_DEADLINE_MS = 30_000

_FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})\s*(?P<info>\w*)")

# Sourced by bash before each block. Commands that change the machine or recurse are replaced: `make` is a dry run,
# `pip install` does nothing, and `git clone` links to this copy. Commands of limitforge that exit by themselves run in
# forks of one process, because importing it takes a second of CPU time.
_SHELL_PRELUDE = """
unset BASH_ENV
set -Eeuo pipefail
trap 'echo "failed at line $LINENO: $BASH_COMMAND" >&2' ERR
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
make() { command make --dry-run "$@"; }
pip() { [ "$1" = install ] || command pip "$@"; }
python() { [ "${*:1:3}" = "-m pip install" ] || command python "$@"; }
limitforge() { case "${1-}" in
  serve | demo) command limitforge "$@" ;;
  *) python -SE "$FORKING" run "$FORKING_SOCKET" "$@" ;;
esac; }
git() { if [ "$1" = clone ]; then ln -sfn . "$(basename "${!#}" .git)"; else command git "$@"; fi; }
"""


class BlockFailed(AssertionError):
    """A block failed. The message starts with file:line."""


@dataclass(frozen=True, slots=True)
class Block:
    path: Path
    line: int  # of the first line inside the fence, counted from 1
    info: str
    text: str

    @property
    def padded(self) -> str:
        """The text with leading empty lines, so that line numbers in errors are those of the file."""
        return "\n" * (self.line - 1) + self.text

    def failure(self, why: str) -> BlockFailed:
        return BlockFailed(f"{self.path}:{self.line}: {why}")


def find_blocks(path: Path) -> Iterator[Block]:
    lines = path.read_text().splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        start = number
        while number < len(lines) and not _is_closing_fence(lines[number], opening["fence"]):
            number += 1
        text = "".join(f"{line.removeprefix(opening['indent'])}\n" for line in lines[start:number])
        block = Block(path, start + 1, opening["info"], text)
        if number == len(lines):
            raise block.failure("this block is never closed")
        yield block
        number += 1


def run_file(path: Path, redis_url: str, scratch: Path) -> None:
    """Run every block of the file. Raises BlockFailed at the first failure. `scratch` is an empty folder."""
    module = ModuleType(f"code_blocks_of_{path.stem}")
    sys.modules[module.__name__] = module  # where dataclasses and typing resolve names
    try:
        with asyncio.Runner() as runner:
            for found in find_blocks(path):
                text = DOCUMENTED_DEADLINE.sub(
                    f"deadline_ms={TEST_DEADLINE_MS}", found.text.replace(DOCUMENTED_REDIS, redis_url)
                )
                block = Block(path, found.line, found.info, text)
                match block.info:
                    case "python":
                        _run_python(block, module, runner)
                    case "sh" | "bash" | "console":
                        _run_shell(block, scratch)
                    case "json" | "toml":
                        _parse(block)
                    case info if info not in DISPLAYED:
                        raise block.failure(f"a block is one of {ALLOWED}; this one says {info or 'nothing'}")
    finally:
        del sys.modules[module.__name__]


def _is_closing_fence(line: str, fence: str) -> bool:
    stripped = line.strip()
    return stripped.startswith(fence) and not stripped.strip(fence[0])


def _run_python(block: Block, module: ModuleType, runner: asyncio.Runner) -> None:
    try:
        code = compile(block.padded, block.path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        outcome = eval(code, module.__dict__)  # noqa: S307 - code from our own documentation
        if inspect.iscoroutine(outcome):
            runner.run(outcome)
    except Exception as error:
        raise block.failure(f"\n{traceback.format_exc()}") from error


def _run_shell(block: Block, scratch: Path) -> None:
    """Run the whole block in one bash, in a copy of the project that the blocks of a file share."""
    copy = scratch / "limitforge"
    if not copy.exists():
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__"))
    (scratch / "prelude").write_text(_SHELL_PRELUDE)
    script = scratch / "block"
    script.write_text(_commands_of_console(block.padded) if block.info == "console" else block.padded)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "BASH_ENV": str(scratch / "prelude"),
        "FORKING": fork_server.__file__,
        "FORKING_SOCKET": forking_socket(),
    }
    # Write output to a file: a pipe would wait for background processes of the block.
    with (scratch / "output").open("w+") as output:
        process = subprocess.Popen(
            ["bash", script],
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(SHELL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise block.failure(f"still running after {SHELL_SECONDS:.0f} s\n{_text(output.name)}") from error
        finally:
            _kill_process_group(process)
    if status != 0:
        raise block.failure(f"exit status {status}\n{_text(output.name)}")


def _commands_of_console(text: str) -> str:
    """Return the commands of a session: lines after "$ ", continued after "> ". Other lines are output."""
    return "".join(f"{line[2:] if line.startswith(('$ ', '> ')) else ''}\n" for line in text.splitlines())


def _kill_process_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all processes have exited by themselves
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(path: str) -> str:
    return Path(path).read_text(errors="replace")


def _parse(block: Block) -> None:
    try:
        if block.info == "json":
            json.loads(block.text)
        else:
            tomllib.loads(block.text)
    except ValueError as error:
        raise block.failure(str(error)) from error
