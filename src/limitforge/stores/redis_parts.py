"""What both Redis shells are made of, beside their way of talking: options in force, and which commands free room."""

from collections.abc import Sequence
from typing import Any

from limitforge.core.check import Check
from limitforge.core.clock import Clock, MonotonicClock, SystemClock
from limitforge.core.decision import Decision, Outcome
from limitforge.core.keys import Keys, decoded
from limitforge.errors import LimitforgeError
from limitforge.stores.codec import OWN_TIME, Flow, Note, T, batch_flow, check_flow
from limitforge.stores.command_codec import command_flow
from limitforge.stores.denials import Denials, Drop
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import (
    ClearOverrides,
    Command,
    DeleteOverride,
    DropDenials,
    Release,
    Renew,
    Reset,
    SetOverride,
    Settle,
    StoreStatus,
)
from limitforge.stores.resilience import Resilience

COMMAND_SECONDS = 1.0  # what everything other than a check may take


class Parts:
    """The flows, the cache and the account of one store."""

    def __init__(self, keys: Keys, clock: Clock | None, options: StoreOptions) -> None:
        self.keys = keys
        self.channel = f"{keys.prefix}:denials".encode()
        self.resilience = Resilience(options, keys, clock)
        self._injected = clock is not None
        self._clock = clock or SystemClock()
        self.denials: Denials | None = None
        if options.denial_cache_ms:
            self.denials = Denials(
                max_age_us=int(1_000 * options.denial_cache_ms),
                max_keys=options.denial_cache_size,
                clock=clock or MonotonicClock(),
            )

    def judge(self, checks: Sequence[Check]) -> Flow[list[Decision | LimitforgeError]]:
        """To be started when it is sent: a denial is remembered from then on."""
        now_us = self._clock.now_us()
        return check_flow(checks, now_us, now_us if self._injected else OWN_TIME, self._note())

    def judge_batch(self, checks: Sequence[Check]) -> Flow[list[Decision | LimitforgeError]]:
        """The same for as many as one call can take."""
        now_us = self._clock.now_us()
        return batch_flow(checks, now_us, now_us if self._injected else OWN_TIME, self._note())

    def command(self, command: Command[T]) -> Flow[T]:
        now_us = self._clock.now_us()
        return command_flow(command, self.keys, now_us, now_us if self._injected else OWN_TIME)

    def is_local(self, command: Command[Any]) -> bool:
        """Whether it is about something that was handed out here while the store was away."""
        match command:
            case Release(ticket) | Renew(ticket) | Settle(ticket):
                return ticket.local
        return False

    def status(self, waiting: int = 0) -> StoreStatus:
        return StoreStatus(
            self.resilience.state,
            self.resilience.since,
            dict(self.resilience.degraded),
            0 if self.denials is None else len(self.denials),
            0 if self.denials is None else self.denials.hits,
            waiting,
        )

    def _note(self) -> Note | None:
        denials = self.denials
        if denials is None:
            return None
        sent_us = denials.now_us()

        def note(check: Check, outcome: Outcome) -> None:
            denials.note(check, outcome, sent_us)

        return note


def dropped_by(command: Command[Any]) -> Drop | None:
    """Which cached denials a command makes doubtful."""
    match command:
        case Reset(keys):
            return Drop(keys=keys)
        case Settle(reservation):
            return Drop(keys=tuple(decoded(limit.key) for limit in reservation.limits))
        case SetOverride(tenant_key=tenant, subject=subject) | DeleteOverride(tenant_key=tenant, subject=subject):
            return Drop(subjects=(Keys.overrides(tenant, subject),))
        case ClearOverrides(tenant) | DropDenials(tenant):
            return Drop(tenants=(tenant,))
    return None
