"""The configuration cache of one process: keys, tenants, and authenticated callers.

`CatalogCache` is the entry point. A lookup of a caller in memory does no I/O. Everything is bounded, and belongs to one
event loop.
"""
