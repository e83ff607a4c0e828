"""Check what `limitforge` exports, and what importing it loads."""

import importlib
import pkgutil
import subprocess
import sys
from importlib.resources import files

import pytest

import limitforge

PUBLIC = [
    "Clock",
    "Concurrency",
    "Decision",
    "Entry",
    "Failure",
    "FixedWindow",
    "HotKey",
    "InvalidInput",
    "InvalidLimit",
    "Lanes",
    "Layer",
    "LeakyBucket",
    "Limit",
    "LimitState",
    "Limiter",
    "LimitforgeError",
    "Limits",
    "ManualClock",
    "MemoryStore",
    "Override",
    "OverridePage",
    "Quota",
    "Request",
    "Settlement",
    "SlidingWindow",
    "SlidingWindowCounter",
    "StoreCorrupt",
    "StoreError",
    "StoreOptions",
    "StoreStatus",
    "StoreUnavailable",
    "SyncLimiter",
    "TokenBucket",
    "TooManyReservations",
    "UnknownReservation",
    "limit_from_fields",
]


def test_the_public_names_are_these_and_no_others() -> None:
    assert limitforge.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_is_for(name: str) -> None:
    written = getattr(limitforge, name).__doc__
    assert written
    assert not written.startswith(f"{name}(")  # the generated docstring of a dataclass


def test_the_package_is_marked_as_typed() -> None:
    assert (files("limitforge") / "py.typed").is_file()


def test_importing_limitforge_imports_no_optional_dependency() -> None:
    program = "import limitforge, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "limitforge" in imported
    assert not imported & {"redis", "hiredis", "typer", "click", "rich", "sqlalchemy", "uvloop"}


def test_every_module_can_be_imported() -> None:
    """Import every module, also with the lowest and newest versions of its dependencies: see `make test-lowest`."""
    found = [each.name for each in pkgutil.walk_packages(limitforge.__path__, "limitforge.")]
    modules = [name for name in found if ".migrations" not in name and not name.endswith(".__main__")]
    assert len(modules) > 100
    for name in modules:
        importlib.import_module(name)
