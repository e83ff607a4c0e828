"""How Alembic reaches the database: by the connection that `Database` hands it, inside its transaction."""

from alembic import context

from limitforge.catalog.database.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
