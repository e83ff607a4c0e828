"""What a run of `make chaos` or `make soak` did: faults, checks, admitted against allowed, slowest wait, seed.

Tests add their figures here; the table is printed at the end, also of a run that was stopped. A pytest plugin:
`tests/conftest.py` registers it. All that is drawn at random comes from one seed, so LIMITFORGE_TEST_SEED (`make soak
SEED=...`) draws the same again. LIMITFORGE_TEST_MINUTES (`make soak MINUTES=...`) ends a run by itself.
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
STOPPED = 130  # as a shell says of a program that Ctrl-C has ended


@dataclass
class Figures:
    """Of one test, or of all."""

    faults: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    examples: int = 0  # traces of a random search
    admitted: int = 0  # by limits that can become full
    allowed: int = 0  # the most that these limits let in
    slowest: float = 0.0  # seconds that a caller waited

    def add(self, other: "Figures") -> None:
        self.faults.update(other.faults)
        self.checks += other.checks
        self.examples += other.examples
        self.admitted += other.admitted
        self.allowed += other.allowed
        self.slowest = max(self.slowest, other.slowest)

    def __str__(self) -> str:
        shown = [f"{self.checks:,} checks"] if self.checks else []
        shown += [f"{self.examples:,} examples"] if self.examples else []
        shown += [f"{self.faults.total()} faults"] if self.faults else []
        shown += [f"admitted {self.admitted:,} of {self.allowed:,} allowed"] if self.allowed else []
        shown += [f"slowest wait {self.slowest * 1_000:.0f} ms"] if self.slowest else []
        return ", ".join(shown)


class Run:
    """This process's part of the run."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.is_reported = False
        self.over_at = float("inf")
        self.left = 1  # tests that have not ended yet
        self.now = Figures()  # of the test that runs
        self.running = ""
        self.done: list[tuple[str, Figures]] = []
        self.stop = ""  # why it stops, once it does
        self.is_stopping = False
        self.unshrunk: list[str] = []
        self.when_stopped: list[str] = []


run = Run()


def fault(name: str) -> None:
    run.now.faults[name] += 1


def checked(count: int, slowest: float = 0.0) -> None:
    run.now.add(Figures(checks=count, slowest=slowest))


def example() -> None:
    run.now.examples += 1


def admitted(count: int, allowed: int) -> None:
    run.now.add(Figures(admitted=count, allowed=allowed))


def draw() -> random.Random:
    """Random numbers of the running test, which are the same again for the same seed."""
    return random.Random(f"{os.environ.get(SEED)} {run.running}")


def share_seconds() -> float:
    """How long a random search may last so that the tests after it have as much of the run's time."""
    return max(0.0, run.over_at - time.monotonic()) / max(1, run.left)


# --- The plugin ------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """SIGTERM, as `timeout` and CI send it, stops a run as Ctrl-C does: no server and no folder is left behind."""
    run.is_reported = os.environ.get("LIMITFORGE_TEST_PROFILE") == "soak"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    if not run.is_reported:
        return
    given = config.getoption("--hypothesis-seed", None) or os.environ.get(SEED)
    seed = int(given or random.SystemRandom().randrange(10**9))
    os.environ[SEED] = str(seed)  # the workers of xdist inherit it
    hypothesis.core.global_force_seed = seed  # type: ignore[assignment]


def _time_is_up() -> None:
    run.stop = "as it was asked to"
    os.kill(os.getpid(), signal.SIGINT)


def _stop(number: int, frame: FrameType | None) -> None:
    """Tasks are cancelled, as asyncio does by itself: an exception in the middle of asyncpg's C code ends Python."""
    is_again, run.is_stopping = run.is_stopping, True
    run.stop = run.stop or f"by {signal.Signals(number).name}"
    run.unshrunk = run.unshrunk or [f"{run.running}: {each}" for each in _found_so_far(frame)]
    loop = asyncio._get_running_loop()
    if loop is None or is_again:
        raise KeyboardInterrupt
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])


def _found_so_far(frame: FrameType | None) -> list[str]:
    """The failures that Hypothesis has found in the running test, and is still making smaller."""
    while frame is not None:
        runner = frame.f_locals.get("self")
        if isinstance(runner, ConjectureRunner):
            return [str(origin) for origin in runner.interesting_test_cases]
        frame = frame.f_back
    return []


def pytest_report_header() -> str | None:
    return f"seed: {os.environ[SEED]}" if run.is_reported else None


def pytest_collection_finish(session: pytest.Session) -> None:
    run.left = len(session.items)
    minutes = float(os.environ.get(MINUTES) or 0)
    if run.is_reported and minutes and not hasattr(session.config, "workerinput"):
        run.over_at = time.monotonic() + 60 * minutes
        timer = threading.Timer(60 * minutes, _time_is_up)
        timer.daemon = True
        timer.start()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    run.running, run.now = item.nodeid, Figures()
    result = yield
    run.left -= 1
    run.running = ""
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup() -> Iterator[None]:
    yield from _unless_stopped()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call() -> Iterator[None]:
    yield from _unless_stopped()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _unless_stopped()
    item.user_properties.append(("figures", {**vars(run.now), "faults": dict(run.now.faults)}))  # which xdist hands on


def _unless_stopped() -> Iterator[None]:
    """An error that a test raises while it is stopped comes from the stop, and is not a finding."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if not run.stop:
            raise
        if not isinstance(error, asyncio.CancelledError):
            run.when_stopped.append(f"{run.running}: {error!r}"[:300])
        raise KeyboardInterrupt from error
    if run.stop:  # and the test has not noticed
        raise KeyboardInterrupt


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        for name, figures in report.user_properties:
            if name == "figures" and isinstance(figures, dict):
                of = Figures(**{**figures, "faults": Counter(figures["faults"])})
                run.done.append((report.nodeid, of))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    memo = getattr(reporter, "_keyboardinterrupt_memo", None)
    if memo is None or not run.stop:
        return
    memo.reprcrash.message = said = _last_words(_findings(reporter))  # instead of a traceback
    if "no finding" not in said:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    else:
        session.exitstatus = pytest.ExitCode.OK if run.stop == "as it was asked to" else STOPPED


def _findings(reporter: Any) -> int:
    return len(reporter.stats.get("failed", ())) + len(reporter.stats.get("error", ())) + len(run.unshrunk)


def _last_words(findings: int) -> str:
    found = f"{findings} finding{'s' * (findings > 1)}: see above" if findings else "no finding"
    return f"stopped after {time.monotonic() - run.began:.0f} s, {run.stop}; {found}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for finding in run.unshrunk:
        terminalreporter.section("FOUND, and not yet made smaller when it was stopped")
        terminalreporter.write_line(finding)
    if not run.is_reported:
        return
    terminalreporter.section("what was done")
    if run.running:
        run.done.append((f"{run.running} (stopped)", run.now))
    total = Figures()
    for name, figures in run.done:
        total.add(figures)
        terminalreporter.write_line(f"{name.removeprefix('tests/')}: {str(figures) or 'no figures'}")
    terminalreporter.write_line(f"in all: {len(run.done)} tests, {str(total) or 'no figures'}")
    if total.faults:
        kinds = ", ".join(f"{count} {name}" for name, count in total.faults.most_common())
        terminalreporter.write_line(f"faults: {kinds}")
    for error in run.when_stopped:
        terminalreporter.write_line(f"raised while it was stopped: {error}")
    terminalreporter.write_line(f"seed: {os.environ[SEED]} (SEED={os.environ[SEED]} draws the same again)")
