"""The size of a call to Redis, and the check that a reply belongs to its call."""

import msgspec
import pytest

from limitforge import StoreCorrupt, StoreUnavailable
from limitforge.stores.redis.codec import MAX_CALL_US, split_by_weight
from limitforge.stores.redis.script_call import ScriptCall, decode_reply


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
def test_a_call_has_at_most_a_millisecond_of_work(weights_us: list[int], calls: list[range]) -> None:
    assert list(split_by_weight(weights_us)) == calls


def test_the_reply_to_another_call_is_rejected_and_the_lost_one_may_have_counted() -> None:
    call = ScriptCall(["k"], [], 7)
    assert decode_reply(call, msgspec.msgpack.encode([1, 2, 7])) == [1, 2]
    with pytest.raises(StoreUnavailable) as error:
        decode_reply(call, msgspec.msgpack.encode([1, 2, 6]))
    assert error.value.maybe_counted
    with pytest.raises(StoreCorrupt):
        decode_reply(call, b"nonsense")
