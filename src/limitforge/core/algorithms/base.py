"""What every algorithm offers: a class of exact numbers whose methods are pure steps over an integer state.

The numbers are those of one limit (or of an override of it). A state is opened at a time, probed, perhaps taken from,
and sealed; the stored state is never touched, so a denial leaves nothing behind.
"""

from typing import Any, ClassVar

import msgspec

NEVER = -1  # a wait that does not end
UNLIMITED = -1  # a limit that is not there
UNCHANGED = -2  # a number that an override does not name: that of the limit which is checked holds


class Pending(msgspec.Struct, frozen=True, gc=False):
    """An open reservation on a bucket: what lapses when, and what then goes back where."""

    reservation: bytes
    lapses_us: int
    amount: int
    source: int
    refund: bool


class State(msgspec.Struct, gc=False):
    """What a bucket remembers: its last write, from when on it no longer matters, what counts against its limit."""

    last: int
    until: int
    used: int
    algorithm: Any
    pending: tuple[Pending, ...]


class Algorithm(msgspec.Struct, frozen=True):
    """The numbers of one limit, and its steps. `limit` is the whole number that users see, or UNLIMITED."""

    limit: int

    code: ClassVar[int]
    letter: ClassVar[str]
    override_width: ClassVar[int]
    """How many of the leading numbers an override may replace; the rest belong to the plan or to the key."""
    window_at: ClassVar[int | None] = None
    """Which of the numbers is the window, if there is one."""

    def numbers(self) -> tuple[int, ...]:
        """In the order in which the script reads them."""
        return tuple(getattr(self, name) for name in self.__struct_fields__)

    def with_numbers(self, leading: tuple[int, ...]) -> "Algorithm":
        """Return the same steps with these leading numbers, but for those that are UNCHANGED."""
        numbers = self.numbers()
        changed = (own if new == UNCHANGED else new for own, new in zip(numbers, leading, strict=False))
        return type(self)(*changed, *numbers[len(leading) :])

    def divided(self, nodes: int) -> "Algorithm":
        """One node's part of these numbers, at least 1."""
        return self.with_numbers((max(self.limit // nodes, 1),))

    def fresh(self, now: int) -> Any:
        """The state of a bucket that was never used; None if the caller's calendar does not reach `now`."""
        raise NotImplementedError

    def open(self, state: Any, now: int) -> Any:
        """A copy of `state` as it is at `now` under these numbers; None as in `fresh`."""
        raise NotImplementedError

    def wait(self, state: Any, cost: int, share: int) -> int:
        """Microseconds until `cost` fits into `share`: 0 if it does now, NEVER if it can't."""
        raise NotImplementedError

    def take(self, state: Any, cost: int, lease: bytes) -> None:
        """Take `cost`, which is known to fit."""
        raise NotImplementedError

    def force(self, state: Any, amount: int) -> bool:
        """Take up to `amount` without asking for room, to at most twice the limit in use; tells whether anything
        changed.
        """
        raise NotImplementedError

    def give(self, state: Any, amount: int, source: int) -> None:
        """Give back to the entry or window called `source`; dropped if that has ended."""
        raise NotImplementedError

    def source(self, state: Any) -> int:
        """What a cost that was just taken is given back to."""
        raise NotImplementedError

    def seal(self, state: Any) -> None:
        """Set `used`, rounded up, and `until`: from then on nothing is in use, so it is also when the limit resets."""
        raise NotImplementedError
