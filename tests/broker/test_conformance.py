"""What every adapter promises, held against each of them: this suite is the port's meaning."""

import asyncio
from typing import Any

import pytest
from tests.broker.rigs import Inbox, Rig, send, until, until_depth
from tests.conftest import ServiceNames

from coatcheck.broker import Message, Names, Outgoing, Routing, connect, revive
from coatcheck.errors import BrokerUnavailable, InvalidSettings, OversizedMessage, UsageError

FULL = Message(
    body=b'{"a":1}',
    correlation_id="c1",
    reply_to="somewhere",
    content_type="application/json",
    type="handler",
    message_id="m1",
    headers={"cc-id": "i", "cc-epoch": 7, "cc-keep": True, "traceparent": "t", "tracestate": "s"},
    content_encoding="utf-8",
)


# --- publishing and delivering ---


async def test_message_arrives_as_it_was_sent(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)

    routings = await broker.publish([Outgoing(service_name, FULL)])
    delivery = await inbox.take_one()

    assert routings == [Routing.ROUTED]
    assert delivery.message == FULL
    assert (delivery.queue, delivery.is_redelivered, delivery.delivery_count) == (service_name, False, 1)
    assert not delivery.is_settled
    assert not delivery.is_lost


async def test_message_without_id_gets_a_unique_one(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)

    await send(broker, service_name, b"a", b"b")
    ids = {delivery.message.message_id for delivery in await inbox.take(2)}

    assert len(ids) == 2
    assert None not in ids


async def test_empty_batch_is_fine(rig: Rig) -> None:
    assert await (await rig.connect()).publish([]) == []


async def test_messages_of_a_batch_arrive_in_order(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox(is_acking=True)
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name, prefetch=20)

    bodies = [str(count).encode() for count in range(200)]
    await send(broker, service_name, *bodies)

    assert [delivery.message.body for delivery in await inbox.take(200)] == bodies


async def test_no_route_of_one_in_a_batch_of_many(rig: Rig, service_name: str) -> None:
    broker = await rig.connect()
    await broker.declare_service(service_name)
    batch = [Outgoing(service_name, Message()) for _ in range(30)]
    batch[17] = Outgoing(f"{service_name}.nowhere", Message())

    routings = await broker.publish(batch)

    assert [index for index, routing in enumerate(routings) if routing is Routing.NO_ROUTE] == [17]
    await until_depth(broker, service_name, 29)


async def test_full_queue_refuses_its_own_messages_and_takes_some_again_once_there_is_room(
    rig: Rig, service_names: ServiceNames
) -> None:
    broker, there, full = await rig.connect(), service_names.new("there"), service_names.new("full")
    await broker.declare_service(there)
    await rig.limit(full, 1)
    assert await send(broker, full, b"first") == [Routing.ROUTED]
    batch = [Outgoing(there, Message()) for _ in range(30)]
    batch[3] = batch[17] = Outgoing(full, Message(b"second"))

    routings = await broker.publish(batch)

    assert [index for index, routing in enumerate(routings) if routing is Routing.REFUSED] == [3, 17]
    assert routings.count(Routing.ROUTED) == 28
    await until_depth(broker, there, 28)
    assert broker.is_connected
    assert (broker.stats.refused_count, broker.stats.publish_failure_count, broker.stats.lost_count) == (2, 0, 0)
    await broker.purge(full)
    assert await send(broker, full, b"third") == [Routing.ROUTED]


async def test_two_in_flight_with_one_message_id_keep_their_own_fate(rig: Rig, service_name: str) -> None:
    broker = await rig.connect()
    await broker.declare_service(service_name)
    there, nowhere = service_name, f"{service_name}.nowhere"
    targets = [there, nowhere, nowhere, there, there, nowhere] * 10

    routings = await broker.publish([Outgoing(to, Message(message_id="same")) for to in targets])

    assert routings == [Routing.ROUTED if to == there else Routing.NO_ROUTE for to in targets]
    async with broker.browse(there, 1) as found:
        assert found[0].message.message_id == "same"


