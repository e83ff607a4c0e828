"""The check path: an API key and a body become a response.

Both HTTP front ends call it. It is independent of connections, ASGI and HTTP framing.
"""
