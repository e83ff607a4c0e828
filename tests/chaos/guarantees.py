"""What a limiter guarantees while its store fails, asserted on the record of a load."""

import os
from collections import Counter

from limitforge import StoreOptions
from tests import run_report
from tests.chaos.load import Load
from tests.chaos.load_record import WORKLOADS, LoadRecord

# What the machine adds to the lag that was measured. `make test` allows thirty times as much, because it also runs on
# busy machines. It still finds callers that hang and recoveries that fail: those never end.
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
    """No caller got an exception, and degraded decisions follow the failure behaviour."""
    assert record.exceptions == {}
    assert record.inconsistencies == []
    assert set(record.kinds) <= {None, options.failure}


def assert_degraded_checks_are_counted(load: Load) -> None:
    """Call this after all callers have ended, and before any other check."""
    status = load.limiter.status()
    assert Counter({kind: count for kind, count in status.degraded.items() if count}) == Counter(
        {kind: count for kind, count in load.record.kinds.items() if kind is not None}
    )
    assert status.waiting == 0


def assert_limits_held(record: LoadRecord, options: StoreOptions, *, lives: int = 1, outages: int = 1) -> None:
    """The store admits within the limit, in each life of the data. `local` admits within this process's part."""
    for workload in WORKLOADS:
        admitted = record.admitted(workload)
        if workload.is_finite:
            run_report.record_admitted(admitted[None], lives * workload.max_admitted)
        assert admitted[None] <= lives * workload.max_admitted, workload.resource
        assert admitted["local"] <= outages * max(1, workload.max_admitted // options.processes), workload.resource
        assert admitted["closed"] == 0


def assert_counts_match_admissions(load: Load) -> None:
    """Call this if no data was lost, and before the limiter is closed."""
    for workload in WORKLOADS:
        calls = load.record.of(workload)
        admitted = load.record.admitted(workload)[None]
        unsure = sum(call.degraded is not None for call in calls)
        assert admitted <= load.count_in_store(workload) <= min(workload.max_admitted, admitted + unsure), (
            workload.resource
        )


def recovery_seconds(record: LoadRecord, breaker_seconds: float, deadline_ms: float) -> float:
    """How soon the store must decide again: one probe may have failed just before, and one more on a busy machine."""
    lag = max(record.loop.worst, record.machine.worst)
    return 2 * (breaker_seconds + deadline_ms / 1_000) + RECOVERY_SECONDS + lag
