"""Options of the stores under test, for programs that must not import pytest: it would double their start."""

from limitforge import StoreOptions

# Redis decides every check, even if a busy machine needs long for it.
PATIENT = StoreOptions(deadline_ms=30_000, failure="raise", denial_cache_ms=0)