@pytest.mark.parametrize("name", ["", "x" * 300, "ü" * 200, "\ud800"])
async def test_name_that_no_queue_can_have_is_no_route(rig: Rig, name: str) -> None:
    assert await (await rig.connect()).publish([Outgoing(name, Message())]) == [Routing.NO_ROUTE]


async def test_headers_that_are_not_ours_do_not_leave(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    other = Names(service_name).replies
    headers: dict[str, Any] = {
        "cc-id": "i",
        "CC": [other],
        "BCC": [other],
        "x-delivery-count": 99,
        "x-match": "all",
        "mine": "m",
    }

    await broker.publish([Outgoing(service_name, Message(headers=headers))])
    delivery = await inbox.take_one()

    assert delivery.message.headers == {"cc-id": "i"}
    assert delivery.delivery_count == 1
    assert await broker.depth(other) == 0


async def test_oversized_body_is_refused_before_anything_is_sent_but_dead_letters_pass(
    rig: Rig, service_name: str
) -> None:
    broker = await rig.connect(max_body=10)
    await broker.declare_service(service_name)
    large = Message(b"x" * 11)

    with pytest.raises(OversizedMessage):
        await broker.publish([Outgoing(service_name, Message()), Outgoing(service_name, large)])
    dead = Outgoing(service_name, Message(b"x" * 11, headers={"cc-reason": "oversized"}))

    assert await broker.depth(service_name) == 0
    assert await broker.publish([dead]) == [Routing.ROUTED]


async def test_each_message_has_a_future_of_its_own(rig: Rig, service_name: str) -> None:
    broker = await rig.connect(max_body=10)
    await broker.declare_service(service_name)
    names = (service_name, service_name, f"{service_name}.nowhere", service_name)
    bodies = (b"1", b"x" * 11, b"", b"2")

    futures = broker.publish_soon([Outgoing(to, Message(body)) for to, body in zip(names, bodies, strict=True)])
    fates = await asyncio.gather(*futures, return_exceptions=True)

    assert isinstance(fates.pop(1), OversizedMessage)
    assert fates == [Routing.ROUTED, Routing.NO_ROUTE, Routing.ROUTED]
    await until_depth(broker, service_name, 2)


async def test_future_that_is_cancelled_changes_nothing_for_its_neighbours(rig: Rig, service_name: str) -> None:
    broker = await rig.connect()
    await broker.declare_service(service_name)

    first, second, third = broker.publish_soon([Outgoing(service_name, Message())] * 3)
    second.cancel()

    assert [await first, await third] == [Routing.ROUTED] * 2


async def test_message_for_a_broker_that_is_not_started_fails_in_its_future(rig: Rig, service_name: str) -> None:
    broker = connect(rig.url)

    (future,) = broker.publish_soon([Outgoing(service_name, Message())])

    with pytest.raises(BrokerUnavailable, match="not started"):
        await future


async def test_body_over_the_limit_arrives_without_its_end_and_says_how_long_it_was(
    rig: Rig, service_name: str
) -> None:
    sender, broker, inbox = await rig.connect(), await rig.connect(max_body=5000), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)

    forged = Message(b"y" * 5000, headers={"cc-size": 1})
    await sender.publish([Outgoing(service_name, Message(b"x" * size)) for size in (5001, 300_000)])
    await sender.publish([Outgoing(service_name, forged)])
    cut, large, whole = (delivery.message for delivery in await inbox.take(3))

    assert (cut.body, cut.headers) == (b"x" * 4096, {"cc-size": 5001})
    assert (large.body, large.headers) == (b"x" * 4096, {"cc-size": 300_000})
    assert (whole.body, whole.headers) == (b"y" * 5000, {})


