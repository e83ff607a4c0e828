"""Callers that hammer one limit from many threads, in each of several processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

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
    """Return the number of allowed checks and of lost connections, and all other errors."""
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


def send_admitted(connection: Connection, url: str, plans: list[Any], threads: int, calls: int, resource: str) -> None:
    """Send what `admitted` returns. The plans are the fields of their limits."""
    read = [Limits(*map(limit_from_fields, plan)) for plan in plans]
    connection.send(admitted(url, read, threads=threads, calls=calls, resource=resource))
