"""The store for threads and forked workers: a connection pool for each server."""
