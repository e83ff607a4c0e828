"""The two HTTP front ends: the fast protocol, which answers checks itself, and the ASGI app for everything else.

Bounds on what connections may hold are here too, as are health and metrics.
"""
