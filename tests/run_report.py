"""Report the results of `make chaos` or `make soak`: faults, checks, admitted and allowed, slowest wait, seed.

Tests record their figures here, and the table is printed at the end, also when the run is stopped. This is a pytest
plugin that `tests/conftest.py` registers. All random numbers come from one seed, so LIMITFORGE_TEST_SEED (`make soak
SEED=...`) repeats a run. LIMITFORGE_TEST_MINUTES (`make soak MINUTES=...`) ends a run after that time.
"""

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import hypothesis.core
import pytest
from hypothesis.internal.conjecture.engine import ConjectureRunner

SEED = "LIMITFORGE_TEST_SEED"
MINUTES = "LIMITFORGE_TEST_MINUTES"
TIME_IS_UP = "at its time limit"
EXIT_INTERRUPTED = 130  # the exit status of a shell after Ctrl-C


@dataclass
class Totals:
    """Figures of one test, or of all."""

    faults: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    examples: int = 0  # traces of a random search
    admitted: int = 0  # by limits that can fill up
    allowed: int = 0  # the largest number that these limits may admit
    slowest_seconds: float = 0.0  # the longest wait of a caller

    def add(self, other: "Totals") -> None:
        self.faults.update(other.faults)
        self.checks += other.checks
        self.examples += other.examples
        self.admitted += other.admitted
        self.allowed += other.allowed
        self.slowest_seconds = max(self.slowest_seconds, other.slowest_seconds)

    def __str__(self) -> str:
        shown = [f"{self.checks:,} checks"] if self.checks else []
        shown += [f"{self.examples:,} examples"] if self.examples else []
        shown += [f"{self.faults.total()} faults"] if self.faults else []
        shown += [f"admitted {self.admitted:,} of {self.allowed:,} allowed"] if self.allowed else []
        shown += [f"slowest wait {self.slowest_seconds * 1_000:.0f} ms"] if self.slowest_seconds else []
        return ", ".join(shown)


class Run:
    """The part of the run in this process."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.is_reported = False
        self.ends_at = float("inf")
        self.tests_left = 1  # tests that have not finished
        self.current = Totals()  # of the current test
        self.current_test = ""
        self.done: list[tuple[str, Totals]] = []
        self.stop_reason = ""  # empty until the run is stopped
        self.is_stopping = False
        self.unminimized: list[str] = []
        self.errors_while_stopping: list[str] = []


run = Run()


def record_fault(name: str) -> None:
    run.current.faults[name] += 1


def record_checks(count: int, slowest: float = 0.0) -> None:
    run.current.add(Totals(checks=count, slowest_seconds=slowest))


def record_example() -> None:
    run.current.examples += 1


def record_admitted(count: int, allowed: int) -> None:
    run.current.add(Totals(admitted=count, allowed=allowed))


def seeded_random() -> random.Random:
    """Return a random generator for the current test, which repeats with the same seed."""
    return random.Random(f"{os.environ.get(SEED)} {run.current_test}")


def time_share_seconds() -> float:
    """Return the time for a random search that leaves an equal share to each remaining test."""
    return max(0.0, run.ends_at - time.monotonic()) / max(1, run.tests_left)


# --- The plugin ------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Stop a run at SIGTERM (of `timeout` and CI) as at Ctrl-C, so that no server or folder is left behind."""
    run.is_reported = os.environ.get("LIMITFORGE_TEST_PROFILE") == "soak"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    if not run.is_reported:
        return
    given = config.getoption("--hypothesis-seed", None) or os.environ.get(SEED)
    seed = int(given or random.SystemRandom().randrange(10**9))
    os.environ[SEED] = str(seed)  # inherited by the workers of xdist
    hypothesis.core.global_force_seed = seed  # type: ignore[assignment]


def _on_time_up() -> None:
    run.stop_reason = TIME_IS_UP
    os.kill(os.getpid(), signal.SIGINT)