async def test_browsed_body_over_the_limit_has_no_way_back(rig: Rig, service_name: str) -> None:
    sender, broker = await rig.connect(), await rig.connect(max_body=5000)
    await sender.declare_service(service_name)
    dead = Names(service_name).dead
    headers: dict[str, Any] = {"cc-reason": "undecodable", "cc-queue": service_name}
    await sender.publish([Outgoing(dead, Message(b"x" * 9000, headers=headers))])
    await until_depth(sender, dead, 1)

    async with broker.browse(dead, 1) as letters:
        message = letters[0].message
    async with sender.browse(dead, 1) as letters:
        whole = letters[0].message

    assert message.headers == headers | {"cc-size": 9000}
    with pytest.raises(OversizedMessage, match="9000 bytes, and 4096 were kept"):
        revive(message)
    assert revive(whole).message.body == b"x" * 9000


async def test_broadcast_reaches_every_replica_and_nobody_listening_is_fine(rig: Rig, service_name: str) -> None:
    first, second = await rig.connect(), await rig.connect()
    await first.declare_service(service_name)
    shout = Outgoing(Names(service_name).broadcast, Message(b"hear"), is_broadcast=True)
    assert await first.publish([shout]) == [Routing.ROUTED]
    inboxes = [Inbox(), Inbox()]
    for broker, inbox in zip((first, second), inboxes, strict=True):
        await inbox.consume(broker, await broker.declare_replica(service_name))

    await first.publish([shout])

    assert [(await inbox.take_one()).message.body for inbox in inboxes] == [b"hear", b"hear"]


async def test_broadcast_nobody_declared_is_no_route_and_harms_nothing_else(rig: Rig, service_name: str) -> None:
    broker = await rig.connect()
    await broker.declare_service(service_name)
    unknown = Outgoing(f"{service_name}.nobody", Message(), is_broadcast=True)
    known = Outgoing(Names(service_name).broadcast, Message(), is_broadcast=True)

    routings = await broker.publish([unknown, Outgoing(service_name, Message()), known])

    assert routings == [Routing.NO_ROUTE, Routing.ROUTED, Routing.ROUTED]
    assert broker.is_connected


# --- acks ---


