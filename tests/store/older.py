"""Databases of older schemas, with the rows that a release of their time has written (`data/*.sql`)."""

from pathlib import Path

import asyncpg
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection as CoreConnection
from sqlalchemy import text

from coatcheck.store.postgres.connection import Connection
from coatcheck.store.postgres.database import Database

DATA = Path(__file__).parent / "data"
AGE = "2 minutes"
"""How old the newest row is made: no deadline of the data is over, and a sweeper looks at what was left unsent."""


async def make_older(url: str, version: str) -> None:
    """Bring an empty database to an older schema, and load the rows of that time."""
    await move_to(url, version)
    connection = await asyncpg.connect(url)
    try:
        await connection.execute((DATA / f"{version}.sql").read_text())
        newest = await connection.fetchval("SELECT max(updated_at) FROM coatcheck.task")
        times = await connection.fetch("""
            SELECT table_name, string_agg(format('%1$I = %1$I + age', column_name), ', ') AS moves
              FROM information_schema.columns
             WHERE table_schema = 'coatcheck' AND data_type = 'timestamp with time zone' GROUP BY 1""")
        for table, moves in times:
            shift = f"(SELECT clock_timestamp() - $1::timestamptz - interval '{AGE}' AS age)"
            await connection.execute(f"UPDATE coatcheck.{table} SET {moves} FROM {shift} AS shift", newest)
    finally:
        await connection.close()


async def move_to(url: str, version: str) -> None:
    """Upgrade an empty database to that schema, or take a newer one back to it."""

    def move(connection: CoreConnection) -> None:
        config = Config()
        config.set_main_option("script_location", "coatcheck.store:migrations")
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        is_empty = connection.scalar(text("SELECT to_regclass('coatcheck.schema_version')")) is None
        (command.upgrade if is_empty else command.downgrade)(config, version)

    async def work(connection: Connection) -> None:
        await connection.begin()
        await connection.execute(text("CREATE SCHEMA IF NOT EXISTS coatcheck"))
        await connection.run_sync(move)

    database = Database(url, pool_size=1)
    await database.transact(work)
    await database.close()
