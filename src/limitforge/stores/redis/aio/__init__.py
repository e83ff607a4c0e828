"""The asynchronous store: one client for each event loop, with a pipeline and a connection for each server."""
