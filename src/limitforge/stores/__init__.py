"""Where decisions are kept: memory and Redis, behind one protocol."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl, urlsplit

from limitforge.core.clock import Clock
from limitforge.core.exact import parse_integer, short_repr
from limitforge.core.keys import Keys
from limitforge.errors import InvalidInput
from limitforge.stores.memory.store import MAX_KEYS, AsyncMemoryStore, MemoryStore
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import Store, SyncStore

_REDIS = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")


def connect(url: str, *, keys: Keys, clock: Clock | None = None, options: StoreOptions | None = None) -> Store:
    """The store that a URL names, for an event loop. No connection is opened yet."""
    if _is_memory(url):
        return AsyncMemoryStore(_memory(url, keys, clock, options))
    with _redis_py():
        from limitforge.stores.redis.aio.store import RedisStore
    return RedisStore(url, keys=keys, clock=clock, options=options)


def connect_sync(url: str, *, keys: Keys, clock: Clock | None = None, options: StoreOptions | None = None) -> SyncStore:
    """The same for threads."""
    if _is_memory(url):
        return _memory(url, keys, clock, options)
    with _redis_py():
        from limitforge.stores.redis.sync.store import SyncRedisStore
    return SyncRedisStore(url, keys=keys, clock=clock, options=options)


def _is_memory(url: str) -> bool:
    try:
        scheme = urlsplit(url).scheme if isinstance(url, str) else ""
    except ValueError:
        scheme = ""
    if scheme != "memory" and scheme not in _REDIS:
        raise InvalidInput("url", f"must start with memory://, {', '.join(f'{s}://' for s in _REDIS)}, got {scheme!r}")
    return scheme == "memory"


def _memory(url: str, keys: Keys, clock: Clock | None, options: StoreOptions | None) -> MemoryStore:
    """`memory://?max_keys=10000` bounds the number of buckets."""
    settings = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    max_keys = parse_integer("max_keys", settings.pop("max_keys", MAX_KEYS), minimum=1)
    if settings:
        raise InvalidInput("url", f"memory:// takes max_keys and nothing else, got {short_repr(', '.join(settings))}")
    options = options or StoreOptions()
    return MemoryStore(
        keys=keys,
        clock=clock,
        max_keys=max_keys,
        processes=lambda: options.processes,
        new_buckets_per_minute=options.new_buckets_per_minute,
    )


@contextmanager
def _redis_py() -> Iterator[None]:
    """redis-py is an extra: memory works without it."""
    try:
        yield
    except ImportError as missing:
        raise InvalidInput("url", "a Redis store needs redis-py: pip install 'limitforge[redis]'") from missing
