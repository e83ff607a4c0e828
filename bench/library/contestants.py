"""Who takes part, and what is asked of them."""

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

CheckFunction = Callable[[str], Awaitable[bool]]
"""Checks a subject once, reads all that the answer tells, and says whether it was admitted."""

Sizes = tuple[int, ...]
"""How much each limit of a check holds, per day. The last one is the smallest, so it is the one that denies."""

_prefixes = itertools.count()


class OpenLimiter(NamedTuple):
    """A limiter with state of its own. `first` asks its first limit alone, on the same counters."""

    check: CheckFunction
    check_first_limit: CheckFunction | None
    close: Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Contestant:
    """`full` tells whether it answers with more than the verdict."""

    name: str
    open: Callable[[str, Sizes], Awaitable[OpenLimiter]]
    full_decision: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """The first contestant is the one that all others are compared with."""

    name: str
    contestants: tuple[Contestant, ...]
    limits: int
    subjects: int
    size: int = 10_000_000
    """Of the smallest limit: unless the shape is about denials, more than any run takes of one subject."""


def limit_sizes(limits: int, size: int) -> Sizes:
    """Each limit holds twice as much as the next one."""
    return tuple(size << at for at in reversed(range(limits)))


def check_each_until_denied(each: tuple[CheckFunction, ...]) -> CheckFunction:
    """For those who have no check of several limits: one call for each of them, as their users write it."""
    if len(each) == 1:
        return each[0]

    async def ask(subject: str) -> bool:
        for limit in each:
            if not await limit(subject):
                return False
        return True

    return ask


def unique_prefix() -> str:
    """State of its own for each limiter: they share a Redis."""
    return f"c{next(_prefixes)}"
