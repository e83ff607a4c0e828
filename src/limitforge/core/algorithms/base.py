"""The interface of an algorithm: the exact parameters of one limit, with functions over an integer state.

An evaluation calls `open` for a copy of the stored state as it is now, asks it with `wait` whether the cost fits, takes
the cost if it does, and calls `seal` to finish the copy. The stored state itself never changes: the store writes
the copy back if the check took something, or if a limit with `count_denied` counted a denial.
"""

from typing import Any, ClassVar

import msgspec

NEVER = -1
"""The wait of a cost that never fits."""
UNLIMITED = -1
"""The value of `limit` that means no limit."""
UNCHANGED = -2
"""A parameter that an override does not name: that of the limit applies."""


class Pending(msgspec.Struct, frozen=True, gc=False):
    """An open reservation on a bucket: when it lapses, and whether its amount is then given back to `source`."""

    reservation: bytes
    lapses_us: int
    amount: int
    source: int
    refund: bool


class State(msgspec.Struct, gc=False):
    """The state of a bucket."""

    last_us: int
    """The time of the last write. In an opened state: the time for which it was opened."""
    until_us: int
    """From this time on nothing is in use: stores treat the bucket as absent."""
    used: int
    """What counts against the limit."""
    algorithm: Any
    """The `Algorithm` of the last write, with its parameters."""
    pending: tuple[Pending, ...]


class Algorithm(msgspec.Struct, frozen=True):
    """The exact parameters of one limit and its functions. `limit` is the number that users see, or UNLIMITED."""

    limit: int

    code: ClassVar[int]
    letter: ClassVar[str]
    override_width: ClassVar[int]
    """How many of the first parameters an override may replace. The others belong to the plan or to the key."""
    window_at: ClassVar[int | None] = None
    """The index of the window among the parameters, if there is one."""

    def parameters(self) -> tuple[int, ...]:
        """Return the parameters in the order in which the script reads them."""
        return tuple(getattr(self, name) for name in self.__struct_fields__)

    def with_parameters(self, leading: tuple[int, ...]) -> "Algorithm":
        """Return the same algorithm with these first parameters, except those that are UNCHANGED."""
        parameters = self.parameters()
        changed = (old if new == UNCHANGED else new for old, new in zip(parameters, leading, strict=False))
        return type(self)(*changed, *parameters[len(leading) :])

    def divided_by(self, processes: int) -> "Algorithm":
        """Return the algorithm of one of several processes, with a limit of at least 1."""
        return self.with_parameters((max(self.limit // processes, 1),))

    def fresh(self, now: int) -> Any:
        """Return the state of an unused bucket; None if the calendar windows of a quota do not reach `now`."""
        raise NotImplementedError

    def open(self, state: Any, now: int) -> Any:
        """Return a copy of `state` as it is at `now` under these parameters; None as in `fresh`."""
        raise NotImplementedError

    def wait(self, state: Any, cost: int, share: int) -> int:
        """Return the microseconds until `cost` fits into `share`: 0 if it fits now, NEVER if it never does."""
        raise NotImplementedError

    def take(self, state: Any, cost: int, lease: bytes) -> None:
        """Take `cost`, which must fit."""
        raise NotImplementedError

    def force(self, state: Any, amount: int) -> bool:
        """Take up to `amount` even without room, until twice the limit is in use. Return False if nothing changed."""
        raise NotImplementedError

    def give(self, state: Any, amount: int, source: int) -> None:
        """Refund `amount` to the entry or window with the id `source`. If that has ended, the amount is dropped."""
        raise NotImplementedError

    def source(self, state: Any) -> int:
        """Return the id of the entry or window that holds a cost that was taken now: the `source` of a refund."""
        raise NotImplementedError

    def seal(self, state: Any) -> None:
        """Set `used`, rounded up, and `until_us`, when nothing is in use any more and the limit resets."""
        raise NotImplementedError
