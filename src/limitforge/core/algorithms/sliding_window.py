"""Sliding window: an exact log. A cost of any size is one entry that counts for one window from when it was taken."""

from limitforge.core.algorithms.ledger import Ledger, LedgerAlgorithm, LedgerEntry, insert


class SlidingWindowAlgorithm(LedgerAlgorithm, frozen=True):
    window_us: int

    code = 4
    letter = "s"
    override_width = 2
    window_at = 1

    def take(self, state: Ledger, cost: int, lease: bytes) -> None:
        state.used += cost
        ends_us = state.last_us + self.window_us
        for index in range(len(state.entries) - 1, -1, -1):
            entry = state.entries[index]
            if entry.ends_us < ends_us:
                break
            if entry.ends_us == ends_us:
                state.entries[index] = LedgerEntry(ends_us, entry.cost + cost)
                return
        insert(state.entries, LedgerEntry(ends_us, cost))

    def force(self, state: Ledger, amount: int) -> bool:
        taken = min(amount, 2 * self.limit - state.used)
        if taken <= 0:
            return False
        self.take(state, taken, b"")
        return True

    def give(self, state: Ledger, amount: int, source: int) -> None:
        for index, entry in enumerate(state.entries):
            if entry.ends_us == source:
                given = min(amount, entry.cost)
                state.used -= given
                if given == entry.cost:
                    del state.entries[index]
                else:
                    state.entries[index] = LedgerEntry(source, entry.cost - given)
                return

    def source(self, state: Ledger) -> int:
        return state.last_us + self.window_us
