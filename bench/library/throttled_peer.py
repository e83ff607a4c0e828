"""throttled-py with its asyncio API: it returns limit, remaining, reset and retry."""

from typing import Any

from throttled.asyncio import RedisStore, Throttled, per_day

from bench.library.contestants import (
    CheckFunction,
    Contestant,
    OpenLimiter,
    Sizes,
    check_each_until_denied,
    unique_prefix,
)
from bench.ours import RESOURCE, TENANT


def contestant() -> Contestant:
    return Contestant("throttled-py, token bucket", _open, full_decision=True)


async def _open(url: str, sizes: Sizes) -> OpenLimiter:
    store = RedisStore(server=url)
    each = tuple(_make_check(store, size) for size in sizes)
    client: Any = store._backend.get_client()  # noqa: SLF001 - the store has no public method to close it
    return OpenLimiter(check_each_until_denied(each), each[0], lambda: client.aclose(close_connection_pool=True))


def _make_check(store: RedisStore, size: int) -> CheckFunction:
    limit = Throttled(
        using="token_bucket", quota=per_day(size, burst=size), store=store, key_prefix=unique_prefix()
    ).limit

    async def check_subject(subject: str) -> bool:
        result = await limit(f"{TENANT}:{RESOURCE}:{subject}")
        state = result.state
        _ = (state.limit, state.remaining, state.reset_after, state.retry_after)
        return not result.limited

    return check_subject
