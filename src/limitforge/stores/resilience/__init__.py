"""What a store does while a Redis server is unavailable: circuit breaker, failure behaviour, statistics.

Nothing here does I/O. The Redis stores, sync and async, share one `Resilience` object per server.
"""
