"""Listens to what other nodes changed, and drops what is cached here (Redis pub/sub, by redis-py).

While nobody listens, a denial may outlive a change on another node by its age at most. Whenever the connection is new,
everything is dropped: messages may have been missed.
"""

import asyncio
import contextlib
import logging
import threading
import weakref
from typing import Any, Protocol

import redis
import redis.asyncio

from limitforge.stores.denials import Drop
from limitforge.stores.fleet import Fleet, Node
from limitforge.stores.redis_py import pool_of

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
POLL_SECONDS = 0.5  # how soon a thread notices that it shall stop
PLAIN: dict[str, Any] = {"decode_responses": False, "socket_timeout": None}  # whatever the URL says

_log = logging.getLogger(__name__)


class Cache(Protocol):
    """Something that may be out of date after a change."""

    def drop(self, drop: Drop) -> None:
        """Forget what may have changed."""

    def drop_all(self, *, missed: bool) -> None:
        """Somebody listens from now on. What was cached before is doubtful; `missed` if it was not the first time."""


class Caches:
    """All that must hear of changes."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[Cache]] = []

    def add(self, cache: Cache) -> None:
        self._all = [known for known in self._all if known() is not None] + [weakref.ref(cache)]

    def drop(self, drop: Drop) -> None:
        for known in self._all:
            if (cache := known()) is not None:
                cache.drop(drop)

    def drop_all(self, *, missed: bool) -> None:
        for known in self._all:
            if (cache := known()) is not None:
                cache.drop_all(missed=missed)


class _Heard:
    """What both listeners do with what they hear."""

    def __init__(self, channel: bytes, caches: Caches) -> None:
        self._channel = channel
        self._caches = weakref.ref(caches)
        self._pause = 0.0
        self._has_heard = False

    def is_wanted(self) -> bool:
        return self._caches() is not None

    def handle(self, message: dict[str, Any] | None) -> None:
        caches = self._caches()
        if message is None or caches is None:
            return
        if message["type"] == "subscribe":
            self._pause = 0.0
            caches.drop_all(missed=self._has_heard)
            self._has_heard = True
        elif message["type"] == "message":
            try:
                caches.drop(Drop.read(message["data"]))
            except ValueError:
                _log.warning("a message on %s is not ours: dropping all cached denials", self._channel.decode())
                caches.drop_all(missed=True)

    def failed(self, error: Exception) -> float:
        """How long to wait before the next attempt."""
        if not self._pause:
            _log.warning("can't listen to other nodes on %s: %s", self._channel.decode(), error)
        self._pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        return self._pause


class Listener:
    """A task on the running event loop."""

    def __init__(self, fleet: Fleet, channel: bytes, caches: Caches) -> None:
        self._fleet = fleet
        self._channel = channel
        self._heard = _Heard(channel, caches)
        self._task: asyncio.Task[None] | None = None
        self._node: Node | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def follow(self) -> None:
        """To another server, if the one that it listens to is no longer one of ours."""
        if self._task is not None and self._node is not None and not self._fleet.knows(self._node):
            self._task.cancel()
            self.start()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except Exception as error:  # noqa: BLE001 - whatever it is: go on, or nobody listens any more
                await asyncio.sleep(self._heard.failed(error))

    async def _listen(self) -> None:
        node = self._node = self._fleet.any_node()
        client: Any = redis.asyncio.Redis.from_pool(pool_of(redis.asyncio, node.address, **PLAIN))
        async with client, client.pubsub() as pubsub:
            await pubsub.subscribe(self._channel)
            async for message in pubsub.listen():
                self._heard.handle(message)


class SyncListener:
    """A thread of its own, which ends with the process."""

    def __init__(self, fleet: Fleet, channel: bytes, caches: Caches) -> None:
        self._fleet = fleet
        self._channel = channel
        self._heard = _Heard(channel, caches)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="limitforge-listener", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * POLL_SECONDS)

    def _run(self) -> None:
        while self._is_wanted():
            try:
                self._listen()
            except Exception as error:  # noqa: BLE001 - whatever it is: go on, or nobody listens any more
                self._stopped.wait(self._heard.failed(error))

    def _listen(self) -> None:
        node = self._fleet.any_node()
        client: Any = redis.Redis.from_pool(pool_of(redis, node.address, **PLAIN))
        with client, client.pubsub() as pubsub:
            pubsub.subscribe(self._channel)
            while self._is_wanted() and self._fleet.knows(node):
                self._heard.handle(pubsub.get_message(timeout=POLL_SECONDS))

    def _is_wanted(self) -> bool:
        """Not once it was stopped, or once the limiter is no more: nobody needs to close one that is let go."""
        return not self._stopped.is_set() and self._heard.is_wanted()
