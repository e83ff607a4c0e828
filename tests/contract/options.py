"""Options of the stores under test, for programs that must not import pytest: it would double their start."""

from limitforge import StoreOptions

# A busy machine is no reason for another decision: nothing is decided without Redis here, however long it takes.
PATIENT = StoreOptions(deadline_ms=30_000, failure="raise", denial_cache_ms=0)
