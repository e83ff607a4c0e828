"""Prepaid shares: the part of a limit that this process has debited in the store, and may spend without asking it.

A share is sized for about two sync intervals of the demand that this process has lately seen. It is topped up before it
runs out, at most once in an interval, and returned when it is idle. The store debits a share before it is spent, so all
processes together never exceed the limit. They may stay below it by the unspent shares, including those of processes
that died, until the window ends or the share lapses.

No I/O. Times are those of the monotonic clock of this process. A share expires counted from the moment at which the
request was sent, so it never expires later than in the store.
"""

import os
import threading
from collections.abc import Sequence
from math import ceil

import msgspec

from limitforge.core.check import TOKEN_BYTES, Debit
from limitforge.core.clock import LONG_AGO_US, Clock
from limitforge.core.decision import LimitRow
from limitforge.core.plan import Rule
from limitforge.stores.redis.denial_cache import Invalidation

MAX_SHARES = 10_000
SHARE_INTERVALS = 2  # a share covers the demand of this many sync intervals
IDLE_INTERVALS = 5  # a share without demand for this many intervals is returned
MIN_SHARE = 4  # a smaller share saves too few calls
MIN_LAPSE_US = 2_000_000
LAPSE_INTERVALS = 10


class PrepaidShare(msgspec.Struct, eq=False):
    """The share of this process in one bucket, and its demand."""

    rule: Rule
    key: str
    resource: str
    overrides: str | None
    token: bytes
    synced_us: int
    balance: int = 0
    expires_us: int = 0
    window: tuple[int, int] = (0, 0)
    """Start and end, in the store's time, of the window that the share was debited from."""
    to_return: int = 0
    """Unspent cost to return with the next request."""
    balance_id: int = 0
    """Changes when the balance is replaced. What was spent before can't be refunded to the new balance."""
    invalidated_us: int = LONG_AGO_US
    """Grants of requests that were sent before this are not spent: the limit has changed, or its bucket was deleted."""
    was_reset: bool = False
    demand: int = 0
    """Cost of the checks since the last sync."""
    demand_per_interval: float = 0.0
    idle_intervals: int = 0
    is_syncing: bool = False
    limit: int = 0
    remaining: int = 0
    resets_us: int = 0


class TopUpRequest(msgspec.Struct):
    """A request to the store about one share: what is returned, what this process keeps, and what it needs more."""

    share: PrepaidShare
    returned: int
    kept: int
    requested: int


class TopUpReply(msgspec.Struct):
    """The store's reply to a top-up request."""

    granted: int
    limit: int
    remaining: int
    reset_us: int
    starts_us: int
    ends_us: int
    """End of the window in the store's time; -1 if the kept part of the share had lapsed."""

    @property
    def window(self) -> tuple[int, int]:
        return self.starts_us, max(self.ends_us, 0)


