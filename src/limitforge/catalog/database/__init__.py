"""The catalog in a SQL database: schema, queries, edits with their audit log and outbox, migrations.

`Catalog` is its entry point; `config` and `live` build on it. Only this package builds SQL statements.
"""
