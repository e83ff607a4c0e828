"""Real processes on one prepaid limit, some of which are killed or frozen: the limit is never exceeded."""

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
    """Processes that spend one limit, and what each of them has admitted."""

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
        """Return what remains in the store, as any caller would see it."""
        with SyncLimiter.connect(self.url, options=PATIENT) as limiter:
            return limiter.check("r", "s", limits=limit_from_fields(self.fields), cost=0).remaining or 0

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.close_and_wait()


@pytest.fixture
def spenders(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[SpenderProcesses]:
    spenders = SpenderProcesses(redis_url, request.param, tmp_path)
    yield spenders
    spenders.end()


of_every_plan = pytest.mark.parametrize("spenders", PLANS, ids=lambda fields: fields["algorithm"], indirect=True)
# A quota is a window with another calendar.
of_every_kind = pytest.mark.parametrize(
    "spenders",
    [*PLANS[:2], pytest.param(PLANS[2], marks=pytest.mark.soak)],
    ids=lambda fields: fields["algorithm"],
    indirect=True,
)


@pytest.mark.slow
@of_every_plan
def test_processes_that_prepay_a_limit_spend_all_of_it_and_no_more(spenders: SpenderProcesses) -> None:
    assert spenders.total() + spenders.left() == LIMIT


@pytest.mark.slow
@of_every_kind
def test_a_killed_process_costs_its_share_at_most(spenders: SpenderProcesses) -> None:
    spenders.wait_until_spending(0, 500)
    spenders.running[0].kill()
    killed = spenders.spent(0)
    total = spenders.total()
    assert total <= LIMIT
    # A share is sized by the demand of its process in an interval, which is at most its whole demand.
    assert LIMIT - total - spenders.left() <= 2 * killed + 1


@pytest.mark.slow
@of_every_kind
def test_a_frozen_process_spends_no_share_that_has_lapsed(spenders: SpenderProcesses) -> None:
    spenders.wait_until_spending(1, 500)
    spenders.running[1].send_signal(signal.SIGSTOP)
    time.sleep(2.5)  # longer than the share of a bucket lives
    spenders.running[1].send_signal(signal.SIGCONT)
    assert spenders.total() <= LIMIT
