"""Tenants, plans, keys and policies: what the service knows of its customers, and where that is kept."""
