"""The `--store` option: which store a command decides on."""

from urllib.parse import urlsplit

from limitforge.core.clock import Clock
from limitforge.errors import InvalidInput
from limitforge.limiter import SyncLimiter

HELP = "Where to count: memory, or the URL of a Redis."


def open_limiter(store: str, *, key_prefix: str = "lf", clock: Clock | None = None) -> SyncLimiter:
    try:
        return SyncLimiter.connect(url_of(store), key_prefix=key_prefix, clock=clock)
    except InvalidInput as error:
        raise InvalidInput("--store", error.problem) from None
    except ValueError as error:  # of the URL's port or brackets
        raise InvalidInput("--store", str(error)) from None


def url_of(store: str) -> str:
    return "memory://" if store == "memory" else store


def place_of(store: str) -> str:
    """The store in words, without the password that its URL may hold."""
    url = urlsplit(url_of(store))
    if url.scheme == "memory":
        return "in memory"
    return f"on Redis at {url.netloc.rpartition('@')[2] or url.path or 'localhost'}"