class PrepaidShares:
    """The prepaid shares of one process, or of one event loop in it. Thread-safe."""

    def __init__(self, *, interval_us: int, clock: Clock, max_shares: int = MAX_SHARES) -> None:
        self.interval_us = interval_us
        self.lapse_us = max(MIN_LAPSE_US, LAPSE_INTERVALS * interval_us)
        self._now_us = clock.now_us
        self._max_shares = max_shares
        self._lock = threading.Lock()
        self._shares: dict[str, PrepaidShare] = {}

    def __len__(self) -> int:
        return len(self._shares)

    @property
    def total_balance(self) -> int:
        """The prepaid cost that has not been spent."""
        now_us = self._now_us()
        return sum(share.balance for share in list(self._shares.values()) if now_us < share.expires_us)

    def now_us(self) -> int:
        """Return the time to pass to `apply_replies`. Call it before you send the requests."""
        return self._now_us()

    def spend(self, debit: Debit) -> tuple[LimitRow, int] | None:
        """Spend a debit from its share; return the row and the balance id, or None if the store must decide."""
        rule, key, cost, resource, overrides = debit
        now_us = self._now_us()
        self._lock.acquire()  # `with` would cost twice as much
        try:
            share = self._shares.get(key)
            if share is None:
                self._open_share(debit, now_us)
                return None
            if share.rule is not rule and not self._matches_rule(share, rule):
                return None
            if share.resource != resource and overrides is not None:  # an override may apply to one resource only
                return None
            share.demand += cost
            if share.balance < cost or now_us >= share.expires_us:
                return None
            share.balance -= cost
            reset_us = share.resets_us - now_us
            return (
                share.limit,
                share.balance + share.remaining,
                reset_us if reset_us > 0 else 0,
                0,
                0,
            ), share.balance_id
        finally:
            self._lock.release()

    def refund(self, debit: Debit, balance_id: int) -> None:
        """Return the cost of a check that was denied after all, unless the balance has been replaced since."""
        _, key, cost, *_ = debit
        with self._lock:
            share = self._shares.get(key)
            if share is not None and share.balance_id == balance_id:
                share.balance += cost

    def invalidate(self, invalidation: Invalidation) -> None:
        """Stop spending shares that a reset, an override or a new plan affects.

        The share of a reset bucket is lost: the bucket that it was debited from no longer exists.
        """
        with self._lock:
            for share in self._shares.values():
                if share.key in invalidation.bucket_keys:
                    self._forfeit(share)
                elif share.overrides in invalidation.override_keys or share.key.startswith(invalidation.key_prefixes):
                    self._invalidate(share)

    def invalidate_all(self, *, messages_missed: bool = True) -> None:
        """Stop spending all shares if `messages_missed`. The first subscription can't have missed any."""
        with self._lock:
            for share in self._shares.values() if messages_missed else ():
                self._forfeit(share)

    # -- sync with the store

    def due_requests(self) -> list[TopUpRequest]:
        """Return the requests to send now, at most one per share and sync interval."""
        now_us = self._now_us()
        requests = []
        with self._lock:
            for share in list(self._shares.values()):
                if not share.is_syncing and now_us - share.synced_us >= self.interval_us:
                    request = self._make_request(share, now_us)
                    if request is not None:
                        requests.append(request)
        return requests

    def return_all(self) -> list[TopUpRequest]:
        """Close all shares; return the requests that give their balance back to the store."""
        with self._lock:
            shares, self._shares = self._shares, {}
            for share in shares.values():
                self._stop_spending(share)
        return [TopUpRequest(share, share.to_return, 0, 0) for share in shares.values() if share.to_return]

    def apply_replies(
        self, requests: Sequence[TopUpRequest], replies: Sequence[TopUpReply | None] | None, sent_us: int
    ) -> None:
        """Apply the replies to requests that were sent at `sent_us`.

        A reply is None if the store did nothing for its request. `replies` is None if the outcome is unknown: a grant
        is then never spent, and the balance that was kept is still spent.
        """
        with self._lock:
            for index, request in enumerate(requests):
                request.share.is_syncing = False
                reply = None if replies is None else replies[index]
                if reply is not None:
                    self._apply_reply(request.share, reply, sent_us)
                elif replies is not None and not (request.share.was_reset and sent_us <= request.share.invalidated_us):
                    request.share.to_return += request.returned

    # -- helpers, called with the lock held

    def _apply_reply(self, share: PrepaidShare, reply: TopUpReply, sent_us: int) -> None:
        if self._shares.get(share.key) is not share:
            return  # the share was closed: the grant lapses in the store, or ends with its window
        is_bucket = share.rule.has_level
        if reply.ends_us == -1 or (not is_bucket and reply.window != share.window):  # lapsed, or in another window
            share.balance = share.to_return = 0
            share.balance_id += 1
        if sent_us <= share.invalidated_us:  # granted under old numbers, or from a bucket that was reset
            share.to_return += 0 if share.was_reset else reply.granted
            share.window = reply.window
            return
        share.balance += reply.granted
        share.window = reply.window
        share.expires_us = sent_us + (self.lapse_us if is_bucket else reply.reset_us)
        share.limit, share.remaining, share.resets_us = reply.limit, reply.remaining, sent_us + reply.reset_us

    def _open_share(self, debit: Debit, now_us: int) -> None:
        rule, key, cost, resource, overrides = debit
        if len(self._shares) < self._max_shares:
            token = os.urandom(TOKEN_BYTES)
            self._shares[key] = PrepaidShare(rule, key, resource, overrides, token, now_us, demand=cost)

    def _matches_rule(self, share: PrepaidShare, rule: Rule) -> bool:
        """Return whether the share was debited under this limit. If not, stop spending it."""
        if share.rule.limit == rule.limit:
            return True
        self._invalidate(share)
        share.rule = rule
        return False

    def _stop_spending(self, share: PrepaidShare) -> None:
        share.to_return += share.balance  # the store drops it if the window has changed
        share.balance, share.balance_id = 0, share.balance_id + 1

    def _invalidate(self, share: PrepaidShare) -> None:
        """Stop spending a share that was debited under old numbers."""
        self._stop_spending(share)
        share.invalidated_us, share.was_reset = self._now_us(), False

    def _forfeit(self, share: PrepaidShare) -> None:
        """Drop a share whose bucket was reset. If it were returned, it would refund the new bucket."""
        share.balance = share.to_return = 0
        share.balance_id += 1
        share.invalidated_us, share.was_reset = self._now_us(), True

    def _make_request(self, share: PrepaidShare, now_us: int) -> TopUpRequest | None:
        elapsed = max(now_us - share.synced_us, 1) / self.interval_us
        demand = share.demand / elapsed
        share.demand_per_interval = max(demand, (share.demand_per_interval + demand) / 2)  # rise at once, fall by half
        share.synced_us, share.demand = now_us, 0
        share.idle_intervals = 0 if demand else share.idle_intervals + 1
        if now_us >= share.expires_us and share.balance:
            self._stop_spending(share)
        if share.idle_intervals >= IDLE_INTERVALS:
            del self._shares[share.key]
            self._stop_spending(share)
            return TopUpRequest(share, share.to_return, 0, 0) if share.to_return else None
        target = ceil(SHARE_INTERVALS * share.demand_per_interval)
        is_worthwhile = target >= MIN_SHARE and share.idle_intervals == 0
        missing = target - share.balance if is_worthwhile and share.balance < target else 0
        needs_renewal = share.rule.has_level and share.balance > 0 and share.expires_us - now_us < self.lapse_us // 2
        if not (missing or needs_renewal or share.to_return):
            return None
        request = TopUpRequest(share, share.to_return, share.balance, missing)
        share.to_return, share.is_syncing = 0, True
        return request
