"""Decisions on Redis, for an event loop. One check is one EVALSHA, whatever the number of its limits."""

from collections.abc import Sequence

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.exceptions import NoScriptError

from limitforge import lua
from limitforge.core.check import Check
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.decision import Decision
from limitforge.core.keys import Keys
from limitforge.errors import LimitforgeError
from limitforge.stores.codec import OWN_TIME, Call, Flow, Reply, T, check_flow, command_flow
from limitforge.stores.protocol import Answer, Command
from limitforge.stores.redis_driver import pool_of, translated


class RedisStore:
    """Decides in Redis, by Redis's time. A `clock` replaces that time: for tests and replays only."""

    def __init__(self, url: str, *, keys: Keys | None = None, clock: Clock | None = None) -> None:
        self.keys = keys or Keys()
        self._injected = clock
        self._clock = clock or SystemClock()
        self._redis = Redis.from_pool(pool_of(BlockingConnectionPool, Retry, url))

    async def check(self, check: Check) -> Decision:
        (answer,) = await self.check_many((check,))
        if isinstance(answer, LimitforgeError):
            raise answer
        return answer

    async def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        now_us = self._clock.now_us()
        return await self._carry(check_flow(checks, now_us, now_us if self._injected else OWN_TIME))

    async def run(self, command: Command[Answer]) -> Answer:
        now_us = self._clock.now_us()
        return await self._carry(command_flow(command, self.keys, now_us, now_us if self._injected else OWN_TIME))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _carry(self, flow: Flow[T]) -> T:
        try:
            call = next(flow)
            while True:
                call = flow.send(await self._evalsha(call))
        except StopIteration as done:
            answer: T = done.value
            return answer

    async def _evalsha(self, call: Call) -> Reply:
        with translated():
            try:
                return await self._redis.execute_command("EVALSHA", lua.sha(), len(call.keys), *call.keys, *call.args)  # type: ignore[no-untyped-call, no-any-return]
            except NoScriptError:  # Redis was restarted or flushed; nothing was executed, so this is no retry
                return await self._redis.execute_command("EVAL", lua.script(), len(call.keys), *call.keys, *call.args)  # type: ignore[no-untyped-call, no-any-return]
