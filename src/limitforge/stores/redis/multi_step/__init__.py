"""Checks of several steps: flows that yield steps to send side by side, and receive their replies.

`cross_slot` decides a check whose limits lie in several slots, with a two-phase commit. `hybrid` decides the prepaid
and local limits of a check in this process, and leaves the others to the store. Nothing here does I/O.
"""
