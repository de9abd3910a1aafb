"""The RabbitMQ adapter against a real server through a bad network: the pitfalls one by one."""

import asyncio
import datetime as dt
import struct
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiormq
import pamqp.frame
import pytest
import structlog
from aiormq.abc import ChannelFrame, DeliveredMessage
from aiormq.channel import Channel
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader
from tests.broker.proxy import Proxy
from tests.broker.rigs import QUICK, Inbox, Rig, send, until, until_depth
from tests.conftest import ServiceNames

from coatcheck.broker import (
    BrokerSettings,
    BrokerStats,
    Message,
    Names,
    Outgoing,
    Routing,
    connect,
    parse_request,
    topology,
)
from coatcheck.broker.amqp import codec
from coatcheck.broker.amqp.broker import AmqpBroker
from coatcheck.broker.amqp.connection import AmqpLink, genuine
from coatcheck.broker.amqp.consumer import AmqpConsumer
from coatcheck.broker.amqp.publisher import Lane, Sending
from coatcheck.errors import BrokerUnavailable, InvalidSettings, MalformedMessage, UsageError


@pytest.fixture
async def stranger(broker_url: str) -> AsyncIterator[Channel]:
    """A peer that uses nothing of ours."""
    connection = await aiormq.connect(broker_url)
    channel = await connection.channel()
    assert isinstance(channel, Channel)
    yield channel
    await connection.close()


async def started(rig: Rig, service: str, **settings: Any) -> AmqpBroker:
    broker = await rig.connect(**settings)
    assert isinstance(broker, AmqpBroker)
    await broker.declare_service(service)
    return broker


# --- what goes out ---


async def test_messages_are_persistent(amqp: Rig, service_name: str, stranger: Channel) -> None:
    broker = await started(amqp, service_name)

    await send(broker, service_name, b"x")
    delivered = await stranger.basic_get(service_name, no_ack=True)

    assert delivered.header.properties.delivery_mode == 2


async def test_direct_reply_to_arrives_once_and_is_routed(amqp: Rig, service_name: str, stranger: Channel) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)
    replies: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
    await stranger.basic_consume("amq.rabbitmq.reply-to", replies.put, no_ack=True)
    await stranger.basic_publish(
        b"30",
        routing_key=service_name,
        properties=Basic.Properties(reply_to="amq.rabbitmq.reply-to", correlation_id="c"),
    )
    request = parse_request((await inbox.take_one()).message)
    assert request.reply_to is not None

    reply = Outgoing(request.reply_to, Message(b"832040", correlation_id="c"))
    routings = await broker.publish([reply, Outgoing(service_name, Message(b"other"))])

    assert routings == [Routing.ROUTED, Routing.ROUTED]
    async with asyncio.timeout(10):
        assert (await replies.get()).body == b"832040"
    await inbox.take_one()
    assert replies.empty()


CRASHING = "amq.rabbitmq.reply-to.g2gg"
"""Decodes to a term that is no process id."""
MADE_UP = f"{CRASHING}.x"


@pytest.mark.parametrize(
    "name", ["amq.rabbitmq.reply-to", "amq.rabbitmq.reply-to.garbage", "amq.rabbitmq.reply-to.g1.x", MADE_UP]
)
async def test_made_up_reply_to_harms_nobody_else(amqp: Rig, service_name: str, name: str) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)
    batch = [Outgoing(service_name, Message(b"a")), Outgoing(name, Message()), Outgoing(service_name, Message(b"b"))]

    routings = await broker.publish(batch)

    assert (routings[0], routings[2]) == (Routing.ROUTED, Routing.ROUTED)
    assert [delivery.is_redelivered for delivery in await inbox.take(2)] == [False, False]
    assert broker.is_connected
    assert broker.stats.lost_count == (name == MADE_UP)  # the connection for such replies, and no other


async def test_many_made_up_reply_tos_do_not_hold_up_one_that_is_real_nor_other_queues(
    amqp: Rig, service_name: str, stranger: Channel
) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)
    replies: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
    await stranger.basic_consume("amq.rabbitmq.reply-to", replies.put, no_ack=True)
    properties = Basic.Properties(reply_to="amq.rabbitmq.reply-to")
    await stranger.basic_publish(b"", routing_key=service_name, properties=properties)
    real = (await inbox.take_one()).message.reply_to
    assert real is not None
    assert await send(broker, real, b"first") == [Routing.ROUTED]

    forged = [asyncio.create_task(send(broker, f"{CRASHING}.{number}", b"x")) for number in range(300)]
    await until(lambda: broker.stats.lost_count > 0)
    assert await send(broker, real, b"second") == [Routing.ROUTED]
    assert await send(broker, service_name, b"x") == [Routing.ROUTED]
    done_count = sum(task.done() for task in forged)
    fates = [routing for routings in await asyncio.gather(*forged) for routing in routings]

    assert done_count < 300
    assert set(fates) == {Routing.NO_ROUTE, Routing.REFUSED}
    assert broker.stats.lost_count < 5  # most of them never came near the connection for replies
    async with asyncio.timeout(10):
        assert [(await replies.get()).body for _ in range(2)] == [b"first", b"second"]


