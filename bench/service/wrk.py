"""`wrk`, the load: one thread, 64 connections, each asking as soon as it was answered."""

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
SPARE_SECONDS = 30  # after its time is over; then it hangs

_UNITS = {"us": 0.001, "ms": 1.0, "s": 1_000.0, "m": 60_000.0}


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """A request. In its headers and its body SUBJECT is replaced by the number of a subject, and LINE by one of the
    lines: one of many keys, or resources.
    """

    url: str
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    lines: tuple[str, ...] = ("",)
    denial_text: str = ""
    """What the body of a denial holds, where its status does not tell."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What came of it. `denied` is None where only bodies would tell, and nobody looked at them."""

    requests: int
    per_second: float
    p50_ms: float
    p99_ms: float
    denied: int | None
    errors: int
    """Of sockets, and answers that took longer than two seconds."""


def program() -> str:
    found = shutil.which("wrk")
    if found is None:
        raise ServerUnavailable("this part needs wrk on the PATH (apt install wrk), or run `make bench`")
    return found


def version() -> str:
    said = subprocess.run([program(), "-v"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+\.\d+\.\d+", said)
    return found[0] if found else "unknown"


def run_load(ask: RequestTemplate, subjects: int, seconds: int, folder: Path, *, look: bool = False) -> LoadResult:
    """`look` reads bodies where only they tell a denial."""
    done = _run(ask, subjects, seconds, folder, "random", ask.denial_text if look else "")
    if done.returncode or "requests in" not in done.stdout:
        raise ServerUnavailable(f"wrk did not load {ask.url}: {done.stderr.strip() or done.stdout.strip()}")
    return _parse_output(done.stdout, by_body=ask.denial_text != "", looked=look)


def send_each_once(ask: RequestTemplate, subjects: int, seconds: int, folder: Path) -> None:
    """Every subject of every line once, or as many as there is time for."""
    done = _run(ask, subjects, seconds, folder, "once", "")
    if done.returncode:
        raise ServerUnavailable(f"wrk did not load {ask.url}: {done.stderr.strip() or done.stdout.strip()}")


def _run(
    ask: RequestTemplate, subjects: int, seconds: int, folder: Path, order: str, denial: str
) -> subprocess.CompletedProcess[str]:
    lines = folder / "lines"
    lines.write_text("".join(f"{line}\n" for line in ask.lines))
    headers = [part for name, value in ask.headers.items() for part in ("-H", f"{name}: {value}")]
    command = [program(), "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--latency", "-s", str(SCRIPT), *headers, ask.url]
    told = [ask.method, ask.body, str(subjects), order, str(lines), denial]
    return subprocess.run(
        [*command, "--", *told], capture_output=True, text=True, check=False, timeout=seconds + SPARE_SECONDS
    )


def _parse_output(said: str, *, by_body: bool, looked: bool) -> LoadResult:
    denied: int | None = _find_number(said, r"Non-2xx or 3xx responses: (\d+)")
    if by_body:
        denied = _find_number(said, r"Denials in bodies: (\d+)") if looked else None
    errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", said)
    return LoadResult(
        _find_number(said, r"(\d+) requests in"),
        float(_find_text(said, r"Requests/sec:\s+([\d.]+)")),
        _in_ms(_find_text(said, r"(?m)^\s+50%\s+(\S+)")),
        _in_ms(_find_text(said, r"(?m)^\s+99%\s+(\S+)")),
        denied,
        sum(map(int, errors.groups())) if errors else 0,
    )


def _find_text(said: str, pattern: str) -> str:
    found = re.search(pattern, said)
    return found[1] if found else ""


def _find_number(said: str, pattern: str) -> int:
    return int(_find_text(said, pattern) or 0)


def _in_ms(text: str) -> float:
    found = re.fullmatch(r"([\d.]+)(us|ms|s|m)", text)
    return float(found[1]) * _UNITS[found[2]] if found else 0.0
