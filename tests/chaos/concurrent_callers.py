"""Concurrent callers in another process: tasks, callbacks, threads and forks."""

import asyncio
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from limitforge import Decision, Limiter, LimitforgeError, Limits, StoreOptions, SyncLimiter, limit_from_fields

# With this deadline nothing is degraded on a busy machine. A degraded answer could admit more than the limit.
REDIS_ONLY = StoreOptions(failure="open", deadline_ms=30_000, denial_cache_ms=1_000)
WORKERS = 3

Tally = tuple[int, int]


def count_decisions(decisions: Iterable[Decision]) -> Tally:
    admitted = degraded = 0
    for decision in decisions:
        admitted += decision.allowed
        degraded += decision.degraded is not None
    return admitted, degraded


def total(tallies: Iterable[Tally]) -> Tally:
    admitted, degraded = zip(*tallies, strict=True)
    return sum(admitted), sum(degraded)


async def tasks(limiter: Limiter, limits: Limits, callers: int, calls: int) -> Tally:
    """Concurrent callers of one loop, whose checks share calls."""

    async def call() -> Tally:
        return count_decisions([await limiter.check("r", "s", limits=limits) for _ in range(calls)])

    return total(await asyncio.gather(*(call() for _ in range(callers))))


async def callbacks(limiter: Limiter, limits: Limits, callers: int, calls: int) -> Tally:
    """Concurrent callers without tasks: each starts its next check in the callback of the one before."""
    answers: list[Decision] = []
    done = asyncio.get_running_loop().create_future()

    def submit_next(left: int) -> None:
        def answered(answer: Decision | LimitforgeError) -> None:
            if not isinstance(answer, Decision):
                done.set_exception(answer)
                return
            answers.append(answer)
            if left > 1:
                loop.call_soon(submit_next, left - 1)
            elif len(answers) == callers * calls:
                done.set_result(None)

        limiter.submit(answered, "r", "s", limits=limits)

    loop = asyncio.get_running_loop()
    for _ in range(callers):
        submit_next(calls)
    await done
    return count_decisions(answers)


def threads(limiter: SyncLimiter, limits: Limits, callers: int, calls: int) -> Tally:
    start = threading.Barrier(callers)

    def call(_: int) -> Tally:
        start.wait()
        return count_decisions(limiter.check("r", "s", limits=limits) for _ in range(calls))

    with ThreadPoolExecutor(callers) as pool:
        return total(pool.map(call, range(callers)))


def forked(work: Callable[[], Tally]) -> Tally:
    """Do some work in several forked processes and in this one."""
    readers = []
    for _ in range(WORKERS):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(reader)
            code = 1
            try:
                os.write(writer, json.dumps(work()).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        readers.append(reader)
    tallies = [work()]
    for reader in readers:
        with os.fdopen(reader, "rb") as pipe:
            tallies.append(json.loads(pipe.read()))
        os.wait()
    return total(tallies)


def by_tasks(url: str, *load: Any) -> Tally:
    async def run() -> Tally:
        async with Limiter.connect(url, options=REDIS_ONLY) as limiter:
            return await tasks(limiter, *load)

    return asyncio.run(run())


def by_callbacks(url: str, *load: Any) -> Tally:
    async def run() -> Tally:
        async with Limiter.connect(url, options=REDIS_ONLY) as limiter:
            return await callbacks(limiter, *load)

    return asyncio.run(run())


def by_threads(url: str, *load: Any) -> Tally:
    with SyncLimiter.connect(url, options=REDIS_ONLY) as limiter:
        return threads(limiter, *load)


def by_forks(url: str, *load: Any) -> Tally:
    """As gunicorn does with --preload: the limiter is created and used, then the workers are forked."""
    with SyncLimiter.connect(url, options=REDIS_ONLY) as limiter:
        used = threads(limiter, load[0], 4, 5)
        return total([used, forked(lambda: threads(limiter, *load))])


def by_forks_in_mid_use(url: str, *load: Any) -> Tally:
    """Fork while other threads run checks: a lock that one of them holds stays locked in the child."""
    over = threading.Event()

    in_use = threading.Barrier(5)

    def call(limiter: SyncLimiter) -> Tally:
        decisions = [limiter.check("r", "s", limits=load[0])]
        in_use.wait()
        while not over.is_set():
            decisions.append(limiter.check("r", "s", limits=load[0]))
        return count_decisions(decisions)

    with SyncLimiter.connect(url, options=REDIS_ONLY) as limiter, ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(call, limiter) for _ in range(4)]
        in_use.wait()
        tallies = [forked(lambda: threads(limiter, *load))]
        over.set()
        return total(tallies + [each.result() for each in busy])


def by_forks_with_loops(url: str, *load: Any) -> Tally:
    """Use an async limiter before the fork, and then in each worker on a loop of its own."""
    limiter = Limiter.connect(url, options=REDIS_ONLY)

    async def finish() -> Tally:
        try:
            return await tasks(limiter, *load)
        finally:
            await limiter.close()

    used = asyncio.run(tasks(limiter, load[0], 4, 5))
    return total([used, forked(lambda: asyncio.run(finish()))])


def by_forks_beside_a_loop(url: str, *load: Any) -> Tally:
    """Fork while a loop in another thread runs checks on the limiter that the workers use, too."""
    in_use, over = threading.Event(), threading.Event()
    limiter = Limiter.connect(url, options=REDIS_ONLY)

    async def call() -> Tally:
        decisions = []
        while not over.is_set():
            decisions += await asyncio.gather(*(limiter.check("r", "s", limits=load[0]) for _ in range(8)))
            in_use.set()
        await limiter.close()
        return count_decisions(decisions)

    async def finish() -> Tally:
        try:
            return await tasks(limiter, *load)
        finally:
            await limiter.close()

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(asyncio.run, call())
        in_use.wait()
        tallies = [forked(lambda: asyncio.run(finish()))]
        over.set()
        return total([*tallies, busy.result()])


CALLER_KINDS = {
    "tasks": by_tasks,
    "callbacks": by_callbacks,
    "threads": by_threads,
    "forks": by_forks,
    "forks-in-mid-use": by_forks_in_mid_use,
    "forks-with-loops": by_forks_with_loops,
    "forks-beside-a-loop": by_forks_beside_a_loop,
}


def send_tallies(connection: Connection, way: str, url: str, limits: list[Any], callers: int, calls: int) -> None:
    """Send how many checks of each limit were admitted and degraded, and what was written to stderr.

    `limits` are the fields of the limits, which are checked one after the other.
    """
    with tempfile.TemporaryFile("w+") as stderr:
        os.dup2(stderr.fileno(), sys.stderr.fileno())
        tallies = [CALLER_KINDS[way](url, Limits(limit_from_fields(fields)), callers, calls) for fields in limits]
        sys.stderr.flush()
        stderr.seek(0)
        connection.send((tallies, stderr.read()))