async def test_crash_over_one_reply_to_does_not_lose_the_replies_beside_it(
    amqp: Rig, service_name: str, stranger: Channel
) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)
    replies: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
    await stranger.basic_consume("amq.rabbitmq.reply-to", replies.put, no_ack=True)
    properties = Basic.Properties(reply_to="amq.rabbitmq.reply-to")
    await stranger.basic_publish(b"", routing_key=service_name, properties=properties)
    address = (await inbox.take_one()).message.reply_to
    assert address is not None

    routings = await broker.publish([Outgoing(MADE_UP, Message()), Outgoing(address, Message(b"good"))])

    assert routings == [Routing.NO_ROUTE, Routing.ROUTED]
    async with asyncio.timeout(10):
        assert (await replies.get()).body == b"good"


async def test_reply_under_way_when_the_broker_is_stopped_fails_and_is_not_cancelled(
    amqp: Rig, service_name: str
) -> None:
    broker = await started(amqp, service_name)
    assert await send(broker, MADE_UP, b"x") == [Routing.NO_ROUTE]  # from now on each is tried on its own connection
    assert amqp.proxy is not None

    amqp.proxy.blackhole()
    (fate,) = broker.publish_soon([Outgoing(f"{CRASHING}.y", Message(b"x"))])
    await asyncio.sleep(0)
    await broker.stop()

    with pytest.raises(BrokerUnavailable, match="may or may not have arrived"):
        await fate


async def test_reply_to_a_requester_that_has_gone_is_harmless(amqp: Rig, service_name: str, broker_url: str) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)
    requester = await aiormq.connect(broker_url)
    channel = await requester.channel()
    await channel.basic_consume("amq.rabbitmq.reply-to", Inbox(), no_ack=True)  # type: ignore[arg-type]
    properties = Basic.Properties(reply_to="amq.rabbitmq.reply-to")
    await channel.basic_publish(b"", routing_key=service_name, properties=properties)
    address = (await inbox.take_one()).message.reply_to
    assert address is not None
    await requester.close()

    await broker.publish([Outgoing(address, Message(b"late"))])

    assert broker.stats.lost_count == 0


@pytest.mark.parametrize("queue", ["ü", "x" * 300])
async def test_queue_name_the_driver_refuses_is_a_usage_error(amqp: Rig, queue: str) -> None:
    broker = await amqp.connect()

    for ask in (broker.depth, broker.purge, broker.delete_queue):
        with pytest.raises(UsageError, match="cannot name"):
            await ask(queue)
    with pytest.raises(UsageError, match="cannot name"):
        async with broker.browse(queue, 1):
            pass
    with pytest.raises(UsageError, match="cannot name"):
        await broker.consume(queue, Inbox(), prefetch=1)


async def test_property_that_amqp_cannot_carry_fails_alone(amqp: Rig, service_name: str) -> None:
    broker = await started(amqp, service_name)
    bad = Outgoing(service_name, Message(correlation_id="x" * 300))

    with pytest.raises(MalformedMessage, match="unencodable"):
        await broker.publish([Outgoing(service_name, Message()), bad, Outgoing(service_name, Message())])

    await until_depth(broker, service_name, 2)
    assert await send(broker, service_name, b"x") == [Routing.ROUTED]


async def test_large_message_and_empty_message_pass(amqp: Rig, service_name: str) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)

    await send(broker, service_name, b"x" * 1_048_576, b"", b"y" * 131_064, b"z" * 131_072)

    assert [len(delivery.message.body) for delivery in await inbox.take(4)] == [1_048_576, 0, 131_064, 131_072]


def deafen(monkeypatch: pytest.MonkeyPatch, *queues: str) -> None:
    """Lose the confirms of what goes to these queues, as if they had no quorum."""
    on_method = Lane.on_method

    def hear(lane: Lane, method: int, args: bytes) -> None:
        tag, is_multiple = codec.read_confirm(args)
        for each in [*lane._tags_up_to(tag - 1), tag] if is_multiple else [tag]:
            sending = lane._unconfirmed.get(each) or lane._overtaken.get(each)
            if sending is None or sending.outgoing.to not in queues:
                on_method(lane, method, args[:4] + struct.pack(">QB", each, 0))

    monkeypatch.setattr(Lane, "on_method", hear)


