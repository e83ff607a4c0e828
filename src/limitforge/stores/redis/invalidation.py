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

from limitforge.stores.redis.client import create_pool
from limitforge.stores.redis.denial_cache import Invalidation
from limitforge.stores.redis.topology.topology import Server, Topology

MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 5.0
POLL_SECONDS = 0.5  # how soon a thread notices that it shall stop
CLIENT_OPTIONS: dict[str, Any] = {"decode_responses": False, "socket_timeout": None}  # whatever the URL says

_log = logging.getLogger(__name__)


class InvalidatedCache(Protocol):
    """Something that may be out of date after a change."""

    def invalidate(self, invalidation: Invalidation) -> None:
        """Forget what may have changed."""

    def invalidate_all(self, *, messages_missed: bool) -> None:
        """Somebody listens from now on. What was cached before is doubtful; `missed` if it was not the first time."""


class InvalidatedCaches:
    """All that must hear of changes."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[InvalidatedCache]] = []

    def add(self, cache: InvalidatedCache) -> None:
        self._all = [known for known in self._all if known() is not None] + [weakref.ref(cache)]

    def invalidate(self, invalidation: Invalidation) -> None:
        for known in self._all:
            if (cache := known()) is not None:
                cache.invalidate(invalidation)

    def invalidate_all(self, *, messages_missed: bool) -> None:
        for known in self._all:
            if (cache := known()) is not None:
                cache.invalidate_all(messages_missed=messages_missed)


class _MessageHandler:
    """What both listeners do with what they hear."""

    def __init__(self, channel: bytes, caches: InvalidatedCaches) -> None:
        self._channel = channel
        self._caches = weakref.ref(caches)
        self._retry_seconds = 0.0
        self._was_subscribed = False

    def has_caches(self) -> bool:
        return self._caches() is not None

    def on_message(self, message: dict[str, Any] | None) -> None:
        caches = self._caches()
        if message is None or caches is None:
            return
        if message["type"] == "subscribe":
            self._retry_seconds = 0.0
            caches.invalidate_all(messages_missed=self._was_subscribed)
            self._was_subscribed = True
        elif message["type"] == "message":
            try:
                caches.invalidate(Invalidation.decode(message["data"]))
            except ValueError:
                _log.warning("a message on %s is not ours: dropping all cached denials", self._channel.decode())
                caches.invalidate_all(messages_missed=True)

    def on_failure(self, error: Exception) -> float:
        """How long to wait before the next attempt."""
        if not self._retry_seconds:
            _log.warning("can't listen to other nodes on %s: %s", self._channel.decode(), error)
        self._retry_seconds = min(max(2 * self._retry_seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        return self._retry_seconds


class InvalidationListener:
    """A task on the running event loop."""

    def __init__(self, topology: Topology, channel: bytes, caches: InvalidatedCaches) -> None:
        self._topology = topology
        self._channel = channel
        self._handler = _MessageHandler(channel, caches)
        self._task: asyncio.Task[None] | None = None
        self._server: Server | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def follow_topology(self) -> None:
        """To another server, if the one that it listens to is no longer one of ours."""
        if self._task is not None and self._server is not None and not self._topology.is_current(self._server):
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
                await asyncio.sleep(self._handler.on_failure(error))

    async def _listen(self) -> None:
        node = self._server = self._topology.healthiest_server()
        client: Any = redis.asyncio.Redis.from_pool(create_pool(redis.asyncio, node.address, **CLIENT_OPTIONS))
        async with client, client.pubsub() as pubsub:
            await pubsub.subscribe(self._channel)
            async for message in pubsub.listen():
                self._handler.on_message(message)


class SyncInvalidationListener:
    """A thread of its own, which ends with the process."""

    def __init__(self, topology: Topology, channel: bytes, caches: InvalidatedCaches) -> None:
        self._topology = topology
        self._channel = channel
        self._handler = _MessageHandler(channel, caches)
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
                self._stopped.wait(self._handler.on_failure(error))

    def _listen(self) -> None:
        node = self._topology.healthiest_server()
        client: Any = redis.Redis.from_pool(create_pool(redis, node.address, **CLIENT_OPTIONS))
        with client, client.pubsub() as pubsub:
            pubsub.subscribe(self._channel)
            while self._is_wanted() and self._topology.is_current(node):
                self._handler.on_message(pubsub.get_message(timeout=POLL_SECONDS))

    def _is_wanted(self) -> bool:
        """Not once it was stopped, or once the limiter is no more: nobody needs to close one that is let go."""
        return not self._stopped.is_set() and self._handler.has_caches()
