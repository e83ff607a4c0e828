"""The check path: an API key and a body become a response.

Both HTTP front ends call it. It knows no connection, no ASGI and no HTTP framing.
"""