async def test_queue_that_never_confirms_holds_up_nobody_and_refuses_in_the_end(
    amqp: Rig, service_names: ServiceNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatcheck.broker.amqp.publisher.WINDOW_COUNT", 10)
    there, deaf = service_names.new("there"), service_names.new("deaf")
    broker = await started(amqp, there, publish_timeout=4)
    await broker.declare_service(deaf)
    deafen(monkeypatch, deaf)

    stuck = asyncio.create_task(send(broker, deaf, *[b"x"] * 15))  # more than the window holds
    await asyncio.sleep(0)
    begun_s = asyncio.get_running_loop().time()
    assert await send(broker, there, *[b"x"] * 30) == [Routing.ROUTED] * 30
    took_s = asyncio.get_running_loop().time() - begun_s

    assert not stuck.done()
    assert took_s < 2.0  # half the timeout is what a queue has to confirm
    assert await stuck == [Routing.REFUSED] * 15
    assert (broker.stats.lost_count, broker.stats.publish_failure_count, broker.stats.refused_count) == (0, 0, 15)
    assert await send(broker, there, b"x") == [Routing.ROUTED]


async def test_queue_that_never_confirms_is_told_from_a_stuck_connection_where_nothing_else_is_published(
    amqp: Rig, service_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await started(amqp, service_name, publish_timeout=1)
    deafen(monkeypatch, service_name)

    assert await send(broker, service_name, b"x", b"y") == [Routing.REFUSED] * 2

    assert broker.stats.lost_count == 0


async def test_many_callers_publish_at_once(amqp: Rig, service_name: str) -> None:
    broker = await started(amqp, service_name)
    there, nowhere = Outgoing(service_name, Message()), Outgoing(f"{service_name}.nowhere", Message())

    results = await asyncio.gather(*(broker.publish([there, nowhere]) for _ in range(100)))

    assert results == [[Routing.ROUTED, Routing.NO_ROUTE]] * 100
    await until_depth(broker, service_name, 100)


async def test_cancelled_publisher_harms_nobody(amqp: Rig, service_name: str) -> None:
    broker = await started(amqp, service_name)
    tasks = [asyncio.create_task(send(broker, service_name, *[b"x"] * 20)) for _ in range(10)]

    for turn, task in enumerate(tasks):
        for _ in range(turn):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait(tasks)

    assert await send(broker, service_name, b"y") == [Routing.ROUTED]
    assert broker.stats.lost_count == 0


# --- what comes in ---


async def test_headers_that_are_not_ours_do_not_come_in(amqp: Rig, service_name: str, stranger: Channel) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)
    headers: dict[str, Any] = {"cc-id": "i", "traceparent": "t", "x-delivery-count": 99, "x-death": [], "secret": "s"}

    await stranger.basic_publish(b"x", routing_key=service_name, properties=Basic.Properties(headers=headers))
    delivery = await inbox.take_one()

    assert delivery.message.headers == {"cc-id": "i", "traceparent": "t"}
    assert delivery.delivery_count == 1


def _with_bad_text(number: int) -> bytes:
    header = ContentHeader(body_size=1, properties=Basic.Properties(correlation_id="@@@@"))
    return pamqp.frame.marshal(header, number).replace(b"@@@@", b"\xff\xfe\xff\xfe")


def _with_bad_date(number: int) -> bytes:
    instant = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    frame = pamqp.frame.marshal(ContentHeader(body_size=1, properties=Basic.Properties(timestamp=instant)), number)
    return frame.replace(int(instant.timestamp()).to_bytes(8, "big"), b"\x7f" + b"\xff" * 7)


def _with_deep_table(number: int, name: str = "k") -> bytes:
    table: dict[str, Any] = {"k": 1}
    for _ in range(3000):
        table = {"k": table}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        properties = Basic.Properties(headers={name: table})
        return pamqp.frame.marshal(ContentHeader(body_size=1, properties=properties), number)
    finally:
        sys.setrecursionlimit(limit)


def _with_deep_table_of_ours(number: int) -> bytes:
    return _with_deep_table(number, "cc-id")


async def publish_raw(stranger: Channel, queue: str, make_header: Callable[[int], bytes]) -> None:
    number = stranger.number
    publish = pamqp.frame.marshal(Basic.Publish(routing_key=queue), number)
    payload = publish + make_header(number) + pamqp.frame.marshal(ContentBody(b"x"), number)
    await stranger.connection.write_queue.put(ChannelFrame(payload=payload, should_close=False))


@pytest.mark.parametrize("make_header", [_with_bad_text, _with_deep_table_of_ours])
async def test_properties_that_cannot_be_read_do_not_break_the_consumer(
    amqp: Rig, service_name: str, stranger: Channel, make_header: Callable[[int], bytes]
) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)

    await publish_raw(stranger, service_name, make_header)
    delivery = await inbox.take_one()

    with pytest.raises(MalformedMessage, match="bad_properties"):
        parse_request(delivery.message)
    assert delivery.message.body == b"x"
    delivery.ack()
    await send(broker, service_name, b"y")
    assert (await inbox.take_one()).message.body == b"y"
    assert (broker.stats.lost_count, broker.stats.undecodable_count) == (0, 1)


