"""Prepaid limits on a real Redis: all processes together never exceed the limit, and stay below it within a bound.

Several processes top up shares, spend them, lose messages, die and come back, each with its own clock. A model counts
what they admit.
"""

import time
from collections import Counter
from fractions import Fraction
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from limitforge import FixedWindow, Limit, ManualClock, Quota, StoreOptions, SyncLimiter, TokenBucket
from limitforge.stores.redis.prepaid.shares import PrepaidShares, TopUpRequest
from limitforge.stores.redis.sync.store import SyncRedisStore
from tests.servers import RedisServer
from tests.state_machines import run_machine
from tests.topologies import RedisCluster

BASE_US = 1_700_006_400_000_000
INTERVAL_US = 100_000
DAY_US = 86_400_000_000
PROCESSES = 3
PATIENT = StoreOptions(failure="raise", deadline_ms=30_000, denial_cache_ms=0, sync_interval_ms=INTERVAL_US / 1_000)

WINDOW = FixedWindow(name="window", limit=60, window_seconds=2, consistency="prepaid")
SPREAD = FixedWindow(name="spread", limit=60, window_seconds=2, spread=True, consistency="prepaid")
QUOTA = Quota(name="quota", limit=200, period="day", consistency="prepaid")
BUCKET = TokenBucket(name="bucket", bucket_capacity=50, refill_rate_per_sec="33.3", consistency="prepaid")


class PrepaidProcess:
    """One process: a limiter whose shares use their own clock and are synced by the test."""

    def __init__(self, url: str, store_clock: ManualClock, offset_us: int) -> None:
        self.clock = ManualClock(offset_us)
        self.limiter = SyncLimiter.connect(url, clock=store_clock, options=PATIENT)
        self.store = cast("SyncRedisStore", self.limiter._store)
        self.store._prepaid_thread = cast("Any", self)  # only the test syncs the shares
        self.shares: PrepaidShares = self.store._hybrid.shares
        self.shares._now_us = self.clock.now_us

    def close(self) -> None:
        self.store._pools.close()

    def unreturned(self, now_us: int) -> int:
        """Return the prepaid cost of windows that have not ended in the store's time, and that is not returned yet."""
        held = list(self.shares._shares.values())
        return sum(share.balance + share.to_return for share in held if now_us < share.window[1])


class PrepaidModel(RuleBasedStateMachine):
    server: Any
    limit: Limit

    def __init__(self) -> None:
        super().__init__()
        self.server.flush()
        self.clock = ManualClock(BASE_US)
        self.processes: list[PrepaidProcess] = []
        self.lost = 0  # prepaid cost in the current buckets that no process can spend any more
        self.in_flight = 0
        self.window = 0

    @initialize(offsets=st.lists(st.integers(0, 10**12), min_size=PROCESSES, max_size=PROCESSES))
    def start(self, offsets: list[int]) -> None:
        self.processes = [PrepaidProcess(self.server.url, self.clock, offset) for offset in offsets]
        self.window = self.window_now()

    def teardown(self) -> None:
        for process in self.processes:
            process.close()

    def pass_time(self, us: int) -> None:
        self.clock.advance_us(us)
        for process in self.processes:
            process.clock.advance_us(us)
        if self.window_now() != self.window:
            self.window, self.lost = self.window_now(), 0
        self.passed(us)

    def window_now(self) -> int:
        raise NotImplementedError

    def passed(self, us: int) -> None:
        """Advance a model that refills."""

    def admitted(self, cost: int) -> None:
        raise NotImplementedError

    def denied(self, cost: int) -> None:
        raise NotImplementedError

    def out(self) -> int:
        return sum(process.unreturned(self.clock.now_us()) for process in self.processes) + self.lost + self.in_flight

    def ask(self, process: PrepaidProcess, cost: int) -> None:
        decision = process.limiter.check("r", "s", limits=self.limit, cost=cost)
        if not decision.allowed:
            self.denied(cost)
        elif cost:
            self.admitted(cost)

    @rule(process=st.integers(0, PROCESSES - 1), cost=st.sampled_from([1, 1, 1, 2, 3, 10]), times=st.integers(1, 30))
    def check(self, process: int, cost: int, times: int) -> None:
        for _ in range(times):
            self.ask(self.processes[process], cost)

    @rule(us=st.one_of(st.sampled_from([1, 1_000, 50_000, INTERVAL_US, 300_000, 1_000_000, 2_500_000])))
    def let_time_pass(self, us: int) -> None:
        self.pass_time(us)

    @rule(before_us=st.integers(-3, 3), process=st.integers(0, PROCESSES - 1))
    def come_to_the_edge_of_a_window(self, before_us: int, process: int) -> None:
        peek = self.processes[process].limiter.check("r", "s", limits=self.limit, cost=0)
        self.pass_time(max((peek.reset_after_ms or 0) * 1_000 + before_us, 0))

    @rule(
        process=st.integers(0, PROCESSES - 1),
        request_us=st.sampled_from([0, 100, 5_000, 700_000]),
        reply_us=st.sampled_from([0, 100, 5_000, 700_000]),
        meanwhile=st.integers(0, 20),
        fate=st.sampled_from(["arrives", "arrives", "arrives", "arrives", "request lost", "reply lost"]),
    )
    def sync(self, process: int, request_us: int, reply_us: int, meanwhile: int, fate: str) -> None:
        """Sync with delays, while the process keeps spending what it kept."""
        synced = self.processes[process]
        self.pass_time(INTERVAL_US)
        requests = synced.shares.due_requests()
        sent_us = synced.shares.now_us()
        self.pass_time(request_us)
        window = self.window
        replies: list[Any] = [None] * len(requests)
        due = time.monotonic() + 30
        if fate != "request lost" and requests:
            replies = synced.store._run_flow(synced.store._core.top_up_flow(requests, synced.shares.lapse_us), due)
        self.in_flight = sum(reply.granted for reply in replies if reply is not None)
        self.in_flight += sum(top_up.returned for top_up in requests) if fate == "request lost" else 0
        for _ in range(meanwhile):
            self.ask(synced, 1)
        self.pass_time(reply_us)
        self.in_flight = 0
        synced.shares.apply_replies(requests, replies if fate == "arrives" else None, sent_us)
        for top_up, reply in zip(requests, replies, strict=True):
            if fate == "arrives" and reply is not None:
                self.lose_unless_ended(window, self.granted_to_closed_share(synced, top_up, reply.granted))
            else:
                self.lose_unless_ended(window, 0 if reply is None else reply.granted)
                self.lose_unless_ended(window, top_up.returned if fate == "request lost" else 0)

    def granted_to_closed_share(self, process: PrepaidProcess, top_up: TopUpRequest, granted: int) -> int:
        """Return what was granted to a share that was closed meanwhile, and is never spent."""
        share = top_up.share
        return 0 if process.shares._shares.get(share.key) is share else granted

    def lose_unless_ended(self, window: int, amount: int) -> None:
        if window == self.window:
            self.lost += amount

    @rule(process=st.integers(0, PROCESSES - 1), offset=st.integers(0, 10**12))
    def kill(self, process: int, offset: int) -> None:
        self.lost += self.processes[process].unreturned(self.clock.now_us())
        self.processes[process].close()
        self.processes[process] = PrepaidProcess(self.server.url, self.clock, offset)

    @rule(process=st.integers(0, PROCESSES - 1))
    def leave(self, process: int) -> None:
        """Close a process, which returns everything."""
        self.processes[process].store._top_up(self.processes[process].shares.return_all(), time.monotonic() + 30)


