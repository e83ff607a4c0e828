"""The rate limiting algorithms, one file each: pure functions over integer state.

Each file has a twin of the same name in `limitforge/lua/`, function by function. The differential tests compare them.
"""
