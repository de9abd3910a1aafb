"""What a store test gets: a store on empty tables, a second one like another replica, and a bench to reach the rows.

It runs on Postgres and in memory alike, unless it asks for `sql` or `store_url`: then it is about Postgres itself.
"""

from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest
from hypothesis import settings
from tests.conftest import temporary_database
from tests.services import run_sync
from tests.store.bench import Bench, MemoryBench, PostgresBench

from coatcheck.testing.store_conformance.fixtures import other, store  # noqa: F401 - the fixtures of every test here

# A busy machine is slow, not wrong.
settings.register_profile("store", deadline=None)
settings.load_profile("store")


@pytest.fixture(scope="session")
def shared_store_url(postgres_url: str, migrated_template: str) -> Iterator[str]:
    with temporary_database(postgres_url, template=migrated_template) as url:
        yield url


@pytest.fixture
def store_url(shared_store_url: str) -> str:
    """A database whose tables are empty. Emptying one takes a tenth of the time of making one."""
    run_sync(_empty(shared_store_url))
    return shared_store_url


async def _empty(url: str) -> None:
    connection = await asyncpg.connect(url, server_settings={"lock_timeout": "5s"})
    try:
        await connection.execute(
            "TRUNCATE coatcheck.seal, coatcheck.seal_leaf, coatcheck.seal_sink, coatcheck.history, coatcheck.journal, "
            "coatcheck.call, coatcheck.task"
        )
    finally:
        await connection.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rows_url" in metafunc.fixturenames:
        kinds = ["postgres"] if "store_url" in metafunc.fixturenames else ["postgres", "memory"]
        metafunc.parametrize("rows_url", kinds, indirect=True)


@pytest.fixture
def rows_url(request: pytest.FixtureRequest) -> str | None:
    """Where the rows are; None: in memory."""
    return request.getfixturevalue("store_url") if request.param == "postgres" else None


@pytest.fixture
async def bench(rows_url: str | None) -> AsyncIterator[Bench]:
    if rows_url is None:
        yield MemoryBench()
        return
    connection = await asyncpg.connect(rows_url)
    yield PostgresBench(rows_url, connection)
    await connection.close()


@pytest.fixture
async def sql(store_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(store_url)
    yield connection
    await connection.close()
