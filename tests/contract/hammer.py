"""Callers that hammer one limit from many threads; each process of a test runs this as a program of its own."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from limitforge import Limits, SyncLimiter, limit_from_fields
from limitforge.errors import StoreUnavailable
from tests.contract.options import PATIENT


def admitted(url: str, plans: list[Limits], *, threads: int, calls: int, resource: str = "r") -> list[int]:
    """Return for each plan how many of `threads` times `calls` checks were allowed.

    All threads start at the same moment, and check the plans in turn.
    """
    start = threading.Barrier(threads)
    with SyncLimiter.connect(url, options=PATIENT) as limiter, ThreadPoolExecutor(threads) as pool:

        def call(_: int) -> list[int]:
            start.wait()
            allowed = [0] * len(plans)
            for _ in range(calls):
                for at, limits in enumerate(plans):
                    allowed[at] += limiter.check(resource, "s", limits=limits).allowed
            return allowed

        return [sum(each) for each in zip(*pool.map(call, range(threads)), strict=True)]


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

    url, described, threads, calls, resource = sys.argv[1:]
    plans = [Limits(*map(limit_from_fields, plan)) for plan in json.loads(described)]
    print(json.dumps(admitted(url, plans, threads=int(threads), calls=int(calls), resource=resource)))  # noqa: T201
