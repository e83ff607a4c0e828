"""Shares of leased limits: what this process has paid for in the store, and may spend without asking.

A share is sized by how fast this process has lately asked for the limit: about two sync intervals. It is topped up
ahead of need, at most once an interval, and goes back when nobody asks any more. So the total over all processes never
passes the limit: what is out was taken first. It may stay below the limit by the shares that are out, and by those of
processes that died, until their window ends or their share lapses.

Nothing here does I/O or reads a clock of its own. Times are of this process's monotonic clock, and a share ends counted
from the moment at which it was asked for: never later than in the store.
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
SHARE_INTERVALS = 2  # what a share is sized for
IDLE_INTERVALS = 5  # after these without a question, it goes back
MIN_SHARE = 4  # a share below this saves nothing
MIN_LAPSE_US = 2_000_000
LAPSE_INTERVALS = 10


class PrepaidShare(msgspec.Struct, eq=False):
    """What this process has of one bucket, and how fast it goes."""

    rule: Rule
    key: str
    resource: str
    overrides: str | None
    token: bytes
    synced_us: int
    balance: int = 0
    expires_us: int = 0
    window: tuple[int, int] = (0, 0)
    """Names the count that it was taken from: when its window starts and ends, by the store's time."""
    to_return: int = 0
    """What is no longer spent, and goes back with the next message."""
    epoch: int = 0
    """Changes whenever what is left was replaced: what was spent of it before can't come back."""
    invalidated_us: int = LONG_AGO_US
    """Answers to what was sent before this are of numbers, or of a bucket, that are no more."""
    was_reset: bool = False
    demand: int = 0
    """What was asked for since the last sync."""
    demand_per_interval: float = 0.0
    idle_intervals: int = 0
    is_syncing: bool = False
    limit: int = 0
    remaining: int = 0
    resets_us: int = 0


class TopUpRequest(msgspec.Struct):
    """What is sent to the store about one share."""

    share: PrepaidShare
    returned: int
    kept: int
    requested: int


class TopUpReply(msgspec.Struct):
    """What the store says to that."""

    granted: int
    limit: int
    remaining: int
    reset_us: int
    starts_us: int
    ends_us: int
    """The end of its window, by the store's time; -1 if what was kept had lapsed."""

    @property
    def window(self) -> tuple[int, int]:
        return self.starts_us, max(self.ends_us, 0)


