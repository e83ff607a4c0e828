"""The admin API: the catalog over HTTP, and what operators do with a running service."""
