"""Run a check of several steps on an event loop."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from limitforge.core.check import Check
from limitforge.core.decision import Decision
from limitforge.errors import LimitforgeError, StoreError
from limitforge.stores.redis.aio.pending import OnReply, PendingCheck, deliver
from limitforge.stores.redis.multi_step.cross_slot import FinishHold, HoldAction, MultiStepFlow, Step
from limitforge.stores.redis.script_call import as_internal_error

Route = Callable[[PendingCheck], None]

_EMPTY_CHECK = Check([], ())


class MultiStepCheck:
    """A check of several steps that waits for replies. To cancel it, set `on_reply` to None."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        route: Route,
        flow: MultiStepFlow[Decision | LimitforgeError],
        on_reply: OnReply,
        deadline: float,
    ) -> None:
        self.on_reply: OnReply | None = on_reply
        self._loop = loop
        self._route = route
        self._flow = flow
        self._deadline = deadline
        self._has_started = False
        self._pending_replies = 0
        self._replies: list[Any] = []

    @classmethod
    def start(
        cls,
        loop: asyncio.AbstractEventLoop,
        route: Route,
        flow: MultiStepFlow[Decision | LimitforgeError],
        on_reply: OnReply,
        deadline: float,
    ) -> Self:
        """Send the first steps of a check. `route` sends a step to the server that owns its slot."""
        check = cls(loop, route, flow, on_reply, deadline)
        check._advance(partial(next, flow))
        return check

    def _advance(self, resume: Callable[[], list[Step]]) -> None:
        """Resume the flow, and send the steps that it yields side by side."""
        try:
            steps = resume()
        except StopIteration as done:
            self._finish(done.value)
            return
        except Exception as error:  # noqa: BLE001 - a bug in limitforge: the caller must get a result
            self._finish(as_internal_error(error))
            return
        is_resubmitted, self._has_started = self._has_started, True
        if self.on_reply is None and any(_is_confirmation(step) for step in steps):
            cancelled = StoreError("the caller cancelled the check")  # confirming would charge for an unused decision
            self._advance(partial(self._flow.send, [cancelled] * len(steps)))
            return
        self._pending_replies, self._replies = len(steps), [None] * len(steps)
        for index, step in enumerate(steps):
            on_reply = partial(self._on_step_reply, index)
            self._route(PendingCheck(step, on_reply, self._deadline, is_resubmitted=is_resubmitted))

    def _on_step_reply(self, index: int, reply: Any) -> None:
        self._replies[index] = reply
        self._pending_replies -= 1
        if not self._pending_replies:
            self._advance(partial(self._flow.send, self._replies))

    def _finish(self, result: Decision | LimitforgeError) -> None:
        if self.on_reply is not None:
            deliver(self._loop, PendingCheck(_EMPTY_CHECK, self.on_reply, self._deadline), result)


def _is_confirmation(step: Step) -> bool:
    return isinstance(step, FinishHold) and step.action is HoldAction.CONFIRM
