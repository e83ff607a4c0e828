"""The contract, pure: no I/O, no clock reads, nothing but the standard library and msgspec."""
