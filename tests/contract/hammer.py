"""Callers that hammer one limit from many threads; each process of a test runs this as a program of its own."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from limitforge import Limits, SyncLimiter, limit_from_fields
from limitforge.errors import StoreUnavailable
from tests.contract.conftest import PATIENT


def admitted(url: str, limits: Limits, *, threads: int, calls: int, resource: str = "r") -> int:
    """How many of `threads` times `calls` checks were allowed. All threads start at the same moment."""
    start = threading.Barrier(threads)
    with SyncLimiter.connect(url, options=PATIENT) as limiter, ThreadPoolExecutor(threads) as pool:

        def call(_: int) -> int:
            start.wait()
            return sum(limiter.check(resource, "s", limits=limits).allowed for _ in range(calls))

        return sum(pool.map(call, range(threads)))


def survived(limiter: SyncLimiter, limits: Limits, calls: int) -> tuple[int, int, list[str]]:
    """Checks allowed, connections lost, and any other error by its name."""
    allowed = lost = 0
    others = []
    for _ in range(calls):
        try:
            allowed += limiter.check("r", "s", limits=limits).allowed
        except StoreUnavailable:
            lost += 1
        except Exception as error:  # noqa: BLE001 - that is the question
            others.append(repr(error))
    return allowed, lost, others


if __name__ == "__main__":
    import json

    url, plan, threads, calls, resource = sys.argv[1:]
    limits = Limits(*map(limit_from_fields, json.loads(plan)))
    print(admitted(url, limits, threads=int(threads), calls=int(calls), resource=resource))  # noqa: T201
