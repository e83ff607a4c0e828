"""Runs the `limitforge` command as a user does, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

SECONDS = 60.0  # generous: a busy machine is no reason to fail
PROGRAM = str(Path(sys.executable).parent / "limitforge")

# A known terminal, whatever the one is that the tests run in.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")} | {
    "COLUMNS": "80",
    "LINES": "40",
    "TERM": "xterm-256color",
    "PYTHONUTF8": "1",
}


def limitforge(*arguments: str, given: bytes | None = None) -> subprocess.CompletedProcess[str]:
    """The finished process; `given` is its stdin."""
    done = subprocess.run(
        [PROGRAM, *arguments],
        input=given or b"",
        capture_output=True,
        env=ENVIRONMENT,
        timeout=SECONDS,
        check=False,
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