def _stop(number: int, frame: FrameType | None) -> None:
    """Cancel tasks, as asyncio does, because an exception in the C code of asyncpg crashes Python."""
    is_again, run.is_stopping = run.is_stopping, True
    run.stop_reason = run.stop_reason or f"by {signal.Signals(number).name}"
    run.unminimized = run.unminimized or [f"{run.current_test}: {each}" for each in _unminimized_failures(frame)]
    loop = asyncio._get_running_loop()
    if loop is None or is_again:
        raise KeyboardInterrupt
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])


def _unminimized_failures(frame: FrameType | None) -> list[str]:
    """Return the failures that Hypothesis has found in the current test and is still minimizing."""
    while frame is not None:
        runner = frame.f_locals.get("self")
        if isinstance(runner, ConjectureRunner):
            return [str(origin) for origin in runner.interesting_test_cases]
        frame = frame.f_back
    return []


def pytest_report_header() -> str | None:
    return f"seed: {os.environ[SEED]}" if run.is_reported else None


def pytest_collection_finish(session: pytest.Session) -> None:
    run.tests_left = len(session.items)
    minutes = float(os.environ.get(MINUTES) or 0)
    if run.is_reported and minutes and not hasattr(session.config, "workerinput"):
        run.ends_at = time.monotonic() + 60 * minutes
        timer = threading.Timer(60 * minutes, _on_time_up)
        timer.daemon = True
        timer.start()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    run.current_test, run.current = item.nodeid, Totals()
    result = yield
    run.tests_left -= 1
    run.current_test = ""
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup() -> Iterator[None]:
    yield from _translate_stop()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call() -> Iterator[None]:
    yield from _translate_stop()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _translate_stop()
    item.user_properties.append(
        ("figures", {**vars(run.current), "faults": dict(run.current.faults)})
    )  # xdist transfers it


def _translate_stop() -> Iterator[None]:
    """Ignore errors that a test raises while the run is being stopped."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if not run.stop_reason:
            raise
        if not isinstance(error, asyncio.CancelledError):
            run.errors_while_stopping.append(f"{run.current_test}: {error!r}"[:300])
        raise KeyboardInterrupt from error
    if run.stop_reason:  # and the test has not noticed
        raise KeyboardInterrupt


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        for name, figures in report.user_properties:
            if name == "figures" and isinstance(figures, dict):
                of = Totals(**{**figures, "faults": Counter(figures["faults"])})
                run.done.append((report.nodeid, of))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    memo = getattr(reporter, "_keyboardinterrupt_memo", None)
    if memo is None or not run.stop_reason:
        return
    message = memo.reprcrash.message = _stop_message(_findings(reporter))  # instead of a traceback
    if "no finding" not in message:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    else:
        session.exitstatus = pytest.ExitCode.OK if run.stop_reason == TIME_IS_UP else EXIT_INTERRUPTED


def _findings(reporter: Any) -> int:
    return len(reporter.stats.get("failed", ())) + len(reporter.stats.get("error", ())) + len(run.unminimized)


def _stop_message(findings: int) -> str:
    found = f"{findings} finding{'s' * (findings > 1)}: see above" if findings else "no finding"
    return f"stopped after {time.monotonic() - run.started_at:.0f} s, {run.stop_reason}; {found}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for finding in run.unminimized:
        terminalreporter.section("FOUND, and not yet made smaller when it was stopped")
        terminalreporter.write_line(finding)
    if not run.is_reported:
        return
    terminalreporter.section("what was done")
    if run.current_test:
        run.done.append((f"{run.current_test} (stopped)", run.current))
    total = Totals()
    for name, figures in run.done:
        total.add(figures)
        terminalreporter.write_line(f"{name.removeprefix('tests/')}: {str(figures) or 'no figures'}")
    terminalreporter.write_line(f"in all: {len(run.done)} tests, {str(total) or 'no figures'}")
    if total.faults:
        kinds = ", ".join(f"{count} {name}" for name, count in total.faults.most_common())
        terminalreporter.write_line(f"faults: {kinds}")
    for error in run.errors_while_stopping:
        terminalreporter.write_line(f"raised while it was stopped: {error}")
    terminalreporter.write_line(f"seed: {os.environ[SEED]} (SEED={os.environ[SEED]} draws the same again)")
