"""The errors of Redis stores that only the stores tell apart. Callers see each as a `StoreUnavailable`."""

from limitforge.errors import StoreUnavailable

FULL_REASON = "it is full (maxmemory) and its policy evicts nothing"


class NotServerFault(StoreUnavailable):
    """The check was not decided, but not because of the server. The circuit breaker does not count it."""


class StoreFull(StoreUnavailable):
    """The server replied that it has no memory for the writes of a check."""


class NotReplicated(NotServerFault):
    """The server executed the call, but a failover might undo it."""


class Redirected(NotServerFault):
    """A server of a Cluster redirected the call (MOVED or ASK) without executing it.

    `is_ask` is True if the redirection is for this call only.
    """

    def __init__(self, slot: int, host: str, port: int, *, is_ask: bool) -> None:
        state = "is migrating" if is_ask else "belongs to another server"
        super().__init__(f"slot {slot} of the Cluster {state}; connect to a Cluster with redis+cluster:// in the URL")
        self.slot = slot
        self.host = host
        self.port = port
        self.is_ask = is_ask


class SlotMigrating(NotServerFault):
    """A server of a Cluster did not execute the call, because its keys are being migrated (TRYAGAIN)."""


class SlotsNotTogether(NotServerFault):
    """A server did not execute a call across slots, because it does not fully own one of them."""


def as_maybe_counted(error: StoreUnavailable) -> StoreUnavailable:
    """Return a copy of the error for calls of which a part may have been counted."""
    kind = next((kind for kind in (NotServerFault, StoreFull) if isinstance(error, kind)), StoreUnavailable)
    return kind(str(error), maybe_counted=True)
