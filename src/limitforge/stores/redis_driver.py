"""What both Redis shells share: how a URL becomes a client, and how redis-py's errors become ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.backoff import NoBackoff

from limitforge.errors import InvalidInput, StoreCorrupt, StoreUnavailable

MAX_CONNECTIONS = 64
PATIENCE_SECONDS = 5.0  # for a connection, and for an answer: a Redis that is frozen must not freeze its callers

_HINT = "A password with characters such as / # @ must be percent-encoded."

# Redis itself says that it can't serve now; anything else that it refuses is a bug, or a value that is not ours.
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
        raise InvalidInput("url", f"the database must be a number, as in redis://localhost:6379/0. {_HINT}")
    options = {
        "max_connections": MAX_CONNECTIONS,
        "timeout": PATIENCE_SECONDS,
        "socket_connect_timeout": PATIENCE_SECONDS,
        "socket_timeout": PATIENCE_SECONDS,
        "retry": retry(NoBackoff(), 0),
        "retry_on_error": [],
        "decode_responses": False,
    }
    try:
        pool = kind.from_url(url, **options)
        pool.connection_class(**pool.connection_kwargs)  # as the first call would; nothing is opened
    except (ValueError, TypeError, exceptions.RedisError):
        # Nothing of the URL is told: a wrong one may have a piece of its password anywhere.
        raise InvalidInput("url", f"is not one that redis-py can use: see host, port, options. {_HINT}") from None
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
