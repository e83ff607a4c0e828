"""Contestants and workloads of the library benchmark."""

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

CheckFunction = Callable[[str], Awaitable[bool]]
"""Check a subject once, read every field of the reply, and return whether it was admitted."""

Sizes = tuple[int, ...]
"""The size of each limit of a check, per day. The last one is the smallest, so it denies."""

_prefixes = itertools.count()


class OpenLimiter(NamedTuple):
    """A limiter with separate state. `check_first_limit` checks only its first limit, on the same counters."""

    check: CheckFunction
    check_first_limit: CheckFunction | None
    close: Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Contestant:
    """`full_decision` is true if it returns more than the verdict."""

    name: str
    open: Callable[[str, Sizes], Awaitable[OpenLimiter]]
    full_decision: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """All contestants are compared with the first one."""

    name: str
    contestants: tuple[Contestant, ...]
    limits: int
    subjects: int
    size: int = 10_000_000
    """The size of the smallest limit. Except for denials, it is more than one subject takes in a run."""


def limit_sizes(limits: int, size: int) -> Sizes:
    """Return sizes of which each is twice the next one."""
    return tuple(size << at for at in reversed(range(limits)))


def check_each_until_denied(each: tuple[CheckFunction, ...]) -> CheckFunction:
    """Check one limit after the other, like users of a library without checks of several limits."""
    if len(each) == 1:
        return each[0]

    async def check_subject(subject: str) -> bool:
        for limit in each:
            if not await limit(subject):
                return False
        return True

    return check_subject


def unique_prefix() -> str:
    """Return a new prefix, so that limiters on one Redis have separate state."""
    return f"c{next(_prefixes)}"