@pytest.mark.parametrize("make_header", [_with_bad_date, _with_deep_table])
async def test_properties_that_nobody_reads_may_be_nonsense(
    amqp: Rig, service_name: str, stranger: Channel, make_header: Callable[[int], bytes]
) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)

    await publish_raw(stranger, service_name, make_header)
    delivery = await inbox.take_one()

    assert (delivery.message.body, delivery.message.headers) == (b"x", {})
    assert (broker.stats.lost_count, broker.stats.undecodable_count) == (0, 0)


async def test_acks_are_written_in_batches(amqp: Rig, service_name: str) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    consumer = await inbox.consume(broker, service_name, prefetch=500)
    await send(broker, service_name, *[b"x"] * 500)

    for delivery in reversed(await inbox.take(500)):
        delivery.ack()
    await consumer.stop()

    await until_depth(broker, service_name, 0)
    assert (broker.stats.acked_count, broker.stats.ack_frame_count) == (500, 1)


async def test_too_many_deliveries_end_in_the_dead_queue_with_a_reason(
    amqp: Rig, service_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "SERVICE_DELIVERY_LIMIT", 2)
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)
    names = Names(service_name)
    await broker.publish([Outgoing(service_name, Message(b"x", message_id="m", headers={"cc-id": "i"}))])

    for _ in range(3):
        (await inbox.take_one()).requeue()

    await until_depth(broker, names.dead, 1)
    async with broker.browse(names.dead, 1) as (letter,):
        assert letter.message.body == b"x"
        assert letter.message.message_id == "m"
        assert letter.message.headers == {"cc-id": "i", "cc-reason": "delivery_limit", "cc-queue": service_name}
    assert await broker.depth(service_name) == 0


# --- topology ---


OTHERWISE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a quorum queue": (
        {"x-queue-type": "quorum"},
        [
            "x-dead-letter-exchange: wanted 'coatcheck.dead', is none",
            "x-overflow: wanted 'reject-publish', is none",
            "so a message that RabbitMQ gives up on is dropped, not kept as a dead letter",
        ],
    ),
    "a classic queue": ({}, ["x-dead-letter-exchange: wanted 'coatcheck.dead', is none"]),
    "a queue that forgets": (
        {"x-message-ttl": 60_000, "x-max-length": 5},
        [
            "x-message-ttl: wanted none, is 60000",
            "x-max-length: wanted none, is 5",
            "so messages that wait for longer are dropped",
            "so a full queue drops or refuses messages",
        ],
    ),
    "a queue of another service": (
        {"x-queue-type": "quorum", "x-dead-letter-exchange": "elsewhere", "x-overflow": "reject-publish"},
        ["x-dead-letter-exchange: wanted 'coatcheck.dead', is 'elsewhere'"],
    ),
}


@pytest.mark.parametrize(("arguments", "said"), OTHERWISE.values(), ids=OTHERWISE.keys())
async def test_queue_that_another_program_made_is_used_as_it_is_and_explained(
    amqp: Rig, service_name: str, stranger: Channel, arguments: dict[str, Any], said: list[str]
) -> None:
    await stranger.queue_declare(service_name, durable=True, arguments=arguments)
    await stranger.basic_publish(b"waiting", routing_key=service_name)
    broker, inbox = await amqp.connect(), Inbox()

    with structlog.testing.capture_logs() as logs:
        await broker.declare_service(service_name)
        await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"new")

    [warning] = [it for it in logs if it["event"] == "queue_used_as_it_is"]
    assert warning["queue"] == service_name
    assert broker.odd_queues == {service_name: warning["differences"]}
    assert [text for text in said if text not in warning["differences"]] == []
    assert [delivery.message.body for delivery in await inbox.take(2)] == [b"waiting", b"new"]
    assert await broker.depth(Names(service_name).replies) == 0
    await stranger.queue_declare(service_name, durable=True, arguments=arguments)  # it is what it was


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"durable": False}, "durable is false there; it has to be true"),
        ({"durable": True, "auto_delete": True}, "auto_delete is true there; it has to be false"),
        ({"durable": True, "exclusive": True}, "RESOURCE_LOCKED"),
        ({"durable": True, "arguments": {"x-queue-type": "stream"}}, "it is a stream"),
    ],
)
async def test_queue_that_cannot_keep_messages_is_refused_and_left_alone(
    amqp: Rig, service_name: str, stranger: Channel, options: dict[str, Any], why: str
) -> None:
    await stranger.queue_declare(service_name, **options)
    broker, other, inbox = await amqp.connect(), await amqp.connect(), Inbox()
    private = await broker.declare_private()
    await inbox.consume(broker, private)

    with pytest.raises(InvalidSettings, match=why):
        await broker.declare_service(service_name)
    await send(other, private, b"x")

    assert (await inbox.take_one()).message.body == b"x"  # nobody's channel went with it
    assert inbox.losses.empty()
    await stranger.queue_declare(service_name, **options)
    await stranger.queue_delete(service_name)


