"""Compare the service with its peers: each is a separate process on one Redis, under load of `wrk` in interleaved
rounds.
"""
