"""The rate limiting engine: limits, plans, keys, checks, decisions and the algorithms in Python.

It is pure: no I/O, no logging, and no clock but the ones in `clock.py`, which callers pass in. It imports only the
standard library and msgspec. Stores, limiter, catalog and service all use it.
"""