async def test_queue_of_another_program_that_goes_away_is_made_by_us(
    amqp: Rig, service_name: str, stranger: Channel
) -> None:
    await stranger.queue_declare(service_name, durable=True)
    broker, inbox = await amqp.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)

    await stranger.queue_delete(service_name)
    await until(lambda: not broker.odd_queues)
    await inbox.lost()
    await until_depth(broker, service_name, 0)
    await send(broker, service_name, b"x")

    assert (await inbox.take_one()).message.body == b"x"
    arguments: dict[str, Any] = {**topology.service_arguments(Names(service_name).dead)}
    await stranger.queue_declare(service_name, durable=True, arguments=arguments)


async def test_service_queues_are_quorum_queues_with_a_dead_letter_route(
    amqp: Rig, service_name: str, stranger: Channel
) -> None:
    await started(amqp, service_name)

    arguments: dict[str, Any] = dict(topology.service_arguments(Names(service_name).dead))
    for queue in Names(service_name).queues[1:]:
        await stranger.queue_declare(queue, durable=True, arguments=arguments)

    assert arguments["x-queue-type"] == "quorum"
    assert arguments["x-dead-letter-strategy"] == "at-least-once"


# --- connecting ---


async def test_start_says_where_and_why_it_cannot_connect(proxy: Proxy) -> None:
    proxy.refuse()
    broker = connect(proxy.url, **QUICK, connect_budget=0.4)

    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:\d+.*cannot connect within 0\.4 s; last error"):
        await broker.start()

    assert not broker.is_connected
    proxy.accept()
    await broker.start()
    assert broker.is_connected
    await broker.stop()


async def test_silent_server_is_given_up_on(proxy: Proxy) -> None:
    proxy.blackhole()
    broker = connect(proxy.url, **QUICK, connect_budget=1.0, connect_timeout=0.3)

    with pytest.raises(BrokerUnavailable, match="no answer in time"):
        await broker.start()

    assert broker.stats.connect_failure_count >= 2


async def test_wrong_password_is_said_at_once_and_not_repeated_in_full(broker_url: str) -> None:
    broker = connect(broker_url.replace("guest:guest", "guest:s3cret-pw"), **QUICK, connect_budget=60)

    async with asyncio.timeout(10):
        with pytest.raises(BrokerUnavailable, match="ACCESS_REFUSED") as caught:
            await broker.start()

    assert "s3cret-pw" not in str(caught.value)


async def test_cancelled_start_leaves_nothing_behind(proxy: Proxy) -> None:
    proxy.blackhole()
    before = asyncio.all_tasks()
    broker = connect(proxy.url, **QUICK)
    starting = asyncio.create_task(broker.start())
    await until(lambda: proxy.connection_count == 2)

    starting.cancel()
    await asyncio.wait([starting])

    assert not {task for task in asyncio.all_tasks() - before if task.get_name().startswith("broker-")}


async def test_looking_at_queues_leaves_nothing_on_the_connection(amqp: Rig, service_name: str) -> None:
    """A connection lives for months. RabbitMQ closes the channel on which a queue is missed."""
    broker = await started(amqp, service_name)
    link = broker._consuming.link
    assert link is not None
    assert link._driver is not None
    before = len(link._driver.closing._callbacks)

    for _ in range(50):
        assert await broker.depth(f"{service_name}.nowhere") is None
        assert await broker.depth(service_name) == 0

    assert len(link._driver.closing._callbacks) == before
    assert not link._driver.channels


async def test_stop_leaves_no_tasks(amqp: Rig, service_name: str) -> None:
    before = asyncio.all_tasks()
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"x")
    await inbox.take_one()

    await broker.stop()
    pipes = {task for task in asyncio.all_tasks() if "Proxy" in repr(task)}

    assert not asyncio.all_tasks() - before - pipes


# --- bad networks ---


async def test_blackholed_publish_is_unavailable_in_time_and_recovers(
    amqp: Rig, proxy: Proxy, service_name: str
) -> None:
    broker = await started(amqp, service_name, publish_timeout=0.5, connect_timeout=0.5)
    await send(broker, service_name, b"before")
    proxy.blackhole()

    async with asyncio.timeout(3):
        with pytest.raises(BrokerUnavailable, match="confirmed in time"):
            await send(broker, service_name, b"lost")
    proxy.restore()

    async def is_published() -> bool:
        try:
            return await send(broker, service_name, b"after") == [Routing.ROUTED]
        except BrokerUnavailable:
            return False

    await until(is_published)
    assert broker.stats.publish_failure_count >= 1


