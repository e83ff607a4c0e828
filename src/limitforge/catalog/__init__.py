"""Tenants, plans, policies, keys and overrides: the configuration of the service.

The modules at this level import only each other and the packages below, such as the core: they need no database.
`database` stores the catalog, `config` applies configuration files, and `live` keeps the configuration of a process
current.
"""
