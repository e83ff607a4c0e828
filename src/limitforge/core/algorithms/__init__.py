"""One file per algorithm: its exact numbers, and the pure steps over its integer state.

Each has a twin of the same name in `limitforge/lua/`, function by function; the differential tests hold the two
together.
"""
