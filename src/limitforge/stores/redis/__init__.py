"""Decide checks on Redis: one server, a Sentinel set or a Cluster.

The modules at the top do no I/O and serve both stores: `core` puts them together, `codec` and `resp` encode calls of
the Lua script. `aio` and `sync` do the I/O, for event loops and for threads. `topology` finds the servers, `prepaid`
decides in this process what was debited in advance.
"""
