"""Checks whose limits lie on several shards of a real Cluster: all or nothing, as if one script saw them all."""

import dataclasses

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from limitforge import FixedWindow, Limit, Limits
from tests.contract.strategies import NAMES, PRIORITIES, RESOURCES, costs, limits, steps_us
from tests.contract.test_differential import Engines, run
from tests.topologies import RedisCluster

SUBJECTS = tuple(f"user:{number}" for number in range(6))
LANES = {"default": 64}


class CrossSlotEngines(Engines):
    """Four limits of any kind and scope that stay as they are.

    Where limits change, a bucket that was held for a moment and given back has been written under the new numbers,
    which one script would not have done; it remembers the time of that, and a window that the first hit opens is open.
    So here limits stay, time goes on, and windows lie on the clock.
    """

    lanes = LANES

    def __init__(self) -> None:
        super().__init__()
        self.plan: dict[str, Limit] = {}

    @initialize(first=st.tuples(*(limits(name=name) for name in NAMES)))
    def start(self, first: tuple[Limit, ...]) -> None:
        for limit in first:
            if isinstance(limit, FixedWindow):
                limit = dataclasses.replace(limit, align="clock")  # noqa: PLW2901
            self.plan[limit.name] = limit

    @rule(by_us=steps_us())
    def let_time_pass(self, by_us: int) -> None:
        self.clock.advance_us(max(by_us, 0))

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
        resource=st.sampled_from(RESOURCES),
        subject=st.sampled_from(SUBJECTS),
        priority=st.sampled_from(PRIORITIES),
        cost=costs(),
        times=st.integers(1, 12),
        has_shadow=st.booleans(),
    )
    def check(
        self, names: list[str], resource: str, subject: str, priority: str, cost: int, times: int, has_shadow: bool
    ) -> None:
        chosen = Limits(*(self.plan[name] for name in names))
        shadow = chosen if has_shadow else None
        for _ in range(times):
            self.remember(
                *self.both(
                    lambda limiter: limiter.check(
                        resource, subject, limits=chosen, cost=cost, priority=priority, shadow=shadow
                    )
                )
            )

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
        subject=st.sampled_from(SUBJECTS),
        cost=costs(),
        ttl_seconds=st.sampled_from([1, 30, 86_400]),
        on_lapse=st.sampled_from(["keep", "refund"]),
    )
    def reserve(self, names: list[str], subject: str, cost: int, ttl_seconds: float, on_lapse: str) -> None:
        chosen = Limits(*(self.plan[name] for name in names))
        self.remember(
            *self.both(
                lambda limiter: limiter.reserve(
                    RESOURCES[0], subject, limits=chosen, cost=cost, ttl_seconds=ttl_seconds, on_lapse=on_lapse
                )
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize("store", ["cluster", "cluster-lanes"])
def test_limits_on_several_shards_decide_as_if_they_were_on_one(cluster_servers: RedisCluster, store: str) -> None:
    run(CrossSlotEngines, cluster_servers, 20, 7, store=store)


@pytest.mark.soak
@pytest.mark.parametrize("store", ["cluster", "cluster-lanes"])
def test_limits_on_several_shards_decide_so_on_ever_new_traces(cluster_servers: RedisCluster, store: str) -> None:
    run(CrossSlotEngines, cluster_servers, 2_000, None, store=store)
