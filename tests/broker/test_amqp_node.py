"""The RabbitMQ adapter against a server of its own: alarms, power cuts, consumer timeouts, single active consumer."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.broker.node import Node
from tests.broker.rigs import Inbox, Rig, send, until, until_depth

from coatcheck.broker import SWEEPER_QUEUE, Names, Routing
from coatcheck.errors import BrokerUnavailable

pytestmark = pytest.mark.timeout(180)

SERVICE = "cctest-node"


@pytest.fixture
def config() -> dict[str, str]:
    """What the node of a test is configured with; a test that needs more says so."""
    return {}


@pytest.fixture
async def node(config: dict[str, str]) -> AsyncIterator[Node]:
    node = Node(**config)
    try:
        await node.start()
        yield node
    finally:
        await node.close()


@pytest.fixture
async def own(node: Node) -> AsyncIterator[Rig]:
    rig = Rig(node.url, None)
    yield rig
    await rig.close()


async def test_alarm_blocks_publishing_while_acks_go_through(own: Rig, node: Node) -> None:
    broker, inbox = await own.connect(publish_timeout=1.0), Inbox()
    await broker.declare_service(SERVICE)
    await send(broker, SERVICE, b"x", b"y")
    consumer = await inbox.consume(broker, SERVICE)
    deliveries = await inbox.take(2)

    await node.control("set_vm_memory_high_watermark", "0.00001")
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            await send(broker, SERVICE, b"z")
    assert broker.stats.blocked_count == 1
    for delivery in deliveries:
        delivery.ack()
    await consumer.stop()
    await until_depth(broker, SERVICE, 0)
    assert broker.stats.lost_count == 0
    await node.control("set_vm_memory_high_watermark", "0.8")

    async def is_published() -> bool:
        try:
            return await send(broker, SERVICE, b"after") == [Routing.ROUTED]
        except BrokerUnavailable:
            return False

    await until(is_published)


async def test_confirmed_messages_survive_a_power_cut_and_everything_reconnects(own: Rig, node: Node) -> None:
    broker, inbox = await own.connect(publish_timeout=60, rpc_timeout=30), Inbox()
    await broker.declare_service(SERVICE)
    private = await broker.declare_private()
    idle = Inbox(is_acking=True)
    await idle.consume(broker, private)
    await inbox.consume(broker, SERVICE, prefetch=1)
    routings = await send(broker, SERVICE, *[str(count).encode() for count in range(100)])
    assert routings == [Routing.ROUTED] * 100
    first = await inbox.take_one()

    await node.kill()
    await inbox.lost()
    publishing = asyncio.create_task(send(broker, SERVICE, b"during"))
    await node.start()

    assert await publishing == [Routing.ROUTED]
    first.ack()
    seen: set[bytes] = set()
    async with asyncio.timeout(60):
        while len(seen) < 101:
            delivery = await inbox.deliveries.get()
            seen.add(delivery.message.body)
            delivery.ack()
    assert seen == {*(str(count).encode() for count in range(100)), b"during"}
    assert await send(broker, private, b"reply") == [Routing.ROUTED]
    assert (await idle.take_one()).message.body == b"reply"


async def test_broker_that_comes_back_empty_gets_its_queues_again(own: Rig, node: Node) -> None:
    broker, inbox = await own.connect(publish_timeout=60, rpc_timeout=30), Inbox(is_acking=True)
    await broker.declare_service(SERVICE)
    await inbox.consume(broker, SERVICE)

    await node.control("stop_app")
    await node.control("reset")
    await node.control("start_app")

    async def is_published() -> bool:
        return await send(broker, SERVICE, b"x") == [Routing.ROUTED]

    await until(is_published, patience_s=60)
    assert (await inbox.take_one()).message.body == b"x"
    assert await broker.depth(Names(SERVICE).dead) == 0


@pytest.mark.parametrize(
    "config", [{"config": "consumer_timeout = 3000", "advanced": "[{rabbit, [{channel_tick_interval, 1000}]}]."}]
)
async def test_delivery_held_beyond_the_consumer_timeout_comes_again(own: Rig) -> None:
    broker, inbox = await own.connect(), Inbox()
    await broker.declare_service(SERVICE)
    await inbox.consume(broker, SERVICE)
    await send(broker, SERVICE, b"x")
    held = await inbox.take_one()

    async with asyncio.timeout(90):
        await inbox.losses.get()
    again = await inbox.take_one()

    assert held.is_lost
    assert again.is_redelivered
    held.ack()
    again.ack()
    assert broker.stats.lost_count == 0


@pytest.fixture(params=["own", "memory"])
def solo(request: pytest.FixtureRequest) -> Rig:
    """Every adapter in turn, with nobody else on its server: the sweeper's queue has one name for all."""
    rig: Rig = request.getfixturevalue(request.param)
    return rig


async def test_one_consumer_of_the_sweeper_queue_is_active_and_hands_over(solo: Rig) -> None:
    first, second = await solo.connect(), await solo.connect()
    await first.declare_sweeper()
    inboxes = [Inbox(is_acking=True), Inbox(is_acking=True)]
    active = await inboxes[0].consume(first, SWEEPER_QUEUE)
    await inboxes[1].consume(second, SWEEPER_QUEUE)

    await send(first, SWEEPER_QUEUE, *[b"x"] * 6)
    await inboxes[0].take(6)
    assert inboxes[1].is_empty
    await active.stop()
    await send(first, SWEEPER_QUEUE, b"y")

    assert (await inboxes[1].take_one()).message.body == b"y"
