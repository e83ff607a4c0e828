"""Plant deliberate bugs, one at a time, and verify that tests find them: `make mutants`."""

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from tests.mutants.bugs import Bug, read_bugs
from tests.mutants.runner import TIMEOUT_S, MutantRunner, Outcome

ROOT = Path(__file__).parents[2]
BUG_LIST = Path("tests/mutants/bugs.toml")
PARALLEL_RUNS = 2

Task = TypeVar("Task")
Result = TypeVar("Result")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only bugs whose file name holds one of these words")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project (default: this one)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for the tests of one bug")
    options = parser.parse_args(arguments)
    bugs = [bug for bug in read_bugs(options.root / BUG_LIST) if _is_selected(bug, options.words)]
    if not bugs:
        _print_line("No bug is in a file of that name.")
        return 1
    started, outcomes = time.monotonic(), list[Outcome]()
    try:
        with MutantRunner(options.root, options.timeout) as trials:
            _print_line(f"{len(bugs)} bugs. Their tests without a bug:")
            if not _original_passes(trials, bugs):
                return 1
            _print_line(f"passed in {time.monotonic() - started:.0f} s. Now with each bug, {PARALLEL_RUNS} at a time:")
            for bug, outcome in _results(trials, bugs, trials.run_mutant):
                outcomes.append(outcome)
                _print_line(_line(len(outcomes), len(bugs), bug, outcome))
    except KeyboardInterrupt:
        _print_line(f"Interrupted after {len(outcomes)} of {len(bugs)} bugs.")
        _print_totals(outcomes, time.monotonic() - started)
        return 130
    return _print_totals(outcomes, time.monotonic() - started)


def _is_selected(bug: Bug, words: list[str]) -> bool:
    return not words or any(word in bug.file for word in words)


def _original_passes(trials: MutantRunner, bugs: list[Bug]) -> bool:
    groups = group_test_arguments(bug.tests for bug in bugs if not bug.equivalent)
    failures = [failure for _, failure in _results(trials, groups, trials.failure_on_original) if failure]
    if failures:
        _print_line("\n".join([*failures, "Tests must pass before a bug is planted."]))
    return not failures


def group_test_arguments(lines: Iterable[str]) -> list[str]:
    """Return fewer argument lines that run the same tests: one per process, and one for each line with options.

    A single test is omitted if its whole file runs.
    """
    distinct = dict.fromkeys(lines)
    with_options = [line for line in distinct if "-" in (word[0] for word in line.split())]
    words = sorted({word for line in distinct if line not in with_options for word in line.split()})
    plain = [word for word in words if "::" not in word or word.partition("::")[0] not in words]
    return [line for line in (" ".join(plain[n::PARALLEL_RUNS]) for n in range(PARALLEL_RUNS)) if line] + with_options


def _results(trials: MutantRunner, tasks: list[Task], work: Callable[[Task], Result]) -> Iterator[tuple[Task, Result]]:
    """Yield each task with its result as they finish. An interrupt stops running tasks."""
    with ThreadPoolExecutor(PARALLEL_RUNS) as pool:
        running = {pool.submit(work, task): task for task in tasks}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            trials.stop()
            raise


def _line(number: int, total: int, bug: Bug, outcome: Outcome) -> str:
    took = f" ({outcome.seconds:.1f} s)" if outcome.seconds else ""
    detail = f"\n{' ' * 21}{outcome.detail}" if outcome.detail else ""
    return f"{f'{number}/{total}':>9} {outcome.verdict:<10} {bug}{took}{detail}"


def _print_totals(outcomes: list[Outcome], seconds: float) -> int:
    """Print the totals, and return the exit status."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    hung = sum(outcome.detail.startswith("hung") for outcome in outcomes)
    _print_line(
        f"{counts['killed']} killed ({hung} by a time-out), {counts['survived']} survived, {counts['broken']} broken, "
        f"{counts['equivalent']} equivalent, of {len(outcomes)} bugs in {seconds:.0f} s"
    )
    return 1 if counts["survived"] or counts["broken"] else 0


def _print_line(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
