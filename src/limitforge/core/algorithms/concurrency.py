"""Concurrency: leases that each hold `cost` slots until released, or for their TTL after they were taken or renewed."""

from limitforge.core.algorithms.ledger import Ledger, LedgerAlgorithm, LedgerEntry, insert


class ConcurrencyAlgorithm(LedgerAlgorithm, frozen=True):
    ttl_us: int

    code = 6
    letter = "c"
    override_width = 2

    def take(self, state: Ledger, cost: int, lease: bytes) -> None:
        state.used += cost
        insert(state.entries, LedgerEntry(state.last + self.ttl_us, cost, lease))


def release(state: Ledger, lease: bytes) -> bool:
    """Free the slots of `lease`; tells whether it held any."""
    for at, item in enumerate(state.entries):
        if item.lease == lease:
            del state.entries[at]
            state.used -= item.cost
            return True
    return False


def renew(state: Ledger, lease: bytes) -> bool:
    """Let `lease` start again, with the TTL that the bucket was last written with; tells whether it was still live."""
    for at, item in enumerate(state.entries):
        if item.lease == lease:
            del state.entries[at]
            insert(state.entries, item._replace(ends_us=state.last + state.algorithm.ttl_us))
            return True
    return False
