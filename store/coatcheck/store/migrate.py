"""Bring the schema up to date. Safe when ten replicas start at once: an advisory lock lets one do it, the rest look."""

from __future__ import annotations

from sqlalchemy import Connection as CoreConnection
from sqlalchemy import text

from coatcheck.store.opening import is_in_memory
from coatcheck.store.postgres.connection import Connection
from coatcheck.store.postgres.database import Database, StoreNotReady
from coatcheck.store.versions import known_versions, newest_version

_LOCK = 0x636F6174  # "coat"
MIGRATION_TIMEOUT_S = 600.0


async def migrate(url: str) -> str:
    """Upgrade the schema to this release's version and return it. Repeating it changes nothing. Tables in memory are
    always of this release.

    Raises StoreNotReady for a schema that a newer release has made: this one cannot know what it would break.
    """
    if is_in_memory(url):
        return newest_version()
    database = Database(url, pool_size=1, command_timeout_s=MIGRATION_TIMEOUT_S)
    try:
        return await database.transact(_upgrade)
    finally:
        await database.close()


async def schema_version(connection: Connection) -> str | None:
    """The version the database stands at; None before the first migration."""
    found = await connection.scalar(text("SELECT to_regclass('coatcheck.schema_version')"))
    if found is None:
        return None
    version: str | None = await connection.scalar(text("SELECT version_num FROM coatcheck.schema_version"))
    return version


async def _upgrade(connection: Connection) -> str:
    await connection.begin()
    # A transaction-level lock: it goes with the transaction, also behind pgbouncer, also when we die here.
    await connection.execute(text("SET LOCAL lock_timeout = '60s'"))
    await connection.execute(text("SET LOCAL statement_timeout = '10min'"))
    await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    found = await schema_version(connection)
    if found is not None and found not in known_versions():
        raise StoreNotReady(
            f"the schema is at version {found}, and this release knows {newest_version()} as the newest; "
            "upgrade coatcheck here, or leave migrating to the newer release"
        )
    if found != newest_version():
        if await connection.scalar(text("SELECT to_regnamespace('coatcheck')")) is None:
            # Not IF NOT EXISTS: that needs the right to create schemas even where there is nothing to create.
            await connection.execute(text("CREATE SCHEMA coatcheck"))
        await connection.run_sync(_run_alembic)
    return newest_version()


def _run_alembic(connection: CoreConnection) -> None:
    # Loaded only where there is something to migrate: it takes as long to import as all the rest.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "coatcheck.store:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
