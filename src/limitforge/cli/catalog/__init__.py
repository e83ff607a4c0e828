"""What the commands of the catalog share: their options, the database connection, and lookups by name.

It needs the extra `catalog`. `cli/app.py` imports it only when such a command is run.
"""
