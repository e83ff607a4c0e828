"""What a limiter owes its callers while its store fails, asked of the record of a load."""

import os
from collections import Counter

from limitforge import StoreOptions
from tests import run_report
from tests.chaos.load import Load
from tests.chaos.load_record import WORKLOADS, LoadRecord

# What a machine adds beside the lag that was measured. `make test` allows thirty times as much, because it also runs on
# busy machines: a caller that hangs or a recovery that does not happen takes for ever, since a fault lasts until enough
# answers have come.
PATIENCE = 1 if os.environ.get("LIMITFORGE_TEST_PROFILE") == "soak" else 30
SCHEDULING_SECONDS = 1.0 * PATIENCE
RECOVERY_SECONDS = 0.5 * PATIENCE
BLOCKED_SECONDS = 0.5 * PATIENCE


def assert_no_caller_hung(record: LoadRecord, options: StoreOptions) -> None:
    assert record.hung == 0
    assert record.loop.worst < record.machine.worst + BLOCKED_SECONDS
    lag = max(record.loop.worst, record.machine.worst)
    assert record.slowest < options.deadline_ms / 1_000 + SCHEDULING_SECONDS + lag
    assert record.close_seconds < options.deadline_ms / 1_000 + SCHEDULING_SECONDS + lag


def assert_answers_are_valid(record: LoadRecord, options: StoreOptions) -> None:
    """No exception, and degraded decisions are of the kind that was chosen."""
    assert record.exceptions == {}
    assert record.inconsistencies == []
    assert set(record.kinds) <= {None, options.failure}


def assert_degraded_checks_are_counted(load: Load) -> None:
    """Once all callers have ended, and before anything else is asked."""
    status = load.limiter.status()
    assert Counter({kind: count for kind, count in status.degraded.items() if count}) == Counter(
        {kind: count for kind, count in load.record.kinds.items() if kind is not None}
    )
    assert status.waiting == 0


def assert_limits_held(record: LoadRecord, options: StoreOptions, *, lives: int = 1, outages: int = 1) -> None:
    """Undegraded ones within the limit, in each life of the data; local ones within this node's share."""
    for ask in WORKLOADS:
        admitted = record.admitted(ask)
        if ask.is_finite:
            run_report.record_admitted(admitted[None], lives * ask.max_admitted)
        assert admitted[None] <= lives * ask.max_admitted, ask.resource
        assert admitted["local"] <= outages * max(1, ask.max_admitted // options.processes), ask.resource
        assert admitted["closed"] == 0


def assert_counts_match_admissions(load: Load) -> None:
    """Where the data was kept, and before the limiter is closed."""
    for ask in WORKLOADS:
        calls = load.record.of(ask)
        admitted = load.record.admitted(ask)[None]
        unsure = sum(call.degraded is not None for call in calls)
        assert admitted <= load.count_in_store(ask) <= min(ask.max_admitted, admitted + unsure), ask.resource


def recovery_seconds(record: LoadRecord, breaker_seconds: float, deadline_ms: float) -> float:
    """How soon it must work again: one probe may have failed just before, and a busy machine may fail another."""
    lag = max(record.loop.worst, record.machine.worst)
    return 2 * (breaker_seconds + deadline_ms / 1_000) + RECOVERY_SECONDS + lag
