"""Stores keep the state of buckets and decide checks. Limiters use them through the interfaces in `protocol`.

`memory` decides in this process. `redis` decides in a Lua script on Redis, and `resilience` decides what happens while
Redis is unavailable. `connect` opens the store that a URL names.
"""
