"""What caches drop after a new subscription, and after an invalid message."""

from typing import Any

import pytest

from limitforge.stores.redis.denial_cache import Invalidation
from limitforge.stores.redis.invalidation import InvalidatedCaches, _MessageHandler

SUBSCRIBED: dict[str, Any] = {"type": "subscribe", "data": 1}


class Cache:
    """Records what it was asked to drop."""

    def __init__(self) -> None:
        self.forgot: list[object] = []

    def invalidate(self, invalidation: Invalidation) -> None:
        self.forgot.append(invalidation)

    def invalidate_all(self, *, messages_missed: bool) -> None:
        self.forgot.append("all, as messages were missed" if messages_missed else "all")


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def caches(cache: Cache) -> InvalidatedCaches:
    caches = InvalidatedCaches()
    caches.add(cache)
    return caches


def test_messages_may_have_been_missed_whenever_the_connection_is_not_the_first(
    cache: Cache, caches: InvalidatedCaches
) -> None:
    handler = _MessageHandler(b"lf:denials", caches)
    for _ in range(3):
        handler.on_message(SUBSCRIBED)
    assert cache.forgot == ["all", "all, as messages were missed", "all, as messages were missed"]


def test_a_message_drops_what_it_names(cache: Cache, caches: InvalidatedCaches) -> None:
    drop = Invalidation(bucket_keys=("lf:{t}:k",))
    _MessageHandler(b"lf:denials", caches).on_message({"type": "message", "data": drop.encode()})
    assert cache.forgot == [drop]


def test_a_message_that_can_not_be_read_drops_everything(cache: Cache, caches: InvalidatedCaches) -> None:
    _MessageHandler(b"lf:denials", caches).on_message({"type": "message", "data": b"nonsense"})
    assert cache.forgot == ["all, as messages were missed"]
