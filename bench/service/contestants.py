"""Contestants and workloads of the service benchmark."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.service.wrk import RequestTemplate


class BenchEnvironment(NamedTuple):
    """What contestants receive: a Redis, and a folder for their files."""

    redis_url: str
    folder: Path


class RunningContestant(NamedTuple):
    """A running contestant: its process, and the request for a plan."""

    pid: int
    request_for: Callable[[str], RequestTemplate]


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    open: Callable[[BenchEnvironment], AbstractContextManager[RunningContestant]]


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    plan: str
    subjects: int
    rounds: int
    seconds: int
