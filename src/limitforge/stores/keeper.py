"""Keeps what one event loop has of leased limits in step with the store, and says that its process is alive."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from limitforge.core.plan import BUCKET_US
from limitforge.errors import LimitforgeError, StoreUnavailable
from limitforge.stores.codec import Flow, fitting
from limitforge.stores.redis_parts import COMMAND_SECONDS, Parts
from limitforge.stores.shares import Grant, Shares, Wish
from limitforge.stores.slots import by_slot

Carry = Callable[[Flow[Any], float], Coroutine[None, None, Any]]


class Keeper:
    """Runs while anybody needs it. `carry` brings a flow to the store, `listen` hears of changes from other nodes."""

    def __init__(self, parts: Parts, shares: Shares, seconds: float, carry: Carry, listen: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts = parts
        self._shares = shares
        self._seconds = seconds
        self._carry = carry
        self._listen = listen
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    def keep_up(self) -> None:
        """Somebody asked for a limit that this process may decide."""
        if self._timer is None and not self._is_stopped:
            self._listen()
            self._timer = self._loop.call_later(self._seconds, self._keep)
            if self._parts.fleet.members.is_due():
                self._start(self._say_alive())

    def stop(self) -> None:
        """Nothing is paid for any more."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    async def leave(self) -> None:
        """Give back what was paid for and not spent, and do not count as alive any more."""
        self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=COMMAND_SECONDS)
        await asyncio.gather(*map(self._sync, self._batches(self._shares.farewell())))
        if self._parts.fleet.members.is_wanted:
            with suppress(LimitforgeError):
                await self._carry(self._parts.beat(0), COMMAND_SECONDS)

    def _keep(self) -> None:
        self._timer = None
        for wishes in self._batches(self._shares.wishes()):
            self._start(self._sync(wishes))
        if len(self._shares) or self._parts.fleet.members.is_wanted:
            self.keep_up()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sync(self, wishes: list[Wish]) -> None:
        sent_us = self._shares.now_us()
        grants: Sequence[Grant | None] | None = None
        try:
            grants = await self._carry(self._parts.shares(wishes, self._shares.lapse_us), COMMAND_SECONDS)
        except StoreUnavailable as error:
            grants = None if error.maybe_counted else [None] * len(wishes)
        except LimitforgeError:
            grants = None
        finally:
            self._shares.answered(wishes, grants, sent_us)

    async def _say_alive(self) -> None:
        with suppress(LimitforgeError):
            self._parts.fleet.members.heard(await self._carry(self._parts.beat(), COMMAND_SECONDS))

    def _batches(self, wishes: Sequence[Wish]) -> list[list[Wish]]:
        """As many as one call can take, of one slot each."""
        return [
            together[part.start : part.stop]
            for together in by_slot(wishes, lambda wish: self._parts.fleet.slot_of(wish.share.key))
            for part in fitting([BUCKET_US] * len(together))
        ]
