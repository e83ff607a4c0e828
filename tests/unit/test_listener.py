"""What is forgotten when a node listens again, and when a message can't be read."""

from typing import Any

import pytest

from limitforge.stores.denials import Drop
from limitforge.stores.listener import Caches, _Heard

SUBSCRIBED: dict[str, Any] = {"type": "subscribe", "data": 1}


class Cache:
    """Notes what it was asked to forget."""

    def __init__(self) -> None:
        self.forgot: list[object] = []

    def drop(self, drop: Drop) -> None:
        self.forgot.append(drop)

    def drop_all(self, *, missed: bool) -> None:
        self.forgot.append("all, as messages were missed" if missed else "all")


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def caches(cache: Cache) -> Caches:
    caches = Caches()
    caches.add(cache)
    return caches


def test_messages_may_have_been_missed_whenever_the_connection_is_not_the_first(cache: Cache, caches: Caches) -> None:
    heard = _Heard(b"lf:denials", caches)
    for _ in range(3):
        heard.handle(SUBSCRIBED)
    assert cache.forgot == ["all", "all, as messages were missed", "all, as messages were missed"]


def test_a_message_drops_what_it_names(cache: Cache, caches: Caches) -> None:
    drop = Drop(keys=("lf:{t}:k",))
    _Heard(b"lf:denials", caches).handle({"type": "message", "data": drop.message()})
    assert cache.forgot == [drop]


def test_a_message_that_can_not_be_read_drops_everything(cache: Cache, caches: Caches) -> None:
    _Heard(b"lf:denials", caches).handle({"type": "message", "data": b"nonsense"})
    assert cache.forgot == ["all, as messages were missed"]
