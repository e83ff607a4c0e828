"""Call the script on a real Redis directly, with any time, as a Cluster or a busy process would."""

from typing import Any, TypeVar

from limitforge import Limits, lua
from limitforge.core.check import Check, Hold, ResultKind, build_check
from limitforge.core.decision import Outcome
from limitforge.core.keys import Keys
from limitforge.core.limits import Limit
from limitforge.stores.redis.codec import check_flow, finish_flow, heartbeat_flow, top_up_flow
from limitforge.stores.redis.multi_step.cross_slot import TENTATIVE_TTL_US, FinishHold, HoldAction
from limitforge.stores.redis.new_buckets import NewBucketBudget
from limitforge.stores.redis.prepaid.shares import PrepaidShare, TopUpReply, TopUpRequest
from limitforge.stores.redis.script_call import Flow

T = TypeVar("T")

NOW_US = 1_700_006_400_000_000  # the start of a day
TOKEN = b"01234567"


class ScriptClient:
    """Calls of the script for the buckets of one resource and subject, at the time `now_us`."""

    def __init__(self, redis: Any) -> None:
        self.redis = redis
        self.now_us = NOW_US

    def check(self, *limits: Limit, cost: int = 1, calendar_us: int | None = None, **fields: Any) -> Outcome:
        """Evaluate a part of a check. `fields` are those of its hold, if it has one."""
        check = check_for(*limits, cost=cost)
        if fields:
            known: dict[str, Any] = {"key": "", "token": TOKEN, "ttl_us": TENTATIVE_TTL_US, "refund": True}
            check.hold = Hold(**known | fields)
            check.lease = check.lease and check.hold.token
        windows_us = self.now_us if calendar_us is None else calendar_us
        (outcome,) = self.run(check_flow([check], windows_us, self.now_us))
        assert isinstance(outcome, Outcome), outcome
        return outcome

    def hold(self, *limits: Limit, cost: int = 1, **fields: Any) -> None:
        """Take and hold a cost, as while limits of other slots are asked."""
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
        calendar_us: int | None = None,
        new_buckets: NewBucketBudget | None = None,
    ) -> TopUpReply:
        request = TopUpRequest(share, returned, kept, wanted)
        windows_us = self.now_us if calendar_us is None else calendar_us
        (reply,) = self.run(top_up_flow([request], windows_us, self.now_us, lapse_us, new_buckets))
        assert reply is not None
        return reply

    def heartbeat(self, name: bytes, alive_us: int) -> int:
        return self.run(heartbeat_flow(Keys().heartbeat_key(), name, alive_us, self.now_us))

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
    """Finish what TOKEN has held of these limits since NOW_US."""
    known: dict[str, Any] = {"may_be_missing": [False] * len(limits), "lapses_us": NOW_US + TENTATIVE_TTL_US}
    return FinishHold(how, TOKEN, [key_of(limit) for limit in limits], **known | fields)
