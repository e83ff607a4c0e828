"""What both Redis shells share: how a URL becomes a client, and how redis-py's errors become ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from limitforge.errors import InvalidInput, StoreCorrupt, StoreUnavailable

try:
    from redis import exceptions
    from redis.backoff import NoBackoff
except ImportError as missing:  # pragma: no cover - needs an environment without redis-py
    raise InvalidInput("url", "a Redis store needs redis-py: pip install 'limitforge[redis]'") from missing

MAX_CONNECTIONS = 64
CONNECT_SECONDS = 5.0

# Redis itself says that it can't serve now; anything else that it refuses is a bug of ours, or a value that is not
# ours.
_TRANSIENT = (
    "LOADING",
    "READONLY",
    "OOM",
    "MASTERDOWN",
    "NOAUTH",
    "BUSY",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "NOREPLICAS",
    "MISCONF",
)


def pool_of(kind: Any, retry: type, url: str) -> Any:
    """A pool that is not connected yet, of either shell's kind. A URL that redis-py can't use is refused here, by name.

    Never a silent retry: a call that may have been executed must not be sent twice.
    """
    parts = urlsplit(url)
    database = parts.path.strip("/")
    if parts.scheme != "unix" and database and not database.isdigit():
        raise InvalidInput(
            "url", f"the database must be a number, as in redis://localhost:6379/0, got {database!r:.40}"
        )
    options = {
        "max_connections": MAX_CONNECTIONS,
        "timeout": CONNECT_SECONDS,
        "socket_connect_timeout": CONNECT_SECONDS,
        "retry": retry(NoBackoff(), 0),
        "retry_on_error": [],
        "decode_responses": False,
    }
    try:
        pool = kind.from_url(url, **options)
        pool.connection_class(**pool.connection_kwargs)  # as the first call would; nothing is opened
    except (ValueError, TypeError, exceptions.RedisError) as error:
        raise InvalidInput("url", f"is not one that redis-py can use: {error}") from None
    return pool


@contextmanager
def translated() -> Iterator[None]:
    """The one place where the driver's errors become `StoreUnavailable` or `StoreCorrupt`."""
    try:
        yield
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        raise StoreUnavailable(f"Redis did not answer: {error}") from error
    except exceptions.ResponseError as error:
        transient = isinstance(
            error, exceptions.ReadOnlyError | exceptions.OutOfMemoryError | exceptions.ClusterDownError
        )
        if transient or str(error).startswith(_TRANSIENT):
            raise StoreUnavailable(f"Redis can't serve now: {error}") from error
        raise StoreCorrupt(f"Redis refused the script: {error}") from error
    except exceptions.RedisError as error:
        raise StoreCorrupt(f"redis-py failed: {error}") from error
