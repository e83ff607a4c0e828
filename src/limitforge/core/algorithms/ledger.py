"""What the log and the leases share: costs that each count until an end of their own, in the order of their ends."""

from typing import NamedTuple

from limitforge.core.algorithms.base import NEVER, Algorithm, State


class LedgerEntry(NamedTuple):
    """A cost that counts until `ends_us`; a lease has a token too."""

    ends_us: int
    cost: int
    lease: bytes = b""


class Ledger(State, gc=False):
    entries: list[LedgerEntry]


class LedgerAlgorithm(Algorithm, frozen=True):
    def fresh(self, now: int) -> Ledger:
        return Ledger(now, now, 0, self, (), [])

    def open(self, state: Ledger, now: int) -> Ledger:
        items = state.entries
        used = state.used
        gone = 0
        while gone < len(items) and items[gone].ends_us <= now:
            used -= items[gone].cost
            gone += 1
        return Ledger(now, 0, used, self, state.pending, items[gone:])

    def wait(self, state: Ledger, cost: int, share: int) -> int:
        if cost > share:
            return NEVER
        short = state.used + cost - share
        if short <= 0:
            return 0
        for item in state.entries:
            short -= item.cost
            if short <= 0:
                return item.ends_us - state.last
        raise AssertionError("a ledger's sum is that of its items")

    def seal(self, state: Ledger) -> None:
        state.until = state.entries[-1].ends_us if state.entries else state.last


def insert(items: list[LedgerEntry], item: LedgerEntry) -> None:
    """After everything that ends no later. The newest nearly always ends last, so search from the back."""
    at = len(items)
    while at and items[at - 1].ends_us > item.ends_us:
        at -= 1
    items.insert(at, item)
