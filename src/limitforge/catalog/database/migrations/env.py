"""Run migrations on the connection that `Database` passes to Alembic, inside its transaction."""

from alembic import context

from limitforge.catalog.database.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
