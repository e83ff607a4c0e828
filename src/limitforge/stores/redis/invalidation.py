"""Receive invalidations that other processes publish, and apply them to the caches of this process.

Each process publishes what a change makes outdated (Redis pub/sub, over connections of redis-py). While a process has
no subscription, a cached denial may outlive a change by its age at most. After each subscription all caches are
cleared, because messages may have been missed.
"""

import asyncio
import contextlib
import logging
import threading
import weakref
from typing import Any, Protocol

import redis
import redis.asyncio

from limitforge.observability.events import log_event
from limitforge.stores.redis.denial_cache import Invalidation
from limitforge.stores.redis.redis_py_pool import create_pool
from limitforge.stores.redis.topology.topology import Server, Topology

MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 5.0
POLL_SECONDS = 0.5  # how soon a thread notices that it was stopped
CLIENT_OPTIONS: dict[str, Any] = {"decode_responses": False, "socket_timeout": None}  # they override the URL

_log = logging.getLogger(__name__)


class InvalidatedCache(Protocol):
    """A cache that changes make outdated."""

    def invalidate(self, invalidation: Invalidation) -> None:
        """Drop what an invalidation names."""

    def invalidate_all(self, *, messages_missed: bool) -> None:
        """Drop what may be outdated after a new subscription. `messages_missed` is False for the first one."""


class InvalidatedCaches:
    """All caches of a store. They are referenced weakly."""

    def __init__(self) -> None:
        self._caches: list[weakref.ref[InvalidatedCache]] = []

    def add(self, cache: InvalidatedCache) -> None:
        self._caches = [known for known in self._caches if known() is not None] + [weakref.ref(cache)]

    def invalidate(self, invalidation: Invalidation) -> None:
        for known in self._caches:
            if (cache := known()) is not None:
                cache.invalidate(invalidation)

    def invalidate_all(self, *, messages_missed: bool) -> None:
        for known in self._caches:
            if (cache := known()) is not None:
                cache.invalidate_all(messages_missed=messages_missed)


class _MessageHandler:
    """Applies messages, and backs off after failures: what both listeners share."""

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
            if self._retry_seconds:
                self._log(logging.INFO, "store.invalidations_subscribed", "receiving invalidations again")
            self._retry_seconds = 0.0
            caches.invalidate_all(messages_missed=self._was_subscribed)
            self._was_subscribed = True
        elif message["type"] == "message":
            try:
                caches.invalidate(Invalidation.decode(message["data"]))
            except ValueError:
                self._log(logging.WARNING, "store.invalidation_invalid", "invalid message, dropping all cached denials")
                caches.invalidate_all(messages_missed=True)

    def on_failure(self, error: Exception) -> float:
        """Return how many seconds to wait before the next attempt."""
        if not self._retry_seconds:
            self._log(
                logging.WARNING,
                "store.invalidations_unsubscribed",
                "cannot receive invalidations, retrying",
                error,
            )
        self._retry_seconds = min(max(2 * self._retry_seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        return self._retry_seconds

    def _log(self, level: int, event: str, message: str, error: Exception | None = None) -> None:
        channel = self._channel.decode()
        if error is None:
            log_event(_log, level, event, message, channel=channel)
        else:
            log_event(_log, level, event, message, channel=channel, error=error)


class InvalidationListener:
    """Listens in a task of the running event loop."""

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
        """Listen on another server, if the current one was retired."""
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
            except Exception as error:  # noqa: BLE001 - no error must end the subscription for good
                await asyncio.sleep(self._handler.on_failure(error))

    async def _listen(self) -> None:
        server = self._server = self._topology.healthiest_server()
        client: Any = redis.asyncio.Redis.from_pool(create_pool(redis.asyncio, server.address, **CLIENT_OPTIONS))
        async with client, client.pubsub() as pubsub:
            await pubsub.subscribe(self._channel)
            async for message in pubsub.listen():
                self._handler.on_message(message)


class SyncInvalidationListener:
    """Listens in a daemon thread."""

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
            except Exception as error:  # noqa: BLE001 - no error must end the subscription for good
                self._stopped.wait(self._handler.on_failure(error))

    def _listen(self) -> None:
        server = self._topology.healthiest_server()
        client: Any = redis.Redis.from_pool(create_pool(redis, server.address, **CLIENT_OPTIONS))
        with client, client.pubsub() as pubsub:
            pubsub.subscribe(self._channel)
            while self._is_wanted() and self._topology.is_current(server):
                self._handler.on_message(pubsub.get_message(timeout=POLL_SECONDS))

    def _is_wanted(self) -> bool:
        """Return False once the listener was stopped, or its limiter was garbage-collected without a `close`."""
        return not self._stopped.is_set() and self._handler.has_caches()
