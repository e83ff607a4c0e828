"""Decide checks on Redis: one server, a Sentinel set or a Cluster.

`aio` and `sync` are the stores for event loops and for threads. What both share does no I/O: `core` puts it together,
`codec` and `resp` encode calls of the Lua script, `topology` finds the servers, `multi_step` decides checks that take
several steps, and `prepaid` keeps what this process may decide. `invalidation` listens for the changes of other
processes. The catalog stores its copies and locks with `catalog_redis`.
"""
