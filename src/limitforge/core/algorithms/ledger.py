"""Costs that each count until a time of their own, sorted by that time: what sliding windows and leases share."""

from typing import NamedTuple

from limitforge.core.algorithms.base import NEVER, Algorithm, State


class LedgerEntry(NamedTuple):
    """A cost that counts until `ends_us`. That of a lease has a token."""

    ends_us: int
    cost: int
    lease: bytes = b""


class Ledger(State, gc=False):
    entries: list[LedgerEntry]


class LedgerAlgorithm(Algorithm, frozen=True):
    def fresh(self, now: int) -> Ledger:
        return Ledger(now, now, 0, self, (), [])

    def open(self, state: Ledger, now: int) -> Ledger:
        entries = state.entries
        used = state.used
        ended = 0
        while ended < len(entries) and entries[ended].ends_us <= now:
            used -= entries[ended].cost
            ended += 1
        return Ledger(now, 0, used, self, state.pending, entries[ended:])

    def wait(self, state: Ledger, cost: int, share: int) -> int:
        if cost > share:
            return NEVER
        short = state.used + cost - share
        if short <= 0:
            return 0
        for entry in state.entries:
            short -= entry.cost
            if short <= 0:
                return entry.ends_us - state.last_us
        raise AssertionError("the costs of a ledger's entries add up to `used`")

    def seal(self, state: Ledger) -> None:
        state.until_us = state.entries[-1].ends_us if state.entries else state.last_us


def insert(entries: list[LedgerEntry], entry: LedgerEntry) -> None:
    """Insert `entry` after all entries that end no later. The search starts at the end, where most go."""
    index = len(entries)
    while index and entries[index - 1].ends_us > entry.ends_us:
        index -= 1
    entries.insert(index, entry)
