"""The circuit breaker and the failure behaviour of one server, with statistics of the current outage.

The caller asks `allows_call` before it calls the server and then reports `record_success` or `record_failure`.
`decide_without_store` decides the checks that the server did not. No I/O.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from limitforge.core.algorithms.base import UNLIMITED
from limitforge.core.check import Check, Debit, Failure
from limitforge.core.clock import MonotonicClock, SystemClock
from limitforge.core.decision import Decision, LimitState, fail_closed_decision, fail_open_decision
from limitforge.core.exact import percent_of
from limitforge.core.handles import Lease, Reservation, mark_local
from limitforge.errors import LimitforgeError, StoreError, StoreUnavailable
from limitforge.observability.events import log_event
from limitforge.stores.errors import NotServerFault, StoreFull
from limitforge.stores.memory.store import MemoryStore
from limitforge.stores.options import StoreOptions
from limitforge.stores.resilience.breaker import BreakerState, CircuitBreaker
from limitforge.stores.resilience.outage import Outage, format_counts

LOG_EVERY_US = 10_000_000
CHARGE_RETRY_US = 1_000_000
LOCAL_MAX_KEYS = 100_000
LOCAL_NEW_BUCKETS = LOCAL_MAX_KEYS // 10  # per tenant and minute, so that it can't evict the buckets of others
RETRY_MS = 1_000  # `retry_after_ms` of a denial while the breaker is closed
MIN_PROBE_US = 100_000

_log = logging.getLogger(__name__)


class Resilience:
    """The circuit breaker of one server, and the failure behaviour of the checks that it can't decide. Thread-safe.

    `local` decides checks with `failure="local"`; all servers of a store share it.
    """

    def __init__(self, options: StoreOptions, local: MemoryStore, name: str = "store") -> None:
        self._options = options
        self._name = name
        self._now_us = MonotonicClock().now_us
        probe_us = max(MIN_PROBE_US, int(2_000 * options.deadline_ms))
        self._breaker = CircuitBreaker(options.breaker_failures, int(1e6 * options.breaker_seconds), probe_us)
        self._lock = threading.Lock()
        self._outage: Outage | None = None
        self._charge_due_us = self._now_us()
        """Before this time, charges are kept, unless the breaker closes."""
        self._logged_us = self._charge_due_us - LOG_EVERY_US
        self._divided_rule = lru_cache(maxsize=4_096)(lambda rule: rule.divided_by(options.processes))
        self.local = local
        self.is_healthy = True
        """True if no call has failed lately, and no charge waits. `allows_call` is then True, and `record_success` has
        no effect."""
        self.since: float | None = None
        self.degraded: Counter[str] = Counter({kind.value: 0 for kind in Failure if kind is not Failure.RAISE})

    @property
    def state(self) -> str:
        return self._breaker.state.value

    def allows_call(self) -> bool:
        """Return whether the server may be called now."""
        if self.is_healthy:
            return True
        with self._lock:
            return self._breaker.allows_call(self._now_us())

    def ensure_allowed(self) -> None:
        """Raise NotServerFault if the server may not be called now."""
        if not self.allows_call():
            raise breaker_open_error()

    def now_us(self) -> int:
        """Return the time to pass to `record_failure`. Call it when a call begins."""
        return self._now_us()

    def record_failure(self, error: StoreUnavailable, began_us: int) -> bool:
        """Record that a call which began at `began_us` failed; return whether that opened the breaker."""
        if isinstance(error, NotServerFault | StoreFull):
            return False  # a full server replies at once, and still decides denials and peeks
        with self._lock:
            self.is_healthy = False
            was_closed = self._breaker.state is BreakerState.CLOSED
            opened = self._breaker.record_failure(self._now_us(), began_us)
            if opened and was_closed:
                self.since = _epoch_seconds()
        if opened:
            log_event(
                _log,
                logging.WARNING,
                "store.breaker_open",
                "circuit breaker open, the server is not called until the next probe",
                server=self._name,
                retry_in_s=self._options.breaker_seconds,
                error=error,
            )
        return opened

    def record_success(self, results: Sequence[object] = ()) -> list[Check]:
        """Record a reply; return the charges of an outage that has ended, which the caller sends once.

        Nothing is returned if the server could not write some of `results`. If the breaker had not opened, charges are
        returned at most once in LOG_EVERY_US.
        """
        if self.is_healthy:
            return []
        is_full = any(isinstance(result, StoreUnavailable) for result in results)
        with self._lock:
            now_us = self._now_us()
            closed = self._breaker.record_success()
            if closed:
                self.since = _epoch_seconds()
            outage = self._outage
            if is_full or (outage is not None and not closed and now_us < self._charge_due_us):
                return []
            self._outage, self._charge_due_us = None, now_us + LOG_EVERY_US
            self.is_healthy = True
        if outage is None:
            return []
        if outage.decisions:  # an outage without decisions holds only charges that failed before
            log_event(
                _log,
                logging.WARNING,
                "store.available",
                "the server replies again and receives the pending charges",
                server=self._name,
                seconds=self._seconds(outage),
                **outage.summary(),
            )
        return outage.charges()

    def requeue_charges(self, charges: Iterable[Check]) -> None:
        """Keep charges that were certainly not made. The first reply after CHARGE_RETRY_US returns them again."""
        with self._lock:
            now_us = self._now_us()
            for charge in charges:
                self._outage = self._outage or Outage(now_us)
                for debit in charge.debits:
                    self._outage.add_charge(debit)
                self._charge_due_us = now_us + CHARGE_RETRY_US
                self.is_healthy = False

    def decide_without_store(self, check: Check, error: StoreUnavailable) -> Decision | LimitforgeError:
        """Decide a check by its failure behaviour. `error` is why the server did not. Never raises."""
        failure = check.failure or self._options.failure
        if failure is Failure.OPEN and check.failure is None and isinstance(error, StoreFull):
            failure = Failure.LOCAL  # else one tenant that fills the server would disable the limits of all tenants
        if failure is Failure.RAISE:
            return error
        try:
            decision = self._decide_by(check, Failure(failure))
        except StoreError:  # the local store can't decide either: it is full of leases, or has no calendar window
            decision = fail_closed_decision(check, self.retry_after_ms())
        except LimitforgeError as refused:  # an error of this check, such as too many reservations of one bucket
            return refused
        self._record_decision(check, decision, error)
        return decision

    def close(self) -> None:
        """Log the outage that has not ended."""
        outage = self._take_outage()
        if outage is not None and outage.decisions:
            log_event(
                _log,
                logging.WARNING,
                "store.closed_unavailable",
                "the store was closed before the server replied again, pending charges are lost",
                server=self._name,
                seconds=self._seconds(outage),
                **outage.summary(),
            )

    def take_charges(self) -> list[Check]:
        """Return the pending charges for the server that replaces this one."""
        outage = self._take_outage()
        if outage is None:
            return []
        if outage.decisions:
            log_event(
                _log,
                logging.WARNING,
                "store.server_replaced",
                "another server has replaced this one and receives the pending charges",
                server=self._name,
                seconds=self._seconds(outage),
                **outage.summary(),
            )
        return outage.charges()

    def retry_after_ms(self) -> int:
        """Return when to retry a check that was denied because the server is unavailable."""
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
        debits: list[Debit] = [
            (self._divided_rule(rule), key, cost, resource, None) for rule, key, cost, resource, _ in check.debits
        ]
        # `is_hybrid` stays false: the store must not divide `local` limits again, by the processes that are alive.
        decision = self.local.check(Check(debits, check.names, check.lease, check.is_dynamic, hold=check.hold))
        limits = {
            name: self._as_whole_limit(decision.limits[name], debit)
            for name, debit in zip(check.names, check.debits, strict=True)
        }
        binding = None if decision.binding is None else limits[decision.binding]
        return msgspec.structs.replace(
            decision,
            limits=limits,
            limit=None if binding is None else binding.limit,
            retry_after_ms=decision.retry_after_ms if decision.allowed or binding is None else binding.retry_after_ms,
            degraded=Failure.LOCAL.value,
            lease_id=mark_local(Lease, decision.lease_id),
            reservation_id=mark_local(Reservation, decision.reservation_id),
        )

    def _as_whole_limit(self, state: LimitState, debit: Debit) -> LimitState:
        """Report the whole limit, which is the one that users know, not the part of this process.

        A cost that exceeds only the part of this process may be retried when the server is back.
        """
        rule, _, cost, *_ = debit
        limit = rule.algorithm.limit
        if limit == UNLIMITED:
            return state
        retry_after_ms = state.retry_after_ms
        if retry_after_ms is None and cost <= percent_of(limit, rule.percent):
            retry_after_ms = self.retry_after_ms()
        return msgspec.structs.replace(state, limit=limit, retry_after_ms=retry_after_ms)

    # -- statistics of the outage

    def _record_decision(self, check: Check, decision: Decision, error: StoreUnavailable) -> None:
        now_us = self._now_us()
        behaviour = decision.degraded or ""
        with self._lock:
            self.degraded[behaviour] += 1
            self.is_healthy = False
            if self._outage is None:
                self._outage = Outage(now_us)
            outage = self._outage
            outage.decisions[behaviour] += 1
            if decision.allowed and behaviour != Failure.CLOSED:
                outage.record_admission(check, decision, maybe_counted=error.maybe_counted)
            is_due = now_us - self._logged_us >= LOG_EVERY_US
            if is_due:
                self._logged_us = now_us
            decisions = dict(outage.decisions)
        if is_due:
            log_event(
                _log,
                logging.WARNING,
                "store.unavailable",
                "checks are decided without the server",
                server=self._name,
                decisions=format_counts(decisions),
                error=error,
            )

    def _take_outage(self) -> Outage | None:
        with self._lock:
            outage, self._outage = self._outage, None
        return outage

    def _seconds(self, outage: Outage) -> float:
        return (self._now_us() - outage.since_us) / 1e6


def breaker_open_error() -> NotServerFault:
    return NotServerFault("the circuit breaker is open")


def _epoch_seconds() -> float:
    return SystemClock().now_us() / 1e6
