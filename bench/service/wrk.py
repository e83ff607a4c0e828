"""Generate load with `wrk`: one thread and 64 connections, each with one request at a time."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.server import ServerUnavailable
from bench.service.run_size import CONNECTIONS

SCRIPT = Path(__file__).with_name("load.lua")
SUBJECT_PLACEHOLDER, LINE_PLACEHOLDER = "#######", "@line@"
SPARE_SECONDS = 30  # added to the duration; then wrk hangs

_UNITS = {"us": 0.001, "ms": 1.0, "s": 1_000.0, "m": 60_000.0}


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """A request. In its headers and body, SUBJECT_PLACEHOLDER is replaced by the number of a subject, and
    LINE_PLACEHOLDER by one of the lines: one of many keys or resources.
    """

    url: str
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    lines: tuple[str, ...] = ("",)
    denial_text: str = ""
    """A text that only the body of a denial contains, if its status does not show it."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load. `denied` is None if only bodies show a denial, and they were not read."""

    requests: int
    per_second: float
    p50_ms: float
    p99_ms: float
    denied: int | None
    errors: int
    """Socket errors, and responses that took longer than two seconds."""


def program() -> str:
    found = shutil.which("wrk")
    if found is None:
        raise ServerUnavailable("this part needs wrk on the PATH (apt install wrk), or run `make bench`")
    return found


def version() -> str:
    output = subprocess.run([program(), "-v"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+\.\d+\.\d+", output)
    return found[0] if found else "unknown"


def run_load(
    request_template: RequestTemplate, subjects: int, seconds: int, folder: Path, *, look: bool = False
) -> LoadResult:
    """Run a load. With `look`, read bodies if only they show a denial."""
    done = _run(request_template, subjects, seconds, folder, "random", request_template.denial_text if look else "")
    if done.returncode or "requests in" not in done.stdout:
        raise ServerUnavailable(
            f"wrk did not load {request_template.url}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return _parse_output(done.stdout, by_body=request_template.denial_text != "", looked=look)


def send_each_once(request_template: RequestTemplate, subjects: int, seconds: int, folder: Path) -> None:
    """Send one request for each subject and line, or as many as fit into the time."""
    done = _run(request_template, subjects, seconds, folder, "once", "")
    if done.returncode:
        raise ServerUnavailable(
            f"wrk did not load {request_template.url}: {done.stderr.strip() or done.stdout.strip()}"
        )


def _run(
    request_template: RequestTemplate, subjects: int, seconds: int, folder: Path, order: str, denial: str
) -> subprocess.CompletedProcess[str]:
    lines = folder / "lines"
    lines.write_text("".join(f"{line}\n" for line in request_template.lines))
    headers = [part for name, value in request_template.headers.items() for part in ("-H", f"{name}: {value}")]
    command = [
        program(),
        "-t1",
        f"-c{CONNECTIONS}",
        f"-d{seconds}s",
        "--latency",
        "-s",
        str(SCRIPT),
        *headers,
        request_template.url,
    ]
    arguments = [request_template.method, request_template.body, str(subjects), order, str(lines), denial]
    return subprocess.run(
        [*command, "--", *arguments], capture_output=True, text=True, check=False, timeout=seconds + SPARE_SECONDS
    )


def _parse_output(output: str, *, by_body: bool, looked: bool) -> LoadResult:
    denied: int | None = _find_number(output, r"Non-2xx or 3xx responses: (\d+)")
    if by_body:
        denied = _find_number(output, r"Denials in bodies: (\d+)") if looked else None
    errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", output)
    return LoadResult(
        _find_number(output, r"(\d+) requests in"),
        float(_find_text(output, r"Requests/sec:\s+([\d.]+)")),
        _in_ms(_find_text(output, r"(?m)^\s+50%\s+(\S+)")),
        _in_ms(_find_text(output, r"(?m)^\s+99%\s+(\S+)")),
        denied,
        sum(map(int, errors.groups())) if errors else 0,
    )


def _find_text(output: str, pattern: str) -> str:
    found = re.search(pattern, output)
    return found[1] if found else ""


def _find_number(output: str, pattern: str) -> int:
    return int(_find_text(output, pattern) or 0)


def _in_ms(text: str) -> float:
    found = re.fullmatch(r"([\d.]+)(us|ms|s|m)", text)
    return float(found[1]) * _UNITS[found[2]] if found else 0.0
