"""The one script, assembled from one file per algorithm. These files are the only copy of the engine that runs in
Redis.
"""

import hashlib
from functools import lru_cache
from importlib.resources import files

ORDER = (
    "exact",
    "state",
    "token_bucket",
    "leaky_bucket",
    "fixed_window",
    "quota",
    "ledger",
    "sliding_window",
    "concurrency",
    "sliding_window_counter",
    "algorithms",
    "overrides",
    "check",
    "reserve",
    "lease",
    "main",
)
"""Each file may use the ones before it."""


@lru_cache(maxsize=1)
def script() -> bytes:
    """The whole script."""
    here = files(__name__)
    return b"\n".join((here / f"{name}.lua").read_bytes() for name in ORDER)


@lru_cache(maxsize=1)
def sha() -> str:
    """Its name for EVALSHA."""
    return hashlib.sha1(script(), usedforsecurity=False).hexdigest()
