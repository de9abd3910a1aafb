"""The schema: made once, by whoever comes first."""

import asyncio
import importlib
import json
import re
from typing import Any

import asyncpg
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from tests.store.older import make_older, move_to

from coatcheck.store import Store, migrate, newest_version
from coatcheck.store.postgres.database import StoreNotReady

migration = importlib.import_module("coatcheck.store.migrations.versions.0002_ended")


async def test_ten_replicas_that_migrate_at_once_all_succeed(empty_store_url):
    versions = await asyncio.gather(*(migrate(empty_store_url) for _ in range(10)))

    assert versions == [newest_version()] * 10


async def test_migrating_twice_changes_nothing(empty_store_url):
    await migrate(empty_store_url)
    connection = await asyncpg.connect(empty_store_url)
    before = await connection.fetch(
        "SELECT oid FROM pg_class WHERE relnamespace = 'coatcheck'::regnamespace ORDER BY 1"
    )

    assert await migrate(empty_store_url) == newest_version()

    after = await connection.fetch("SELECT oid FROM pg_class WHERE relnamespace = 'coatcheck'::regnamespace ORDER BY 1")
    assert before == after
    await connection.close()


async def test_store_tells_the_version_it_found(store, empty_store_url):
    assert await store.ping() == newest_version()

    unmigrated = Store(empty_store_url)
    assert await unmigrated.ping() is None
    await unmigrated.close()


async def test_schema_of_a_newer_release_is_left_alone(empty_store_url):
    await migrate(empty_store_url)
    connection = await asyncpg.connect(empty_store_url)
    await connection.execute("UPDATE coatcheck.schema_version SET version_num = '9999'")

    with pytest.raises(StoreNotReady, match=r"9999.*upgrade coatcheck"):
        await migrate(empty_store_url)

    assert await connection.fetchval("SELECT version_num FROM coatcheck.schema_version") == "9999"
    await connection.close()


async def test_database_of_the_first_version_is_upgraded_and_its_rows_stay_as_they_are(empty_store_url):
    """How its tasks go on: `tests/flow/test_upgrade.py`."""
    await make_older(empty_store_url, "0001")
    connection = await asyncpg.connect(empty_store_url)
    before = await _rows(connection)

    assert await migrate(empty_store_url) == newest_version()

    after = await _rows(connection)
    assert len(before["task"]) == 7
    for table, rows in before.items():
        assert [row | old for row, old in zip(after[table], rows, strict=True)] == after[table]
    assert await connection.fetchval("SELECT to_regclass('coatcheck.task_retention')") is None
    await connection.close()


async def _rows(connection: asyncpg.Connection) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for table in ("task", "call", "journal"):
        key = "task_id, seq" if table == "journal" else "id"
        rows = await connection.fetch(f"SELECT to_jsonb(t) AS row FROM coatcheck.{table} t ORDER BY {key}")
        found[table] = [json.loads(each["row"]) for each in rows]
    return found


async def test_index_that_was_made_before_the_migration_is_left_as_it_is(empty_store_url):
    """As the migration's own text advises for large tables."""
    await migrate(empty_store_url)
    await move_to(empty_store_url, "0001")
    connection = await asyncpg.connect(empty_store_url)
    advice = re.search(r"CREATE INDEX CONCURRENTLY.*?;", migration.__doc__ or "", re.DOTALL)
    assert advice is not None
    await connection.execute(advice[0])
    made = await connection.fetchval("SELECT 'coatcheck.task_ended'::regclass::oid")

    await migrate(empty_store_url)

    assert await connection.fetchval("SELECT 'coatcheck.task_ended'::regclass::oid") == made
    await connection.close()


async def test_hot_tables_are_vacuumed_early(sql):
    options = await sql.fetch("""
        SELECT relname, reloptions FROM pg_class
         WHERE relnamespace = 'coatcheck'::regnamespace AND relname IN ('task', 'call', 'journal')""")

    assert len(options) == 3
    assert all("autovacuum_vacuum_scale_factor=0.01" in row["reloptions"] for row in options)


def test_names_of_the_scripts_are_their_revisions():
    """The newest version is read from file names; Alembic must agree."""
    config = Config()
    config.set_main_option("script_location", "coatcheck.store:migrations")
    config.set_main_option("path_separator", "os")

    assert ScriptDirectory.from_config(config).get_current_head() == newest_version()


async def test_live_transaction_and_the_migration_do_not_wait_for_each_other(empty_store_url):
    """A replica locks rows, then writes them. The migration that came in between waits, and the write does not."""
    await migrate(empty_store_url)
    await move_to(empty_store_url, "0001")
    live = await asyncpg.connect(empty_store_url, server_settings={"lock_timeout": "500ms"})
    watching = await asyncpg.connect(empty_store_url)

    async with live.transaction():
        await live.execute("SELECT FROM coatcheck.task FOR UPDATE")
        migrating = asyncio.create_task(migrate(empty_store_url))
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'coatcheck.task'::regclass"
        while not migrating.done() and not await watching.fetchval(waits):
            await asyncio.sleep(0.01)
        await live.execute("UPDATE coatcheck.task SET seq = seq")

    assert await migrating == newest_version()
    await live.close()
    await watching.close()
