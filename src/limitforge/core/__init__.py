"""The rate limiting engine: limits, plans, keys, checks, decisions and the algorithms in Python.

It does no logging and no I/O, except that it loads time zones. It reads the time only through `clock.py`, and the
evaluation of a check gets the time as an argument. It imports only the standard library and msgspec. Stores, limiter,
catalog and service all use it.
"""
