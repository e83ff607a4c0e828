"""Keep the overrides in the limiter's store equal to those of the database or file.

`sync` writes the overrides of changed tenants, `reconciler` finds overrides that the store has lost, and `full_sync`
compares all tenants after an outage or a restore.
"""
