"""Who takes part, and where they are asked."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.service.wrk import Ask


class Site(NamedTuple):
    """What contestants are given: a Redis, and a folder for what they keep."""

    redis_url: str
    folder: Path


class Door(NamedTuple):
    """A contestant that runs: its process, and how it is asked for a plan."""

    pid: int
    ask: Callable[[str], Ask]


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    open: Callable[[Site], AbstractContextManager[Door]]


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    plan: str
    subjects: int
    rounds: int
    seconds: int
