"""Everything that limitforge raises.

    LimitforgeError
    ├── InvalidInput              a value from the caller is refused; names the field and the bound
    │   ├── InvalidLimit          ... while a limit was built or its text was parsed
    │   └── InvalidFile           ... in a configuration file; names every wrong field with its line
    ├── UnknownReservation        settling something that was never reserved, or more than a day after its end
    ├── TooManyReservations       a bucket holds as many open reservations as it may
    ├── CatalogError
    │   ├── NotFound              no tenant, plan, key, ... of that id or name
    │   ├── Conflict              a name that is taken, or something that others still use
    │   │   └── Outdated          somebody else changed it since it was read
    │   ├── UnknownKey            an API key or token that is wrong, revoked or expired
    │   ├── Forbidden             a right key that may not: disabled, suspended, or without the scope
    │   ├── TooManyUnknownKeys    so many wrong keys from one source that none is looked up for a while
    │   └── CatalogUnavailable    transient: the database did not answer, and nothing usable was remembered
    └── StoreError
        ├── StoreUnavailable      transient: the store did not answer, or can't serve now
        │   └── PartialFailure    ... for some of several writes; the others were done
        └── StoreCorrupt          a bug or a foreign value under one of our keys; never retried, never fails open

A denial is not an error: it is a `Decision` whose `allowed` is false.
"""

from collections.abc import Iterable, Sequence
from typing import Any


class LimitforgeError(Exception):
    """The root of all errors of this package."""


class InvalidInput(LimitforgeError, ValueError):
    """`field` was refused; `problem` says what it must be."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.field, self.problem)


class InvalidLimit(InvalidInput):
    """A limit, or the text of one, was refused."""


class InvalidFile(InvalidInput):
    """A configuration file was refused. `problems` has the line (0 if it has none), the field and what is wrong, for
    each of them; `field` and `problem` are those of the first.
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
    """No such reservation is known to the store, nor was in the last 24 hours."""


class TooManyReservations(LimitforgeError):
    """A bucket already holds the largest number of open reservations; settle some first."""


class StoreError(LimitforgeError):
    """The store could not decide."""


class StoreUnavailable(StoreError):
    """The store did not answer or can't serve now.

    `maybe_counted` tells that the request was on its way when that became clear: it may have been carried out.
    """

    def __init__(self, problem: str, *, maybe_counted: bool = False) -> None:
        super().__init__(problem)
        self.maybe_counted = maybe_counted


class PartialFailure(StoreUnavailable):
    """Some of several writes failed, and the others were done. `failed` names those that failed."""

    def __init__(self, problem: str, failed: Iterable[str]) -> None:
        super().__init__(problem)
        self.failed = frozenset(failed)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (str(self), self.failed)


class StoreCorrupt(StoreError):
    """A key holds something that is not ours, or the script and this code disagree."""


class CatalogError(LimitforgeError):
    """The catalog could not do what was asked."""


class NotFound(CatalogError, LookupError):
    """There is no such thing, or it is another tenant's."""


class Conflict(CatalogError):
    """It contradicts what is there: a name that is taken, or something that others still use."""


class VersionConflict(Conflict):
    """It was changed by somebody else since it was read: read it again, and decide anew."""


class UnknownKey(CatalogError):
    """The API key or token is wrong, revoked or expired; which of these, nobody is told."""


class Forbidden(CatalogError):
    """The key is right, and may not: it is disabled, its tenant is suspended, or it lacks the scope."""


class TooManyUnknownKeys(CatalogError):
    """One source sent so many wrong keys that no more of them are looked up for a while."""

    def __init__(self, problem: str, retry_after_ms: int) -> None:
        super().__init__(problem)
        self.retry_after_ms = retry_after_ms


class CatalogUnavailable(CatalogError):
    """The database did not answer or can't serve now, and nothing usable was remembered."""
