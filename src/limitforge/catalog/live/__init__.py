"""The configuration that one process remembers, and how it stays current.

`LiveCatalog` follows a database and `LiveFile` a configuration file. Both keep a `CatalogCache` up to date, which the
service asks for each check, and write overrides to the limiter's store. This package uses `catalog.database` and
`catalog.config`, and neither of them imports it.
"""
