"""What becomes of a share that was to go back when the message about it failed."""

import asyncio
from typing import Any

import pytest

from limitforge import StoreOptions, StoreUnavailable
from limitforge.core.keys import Keys
from limitforge.stores.redis.aio.prepaid_sync import PrepaidSync
from limitforge.stores.redis.core import RedisCore
from limitforge.stores.redis.denial_cache import Invalidation
from tests.unit.test_prepaid_shares import prepaid_harness


@pytest.mark.parametrize(("maybe_counted", "messages"), [(False, 2), (True, 1)])
async def test_what_goes_back_is_sent_again_only_if_the_store_surely_did_not_hear_of_it(
    *, maybe_counted: bool, messages: int
) -> None:
    desk = prepaid_harness()
    desk.shares.invalidate(
        Invalidation(subjects=(desk.take()[4] or "",))
    )  # another override: what was paid for goes back
    desk.wait()
    sent: list[Any] = []
    failed = asyncio.Event()

    async def carry(flow: Any, _seconds: float) -> Any:
        sent.append(next(flow))
        failed.set()
        raise StoreUnavailable("gone", maybe_counted=maybe_counted)

    parts = RedisCore("redis://127.0.0.1:1", Keys(), None, StoreOptions(), lambda _: None)
    keeper = PrepaidSync(parts, desk.shares, 0.001, carry, lambda: None)
    keeper.ensure_running()
    await failed.wait()
    await keeper.shut_down()
    assert len(sent) == messages
