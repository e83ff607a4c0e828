"""The exceptions of limitforge.

    LimitforgeError
    ├── InvalidInput              an argument is invalid; names the field and the bound
    │   ├── InvalidLimit          ... of a limit, or of the text of limits
    │   └── InvalidFile           ... in a configuration file; names every invalid field with its line
    ├── UnknownReservation        the reservation does not exist, or ended more than a day ago
    ├── TooManyReservations       a bucket has the maximum number of open reservations
    ├── CatalogError
    │   ├── NotFound              no tenant, plan, key, ... has that id or name
    │   ├── Conflict              a name is taken, or something is still in use
    │   │   └── VersionConflict   it has changed since it was read
    │   ├── UnknownKey            an API key or token is wrong, revoked or expired
    │   ├── Forbidden             a valid key may not do this: disabled, suspended, or without the scope
    │   ├── TooManyUnknownKeys    one source sent too many unknown keys: none is looked up for a while
    │   └── CatalogUnavailable    transient: the database did not answer, and the process has no usable copy
    └── StoreError
        ├── StoreUnavailable      transient: the store did not answer, or can't serve now
        │   └── PartialFailure    ... for some of several writes; the others succeeded
        └── StoreCorrupt          a bug, or a foreign value under one of our keys; never retried, never fails open

A denial is not an error: it is a `Decision` whose `allowed` is false.
"""

from collections.abc import Iterable, Sequence
from typing import Any


class LimitforgeError(Exception):
    """The base class of all exceptions of this package."""


class InvalidInput(LimitforgeError, ValueError):
    """An argument is invalid. `field` names it, and `problem` says what it must be."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.field, self.problem)


class InvalidLimit(InvalidInput):
    """A limit, or the text of limits, is invalid. `field` and `problem` are those of `InvalidInput`."""


class InvalidFile(InvalidInput):
    """A configuration file is invalid.

    `problems` lists each problem as (line, field, problem); the line is 0 if the problem has none. `field` and
    `problem` are those of the first.
    """

    def __init__(self, name: str, problems: Sequence[tuple[int, str, str]]) -> None:
        self.name = name
        self.problems = tuple(problems)
        _, field, problem = self.problems[0]
        super().__init__(field, problem)
        shown = [
            f"{name}{f':{line}' if line else ''}: {f'{field}: ' if field else ''}{why}"
            for line, field, why in self.problems[:20]
        ]
        if len(self.problems) > len(shown):
            shown.append(f"... and {len(self.problems) - len(shown)} more")
        self.args = ("\n".join(shown),)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.name, self.problems)


class UnknownReservation(LimitforgeError, LookupError):
    """The store has no reservation of this id: it never existed, or it ended more than 24 hours ago."""


class TooManyReservations(LimitforgeError):
    """A bucket has the maximum number of open reservations (1,000); settle some first."""


class StoreError(LimitforgeError):
    """The store could not do what it was asked."""


class StoreUnavailable(StoreError):
    """The store did not answer or can't serve now.

    `maybe_counted` is true if the request had been sent: the store may have executed it.
    """

    def __init__(self, problem: str, *, maybe_counted: bool = False) -> None:
        super().__init__(problem)
        self.maybe_counted = maybe_counted


class PartialFailure(StoreUnavailable):
    """Some of several writes failed, and the others succeeded. `failed` names those that failed."""

    def __init__(self, problem: str, failed: Iterable[str]) -> None:
        super().__init__(problem)
        self.failed = frozenset(failed)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (str(self), self.failed)


class StoreCorrupt(StoreError):
    """A key holds a foreign value, or the script and this code disagree."""


class CatalogError(LimitforgeError):
    """The base class of the errors of the catalog."""


class NotFound(CatalogError, LookupError):
    """The entity does not exist, or it belongs to another tenant."""


class Conflict(CatalogError):
    """The change conflicts with the current state: a name is taken, or something is still in use."""


class VersionConflict(Conflict):
    """The entity has changed since it was read: read it again, and repeat the change if it still applies."""


class UnknownKey(CatalogError):
    """The API key or token is wrong, revoked or expired. The error does not say which."""


class Forbidden(CatalogError):
    """The key is valid but may not do this: it is disabled, its tenant is suspended, or it lacks the scope."""


class TooManyUnknownKeys(CatalogError):
    """One source sent too many unknown keys. Its keys are looked up again after `retry_after_ms`."""

    def __init__(self, problem: str, retry_after_ms: int) -> None:
        super().__init__(problem)
        self.retry_after_ms = retry_after_ms


class CatalogUnavailable(CatalogError):
    """The database did not answer or can't serve now, and this process has no usable copy."""
