"""Runs the `limitforge` command as a user does, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

SECONDS = 60.0  # generous: a busy machine is no reason to fail
PROGRAM = str(Path(sys.executable).parent / "limitforge")

# A known terminal, whatever the one is that the tests run in.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")} | {
    "COLUMNS": "80",
    "LINES": "40",
    "TERM": "xterm-256color",
    "PYTHONUTF8": "1",
}


def limitforge(
    *arguments: str, given: bytes | None = None, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The finished process; `given` is its stdin, `folder` where it runs, `environment` what is set besides."""
    done = subprocess.run(
        [PROGRAM, *arguments],
        input=given or b"",
        capture_output=True,
        cwd=folder,
        env=ENVIRONMENT | environment,
        timeout=SECONDS,
        check=False,
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


# Imports once what commands of the catalog need, and then becomes one command after the other, each in a fork.
_FORKING = """
import json, os, signal, sys
import limitforge.cli.app, limitforge.cli.config, limitforge.cli.db, limitforge.cli.plans, limitforge.cli.keys
import aiosqlite, sqlalchemy.dialects.sqlite.aiosqlite, rich.table
from limitforge.cli import main

sys.stdout.flush()
orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
for line in orders:
    order = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(order["seconds"])
        for number, file in enumerate(order["files"]):
            os.dup2(os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv = ["limitforge", *order["arguments"]]
        status = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
            status = 70
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
"""


class Commands:
    """The same as `limitforge`, ten times as fast where there are many commands to run."""

    def __init__(self) -> None:
        self._files = TemporaryDirectory(prefix="limitforge-commands-")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    def run(
        self, *arguments: str, given: bytes | None = None, folder: Path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        files = [Path(self._files.name) / name for name in ("stdin", "stdout", "stderr")]
        for file, content in zip(files, (given or b"", b"", b""), strict=True):
            file.write_bytes(content)
        order = {
            "arguments": arguments,
            "files": [str(file) for file in files],
            "folder": str(folder),
            "environment": ENVIRONMENT | environment,
            "seconds": int(SECONDS),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        _, out, err = (file.read_text() for file in files)
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(list(arguments), status, out, err)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._files.cleanup()
