"""Servers in memory, as far as they differ from real ones: how they are found, and for how long."""

import asyncio
from uuid import uuid4

from coatcheck.broker import Broker, Message, Outgoing, Routing, connect
from coatcheck.broker.memory import MemoryBroker, MemoryServer, add_server, find_server, remove_server


async def leave_consumer(broker: Broker) -> str:
    await broker.start()
    queue = await broker.declare_private()
    await broker.consume(queue, lambda delivery: delivery.ack(), prefetch=1)
    return queue


def test_consumer_whose_event_loop_has_closed_gets_no_messages() -> None:
    url = f"memory://{uuid4()}"
    left = connect(url)
    queue = asyncio.run(leave_consumer(left))

    async def publish() -> tuple[list[Routing], int | None]:
        async with connect(url) as broker:
            return await broker.publish([Outgoing(queue, Message(b"1"))]), await broker.depth(queue)

    assert asyncio.run(publish()) == ([Routing.ROUTED], 1)


def test_messages_stay_when_the_last_broker_of_a_url_has_gone() -> None:
    url = f"memory://{uuid4()}"

    async def publish() -> None:
        async with connect(url) as broker:
            await broker.declare_service("cctest-kept")
            await broker.publish([Outgoing("cctest-kept", Message(b"1"))])

    async def count() -> int | None:
        async with connect(url) as broker:
            return await broker.depth("cctest-kept")

    asyncio.run(publish())

    assert asyncio.run(count()) == 1


async def test_server_of_its_own_is_found_by_its_url_until_it_is_removed() -> None:
    url, server = f"memory://{uuid4()}", MemoryServer()
    add_server(url, server)
    broker = connect(url)
    remove_server(url)

    assert isinstance(broker, MemoryBroker)
    assert broker.server is server
    assert find_server(url) is not server
