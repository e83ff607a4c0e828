"""The rate limiting algorithms, one file each: functions over an integer state, without I/O or a clock.

`open` returns a copy of a stored state, and the other functions change that copy. All files but `base.py` have a twin
of the same name in `limitforge/lua/`. Only Lua parses and formats stored states, and tracks what is prepaid. The
differential tests compare the decisions of both.
"""