async def test_blackholed_consumer_is_lost_by_its_heartbeat_and_recovers(
    amqp: Rig, proxy: Proxy, service_name: str
) -> None:
    broker, inbox = await started(amqp, service_name, heartbeat=1, connect_timeout=1), Inbox()
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"x")
    delivery = await inbox.take_one()

    proxy.blackhole()
    await inbox.lost()
    assert delivery.is_lost
    proxy.restore()

    again = await inbox.take_one()
    assert (again.message.body, again.is_redelivered) == (b"x", True)


async def test_watchdog_drops_a_link_that_does_not_answer_before_the_heartbeat_would(
    amqp: Rig, proxy: Proxy, service_name: str
) -> None:
    broker = await started(amqp, service_name, watchdog_interval=0.4, rpc_timeout=0.5, connect_timeout=0.5)
    inbox = Inbox()
    await inbox.consume(broker, service_name)

    proxy.blackhole()
    async with asyncio.timeout(10):
        await inbox.lost()
    proxy.restore()
    await until(lambda: broker.is_connected)
    await send(broker, service_name, b"x")

    assert (await inbox.take_one()).message.body == b"x"


async def test_batch_cut_half_way_is_confirmed_on_the_next_connection(
    amqp: Rig, proxy: Proxy, service_name: str
) -> None:
    broker = await started(amqp, service_name)
    proxy.blackhole(only="down")
    publishing = asyncio.create_task(send(broker, service_name, *[b"x"] * 50))
    await asyncio.sleep(0.1)

    proxy.restore()
    proxy.cut()

    assert await publishing == [Routing.ROUTED] * 50
    depth = await broker.depth(service_name)
    assert depth is not None
    assert depth >= 50


async def test_cuts_again_and_again_lose_nothing(amqp: Rig, proxy: Proxy, service_name: str) -> None:
    broker, inbox = await started(amqp, service_name), Inbox(is_acking=True)
    await inbox.consume(broker, service_name, prefetch=20)
    sent = [str(count).encode() for count in range(400)]
    seen: set[bytes] = set()

    async def publish() -> None:
        for start in range(0, 400, 20):
            while True:
                try:
                    await send(broker, service_name, *sent[start : start + 20])
                    break
                except BrokerUnavailable:
                    continue

    publishing = asyncio.create_task(publish())
    for _ in range(8):
        seen.add((await inbox.take_one()).message.body)
        proxy.cut()
    await publishing
    while seen != set(sent):
        seen.add((await inbox.take_one()).message.body)

    await until_depth(broker, service_name, 0)


async def test_ack_in_the_moment_of_a_cut_never_raises(amqp: Rig, proxy: Proxy, service_name: str) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name, prefetch=50)
    await send(broker, service_name, *[b"x"] * 50)
    deliveries = await inbox.take(50)

    proxy.cut()
    for delivery in deliveries:
        delivery.ack()
        await asyncio.sleep(0)
    await inbox.lost()
    again = await inbox.take(1)

    assert again[0].is_redelivered


async def test_channel_closed_by_the_broker_is_rebuilt(amqp: Rig, service_name: str) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    consumer = await inbox.consume(broker, service_name)
    await send(broker, service_name, b"x")
    await inbox.take_one()
    assert isinstance(consumer, AmqpConsumer)
    assert consumer.session is not None

    await consumer.session.channel.basic_ack(999)  # what a double ack looks like to the broker: 406
    await inbox.lost()

    assert (await inbox.take_one()).is_redelivered
    assert broker.stats.lost_count == 0


async def test_watchdog_rebuilds_a_deaf_consumer(amqp: Rig, service_name: str) -> None:
    broker, inbox = await started(amqp, service_name, watchdog_interval=0.4), Inbox(is_acking=True)
    consumer = await inbox.consume(broker, service_name)
    assert isinstance(consumer, AmqpConsumer)
    assert consumer.session is not None
    (tag,) = consumer.session.channel.consumers
    await consumer.session.channel.basic_cancel(tag)  # behind its back

    await send(broker, service_name, b"x")

    assert (await inbox.take_one()).message.body == b"x"
    assert broker.stats.watchdog_rebuild_count == 1
    await inbox.lost()


async def make_deaf(stranger: Channel, queue: str) -> None:
    """Delete a queue and make it again at once: RabbitMQ then takes its consumer along, and drops what it sends it."""
    arguments: dict[str, Any] = dict(topology.service_arguments(Names(queue).dead))
    await stranger.queue_delete(queue)
    await stranger.queue_declare(queue, durable=True, arguments=arguments)


