"""What goes into one call to Redis, and which answer is the one to it."""

import msgspec
import pytest

from limitforge import StoreCorrupt, StoreUnavailable
from limitforge.stores.redis.codec import MAX_CALL_US, ScriptCall, decode_reply, split_by_weight


@pytest.mark.parametrize(
    ("weights_us", "calls"),
    [
        ([], []),
        ([MAX_CALL_US, 1], [range(1), range(1, 2)]),
        ([MAX_CALL_US - 1, 1, 1], [range(2), range(2, 3)]),
        ([2 * MAX_CALL_US, 1, 1], [range(1), range(1, 3)]),
        ([400] * 7, [range(2), range(2, 4), range(4, 6), range(6, 7)]),
    ],
)
def test_a_call_takes_as_much_as_keeps_redis_busy_for_a_millisecond(weights_us: list[int], calls: list[range]) -> None:
    assert list(split_by_weight(weights_us)) == calls


def test_the_answer_to_another_call_is_none_and_its_own_may_have_been_lost_after_it_counted() -> None:
    call = ScriptCall(["k"], [], 7)
    assert decode_reply(call, msgspec.msgpack.encode([1, 2, 7])) == [1, 2]
    with pytest.raises(StoreUnavailable) as error:
        decode_reply(call, msgspec.msgpack.encode([1, 2, 6]))
    assert error.value.maybe_counted
    with pytest.raises(StoreCorrupt):
        decode_reply(call, b"nonsense")
