"""Open the store that a URL names."""

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
    """Return the asynchronous store for a URL. It connects with the first check. Raises InvalidInput."""
    if _names_memory_store(url):
        return AsyncMemoryStore(_memory_store(url, keys, clock, options))
    with _require_redis_py():
        from limitforge.stores.redis.aio.store import RedisStore
    return RedisStore(url, keys=keys, clock=clock, options=options)


def connect_sync(url: str, *, keys: Keys, clock: Clock | None = None, options: StoreOptions | None = None) -> SyncStore:
    """Return the store for a URL, for use from threads. It connects with the first check. Raises InvalidInput."""
    if _names_memory_store(url):
        return _memory_store(url, keys, clock, options)
    with _require_redis_py():
        from limitforge.stores.redis.sync.store import SyncRedisStore
    return SyncRedisStore(url, keys=keys, clock=clock, options=options)


def _names_memory_store(url: str) -> bool:
    """Return whether a URL names a memory store. Raises InvalidInput for an unknown scheme."""
    try:
        scheme = urlsplit(url).scheme if isinstance(url, str) else ""
    except ValueError:
        scheme = ""
    if scheme != "memory" and scheme not in _REDIS:
        raise InvalidInput("url", f"must start with memory://, {', '.join(f'{s}://' for s in _REDIS)}, got {scheme!r}")
    return scheme == "memory"


def _memory_store(url: str, keys: Keys, clock: Clock | None, options: StoreOptions | None) -> MemoryStore:
    """Return a memory store. `memory://?max_keys=10000` bounds the number of its buckets."""
    settings = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    max_keys = parse_integer("max_keys", settings.pop("max_keys", MAX_KEYS), minimum=1)
    if settings:
        raise InvalidInput("url", f"memory:// has only the parameter max_keys, got {short_repr(', '.join(settings))}")
    options = options or StoreOptions()
    return MemoryStore(
        keys=keys,
        clock=clock,
        max_keys=max_keys,
        processes=lambda: options.processes,
        new_buckets_per_minute=options.new_buckets_per_minute,
    )


@contextmanager
def _require_redis_py() -> Iterator[None]:
    """Turn a failed import of redis-py, which is an extra, into a helpful error."""
    try:
        yield
    except ImportError as missing:
        raise InvalidInput("url", "a Redis store needs redis-py: pip install 'limitforge[redis]'") from missing
