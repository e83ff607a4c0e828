"""Exchange top-up requests with the store, without I/O: what event loops and threads do alike."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from limitforge.core.plan import BUCKET_US
from limitforge.errors import LimitforgeError, StoreUnavailable
from limitforge.stores.redis.codec import split_by_weight
from limitforge.stores.redis.prepaid.shares import PrepaidShares, TopUpReply, TopUpRequest
from limitforge.stores.redis.topology.hash_slots import SlotOf, group_by_slot


def top_up_batches(requests: Sequence[TopUpRequest], slot_of: SlotOf) -> list[list[TopUpRequest]]:
    """Split requests into batches that each fit into one call: of one slot, and bounded by their weight."""
    return [
        same_slot[part.start : part.stop]
        for same_slot in group_by_slot(requests, lambda request: slot_of(request.share.key))
        for part in split_by_weight([BUCKET_US] * len(same_slot))
    ]


class TopUp:
    """One call that tops up shares, as a context manager: the caller runs the call inside, and sets `replies`.

    On exit the replies are applied to the shares. An error is not raised again: the next call makes up for it.
    """

    def __init__(self, shares: PrepaidShares, batch: Sequence[TopUpRequest]) -> None:
        self._shares = shares
        self._batch = batch
        self._sent_us = 0
        self.replies: Sequence[TopUpReply | None] | None = None

    def __enter__(self) -> Self:
        self._sent_us = self._shares.now_us()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, StoreUnavailable) and not error.maybe_counted:
            self.replies = [None] * len(self._batch)  # certainly not executed: nothing was debited or returned
        self._shares.apply_replies(self._batch, self.replies, self._sent_us)
        return isinstance(error, LimitforgeError)
