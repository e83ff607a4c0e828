"""Real processes on one prepaid limit, of which some are killed or frozen: never one more than the limit."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from limitforge import SyncLimiter, limit_from_fields
from tests.child_processes import ChildProcess
from tests.contract.conftest import PATIENT
from tests.contract.prepaid_spender import read, spend_all

pytestmark = pytest.mark.timeout(180)  # longer than the patience below

LIMIT = 45_000
PATIENCE_SECONDS = 60.0
SHELLS = ("sync", "async", "async")

PLANS: list[dict[str, Any]] = [
    {"algorithm": "fixed_window", "limit": LIMIT, "window_seconds": 86_400, "align": "first_hit"},
    {"algorithm": "token_bucket", "bucket_capacity": LIMIT, "refill_rate_per_sec": "0.001"},
    {"algorithm": "quota", "limit": LIMIT, "period": "year"},
]


class SpenderProcesses:
    """Processes that spend one limit, and what each has admitted."""

    def __init__(self, url: str, fields: dict[str, Any], folder: Path) -> None:
        self.fields = {**fields, "name": "shared", "consistency": "prepaid"}
        self.url = url
        self.paths = [folder / str(number) for number in range(len(SHELLS))]
        self.running = [
            ChildProcess(spend_all, url, self.fields, shell, path)
            for shell, path in zip(SHELLS, self.paths, strict=True)
        ]

    def spent(self, number: int) -> int:
        path = self.paths[number]
        return read(path) if path.exists() and path.stat().st_size == 8 else 0

    def wait_until_spending(self, number: int, amount: int) -> None:
        ends = time.monotonic() + PATIENCE_SECONDS
        while self.spent(number) < amount and time.monotonic() < ends and self.running[number].is_running:
            time.sleep(0.002)

    def total(self) -> int:
        for process in self.running:
            process.wait()
        return sum(self.spent(number) for number in range(len(self.paths)))

    def left(self) -> int:
        """What the store still has, as any caller would see it."""
        with SyncLimiter.connect(self.url, options=PATIENT) as limiter:
            return limiter.check("r", "s", limits=limit_from_fields(self.fields), cost=0).remaining or 0

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.close_and_wait()


@pytest.fixture
def lessees(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[SpenderProcesses]:
    lessees = SpenderProcesses(redis_url, request.param, tmp_path)
    yield lessees
    lessees.end()


of_every_plan = pytest.mark.parametrize("lessees", PLANS, ids=lambda fields: fields["algorithm"], indirect=True)
# A quota is a window with another calendar.
of_every_kind = pytest.mark.parametrize(
    "lessees",
    [*PLANS[:2], pytest.param(PLANS[2], marks=pytest.mark.soak)],
    ids=lambda fields: fields["algorithm"],
    indirect=True,
)


@pytest.mark.slow
@of_every_plan
def test_processes_that_lease_a_limit_spend_all_of_it_and_no_more(lessees: SpenderProcesses) -> None:
    assert lessees.total() + lessees.left() == LIMIT


@pytest.mark.slow
@of_every_kind
def test_a_process_that_is_killed_costs_its_share_at_most(lessees: SpenderProcesses) -> None:
    lessees.wait_until_spending(0, 500)
    lessees.running[0].kill()
    killed = lessees.spent(0)
    total = lessees.total()
    assert total <= LIMIT
    # A share is sized by what its process asked for within an interval, which is at most all that it asked for.
    assert LIMIT - total - lessees.left() <= 2 * killed + 1


@pytest.mark.slow
@of_every_kind
def test_a_process_that_was_frozen_spends_nothing_that_is_no_longer_its_own(lessees: SpenderProcesses) -> None:
    lessees.wait_until_spending(1, 500)
    lessees.running[1].send_signal(signal.SIGSTOP)
    time.sleep(2.5)  # longer than a share of a bucket lasts
    lessees.running[1].send_signal(signal.SIGCONT)
    assert lessees.total() <= LIMIT
