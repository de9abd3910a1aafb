"""Fixtures for the broker tests."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.broker.proxy import Proxy
from tests.broker.rigs import Rig, as_broker, make_tables
from tests.conftest import ServiceNames, temporary_database
from tests.services import run_sync


@pytest.fixture
async def proxy(broker_url: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the real RabbitMQ."""
    async with Proxy(broker_url) as proxy:
        yield proxy


@pytest.fixture
async def amqp(proxy: Proxy, service_names: ServiceNames) -> AsyncIterator[Rig]:
    """Brokers on the real RabbitMQ, through a proxy that can break their network.

    After `service_names`, so that they stop before the queues are deleted: a live consumer makes its queue again.
    """
    rig = Rig(proxy.url, proxy)
    yield rig
    await rig.close()


@pytest.fixture(scope="session")
def queues_url(postgres_url: str) -> Iterator[str]:
    """A database with the tables of the broker in it. Tests share it, and use names of their own as on any broker."""
    with temporary_database(postgres_url) as url:
        run_sync(make_tables(as_broker(url)))
        yield as_broker(url)


@pytest.fixture
async def pg(queues_url: str) -> AsyncIterator[Rig]:
    """Brokers on the real Postgres, through a proxy that can break their network."""
    async with Proxy(queues_url) as proxy:
        rig = Rig(proxy.url, proxy)
        yield rig
        await rig.close()


@pytest.fixture
async def memory() -> AsyncIterator[Rig]:
    """Brokers in memory."""
    rig = Rig(f"memory://{uuid.uuid4().hex}", None)
    yield rig
    await rig.close()


@pytest.fixture(params=["amqp", "pg", "memory"])
def rig(request: pytest.FixtureRequest) -> Rig:
    """Every adapter in turn."""
    rig: Rig = request.getfixturevalue(request.param)
    return rig
