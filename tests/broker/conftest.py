"""Fixtures for the broker tests."""

import uuid
from collections.abc import AsyncIterator

import pytest
from tests.broker.proxy import Proxy
from tests.broker.rigs import Rig
from tests.conftest import ServiceNames


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


@pytest.fixture
async def memory() -> AsyncIterator[Rig]:
    """Brokers in memory."""
    rig = Rig(f"memory://{uuid.uuid4().hex}", None)
    yield rig
    await rig.close()


@pytest.fixture(params=["amqp", "memory"])
def rig(request: pytest.FixtureRequest) -> Rig:
    """Every adapter in turn."""
    rig: Rig = request.getfixturevalue(request.param)
    return rig
