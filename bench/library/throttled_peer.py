"""throttled-py, its asyncio API: it answers with limit, remaining, reset and retry."""

from typing import Any

from throttled.asyncio import RedisStore, Throttled, per_day

from bench.library.contest import Ask, Contestant, Door, Sizes, prefix, until_one_denies
from bench.ours import RESOURCE, TENANT


def contestant() -> Contestant:
    return Contestant("throttled-py, token bucket", _open, full=True)


async def _open(url: str, sizes: Sizes) -> Door:
    store = RedisStore(server=url)
    each = tuple(_asking(store, size) for size in sizes)
    client: Any = store._backend.get_client()  # noqa: SLF001 - there is no way to close a store
    return Door(until_one_denies(each), each[0], lambda: client.aclose(close_connection_pool=True))


def _asking(store: RedisStore, size: int) -> Ask:
    limit = Throttled(using="token_bucket", quota=per_day(size, burst=size), store=store, key_prefix=prefix()).limit

    async def ask(subject: str) -> bool:
        result = await limit(f"{TENANT}:{RESOURCE}:{subject}")
        state = result.state
        _ = (state.limit, state.remaining, state.reset_after, state.retry_after)
        return not result.limited

    return ask