class PrepaidShares:
    """The shares of one process, or of one event loop of it. Thread-safe."""

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
        """How much has been paid for and not been spent."""
        now_us = self._now_us()
        return sum(share.balance for share in list(self._shares.values()) if now_us < share.expires_us)

    def now_us(self) -> int:
        """For `answered`: the moment before a wish is sent."""
        return self._now_us()

    def spend(self, take: Debit) -> tuple[LimitRow, int] | None:
        """Take it from what was paid for, with the share's epoch; None if the store must be asked."""
        rule, key, cost, resource, overrides = take
        now_us = self._now_us()
        self._lock.acquire()  # `with` would cost twice as much
        try:
            share = self._shares.get(key)
            if share is None:
                self._open_share(take, now_us)
                return None
            if share.rule is not rule and not self._matches_rule(share, rule):
                return None
            if share.resource != resource and overrides is not None:  # an override may be of one resource
                return None
            share.demand += cost
            if share.balance < cost or now_us >= share.expires_us:
                return None
            share.balance -= cost
            reset_us = share.resets_us - now_us
            return (share.limit, share.balance + share.remaining, reset_us if reset_us > 0 else 0, 0, 0), share.epoch
        finally:
            self._lock.release()

    def refund(self, take: Debit, epoch: int) -> None:
        """What was spent for a check that was denied after all, unless the share is another by now."""
        _, key, cost, *_ = take
        with self._lock:
            share = self._shares.get(key)
            if share is not None and share.epoch == epoch:
                share.balance += cost

    def invalidate(self, invalidation: Invalidation) -> None:
        """Spend no more of what a reset or an override has touched, or another plan. What was reset is lost: the bucket
        that it came from is no more.
        """
        with self._lock:
            for share in self._shares.values():
                if share.key in invalidation.keys:
                    self._forfeit(share)
                elif share.overrides in invalidation.subjects or share.key.startswith(invalidation.tenants):
                    self._invalidate(share)

    def invalidate_all(self, *, messages_missed: bool = True) -> None:
        """Spend no more of anything if messages may have been `missed`; before anybody listens nothing is promised."""
        with self._lock:
            for share in self._shares.values() if messages_missed else ():
                self._forfeit(share)

    # -- keeping in step with the store

    def due_requests(self) -> list[TopUpRequest]:
        """What to tell the store now; each share at most once an interval."""
        now_us = self._now_us()
        wishes = []
        with self._lock:
            for share in list(self._shares.values()):
                if not share.is_syncing and now_us - share.synced_us >= self.interval_us:
                    wish = self._make_request(share, now_us)
                    if wish is not None:
                        wishes.append(wish)
        return wishes

    def return_all(self) -> list[TopUpRequest]:
        """Everything goes back."""
        with self._lock:
            shares, self._shares = self._shares, {}
            for share in shares.values():
                self._stop_spending(share)
        return [TopUpRequest(share, share.to_return, 0, 0) for share in shares.values() if share.to_return]

    def apply_replies(
        self, wishes: Sequence[TopUpRequest], grants: Sequence[TopUpReply | None] | None, sent_us: int
    ) -> None:
        """What the store said to wishes that were sent then; None for one that it did nothing about, or instead of all
        where nothing was heard: what may have been granted then is never spent, and what was kept still is.
        """
        with self._lock:
            for at, wish in enumerate(wishes):
                wish.share.is_syncing = False
                grant = None if grants is None else grants[at]
                if grant is not None:
                    self._apply_reply(wish.share, grant, sent_us)
                elif grants is not None and not (wish.share.was_reset and sent_us <= wish.share.invalidated_us):
                    wish.share.to_return += wish.returned

    # -- inside the lock

    def _apply_reply(self, share: PrepaidShare, grant: TopUpReply, sent_us: int) -> None:
        if self._shares.get(share.key) is not share:
            return  # it is gone by now: what was granted lapses, or ends with its window
        is_bucket = share.rule.is_bucket
        if grant.ends_us == -1 or (not is_bucket and grant.window != share.window):  # lapsed, or of another window
            share.balance = share.to_return = 0
            share.epoch += 1
        if sent_us <= share.invalidated_us:  # granted under other numbers, or of a bucket that was reset
            share.to_return += 0 if share.was_reset else grant.granted
            share.window = grant.window
            return
        share.balance += grant.granted
        share.window = grant.window
        share.expires_us = sent_us + (self.lapse_us if is_bucket else grant.reset_us)
        share.limit, share.remaining, share.resets_us = grant.limit, grant.remaining, sent_us + grant.reset_us

    def _open_share(self, take: Debit, now_us: int) -> None:
        rule, key, cost, resource, overrides = take
        if len(self._shares) < self._max_shares:
            token = os.urandom(TOKEN_BYTES)
            self._shares[key] = PrepaidShare(rule, key, resource, overrides, token, now_us, demand=cost)

    def _matches_rule(self, share: PrepaidShare, rule: Rule) -> bool:
        """Whether a rule still says what the share was taken under; if not, that is spent no more."""
        if share.rule.limit == rule.limit:
            return True
        self._invalidate(share)
        share.rule = rule
        return False

    def _stop_spending(self, share: PrepaidShare) -> None:
        share.to_return += share.balance  # the store knows whether it is still of the same window
        share.balance, share.epoch = 0, share.epoch + 1

    def _invalidate(self, share: PrepaidShare) -> None:
        """It was taken under numbers that no longer hold."""
        self._stop_spending(share)
        share.invalidated_us, share.was_reset = self._now_us(), False

    def _forfeit(self, share: PrepaidShare) -> None:
        """What it was taken from is no more: given back, it would make room in something else."""
        share.balance = share.to_return = 0
        share.epoch += 1
        share.invalidated_us, share.was_reset = self._now_us(), True

    def _make_request(self, share: PrepaidShare, now_us: int) -> TopUpRequest | None:
        elapsed = max(now_us - share.synced_us, 1) / self.interval_us
        asked = share.demand / elapsed
        share.demand_per_interval = max(asked, (share.demand_per_interval + asked) / 2)  # up at once, down by halves
        share.synced_us, share.demand = now_us, 0
        share.idle_intervals = 0 if asked else share.idle_intervals + 1
        if now_us >= share.expires_us and share.balance:
            self._stop_spending(share)
        if share.idle_intervals >= IDLE_INTERVALS:
            del self._shares[share.key]
            self._stop_spending(share)
            return TopUpRequest(share, share.to_return, 0, 0) if share.to_return else None
        wanted = ceil(SHARE_INTERVALS * share.demand_per_interval)
        is_worth_it = wanted >= MIN_SHARE and share.idle_intervals == 0
        missing = wanted - share.balance if is_worth_it and share.balance < wanted else 0
        is_ageing = share.rule.is_bucket and share.balance > 0 and share.expires_us - now_us < self.lapse_us // 2
        if not (missing or is_ageing or share.to_return):
            return None
        wish = TopUpRequest(share, share.to_return, share.balance, missing)
        share.to_return, share.is_syncing = 0, True
        return wish
