"""Sliding window: the exact log. A cost counts for one window from when it was taken, and is one item however large."""

from limitforge.core.algorithms.ledger import Ledger, LedgerAlgorithm, LedgerEntry, insert


class SlidingWindowAlgorithm(LedgerAlgorithm, frozen=True):
    window_us: int

    code = 4
    letter = "s"
    override_width = 2
    window_at = 1

    def take(self, state: Ledger, cost: int, lease: bytes) -> None:
        state.used += cost
        ends_us = state.last + self.window_us
        for at in range(len(state.entries) - 1, -1, -1):
            item = state.entries[at]
            if item.ends_us < ends_us:
                break
            if item.ends_us == ends_us:
                state.entries[at] = LedgerEntry(ends_us, item.cost + cost)
                return
        insert(state.entries, LedgerEntry(ends_us, cost))

    def force(self, state: Ledger, amount: int) -> bool:
        taken = min(amount, 2 * self.limit - state.used)
        if taken <= 0:
            return False
        self.take(state, taken, b"")
        return True

    def give(self, state: Ledger, amount: int, source: int) -> None:
        for at, item in enumerate(state.entries):
            if item.ends_us == source:
                given = min(amount, item.cost)
                state.used -= given
                if given == item.cost:
                    del state.entries[at]
                else:
                    state.entries[at] = LedgerEntry(source, item.cost - given)
                return

    def source(self, state: Ledger) -> int:
        return state.last + self.window_us