async def test_consumer_of_a_queue_made_again_behind_its_back_hears_again(
    amqp: Rig, service_name: str, stranger: Channel
) -> None:
    broker, inbox = await started(amqp, service_name, watchdog_interval=0.4), Inbox(is_acking=True)
    await inbox.consume(broker, service_name)
    await send(broker, service_name, *[b"x"] * 10)
    await inbox.take(10)
    await until_depth(broker, service_name, 0)

    await make_deaf(stranger, service_name)
    await send(broker, service_name, b"y")

    assert (await inbox.take_one()).message.body == b"y"


async def test_who_makes_a_queue_again_has_its_consumers_listen_anew(
    amqp: Rig, service_name: str, stranger: Channel
) -> None:
    broker, inbox = await started(amqp, service_name), Inbox(is_acking=True)  # its watchdog would take a minute
    await inbox.consume(broker, service_name)
    await send(broker, service_name, *[b"x"] * 10)
    await inbox.take(10)
    await until_depth(broker, service_name, 0)

    await make_deaf(stranger, service_name)
    await broker.declare_service(service_name)
    await send(broker, service_name, b"y")

    assert (await inbox.take_one()).message.body == b"y"
    assert inbox.losses.empty()


async def test_consumer_that_holds_something_listens_anew_once_it_is_settled(
    amqp: Rig, service_name: str, stranger: Channel
) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)
    await send(broker, service_name, *[b"x"] * 10)
    *others, held = await inbox.take(10)
    for delivery in others:
        delivery.ack()
    await make_deaf(stranger, service_name)
    await broker.declare_service(service_name)
    await send(broker, service_name, b"y")
    assert not held.is_lost

    held.ack()

    assert (await inbox.take_one()).message.body == b"y"


async def test_consumer_outlives_a_queue_that_it_may_not_make_again(
    amqp: Rig, service_name: str, stranger: Channel
) -> None:
    await started(amqp, service_name)
    broker, inbox = await started(amqp, service_name, declares=False), Inbox(is_acking=True)
    await inbox.consume(broker, service_name)

    await stranger.queue_delete(service_name)
    await inbox.lost()
    arguments: dict[str, Any] = dict(topology.service_arguments(Names(service_name).dead))
    await stranger.queue_declare(service_name, durable=True, arguments=arguments)
    await send(broker, service_name, b"y")

    assert (await inbox.take_one()).message.body == b"y"


async def test_consume_that_is_cancelled_leaves_no_consumer_behind(amqp: Rig, service_name: str) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    for turn in range(12):
        consuming = asyncio.create_task(inbox.consume(broker, service_name))
        for _ in range(3 * turn):
            await asyncio.sleep(0)
        consuming.cancel()
        await asyncio.wait([consuming])
        if not consuming.cancelled():
            await consuming.result().stop()

    async def is_left_alone() -> bool:
        return await broker.consumer_count(service_name) == 0

    await until(is_left_alone)
    assert broker.stats.lost_count == 0


async def test_watchdog_leaves_busy_paused_and_idle_consumers_alone(amqp: Rig, service_name: str) -> None:
    broker, inbox = await started(amqp, service_name, watchdog_interval=0.1), Inbox()
    names = Names(service_name)
    await inbox.consume(broker, names.requests, prefetch=1)
    paused = await inbox.consume(broker, names.replies, prefetch=1)
    await paused.pause()
    await inbox.consume(broker, names.control, prefetch=1)
    await send(broker, names.requests, b"a", b"b")
    await send(broker, names.replies, b"c")
    delivery = await inbox.take_one()

    await asyncio.sleep(0.6)  # six looks of the watchdog

    assert broker.stats.watchdog_rebuild_count == 0
    assert not delivery.is_lost
    assert inbox.is_empty


async def test_cancelled_pause_and_resume_do_not_close_the_channel(amqp: Rig, service_name: str) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    consumer = await inbox.consume(broker, service_name)
    await send(broker, service_name, b"x")
    delivery = await inbox.take_one()

    for turn in range(6):
        for wish in (consumer.pause, consumer.resume):
            task = asyncio.create_task(wish())
            for _ in range(turn):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
    await consumer.resume()

    assert not delivery.is_lost
    assert inbox.losses.empty()
    await send(broker, service_name, b"y")
    assert (await inbox.take_one()).message.body == b"y"


async def test_stop_during_an_outage_is_quick(amqp: Rig, proxy: Proxy, service_name: str) -> None:
    broker, inbox = await started(amqp, service_name), Inbox()
    await inbox.consume(broker, service_name)
    await broker.declare_private()
    proxy.refuse()
    await inbox.lost()

    async with asyncio.timeout(3):
        await broker.stop()


async def test_cancellation_nobody_asked_for_is_a_connection_error() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()

    with pytest.raises(ConnectionError):
        await genuine(future)


