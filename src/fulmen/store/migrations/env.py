"""Run by Alembic, inside of `fulmen.store.migrate.migrate` and its transaction."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    render_as_batch=True,  # SQLite changes a table by making another
)
with context.begin_transaction():
    context.run_migrations()
