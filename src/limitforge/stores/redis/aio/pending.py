"""Checks that wait for a reply: in the queue of a pipeline, or in a call that was sent."""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from limitforge.core.plan import BUCKET_US
from limitforge.stores.redis.multi_step.cross_slot import Step
from limitforge.stores.redis.script_call import Flow

OnReply = Callable[[Any], None]
"""Receives a `CheckResult`. For a step of a multi-step check, it receives an `Outcome`, the reply to a `FinishHold`, or
an error."""


class PendingCheck(msgspec.Struct, eq=False, gc=False):
    """A check, or one step of a multi-step check, that needs a reply before `deadline`.

    To cancel it, set `on_reply` to None. Checks of one `group` come from one `check_many`: those that share a
    `slot` are decided in order.
    """

    check: Step
    on_reply: OnReply | None
    deadline: float
    group: object = None
    slot: int = 0
    is_resubmitted: bool = False
    """True for a check that waited before, in another pipeline or step: its deadline is not postponed any more."""
    needs_asking: bool = False
    """True if the call needs an ASKING before it: the server is importing the slot."""
    needs_single_slot_call: bool = False
    """True if the check can't share a call with other slots."""
    needs_own_call: bool = False
    """True if the check can't share a call at all: its slot is migrating, and keys of other checks may be missing."""
    redirects: int = 0


class Write(msgspec.Struct, eq=False):
    """One write to the connection, of one or more calls."""

    calls_in_flight: int
    is_group_split: bool
    """True if the rest of its last group is still queued. The rest waits, because the first part may have to be sent
    again, and must be decided before it."""


class InFlightCall(msgspec.Struct, eq=False):
    """A call that was sent. Its late reply is ignored, but the call counts as in flight until the reply arrives."""

    batch: list[PendingCheck]
    flow: Flow[list[Any]]
    began_us: int
    write: Write
    is_late: bool = False
    calls_sent: int = 0
    needs_asking: bool = False
    is_multi_slot: bool = False
    """True if its keys lie in several slots."""


def deliver(loop: asyncio.AbstractEventLoop, pending: PendingCheck, result: object) -> None:
    """Call back with a result, once. An error in the callback must not affect other checks of its batch."""
    if pending.on_reply is None:
        return
    on_reply, pending.on_reply = pending.on_reply, None
    try:
        on_reply(result)
    except Exception as error:  # noqa: BLE001
        report_callback_error(loop, error)


def report_callback_error(loop: asyncio.AbstractEventLoop, error: Exception) -> None:
    if not isinstance(error, asyncio.InvalidStateError):  # then the caller was cancelled in this loop iteration
        loop.call_exception_handler({"message": "the callback of a check failed", "exception": error})


def not_cancelled(batch: Sequence[PendingCheck]) -> list[PendingCheck]:
    return [pending for pending in batch if pending.on_reply is not None]


def deadline_of(in_flight: InFlightCall) -> float:
    return min([pending.deadline for pending in in_flight.batch])


def count_that_fits(queue: Sequence[PendingCheck], max_us: int) -> int:
    """Return how many checks, at least one, keep Redis busy for at most `max_us`."""
    most = max_us // BUCKET_US + 1  # every check with a limit weighs at least BUCKET_US
    return bisect_right(list(accumulate([pending.check.weight_us for pending in queue[:most]])), max_us) or 1


def would_split_group(queue: Sequence[PendingCheck], count: int) -> bool:
    """Return True if a cut after `count` checks would split a group."""
    return count < len(queue) and queue[count].group is not None and queue[count].group is queue[count - 1].group


def group_around(queue: Sequence[PendingCheck], index: int) -> tuple[int, int]:
    """Return the first index of the group at `index`, and the index after its last."""
    group = queue[index].group
    first = end = index
    while first and queue[first - 1].group is group:
        first -= 1
    while end < len(queue) and queue[end].group is group:
        end += 1
    return first, end
