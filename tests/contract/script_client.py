"""The script on a real Redis, called directly and at any time: what a Cluster, or a busy process, would ask of it."""

from typing import Any, TypeVar

from limitforge import Limits, lua
from limitforge.core.check import Check, Hold, ResultKind, build_check
from limitforge.core.decision import Outcome
from limitforge.core.keys import Keys
from limitforge.core.limits import Limit
from limitforge.stores.redis.codec import Flow, check_flow, finish_flow, heartbeat_flow, top_up_flow
from limitforge.stores.redis.new_buckets import NewBucketBudget
from limitforge.stores.redis.prepaid.shares import PrepaidShare, TopUpReply, TopUpRequest
from limitforge.stores.redis.topology.cross_slot import HOLD_TTL_US, FinishHold, HoldAction

T = TypeVar("T")

NOW_US = 1_700_006_400_000_000  # the start of a day
TOKEN = b"01234567"


class ScriptClient:
    """Calls of the script about the buckets of one resource and subject. `now_us` is the time that it is given."""

    def __init__(self, redis: Any) -> None:
        self.redis = redis
        self.now_us = NOW_US

    def check(self, *limits: Limit, cost: int = 1, around_us: int | None = None, **fields: Any) -> Outcome:
        """Judge as a part of a check; `fields` are those of the hold, if it is to hold something."""
        check = check_for(*limits, cost=cost)
        if fields:
            known: dict[str, Any] = {"key": "", "token": TOKEN, "ttl_us": HOLD_TTL_US, "refund": True}
            check.hold = Hold(**known | fields)
            check.lease = check.lease and check.hold.token
        calendars_us = self.now_us if around_us is None else around_us
        (outcome,) = self.run(check_flow([check], calendars_us, self.now_us))
        assert isinstance(outcome, Outcome), outcome
        return outcome

    def hold(self, *limits: Limit, cost: int = 1, **fields: Any) -> None:
        """Take, for as long as limits of other slots are asked."""
        assert self.check(*limits, cost=cost, **{"token": TOKEN} | fields).allowed

    def remaining(self, limit: Limit) -> int:
        return self.check(limit, cost=0).rows[0][1]

    def reset_us(self, limit: Limit) -> int:
        return self.check(limit, cost=0).rows[0][2]

    def finish(self, *finishes: FinishHold) -> list[Any]:
        return self.run(finish_flow(finishes, self.now_us))

    def top_up(
        self,
        share: PrepaidShare,
        *,
        returned: int = 0,
        kept: int = 0,
        wanted: int = 0,
        lapse_us: int = 0,
        around_us: int | None = None,
        new_buckets: NewBucketBudget | None = None,
    ) -> TopUpReply:
        wish = TopUpRequest(share, returned, kept, wanted)
        calendars_us = self.now_us if around_us is None else around_us
        (grant,) = self.run(top_up_flow([wish], calendars_us, self.now_us, lapse_us, new_buckets))
        assert grant is not None
        return grant

    def heartbeat(self, name: bytes, alive_us: int) -> int:
        return self.run(heartbeat_flow(Keys().heartbeats(), name, alive_us, self.now_us))

    def run(self, flow: Flow[T]) -> T:
        call = next(flow)
        while True:
            reply = self.redis.eval(lua.script(), len(call.keys), *call.keys, *call.args)
            try:
                call = flow.send(reply)
            except StopIteration as done:
                answer: T = done.value
                return answer


def check_for(*limits: Limit, cost: int = 1) -> Check:
    check = build_check(Keys(), Limits(*limits), "r", "s", cost, None, "t", "P0")
    check.result_kind = ResultKind.PART
    return check


def key_of(limit: Limit) -> str:
    return check_for(limit).debits[0][1]


def share_of(limit: Limit, token: bytes = TOKEN, window: tuple[int, int] = (0, 0)) -> PrepaidShare:
    rule, key, _, resource, overrides = check_for(limit).debits[0]
    return PrepaidShare(rule, key, resource, overrides, token, 0, window=window)


def ending(how: HoldAction, *limits: Limit, **fields: Any) -> FinishHold:
    """End what TOKEN holds of these limits since NOW_US."""
    known: dict[str, Any] = {"optional": [False] * len(limits), "forgotten_before_us": NOW_US + HOLD_TTL_US}
    return FinishHold(how, TOKEN, [key_of(limit) for limit in limits], **known | fields)
