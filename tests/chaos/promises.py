"""What a limiter owes its callers while its store fails, asked of the record of a load."""

import os
from collections import Counter

from limitforge import StoreOptions
from tests import report
from tests.chaos.load import Load
from tests.chaos.record import ASKS, Record

# What a machine adds beside the lag that was measured. `make test` allows thirty times as much, because it also runs on
# busy machines: a caller that hangs or a recovery that does not happen takes for ever, since a fault lasts until enough
# answers have come.
PATIENCE = 1 if os.environ.get("LIMITFORGE_TEST_PROFILE") == "soak" else 30
SCHEDULING_SECONDS = 1.0 * PATIENCE
RECOVERY_SECONDS = 0.5 * PATIENCE
BLOCKED_SECONDS = 0.5 * PATIENCE


def nobody_hung(record: Record, options: StoreOptions) -> None:
    assert record.hung == 0
    assert record.loop.worst < record.machine.worst + BLOCKED_SECONDS
    lag = max(record.loop.worst, record.machine.worst)
    assert record.slowest < options.deadline_ms / 1_000 + SCHEDULING_SECONDS + lag
    assert record.close_seconds < options.deadline_ms / 1_000 + SCHEDULING_SECONDS + lag


def every_answer_was_right(record: Record, options: StoreOptions) -> None:
    """No exception, and degraded decisions are of the kind that was chosen."""
    assert record.exceptions == {}
    assert record.oddities == []
    assert set(record.kinds) <= {None, options.failure}


def every_degraded_answer_was_counted(load: Load) -> None:
    """Once all callers have ended, and before anything else is asked."""
    status = load.limiter.status()
    assert Counter({kind: count for kind, count in status.degraded.items() if count}) == Counter(
        {kind: count for kind, count in load.record.kinds.items() if kind is not None}
    )
    assert status.waiting == 0


def no_more_was_admitted(record: Record, options: StoreOptions, *, lives: int = 1, outages: int = 1) -> None:
    """Undegraded ones within the limit, in each life of the data; local ones within this node's share."""
    for ask in ASKS:
        admitted = record.admitted(ask)
        if ask.can_be_full:
            report.admitted(admitted[None], lives * ask.most)
        assert admitted[None] <= lives * ask.most, ask.resource
        assert admitted["local"] <= outages * max(1, ask.most // options.nodes), ask.resource
        assert admitted["closed"] == 0


def the_count_is_between_what_was_admitted_and_what_was_sent(load: Load) -> None:
    """Where the data was kept, and before the limiter is closed."""
    for ask in ASKS:
        calls = load.record.of(ask)
        admitted = load.record.admitted(ask)[None]
        unsure = sum(call.degraded is not None for call in calls)
        assert admitted <= load.counted(ask) <= min(ask.most, admitted + unsure), ask.resource


def recovery_seconds(record: Record, breaker_seconds: float, deadline_ms: float) -> float:
    """How soon it must work again: one probe may have failed just before, and a busy machine may fail another."""
    lag = max(record.loop.worst, record.machine.worst)
    return 2 * (breaker_seconds + deadline_ms / 1_000) + RECOVERY_SECONDS + lag
