"""Concurrency: leases that hold `cost` slots each, until they are released or their TTL has passed since a renewal."""

from limitforge.core.algorithms.ledger import Ledger, LedgerAlgorithm, LedgerEntry, insert


class ConcurrencyAlgorithm(LedgerAlgorithm, frozen=True):
    ttl_us: int

    code = 6
    letter = "c"
    override_width = 2

    def take(self, state: Ledger, cost: int, lease: bytes) -> None:
        state.used += cost
        insert(state.entries, LedgerEntry(state.last_us + self.ttl_us, cost, lease))


def release(state: Ledger, lease: bytes) -> bool:
    """Free the slots of `lease`. Return False if it held none."""
    for index, entry in enumerate(state.entries):
        if entry.lease == lease:
            del state.entries[index]
            state.used -= entry.cost
            return True
    return False


def renew(state: Ledger, lease: bytes) -> bool:
    """Restart the TTL of `lease`, as long as it was at the last write. Return False if the lease was not live."""
    for index, entry in enumerate(state.entries):
        if entry.lease == lease:
            del state.entries[index]
            insert(state.entries, entry._replace(ends_us=state.last_us + state.algorithm.ttl_us))
            return True
    return False
