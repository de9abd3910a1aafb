"""What a store test gets: a store on empty tables, a second one like another replica, and plain SQL."""

from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest
from hypothesis import settings
from tests.conftest import _temporary_database
from tests.services import run_sync

from coatcheck.store import Store

# A busy machine is slow, not wrong.
settings.register_profile("store", deadline=None)
settings.load_profile("store")


@pytest.fixture(scope="session")
def shared_store_url(postgres_url: str, migrated_template: str) -> Iterator[str]:
    with _temporary_database(postgres_url, template=migrated_template) as url:
        yield url


@pytest.fixture
def store_url(shared_store_url: str) -> str:
    """A database whose tables are empty. Emptying one takes a tenth of the time of making one."""
    run_sync(_empty(shared_store_url))
    return shared_store_url


async def _empty(url: str) -> None:
    connection = await asyncpg.connect(url, server_settings={"lock_timeout": "5s"})
    try:
        await connection.execute("TRUNCATE coatcheck.journal, coatcheck.call, coatcheck.task")
    finally:
        await connection.close()


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    store = Store(store_url)
    yield store
    await store.close()


@pytest.fixture
async def other(store_url: str) -> AsyncIterator[Store]:
    """The store of another replica."""
    store = Store(store_url)
    yield store
    await store.close()


@pytest.fixture
async def sql(store_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(store_url)
    yield connection
    await connection.close()
