"""The schema: made once, by whoever comes first."""

import asyncio

import asyncpg
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from coatcheck.store import Store, migrate, newest_version
from coatcheck.store.database import StoreNotReady


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
