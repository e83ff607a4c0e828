"""What happens when the store can't decide: a breaker, a decision without the store, and an account of both.

Nothing here does I/O. A shell asks `admits` before it talks to the backend, tells `succeeded` or `failed` afterwards,
and lets `decide` answer the checks that the backend could not. One object serves one backend, for any number of
threads.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from limitforge.core.algorithms.base import UNLIMITED
from limitforge.core.check import Check, Debit, Failure, build_charge
from limitforge.core.clock import MonotonicClock, SystemClock
from limitforge.core.decision import Decision, LimitState, fail_closed_decision, fail_open_decision
from limitforge.core.exact import percent_of
from limitforge.core.handles import Lease, Reservation, mark_local
from limitforge.errors import LimitforgeError, StoreError, StoreUnavailable
from limitforge.stores.memory.store import MemoryStore
from limitforge.stores.options import StoreOptions
from limitforge.stores.resilience.breaker import BreakerState, CircuitBreaker

LOG_EVERY_US = 10_000_000
CHARGE_RETRY_US = 1_000_000
LOCAL_MAX_KEYS = 100_000
LOCAL_NEW_BUCKETS = LOCAL_MAX_KEYS // 10  # what one tenant may begin a minute: it must not evict the buckets of others
MAX_NAMES = 1_000  # limits whose admissions are summed by name; the rest is summed together
MAX_CHARGED_BUCKETS = 10_000  # buckets that are charged after an outage
OTHER_LIMITS = "(other limits)"
RETRY_MS = 1_000  # what a closed check is told while the breaker has not opened
MIN_PROBE_US = 100_000

_log = logging.getLogger(__name__)


class NotServerFault(StoreUnavailable):
    """The store was not asked, by our own choice: no failure of the store."""


class StoreFull(StoreUnavailable):
    """The store answered, and has no memory for what a check would have written."""


def as_maybe_counted(error: StoreUnavailable) -> StoreUnavailable:
    """Return the same error where some of what was asked may have been counted before it."""
    kind = next((kind for kind in (NotServerFault, StoreFull) if isinstance(error, kind)), StoreUnavailable)
    return kind(str(error), maybe_counted=True)


class Outage(msgspec.Struct):
    """What was decided without the store since it was last heard of."""

    since_us: int
    decisions: Counter[str] = msgspec.field(default_factory=Counter)
    admitted: Counter[str] = msgspec.field(default_factory=Counter)
    """Costs by limit, as `open` and `local` let them pass."""
    pending_charges: dict[str, Debit] = msgspec.field(default_factory=dict)
    """By bucket: what is owed of limits that say `charge_after_outage`."""
    maybe_counted: int = 0
    """Admitted checks that were sent and may have been counted: they are never charged."""
    unrecorded_cost: int = 0
    """Admitted costs that no room was left to note."""


class Resilience:
    """The breaker of one backend, and the failure behaviour of the checks that it can't decide.

    `local` decides by this process's part of a limit: several backends of one store share it.
    """

    def __init__(self, options: StoreOptions, local: MemoryStore, name: str = "store") -> None:
        self._options = options
        self._name = name
        self._now_us = MonotonicClock().now_us
        probe_us = max(MIN_PROBE_US, int(2_000 * options.deadline_ms))
        self._breaker = CircuitBreaker(options.breaker_failures, int(1e6 * options.breaker_seconds), probe_us)
        self._lock = threading.Lock()
        self._outage: Outage | None = None
        self._logged_us = self._charged_us = self._now_us() - LOG_EVERY_US
        self._divided = lru_cache(maxsize=4_096)(lambda rule: rule.divided(options.processes))
        self.local = local
        self.is_healthy = True
        """Nothing has failed lately: `admits` would say yes and `succeeded` would change nothing."""
        self.since: float | None = None
        self.degraded: Counter[str] = Counter({kind.value: 0 for kind in Failure if kind is not Failure.RAISE})

    @property
    def state(self) -> str:
        return self._breaker.state.value

    def allows_call(self) -> bool:
        """Whether the backend may be asked now."""
        if self.is_healthy:
            return True
        with self._lock:
            return self._breaker.allows_call(self._now_us())

    def ensure_allowed(self) -> None:
        """Raise NotAsked if the backend may not be asked now."""
        if not self.allows_call():
            raise breaker_open_error()

    def now_us(self) -> int:
        """For `failed`: the moment at which a call begins."""
        return self._now_us()

    def record_failure(self, error: StoreUnavailable, began_us: int) -> bool:
        """The backend did not answer what began then; tells whether it is left alone from now on."""
        if isinstance(error, NotServerFault | StoreFull):
            return False  # a full store answers at once: leaving it alone would cost its denials and looks
        with self._lock:
            self.is_healthy = False
            was_closed = self._breaker.state is BreakerState.CLOSED
            opened = self._breaker.record_failure(self._now_us(), began_us)
            if opened and was_closed:
                self.since = _epoch_seconds()
        if opened:
            _log.warning("%s left alone for %g s: %s", self._name, self._options.breaker_seconds, error)
        return opened

    def record_success(self, answers: Sequence[object] = ()) -> list[Check]:
        """The backend answered. What it is owed after an outage comes back, to be sent once; not if it could not write
        what some of these checks asked for.

        Single lost calls, one now and then, are settled together: at most once in `LOG_EVERY_US`.
        """
        if self.is_healthy:
            return []
        is_full = any(isinstance(answer, StoreUnavailable) for answer in answers)
        with self._lock:
            now_us = self._now_us()
            closed = self._breaker.record_success()
            if closed:
                self.since = _epoch_seconds()
            outage = self._outage
            if is_full or (outage is not None and not closed and now_us - self._charged_us < LOG_EVERY_US):
                return []
            self._outage, self._charged_us = None, now_us
            self.is_healthy = True
        return [] if outage is None else self._end_outage(outage, "back", "now")

    def requeue_charges(self, charges: Iterable[Check]) -> None:
        """These were surely not charged: they are owed again, and tried again after a while."""
        with self._lock:
            now_us = self._now_us()
            for charge in charges:
                self._outage = self._outage or Outage(now_us)
                for take in charge.debits:
                    _add_charge(self._outage, take)
                self._charged_us = now_us - LOG_EVERY_US + CHARGE_RETRY_US
                self.is_healthy = False

    def decide_without_store(self, check: Check, error: StoreUnavailable) -> Decision | LimitforgeError:
        """Decide without the store, which could not for this reason. Never raises."""
        failure = check.failure or self._options.failure
        if failure is Failure.OPEN and check.failure is None and isinstance(error, StoreFull):
            failure = Failure.LOCAL  # or one tenant that fills the store would switch off the limits of all
        if failure is Failure.RAISE:
            return error
        try:
            decision = self._decide_by(check, Failure(failure))
        except StoreError:  # not even here: full of leases, or a quota that no calendar holds
            decision = fail_closed_decision(check, self.retry_after_ms())
        except LimitforgeError as refused:  # this check's own, such as too many reservations of one bucket
            return refused
        self._record_decision(check, decision, error)
        return decision

    def close(self) -> None:
        """Log what was never reconciled: the store did not come back in time."""
        with self._lock:
            outage, self._outage = self._outage, None
        if outage is not None:
            self._end_outage(outage, "not back", "never")

    def retire(self) -> list[Check]:
        """Another backend has taken over: what this one is owed is owed to that."""
        with self._lock:
            outage, self._outage = self._outage, None
        return [] if outage is None else self._end_outage(outage, "replaced", "now")

    def retry_after_ms(self) -> int:
        """When a caller that was denied for want of the store may come back."""
        with self._lock:
            return -(-self._breaker.retry_after_us(self._now_us()) // 1_000) or RETRY_MS

    # -- decisions

    def _decide_by(self, check: Check, failure: Failure) -> Decision:
        if failure is Failure.OPEN:
            return fail_open_decision(check)
        if failure is Failure.LOCAL:
            return self._decide_locally(check)
        return fail_closed_decision(check, self.retry_after_ms())

    def _decide_locally(self, check: Check) -> Decision:
        takes: list[Debit] = [
            (self._divided(rule), key, cost, resource, None) for rule, key, cost, resource, _ in check.debits
        ]
        decision = self.local.check(Check(takes, check.names, check.lease, check.is_dynamic, hold=check.hold))
        limits = {
            name: self._as_whole_limit(decision.limits[name], take)
            for name, take in zip(check.names, check.debits, strict=True)
        }
        bound = None if decision.binding is None else limits[decision.binding]
        return msgspec.structs.replace(
            decision,
            limits=limits,
            limit=None if bound is None else bound.limit,
            retry_after_ms=decision.retry_after_ms if decision.allowed or bound is None else bound.retry_after_ms,
            degraded=Failure.LOCAL.value,
            lease_id=mark_local(Lease, decision.lease_id),
            reservation_id=mark_local(Reservation, decision.reservation_id),
        )

    def _as_whole_limit(self, state: LimitState, take: Debit) -> LimitState:
        """What users know as the limit is the whole of it. A cost that only this node's part can never hold may come
        back when the store does.
        """
        rule, _, cost, *_ = take
        limit = rule.algorithm.limit
        if limit == UNLIMITED:
            return state
        retry_after_ms = state.retry_after_ms
        if retry_after_ms is None and cost <= percent_of(limit, rule.percent):
            retry_after_ms = self.retry_after_ms()
        return msgspec.structs.replace(state, limit=limit, retry_after_ms=retry_after_ms)

    # -- the account

    def _record_decision(self, check: Check, decision: Decision, error: StoreUnavailable) -> None:
        now_us = self._now_us()
        kind = decision.degraded or ""
        with self._lock:
            self.degraded[kind] += 1
            self.is_healthy = False
            if self._outage is None:
                self._outage = Outage(now_us)
            outage = self._outage
            outage.decisions[kind] += 1
            if decision.allowed and kind != Failure.CLOSED:
                self._record_admission(outage, check, decision, maybe_counted=error.maybe_counted)
            is_due = now_us - self._logged_us >= LOG_EVERY_US
            if is_due:
                self._logged_us = now_us
            kinds = dict(outage.decisions)
        if is_due:
            _log.warning("checks are decided without the store (%s so far): %s", _format_counts(kinds), error)

    def _record_admission(self, outage: Outage, check: Check, decision: Decision, *, maybe_counted: bool) -> None:
        if maybe_counted and any(cost for _, _, cost, *_ in check.debits):
            outage.maybe_counted += 1
        for name, take in zip(check.names, check.debits, strict=True):
            rule, _, cost, *_ = take
            state = decision.limits.get(name)
            if not cost or (state is not None and not state.allowed):
                continue  # a look, or a monitored limit that had no room
            known = name in outage.admitted or len(outage.admitted) < MAX_NAMES
            outage.admitted[name if known else OTHER_LIMITS] += cost
            if rule.limit.charge_after_outage and not maybe_counted:
                _add_charge(outage, take)

    def _log_outage(self, outage: Outage, how: str, when: str) -> None:
        _log.warning(
            "%s %s after %.1f s; decided without it: %s; admitted by limit: %s; charged %s: %d in %d buckets; "
            "admitted checks that may have been counted: %d; admitted but not noted for charging: %d",
            self._name,
            how,
            (self._now_us() - outage.since_us) / 1e6,
            _format_counts(outage.decisions),
            _format_counts(outage.admitted),
            when,
            sum(take[2] for take in outage.pending_charges.values()),
            len(outage.pending_charges),
            outage.maybe_counted,
            outage.unrecorded_cost,
        )

    def _end_outage(self, outage: Outage, how: str, when: str) -> list[Check]:
        if outage.decisions:  # else it only holds what is owed again
            self._log_outage(outage, how, when)
        return [build_charge([take]) for take in outage.pending_charges.values()]


def _add_charge(outage: Outage, take: Debit) -> None:
    """Note what a bucket is owed, up to the most that is ever charged."""
    rule, key, cost, resource, overrides = take
    if key not in outage.pending_charges and len(outage.pending_charges) >= MAX_CHARGED_BUCKETS:
        outage.unrecorded_cost += cost
        return
    owed = outage.pending_charges[key][2] if key in outage.pending_charges else 0
    most = 2 * max(rule.algorithm.limit, 0)
    outage.pending_charges[key] = (rule, key, min(owed + cost, most), resource, overrides)


def breaker_open_error() -> NotServerFault:
    return NotServerFault("the store is left alone for a while, after it failed")


def _epoch_seconds() -> float:
    return SystemClock().now_us() / 1e6


def _format_counts(counted: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counted.items()) or "none"
