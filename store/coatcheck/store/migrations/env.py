"""Run migrations on the connection that `coatcheck.store.migrate` hands over, inside its advisory lock."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table="schema_version", version_table_schema="coatcheck")
with context.begin_transaction():
    context.run_migrations()
