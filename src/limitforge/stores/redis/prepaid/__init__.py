"""The limits that this process decides: prepaid shares and local limits.

A limit with `consistency="prepaid"` is spent from a share that this process has debited in Redis in advance. A limit
with `consistency="local"` is divided by the number of live processes, which heartbeats count. Nothing here does I/O:
`aio` and `sync` send the calls.
"""