async def test_ack_takes_the_message_off_and_repeating_it_is_harmless(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    consumer = await inbox.consume(broker, service_name)
    await send(broker, service_name, *[b"x"] * 5)
    deliveries = await inbox.take(5)

    for delivery in deliveries:
        delivery.ack()
        delivery.ack()
        delivery.requeue()
        assert delivery.is_settled
    await asyncio.sleep(0)
    deliveries[0].ack()
    await send(broker, service_name, b"after")
    after = await inbox.take_one()

    assert (after.message.body, after.is_redelivered) == (b"after", False)
    assert inbox.losses.empty()
    after.ack()
    await consumer.stop()
    await until_depth(broker, service_name, 0)
    assert broker.stats.acked_count == 6


async def test_acks_out_of_order_settle_exactly_those(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    consumer = await inbox.consume(broker, service_name, prefetch=50)
    await send(broker, service_name, *[str(count).encode() for count in range(20)])
    deliveries = await inbox.take(20)

    for index in (3, 0, 1, 2, 9, 19, 5):
        deliveries[index].ack()
    await asyncio.sleep(0)
    for index in (4, 6, 18):
        deliveries[index].ack()
    await consumer.stop()

    await until_depth(broker, service_name, 10)
    async with broker.browse(service_name, 20) as rest:
        left = {int(delivery.message.body) for delivery in rest}
    assert left == set(range(20)) - {0, 1, 2, 3, 4, 5, 6, 9, 18, 19}


async def test_requeue_redelivers_and_counts(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"x")

    counts = []
    for _ in range(4):
        delivery = await inbox.take_one()
        counts.append((delivery.delivery_count, delivery.is_redelivered))
        delivery.requeue()

    assert counts == [(1, False), (2, True), (3, True), (4, True)]


async def test_prefetch_bounds_what_is_out(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name, prefetch=3)
    await send(broker, service_name, *[b"x"] * 10)

    first = await inbox.take(3)
    await until_depth(broker, service_name, 7)
    assert inbox.is_empty
    first[1].ack()
    await inbox.take(1)

    await until_depth(broker, service_name, 6)
    assert inbox.is_empty


async def test_receiver_that_raises_gets_it_again_and_the_consumer_lives(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    is_first = True

    def receive(delivery: object) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            raise ValueError("a bug")
        inbox(delivery)  # type: ignore[arg-type]

    await broker.consume(service_name, receive, prefetch=1)
    await send(broker, service_name, b"x")

    assert (await inbox.take_one()).delivery_count == 2


# --- consumers ---


async def test_pause_stops_deliveries_and_keeps_what_was_handed_over(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    consumer = await inbox.consume(broker, service_name, prefetch=5)
    await send(broker, service_name, b"before")
    before = await inbox.take_one()

    await consumer.pause()
    await consumer.pause()
    await send(broker, service_name, b"after")
    await until_depth(broker, service_name, 1)
    assert inbox.is_empty
    assert not before.is_lost
    before.ack()
    await consumer.resume()
    await consumer.resume()
    after = await inbox.take_one()

    assert (after.message.body, after.is_redelivered) == (b"after", False)
    assert inbox.losses.empty()


async def test_stop_writes_acks_and_gives_the_rest_back(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    consumer = await inbox.consume(broker, service_name)
    await send(broker, service_name, *[b"x"] * 6)
    deliveries = await inbox.take(6)

    for delivery in deliveries[::2]:
        delivery.ack()
    await consumer.stop()
    await consumer.stop()

    await until_depth(broker, service_name, 3)
    assert deliveries[1].is_lost
    deliveries[1].ack()
    assert inbox.losses.empty()


async def test_broker_stop_stops_consumers_too(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"a", b"b")
    deliveries = await inbox.take(2)

    deliveries[0].ack()
    await broker.stop()
    await broker.stop()

    assert not broker.is_connected
    await until_depth(await rig.connect(), service_name, 1)


async def test_consuming_a_queue_nobody_declared_is_a_usage_error(rig: Rig, service_name: str) -> None:
    broker = await rig.connect()

    with pytest.raises(UsageError, match="declare it first"):
        await broker.consume(service_name, Inbox(), prefetch=1)


@pytest.mark.parametrize("prefetch", [0, -1, 70_000])
async def test_prefetch_out_of_range_is_refused(rig: Rig, service_name: str, prefetch: int) -> None:
    broker = await rig.connect()

    with pytest.raises(InvalidSettings, match=str(prefetch)):
        await broker.consume(service_name, Inbox(), prefetch=prefetch)


async def test_two_consumers_share_a_queue(rig: Rig, service_name: str) -> None:
    first, second = await rig.connect(), await rig.connect()
    await first.declare_service(service_name)
    inboxes = [Inbox(), Inbox()]
    await inboxes[0].consume(first, service_name, prefetch=2)
    await inboxes[1].consume(second, service_name, prefetch=2)

    await send(first, service_name, *[b"x"] * 4)

    for inbox in inboxes:
        assert len(await inbox.take(2)) == 2


# --- topology ---


async def test_ten_declare_service_at_once(rig: Rig, service_name: str) -> None:
    brokers = [await rig.connect() for _ in range(3)]

    await asyncio.gather(*(brokers[count % 3].declare_service(service_name) for count in range(10)))

    for queue in Names(service_name).queues:
        assert await brokers[0].depth(queue) == 0


async def test_private_queue_receives_and_goes_with_its_broker(rig: Rig) -> None:
    owner, other = await rig.connect(), await rig.connect()
    inbox = Inbox()
    queue = await owner.declare_private()
    await inbox.consume(owner, queue)

    assert await send(other, queue, b"reply") == [Routing.ROUTED]
    assert (await inbox.take_one()).message.body == b"reply"
    await owner.stop()

    assert await other.depth(queue) is None
    assert await send(other, queue, b"late") == [Routing.NO_ROUTE]


async def test_depth_of_a_queue_that_is_not_there_is_none_and_harms_nothing(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)

    assert await broker.depth(f"{service_name}.nowhere") is None
    await send(broker, service_name, b"x")

    await inbox.take_one()
    assert inbox.losses.empty()


async def test_purge_and_delete(rig: Rig, service_name: str) -> None:
    broker = await rig.connect()
    await broker.declare_service(service_name)
    await send(broker, service_name, *[b"x"] * 3)

    await broker.purge(service_name)
    assert await broker.depth(service_name) == 0
    await broker.delete_queue(service_name)
    await broker.delete_queue(service_name)
    await broker.purge(service_name)

    assert await broker.depth(service_name) is None


async def test_consumers_are_counted_whoever_they_belong_to(rig: Rig, service_name: str) -> None:
    one, other = await rig.connect(), await rig.connect()
    assert await one.consumer_count(service_name) is None
    await one.declare_service(service_name)
    assert await one.consumer_count(service_name) == 0

    consumers = [await each.consume(service_name, lambda _: None, prefetch=1) for each in (one, other)]
    assert await one.consumer_count(service_name) == 2
    await consumers[1].stop()

    assert await one.consumer_count(service_name) == 1


async def test_browse_shows_and_puts_back_what_was_not_acked(rig: Rig, service_name: str) -> None:
    broker, dead = await rig.connect(), Names(service_name).dead
    await broker.declare_service(service_name)
    await send(broker, dead, *[str(count).encode() for count in range(5)])

    async with broker.browse(dead, 3) as found:
        assert [delivery.message.body for delivery in found] == [b"0", b"1", b"2"]
        found[1].ack()
    await until_depth(broker, dead, 4)
    async with broker.browse(dead, 100) as found:
        bodies = sorted(delivery.message.body for delivery in found)

    assert bodies == [b"0", b"2", b"3", b"4"]
    await until_depth(broker, dead, 4)


async def test_what_was_acked_while_browsing_does_not_come_back(rig: Rig, service_name: str) -> None:
    broker, dead = await rig.connect(), Names(service_name).dead
    await broker.declare_service(service_name)
    bodies = [str(count).encode() * (40_000 if count % 20 == 0 else 1) for count in range(400)]
    await send(broker, dead, *bodies)

    async with broker.browse(dead, 400) as found:
        taken = [delivery.message.body for delivery in found]
        for delivery in found:
            delivery.ack()
    async with broker.browse(dead, 400) as found:
        again = len(found)

    assert taken == bodies
    assert again == 0


async def test_browsing_a_dead_letter_many_times_never_drops_it(rig: Rig, service_name: str) -> None:
    broker, dead = await rig.connect(), Names(service_name).dead
    await broker.declare_service(service_name)
    await send(broker, dead, b"x")

    for _ in range(30):
        await until_depth(broker, dead, 1)
        async with broker.browse(dead, 1) as found:
            assert len(found) == 1

    await until_depth(broker, dead, 1)


# --- bad networks ---


async def test_cut_while_handling_redelivers_and_late_acks_do_nothing(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"x")
    first = await inbox.take_one()

    rig.cut()
    await inbox.lost()
    again = await inbox.take_one()

    assert first.is_lost
    first.ack()
    first.requeue()
    assert (again.message.body, again.is_redelivered, again.delivery_count) == (b"x", True, 2)
    again.ack()
    await send(broker, service_name, b"y")
    after = await inbox.take_one()
    assert (after.message.body, after.is_redelivered) == (b"y", False)
    assert broker.stats.consumer_lost_count == 1


async def test_paused_consumer_stays_paused_over_a_cut(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    consumer = await inbox.consume(broker, service_name)
    await consumer.pause()

    rig.cut()
    await inbox.lost()
    await send(broker, service_name, b"x")
    await until_depth(broker, service_name, 1)
    assert inbox.is_empty
    await consumer.resume()

    assert (await inbox.take_one()).message.body == b"x"


async def test_publish_during_an_outage_waits_for_the_connection(rig: Rig, service_name: str) -> None:
    broker = await rig.connect()
    await broker.declare_service(service_name)
    rig.go_dark()
    await until(lambda: not broker.is_connected)

    publishing = asyncio.create_task(send(broker, service_name, b"a", b"b"))
    await asyncio.sleep(0)
    rig.come_back()

    assert await publishing == [Routing.ROUTED, Routing.ROUTED]
    await until(lambda: broker.is_connected)
    assert await broker.depth(service_name) == 2
    assert broker.stats.reconnect_count >= 1


async def test_publish_gives_up_after_its_timeout(rig: Rig, service_name: str) -> None:
    broker = await rig.connect(publish_timeout=0.3)
    rig.go_dark()
    await until(lambda: not broker.is_connected)

    with pytest.raises(BrokerUnavailable):
        await send(broker, service_name, b"x")

    assert broker.stats.publish_failure_count == 1
    rig.come_back()


async def test_private_and_replica_queues_are_there_after_a_cut(rig: Rig, service_name: str) -> None:
    broker = await rig.connect()
    await broker.declare_service(service_name)
    private, replica = await broker.declare_private(), await broker.declare_replica(service_name)
    inbox = Inbox(is_acking=True)
    await inbox.consume(broker, private)
    await inbox.consume(broker, replica)

    rig.cut()
    await inbox.lost()
    await inbox.lost()
    await send(broker, private, b"p")
    shout = Outgoing(Names(service_name).broadcast, Message(b"r"), is_broadcast=True)
    await broker.publish([shout])

    assert sorted(delivery.message.body for delivery in await inbox.take(2)) == [b"p", b"r"]


async def test_queue_deleted_under_its_consumer_comes_back(rig: Rig, service_name: str) -> None:
    broker, other, inbox = await rig.connect(), await rig.connect(), Inbox(is_acking=True)
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)

    await other.delete_queue(service_name)
    await inbox.lost()
    await until_depth(other, service_name, 0)
    await send(other, service_name, b"x")

    assert (await inbox.take_one()).message.body == b"x"


async def test_calls_on_a_broker_that_was_not_started_say_so(rig: Rig, service_name: str) -> None:
    from coatcheck.broker import connect

    broker = connect(rig.url)

    with pytest.raises(BrokerUnavailable, match="not started"):
        await send(broker, service_name, b"x")


# --- with fewer rights ---


async def test_broker_that_must_not_declare_finds_what_is_there(rig: Rig, service_name: str) -> None:
    maker, sweepers = await rig.connect(), f"{service_name}.hints"
    await maker.declare_service(service_name)
    await maker.declare_sweeper(sweepers)
    broker, inbox = await rig.connect(declares=False), Inbox()

    await broker.declare_service(service_name)
    await broker.declare_sweeper(sweepers)
    await inbox.consume(broker, await broker.declare_replica(service_name))
    await broker.publish([Outgoing(Names(service_name).broadcast, Message(b"all"), is_broadcast=True)])

    assert (await inbox.take_one()).message.body == b"all"
    await maker.delete_queue(sweepers)


async def test_broker_that_must_not_declare_says_what_is_missing(rig: Rig, service_name: str) -> None:
    broker = await rig.connect(declares=False)

    with pytest.raises(InvalidSettings, match="run `coatcheck declare`"):
        await broker.declare_service(service_name)
    with pytest.raises(InvalidSettings, match="run `coatcheck declare`"):
        await broker.declare_sweeper(f"{service_name}.hints")
    assert await broker.depth(service_name) is None


async def test_reasons_are_read_off_dead_queues_only_and_tokens_off_live_ones(rig: Rig, service_name: str) -> None:
    broker, inbox = await rig.connect(), Inbox()
    await broker.declare_service(service_name)
    headers = {"cc-reason": "oversized", "cc-queue": "elsewhere", "authorization": "Bearer abc", "cc-id": "1"}
    dead = Names(service_name).dead
    await broker.publish([Outgoing(queue, Message(b"x", headers=headers)) for queue in (service_name, dead)])
    await inbox.consume(broker, service_name)

    alive = await inbox.take_one()
    async with broker.browse(dead, 1) as [letter]:
        assert letter.message.headers == {"cc-reason": "oversized", "cc-queue": "elsewhere", "cc-id": "1"}
    assert alive.message.headers == {"authorization": "Bearer abc", "cc-id": "1"}
    alive.ack()
