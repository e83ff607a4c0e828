"""The hash slots of a Redis Cluster. Keys of one slot can be used in one script call."""

from binascii import crc_hqx
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TypeVar

from limitforge.core.keys import encode_key

SLOT_COUNT = 16_384

T = TypeVar("T")
SlotOf = Callable[[str | bytes], int]


def hash_slot(key: str | bytes) -> int:
    """Return the slot of a key. Every key of limitforge has a hash tag, which alone decides the slot."""
    start, end = (b"{", b"}") if isinstance(key, bytes) else ("{", "}")
    return _slot_of_tag(key[key.index(start) + 1 : key.index(end)])  # type: ignore[arg-type]


def single_slot(_key: str | bytes) -> int:
    """Return the slot of a key outside of a Cluster: always the same."""
    return 0


@lru_cache(maxsize=8_192)
def _slot_of_tag(tag: str | bytes) -> int:
    return crc_hqx(encode_key(tag) if isinstance(tag, str) else tag, 0) % SLOT_COUNT


def group_by_slot(things: Iterable[T], slot_of: Callable[[T], int]) -> list[list[T]]:
    """Group items by their slot, ordered by the first item of each group."""
    found: dict[int, list[T]] = {}
    for thing in things:
        found.setdefault(slot_of(thing), []).append(thing)
    return list(found.values())
