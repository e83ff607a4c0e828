"""If a key loses its right to check in the middle of a batch, the rest of the batch is not decided."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from limitforge.service.checks.batches import SLICE_CHECKS, BatchHandler
from tests.service.live_service import LiveService, TenantFixture
from tests.service.problems import assert_problem

Change = Callable[[TenantFixture], httpx.Response]
PATIENCE_SECONDS = 45.0


class Barrier:
    """Stops a batch after each of its slices, until it may continue."""

    def __init__(self, batches: BatchHandler) -> None:
        self.slices = 0
        self._decide_slice = batches._decide_slice
        self._is_at_rest, self._may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    async def decide_slice(self, *arguments: Any) -> Any:
        answers = await self._decide_slice(*arguments)
        self.slices += 1
        self._is_at_rest.release()
        assert await asyncio.to_thread(self._may_go_on.acquire, timeout=PATIENCE_SECONDS)
        return answers

    def wait(self) -> None:
        assert self._is_at_rest.acquire(timeout=PATIENCE_SECONDS)

    def open(self) -> None:
        self._may_go_on.release()


def is_disabled(account: TenantFixture) -> httpx.Response:
    return account.admin.post(f"/keys/{account.key['id']}/disable")


def is_deleted(account: TenantFixture) -> httpx.Response:
    return account.admin.delete(f"/keys/{account.key['id']}")


def is_suspended(account: TenantFixture) -> httpx.Response:
    return account.admin.patch(f"/tenants/{account.id}", {"suspended": True})


def may_not_check(account: TenantFixture) -> httpx.Response:
    return account.admin.patch(f"/keys/{account.key['id']}", {"scopes": ["usage"]})


@pytest.mark.parametrize(
    ("change", "status", "code", "detail"),
    [
        (is_disabled, 403, "forbidden", "this key is disabled"),
        (is_deleted, 401, "unknown_key", ""),
        (is_suspended, 403, "forbidden", "this tenant is suspended"),
        (may_not_check, 403, "forbidden", "this key lacks the scope check"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_key_that_may_not_check_any_more_ends_its_batch(
    sqlite_service: LiveService,
    account: TenantFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: Change,
    status: int,
    code: str,
    detail: str,
) -> None:
    batches = sqlite_service.service.batches
    barrier = Barrier(batches)
    monkeypatch.setattr(batches, "_decide_slice", barrier.decide_slice)
    body = {"checks": [{"resource": "GET:/orders/7", "subject": f"user:{index}"} for index in range(3 * SLICE_CHECKS)]}
    headers = {"authorization": f"Bearer {account.secret}"}
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(account.admin.http.post, "/v1/check/batch", json=body, headers=headers)
        barrier.wait()
        barrier.open()
        barrier.wait()
        changed = change(account)
        for _ in range(3):
            barrier.open()
        answer = pending.result(PATIENCE_SECONDS)
    assert changed.status_code in (200, 204), changed.text
    assert_problem(answer, status, code, detail)
    assert barrier.slices == 2