async def test_cancellation_somebody_asked_for_stays_one() -> None:
    task = asyncio.create_task(genuine(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)

    task.cancel()
    await asyncio.wait([task])

    assert task.cancelled()


async def test_cancellation_that_the_driver_swallowed_is_raised_after_all() -> None:
    async def swallow() -> str:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return "answer"  # as `asyncio.wait_for` does before Python 3.12
        raise AssertionError

    task = asyncio.create_task(genuine(swallow()))
    await asyncio.sleep(0)

    task.cancel()
    await asyncio.wait([task])

    assert task.cancelled()


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"heartbeat": 0}, "heartbeat is 0"),
        ({"heartbeat": 0.5}, "heartbeat is 0:00:00.5"),
        ({"publish_timeout": -1}, "publish_timeout is -1"),
        ({"publish_timeout": "10"}, "publish_timeout is '10'"),
        ({"max_body": 0}, "max_body is 0"),
        ({"backoff_min": 5, "backoff_max": 1}, "backoff_max is 0:00:01"),
        ({"heart_beat": 15}, "unknown broker setting heart_beat; there are .*heartbeat"),
    ],
)
def test_settings_complain_with_field_value_and_limit(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidSettings, match=complaint):
        connect("memory://x", **settings)


def test_settings_have_the_defaults_of_the_design() -> None:
    settings = BrokerSettings()

    assert (settings.heartbeat.total_seconds(), settings.publish_timeout.total_seconds()) == (15, 10)


def test_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(InvalidSettings, match=r"'kafka'; known are amqp://, amqps://, pg:// and memory://"):
        connect("kafka://x")


@pytest.mark.parametrize("service", ["", "a b", "-a", "x" * 129, "a.dead", "a.replies", "amq.x", "coatcheck.x", "ü"])
def test_service_names_that_would_collide_are_refused(service: str) -> None:
    with pytest.raises(InvalidSettings, match="will not do"):
        Names(service)


async def test_link_that_was_stuck_is_a_lost_connection_and_no_cancellation() -> None:
    """aiormq ends a connection it hears nothing of by a cancellation, which nobody may take for one of our own."""
    link = AmqpLink("publish", BrokerStats())
    closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    closing.set_exception(asyncio.CancelledError())

    link._on_closed(closing)

    assert link.lost.is_set()
    assert isinstance(link.error, ConnectionError)


# --- how much is under way ---


def lane_of(broker: AmqpBroker) -> Lane:
    return broker._publisher._lanes[""]


async def test_message_given_to_a_lane_that_is_lost_goes_over_the_next(amqp: Rig, service_name: str) -> None:
    broker = await started(amqp, service_name)
    await send(broker, service_name, b"first")
    lane, loop = lane_of(broker), asyncio.get_running_loop()
    lane.link.abort("a trial")

    sending = Sending(Outgoing(service_name, Message(b"second")), loop.create_future(), loop.time() + 5.0)
    lane.send(sending)

    assert await sending.routing is Routing.ROUTED
    await until_depth(broker, service_name, 2)


async def test_no_more_than_a_window_is_unconfirmed(
    amqp: Rig, service_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatcheck.broker.amqp.publisher.WINDOW_COUNT", 7)
    broker = await started(amqp, service_name)
    await send(broker, service_name, b"first")
    lane, seen, write = lane_of(broker), list[int](), AmqpLink.write

    def noting(link: AmqpLink, frames: bytes) -> None:
        seen.append(len(lane._unconfirmed))
        write(link, frames)

    monkeypatch.setattr(AmqpLink, "write", noting)

    assert await send(broker, service_name, *[b"x"] * 300) == [Routing.ROUTED] * 300

    assert max(seen) == 7
    await until_depth(broker, service_name, 301)


async def test_publisher_holds_back_what_the_socket_does_not_take(
    amqp: Rig, proxy: Proxy, service_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatcheck.broker.amqp.publisher.WINDOW_BYTES", 1 << 40)
    broker = await started(amqp, service_name, publish_timeout=30)
    await send(broker, service_name, b"first")
    lane, bodies = lane_of(broker), [b"x" * 500_000] * 60

    proxy.blackhole()
    publishing = [asyncio.create_task(send(broker, service_name, body)) for body in bodies]
    await until(lambda: lane.link.wire.is_clogged)
    held_back = len(lane._waiting)
    proxy.restore()

    assert held_back > 0
    assert await asyncio.gather(*publishing) == [[Routing.ROUTED]] * 60
    assert broker.stats.lost_count == 0


async def test_slow_broker_is_not_taken_for_a_dead_one(
    amqp: Rig, proxy: Proxy, service_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatcheck.broker.amqp.publisher.WINDOW_COUNT", 1)
    broker = await started(amqp, service_name, publish_timeout=1)
    await send(broker, service_name, b"first")
    proxy.delay_s = 0.05

    assert await send(broker, service_name, *[b"x"] * 60) == [Routing.ROUTED] * 60

    assert broker.stats.lost_count == 0
