"""The interface of an algorithm: the exact numbers of one limit, with pure functions over an integer state.

An evaluation opens a state at a time, probes it with `wait`, perhaps takes from it, and seals it. `open` returns a copy
and the stored state is never changed, so a denial leaves nothing behind.
"""

from typing import Any, ClassVar

import msgspec

NEVER = -1
"""The wait of a cost that never fits."""
UNLIMITED = -1
"""The limit of an unlimited limit."""
UNCHANGED = -2
"""A number that an override does not name: the limit's own number applies."""


class Pending(msgspec.Struct, frozen=True, gc=False):
    """An open reservation on a bucket: when it lapses, and whether its amount is then given back to `source`."""

    reservation: bytes
    lapses_us: int
    amount: int
    source: int
    refund: bool


class State(msgspec.Struct, gc=False):
    """The state of a bucket."""

    last: int
    """The time of the last write."""
    until: int
    """From this time on nothing is in use: stores treat the bucket as absent."""
    used: int
    """What counts against the limit."""
    algorithm: Any
    """The numbers of the last write, an `Algorithm`."""
    pending: tuple[Pending, ...]


class Algorithm(msgspec.Struct, frozen=True):
    """The exact numbers of one limit and its functions. `limit` is the whole number that users see, or UNLIMITED."""

    limit: int

    code: ClassVar[int]
    letter: ClassVar[str]
    override_width: ClassVar[int]
    """How many of the first numbers an override may replace. The others belong to the plan or to the key."""
    window_at: ClassVar[int | None] = None
    """The index of the window among the numbers, if there is one."""

    def numbers(self) -> tuple[int, ...]:
        """Return the numbers in the order in which the script reads them."""
        return tuple(getattr(self, name) for name in self.__struct_fields__)

    def with_numbers(self, leading: tuple[int, ...]) -> "Algorithm":
        """Return the same algorithm with these first numbers, except those that are UNCHANGED."""
        numbers = self.numbers()
        changed = (old if new == UNCHANGED else new for old, new in zip(numbers, leading, strict=False))
        return type(self)(*changed, *numbers[len(leading) :])

    def divided(self, processes: int) -> "Algorithm":
        """Return the part of one of several processes, at least 1."""
        return self.with_numbers((max(self.limit // processes, 1),))

    def fresh(self, now: int) -> Any:
        """Return the state of an unused bucket; None if the calendar windows of a quota do not reach `now`."""
        raise NotImplementedError

    def open(self, state: Any, now: int) -> Any:
        """Return a copy of `state` as it is at `now` under these numbers; None as in `fresh`."""
        raise NotImplementedError

    def wait(self, state: Any, cost: int, share: int) -> int:
        """Return the microseconds until `cost` fits into `share`: 0 if it fits now, NEVER if it never does."""
        raise NotImplementedError

    def take(self, state: Any, cost: int, lease: bytes) -> None:
        """Take `cost`, which must fit."""
        raise NotImplementedError

    def force(self, state: Any, amount: int) -> bool:
        """Take up to `amount` without asking for room, until twice the limit is in use. Return False if nothing
        changed.
        """
        raise NotImplementedError

    def give(self, state: Any, amount: int, source: int) -> None:
        """Give back to the entry or window that `source` names. If that has ended, the amount is dropped."""
        raise NotImplementedError

    def source(self, state: Any) -> int:
        """Return what a cost that was taken now must be given back to."""
        raise NotImplementedError

    def seal(self, state: Any) -> None:
        """Set `used`, rounded up, and `until`, when nothing is in use any more and the limit resets."""
        raise NotImplementedError
