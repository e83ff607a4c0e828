"""A store in this process, without I/O. It is also the local store that decides while Redis is unavailable.

It imports `core` and the store interface only.
"""
