"""The catalog in a SQL database: schema, queries, edits with their audit log and outbox, migrations.

The only package that uses SQLAlchemy. `Catalog` is its entry point; `config` and `live` build on it.
"""
