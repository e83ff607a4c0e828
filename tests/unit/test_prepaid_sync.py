"""A returned share whose request failed."""

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
async def test_a_returned_share_is_sent_again_only_if_the_store_certainly_did_not_receive_it(
    *, maybe_counted: bool, messages: int
) -> None:
    harness = prepaid_harness()
    harness.shares.invalidate(
        Invalidation(override_keys=(harness.take()[4] or "",))
    )  # an override changed: the share is returned
    harness.wait()
    sent: list[Any] = []
    failed = asyncio.Event()

    async def run_flow(flow: Any, _seconds: float) -> Any:
        sent.append(next(flow))
        failed.set()
        raise StoreUnavailable("gone", maybe_counted=maybe_counted)

    core = RedisCore("redis://127.0.0.1:1", Keys(), None, StoreOptions(), lambda _: None)
    sync = PrepaidSync(core, harness.shares, 0.001, run_flow, lambda: None)
    sync.ensure_running()
    await failed.wait()
    await sync.shut_down()
    assert len(sent) == messages
