"""The option `--store`: the store that `burst` and `replay` use."""

from urllib.parse import urlsplit

from limitforge.core.clock import Clock
from limitforge.errors import InvalidInput
from limitforge.limiter_sync import SyncLimiter
from limitforge.stores.options import StoreOptions

STORE_HELP = "The store: memory, or the URL of a Redis server."

STORE_OPTIONS = StoreOptions(failure="raise", deadline_ms=5_000, denial_cache_ms=0)
"""Every printed decision must come from the store, so a command waits for it, and fails if it is unavailable."""


def open_limiter(store: str, *, key_prefix: str = "lf", clock: Clock | None = None) -> SyncLimiter:
    try:
        return SyncLimiter.connect(store_url(store), key_prefix=key_prefix, clock=clock, options=STORE_OPTIONS)
    except InvalidInput as error:
        raise InvalidInput("--store", error.problem) from None
    except ValueError as error:  # urlsplit raises it for an invalid port or unbalanced brackets
        raise InvalidInput("--store", str(error)) from None


def store_url(store: str) -> str:
    return "memory://" if store == "memory" else store


def describe_store(store: str) -> str:
    """Return a phrase such as "on Redis at localhost:6379", without the password of the URL."""
    url = urlsplit(store_url(store))
    if url.scheme == "memory":
        return "in memory"
    return f"on Redis at {url.netloc.rpartition('@')[2] or url.path or 'localhost'}"