class WindowModel(PrepaidModel):
    """No window admits more than its limit. A check is denied only if the rest is prepaid, or lost with a process."""

    size_us = 0
    offset_us = 0

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[int] = Counter()

    def window_now(self) -> int:
        return (self.clock.now_us() + self.offset_us) // self.size_us

    def admitted(self, cost: int) -> None:
        self.count[self.window_now()] += cost
        assert self.count[self.window_now()] <= cast("int", self.limit.size)

    def denied(self, cost: int) -> None:
        assert self.count[self.window_now()] + self.out() + cost > cast("int", self.limit.size)


class BucketModel(PrepaidModel):
    """An exact bucket that is debited with all admitted costs never falls below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.level = Fraction(50)

    def window_now(self) -> int:
        return 0

    def passed(self, us: int) -> None:
        self.level = min(self.level + Fraction(us) * Fraction("33.3") / 1_000_000, Fraction(50))

    def admitted(self, cost: int) -> None:
        self.level -= cost
        assert self.level >= 0

    def denied(self, cost: int) -> None:
        """A check is denied only because of prepaid or lost shares, all of which return after a while."""

    @rule(process=st.integers(0, PROCESSES - 1))
    def rest(self, process: int) -> None:
        """Once every share has lapsed and the bucket is full again, nothing is missing."""
        self.pass_time(self.processes[process].shares.lapse_us)
        self.pass_time(2_000_000)
        assert self.processes[process].limiter.check("r", "s", limits=self.limit, cost=0).remaining == 50


def run(kind: type[PrepaidModel], server: Any, limit: Limit, examples: int, seed: int | None, **settled: Any) -> None:
    machine: type[PrepaidModel] = type(kind.__name__, (kind,), {"server": server, "limit": limit, **settled})
    run_machine(machine, examples, seed, steps=30)


def test_shares_of_a_window_never_pass_its_limit(redis_server: RedisServer) -> None:
    run(WindowModel, redis_server, WINDOW, 20, 0, size_us=2_000_000)


def test_shares_of_a_quota_never_pass_its_limit(redis_server: RedisServer) -> None:
    run(WindowModel, redis_server, QUOTA, 20, 1, size_us=DAY_US)


def test_shares_of_a_bucket_never_pass_what_it_holds(redis_server: RedisServer) -> None:
    run(BucketModel, redis_server, BUCKET, 20, 0)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [WINDOW, BUCKET], ids=lambda limit: limit.name)
def test_shares_never_pass_the_limit_on_a_cluster(cluster_servers: RedisCluster, limit: Limit) -> None:
    if limit is BUCKET:
        run(BucketModel, cluster_servers, BUCKET, 10, 3)
    else:
        run(WindowModel, cluster_servers, WINDOW, 10, 3, size_us=2_000_000)


@pytest.mark.soak
def test_shares_never_pass_the_limit_on_ever_new_traces(redis_server: RedisServer) -> None:
    run(WindowModel, redis_server, WINDOW, 5_000, None, size_us=2_000_000)
    run(WindowModel, redis_server, QUOTA, 5_000, None, size_us=DAY_US)
    run(BucketModel, redis_server, BUCKET, 5_000, None)


@pytest.mark.soak
def test_shares_never_pass_the_limit_on_ever_new_traces_on_a_cluster(cluster_servers: RedisCluster) -> None:
    run(WindowModel, cluster_servers, WINDOW, 1_000, None, size_us=2_000_000)
    run(BucketModel, cluster_servers, BUCKET, 1_000, None)
