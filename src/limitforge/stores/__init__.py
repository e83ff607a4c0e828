"""Where decisions are kept: memory and Redis, behind one protocol."""

from urllib.parse import urlsplit

from limitforge.core.clock import Clock
from limitforge.core.keys import Keys
from limitforge.errors import InvalidInput
from limitforge.stores.memory import AsyncMemoryStore, MemoryStore
from limitforge.stores.protocol import Store, SyncStore

_REDIS = ("redis", "rediss", "unix")


def connect(url: str, *, keys: Keys, clock: Clock | None = None) -> Store:
    """The store that a URL names, for an event loop. No connection is opened yet."""
    if _scheme(url) == "memory":
        return AsyncMemoryStore(MemoryStore(keys=keys, clock=clock))
    from limitforge.stores.redis import RedisStore

    return RedisStore(url, keys=keys, clock=clock)


def connect_sync(url: str, *, keys: Keys, clock: Clock | None = None) -> SyncStore:
    """The same for threads."""
    if _scheme(url) == "memory":
        return MemoryStore(keys=keys, clock=clock)
    from limitforge.stores.redis_sync import SyncRedisStore

    return SyncRedisStore(url, keys=keys, clock=clock)


def _scheme(url: str) -> str:
    try:
        scheme = urlsplit(url).scheme if isinstance(url, str) else ""
    except ValueError:
        scheme = ""
    if scheme != "memory" and scheme not in _REDIS:
        raise InvalidInput("url", f"must start with memory://, {', '.join(f'{s}://' for s in _REDIS)}, got {scheme!r}")
    return scheme
