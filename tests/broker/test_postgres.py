"""What only queues in Postgres do: sessions that die, freeze and are cut off, and what becomes of what they held."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace
from tests.broker.process import Process
from tests.broker.rigs import QUICK, Inbox, Rig, as_broker, send, until, until_depth
from tests.flow.outages import OwnPostgres

from coatcheck.broker import Message, Names, Outgoing, Routing, connect
from coatcheck.broker.headers import BROKEN
from coatcheck.broker.postgres import receiver
from coatcheck.broker.postgres.codec import encode_head
from coatcheck.broker.postgres.connection import PostgresLink
from coatcheck.broker.postgres.sql import NAMESPACE, SQL
from coatcheck.errors import BrokerUnavailable, InvalidSettings, MalformedMessage, UsageError

Start = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start(queues_url: str) -> AsyncIterator[Start]:
    """Starts consumers as processes of their own; whatever lives at the end is killed."""
    async with AsyncExitStack() as stack:

        async def start(queue: str, *arguments: str) -> Process:
            process = await Process.start(queues_url, queue, *arguments)
            stack.push_async_callback(process.kill)
            await process.says("ready")
            return process

        yield start


@pytest.fixture
async def sql(queues_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of the test's own, to look at rows or to break them."""
    connection = await asyncpg.connect(
        f"postgresql{queues_url.removeprefix('pg')}", server_settings={"search_path": "coatcheck_broker"}
    )
    yield connection
    await connection.close()


# --- processes that die or freeze ---


async def test_killed_process_gives_back_what_it_held(pg: Rig, start: Start, service_name: str) -> None:
    broker, inbox = await pg.connect(), Inbox()
    await broker.declare_service(service_name)
    process = await start(service_name, "--prefetch", "3")
    await send(broker, service_name, b"a", b"b", b"c", b"d")
    await process.says("delivered", 3)

    await process.kill()
    await inbox.consume(broker, service_name)
    found = await inbox.take(4)

    assert {it.message.body: it.delivery_count for it in found} == {b"a": 2, b"b": 2, b"c": 2, b"d": 1}
    assert sum(it.is_redelivered for it in found) == 3
    assert await broker.consumer_count(service_name) == 1


async def test_frozen_process_loses_what_it_held_and_its_late_acks_do_nothing(
    pg: Rig, start: Start, service_name: str
) -> None:
    broker, inbox = await pg.connect(), Inbox()
    await broker.declare_service(service_name)
    process = await start(service_name, "--heartbeat", "1")
    await send(broker, service_name, b"x")
    await process.says("delivered")

    process.signal(signal.SIGSTOP)
    await inbox.consume(broker, service_name)
    taken = await inbox.take_one()
    process.signal(signal.SIGUSR1)  # it acks before it can have noticed anything
    process.signal(signal.SIGCONT)
    await process.says("acked")
    await process.says("lost")
    taken.requeue()
    again = await _first_of(inbox, process)

    assert (taken.delivery_count, again) == (2, 3)


async def _first_of(inbox: Inbox, process: Process) -> int:
    """The delivery count of a message that either of two consumers gets."""
    mine = asyncio.create_task(inbox.take_one())
    theirs = asyncio.create_task(process.says("delivered", 2))
    done, pending = await asyncio.wait([mine, theirs], return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return mine.result().delivery_count if mine in done else theirs.result()[1]["count"]


async def test_living_session_that_was_taken_for_dead_says_so_and_goes_on(
    pg: Rig, sql: asyncpg.Connection, service_name: str
) -> None:
    broker, inbox = await pg.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"x")
    first = await inbox.take_one()
    await pg.connect()  # somebody who buries the dead

    await sql.execute("UPDATE session SET seen_at = seen_at - interval '1 hour' WHERE id = $1", _session(broker))
    await inbox.lost()
    again = await inbox.take_one()
    first.ack()
    again.ack()
    await broker.stop()

    assert first.is_lost
    assert again.delivery_count == 2
    assert await (await pg.connect()).depth(service_name) == 0


async def test_session_that_is_gone_takes_nothing(pg: Rig, sql: asyncpg.Connection, service_name: str) -> None:
    broker = await pg.connect()
    await broker.declare_service(service_name)
    await send(broker, service_name, b"x")

    async with sql.transaction():
        await sql.execute("SELECT FROM session WHERE id = $1 FOR UPDATE", _session(broker))
        taking = asyncio.create_task(_browse_count(broker, service_name))  # it waits for that row
        await until(lambda: _is_somebody_waiting(pg))
        await sql.execute("DELETE FROM session WHERE id = $1", _session(broker))

    assert await taking == 0
    assert await sql.fetchval("SELECT count(*) FROM message WHERE holder IS NOT NULL") == 0


async def _browse_count(broker: Any, queue: str) -> int:
    async with broker.browse(queue, 1) as found:
        return len(found)


async def _is_somebody_waiting(pg: Rig) -> bool:
    looking = await asyncpg.connect(f"postgresql{_without(pg).removeprefix('pg')}")
    try:
        return await looking.fetchval(
            "SELECT EXISTS (SELECT FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock')"
        )
    finally:
        await looking.close()


def _session(broker: Any) -> int:
    return broker._receiver.session.id


async def test_every_message_is_handled_and_none_is_left_while_consumers_are_killed(
    pg: Rig, start: Start, sql: asyncpg.Connection, service_name: str
) -> None:
    broker, prefetch, kill_count = await pg.connect(), 50, 3
    await broker.declare_service(service_name)
    acking = ["--prefetch", str(prefetch), "--acks-after", "0.01"]
    processes = list(await asyncio.gather(*(start(service_name, *acking) for _ in range(2))))
    bodies = [str(count).encode() for count in range(5000)]

    for count in range(kill_count):
        await _publish_in_batches(broker, service_name, bodies[count::4])
        await processes[count].says("delivered", 100)
        await processes[count].kill()
        processes.append(await start(service_name, *acking))
    await _publish_in_batches(broker, service_name, bodies[kill_count::4])
    queue = await sql.fetchval("SELECT id FROM queue WHERE name = $1", service_name)
    await until(lambda: _is_cleared(sql, queue), patience_s=60)

    counts = Counter(it["body"] for process in processes for it in process.all("delivered"))
    assert set(counts) == {body.decode() for body in bodies}
    assert sum(counts.values()) - len(counts) <= kill_count * prefetch


async def _publish_in_batches(broker: Any, queue: str, bodies: list[bytes]) -> None:
    for first in range(0, len(bodies), 100):
        await send(broker, queue, *bodies[first : first + 100])


async def _is_cleared(sql: asyncpg.Connection, queue: int) -> bool:
    return await sql.fetchval("SELECT NOT EXISTS (SELECT FROM message WHERE queue_id = $1)", queue)


async def test_private_queue_outlives_its_killed_process_for_a_while_and_then_goes(
    pg: Rig, start: Start, sql: asyncpg.Connection, service_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "SWEEP_S", (0.1, 0.2))
    broker = await pg.connect()
    await broker.declare_service(service_name)
    process = await start(service_name, "--private")
    private = process.all("ready")[0]["private"]
    await send(broker, private, b"a late reply")

    await process.kill()
    await until(lambda: _consumer_count_is(broker, service_name, 0))
    depth_before = await broker.depth(private)
    await sql.execute("UPDATE queue SET expires = interval '0' WHERE name = $1", private)
    await until_depth(broker, private, None)

    assert depth_before == 1
    assert await send(broker, private, b"x") == [Routing.NO_ROUTE]


async def _consumer_count_is(broker: Any, queue: str, count: int) -> bool:
    return await broker.consumer_count(queue) == count


async def test_two_processes_share_a_queue(pg: Rig, start: Start, service_name: str) -> None:
    broker = await pg.connect()
    await broker.declare_service(service_name)
    processes = await asyncio.gather(*(start(service_name, "--acks-after", "0.01") for _ in range(2)))

    await send(broker, service_name, *[str(count).encode() for count in range(400)])
    await until(lambda: sum(len(it.all("delivered")) for it in processes) == 400)

    assert min(len(process.all("delivered")) for process in processes) >= 80


async def test_burst_smaller_than_one_prefetch_is_shared_too(pg: Rig, service_name: str) -> None:
    brokers, inboxes = [await pg.connect() for _ in range(2)], [Inbox(), Inbox()]
    await brokers[0].declare_service(service_name)
    for broker, inbox in zip(brokers, inboxes, strict=True):
        await inbox.consume(broker, service_name, prefetch=100)

    await send(brokers[0], service_name, *[b"x"] * 30)
    await until(lambda: sum(it.deliveries.qsize() for it in inboxes) == 30)

    assert min(inbox.deliveries.qsize() for inbox in inboxes) >= 4


# --- single active consumer, and whose turn it is ---


async def test_only_the_first_consumer_of_a_sweepers_queue_is_active_and_the_next_takes_over(
    pg: Rig, service_name: str
) -> None:
    first, second = await pg.connect(), await pg.connect()
    queue = f"{service_name}.hints"
    await first.declare_sweeper(queue)
    inboxes = [Inbox(), Inbox()]
    consumer = await inboxes[0].consume(first, queue, prefetch=2)
    await inboxes[1].consume(second, queue, prefetch=10)

    await send(first, queue, *[b"x"] * 5)
    await inboxes[0].take(2)
    await until_depth(second, queue, 3)
    is_second_idle = inboxes[1].is_empty
    await consumer.stop()
    taken_over = await inboxes[1].take(5)

    assert is_second_idle
    assert Counter(it.delivery_count for it in taken_over) == {2: 2, 1: 3}
    await first.delete_queue(queue)


async def test_killed_active_consumer_is_followed_by_the_next(pg: Rig, start: Start, service_name: str) -> None:
    broker, inbox = await pg.connect(), Inbox()
    queue = f"{service_name}.hints"
    await broker.declare_sweeper(queue)
    process = await start(queue)
    await inbox.consume(broker, queue)
    await send(broker, queue, b"x")
    await process.says("delivered")

    await process.kill()

    assert (await inbox.take_one()).delivery_count == 2
    await broker.delete_queue(queue)


async def test_orders_and_replies_are_handed_over_before_new_requests(pg: Rig, service_name: str) -> None:
    broker, other = await pg.connect(), connect(_without(pg), **QUICK)
    await broker.declare_service(service_name)
    names, seen = Names(service_name), Inbox()
    for queue in (names.requests, names.replies, names.control):
        await seen.consume(broker, queue, prefetch=2)
    pg.go_dark()  # so that all is there when it looks again
    await until(lambda: not broker.is_connected)

    async with other:
        for queue in (names.requests, names.replies, names.control):
            await send(other, queue, b"1", b"2")
        pg.come_back()
        found = [it.queue for it in await seen.take(6)]

    assert found == [names.control] * 2 + [names.replies] * 2 + [names.requests] * 2


def _without(rig: Rig) -> str:
    """The address behind the rig's proxy."""
    assert rig.proxy is not None
    return rig.proxy._parts.geturl()


# --- time ---


@pytest.fixture(params=["pg", "memory"])
def delaying(request: pytest.FixtureRequest) -> Rig:
    """The adapters that have delays."""
    rig: Rig = request.getfixturevalue(request.param)
    return rig


async def test_delayed_message_comes_when_it_is_due(
    delaying: Rig, service_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "POLL_S", (3600.0, 3600.0))  # nobody happens to look
    broker, inbox = await delaying.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    delays = {b"later": timedelta(seconds=0.8), b"soon": timedelta(seconds=0.3), b"now": None}

    routings = await broker.publish([Outgoing(service_name, Message(it), delay=delays[it]) for it in delays])
    found = [delivery.message.body for delivery in await inbox.take(3)]

    assert routings == [Routing.ROUTED] * 3
    assert found == [b"now", b"soon", b"later"]


async def test_delayed_message_is_not_counted_and_not_shown_before_it_is_due(pg: Rig, service_name: str) -> None:
    broker = await pg.connect()
    await broker.declare_service(service_name)
    await broker.publish([Outgoing(service_name, Message(b"x"), delay=timedelta(hours=1))])

    assert await broker.depth(service_name) == 0
    async with broker.browse(service_name, 10) as found:
        assert found == []


async def test_rabbitmq_says_that_it_has_no_delays(amqp: Rig, service_name: str) -> None:
    broker = await amqp.connect()

    with pytest.raises(UsageError, match=r"ctx\.sleep"):
        await broker.publish([Outgoing(service_name, Message(), delay=timedelta(seconds=1))])


async def test_message_whose_notify_was_lost_is_found_by_looking(
    pg: Rig, sql: asyncpg.Connection, service_name: str
) -> None:
    broker, inbox = await pg.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"to have it believe that there is no more")
    await inbox.take_one()

    await sql.execute(
        "INSERT INTO message (queue_id, head, body) SELECT id, $2, 'silent' FROM queue WHERE name = $1",
        service_name,
        encode_head(Message()),
    )

    assert (await inbox.take_one()).message.body == b"silent"


# --- what is carried ---


async def test_odd_bytes_arrive_as_they_were_sent(pg: Rig, service_name: str) -> None:
    broker, inbox = await pg.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    odd = Message(
        body=bytes(range(256)),
        correlation_id="nul \0 and \U0001f9e5",
        reply_to="\0",
        message_id="m\0",
        headers={
            "cc-id": "\0\ufffe",
            "cc-key": b"\x00\xff",
            "cc-epoch": 2**63 - 1,
            "cc-deadline": datetime(2030, 1, 1, tzinfo=UTC),
            "cc-detail-not-ours": "dropped",
            "tracestate": {"nested": [1, None, 2.5, {"\0": True}]},
        },
    )

    await broker.publish([Outgoing(service_name, odd), Outgoing(service_name, Message(b""))])
    first, second = await inbox.take(2)

    assert first.message == Message(
        odd.body, odd.correlation_id, odd.reply_to, message_id="m\0",
        headers={name: value for name, value in odd.headers.items() if name != "cc-detail-not-ours"},
    )  # fmt: skip
    assert second.message.body == b""


@pytest.mark.parametrize(
    "bad",
    [
        Outgoing("", Message(correlation_id="\ud800")),
        Outgoing("", Message(headers={"cc-id": 2**70})),
        Outgoing("", Message("text, not bytes")),  # type: ignore[arg-type]
        Outgoing("", Message(), delay=timedelta.max),
    ],
    ids=["surrogate", "large number", "text", "delay beyond the calendar"],
)
async def test_message_that_cannot_be_written_is_refused_and_its_neighbours_are_sent(
    pg: Rig, service_name: str, bad: Outgoing
) -> None:
    broker = await pg.connect()
    await broker.declare_service(service_name)

    outcomes = await asyncio.gather(
        *(send(broker, service_name, b"x") for _ in range(5)),
        broker.publish([replace(bad, to=service_name)]),
        *(send(broker, service_name, b"x") for _ in range(5)),
        return_exceptions=True,
    )

    assert isinstance(outcomes[5], MalformedMessage)
    assert await broker.depth(service_name) == 10
    assert broker.stats.lost_count == 0


async def test_large_batch_goes_in_parts_and_arrives_in_order(pg: Rig, service_name: str) -> None:
    broker = await pg.connect()
    await broker.declare_service(service_name)
    batch = [Outgoing(service_name, Message(str(count).encode())) for count in range(2500)]
    batch[1700] = Outgoing(f"{service_name}.nowhere", Message())

    routings = await broker.publish(batch)
    async with broker.browse(service_name, 3000) as found:
        bodies = [int(delivery.message.body) for delivery in found]

    assert [place for place, routing in enumerate(routings) if routing is Routing.NO_ROUTE] == [1700]
    assert bodies == [count for count in range(2500) if count != 1700]


async def test_one_statement_carries_so_many_messages_and_bytes(
    pg: Rig, service_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, sent = await pg.connect(), list[int]()
    await broker.declare_service(service_name)
    fetch = PostgresLink.fetch

    async def noting(link: PostgresLink, statement: str, *values: Any, timeout_s: float) -> list[Any]:
        if statement == SQL["publish"]:
            sent.append(len(values[0]))
        return await fetch(link, statement, *values, timeout_s=timeout_s)

    monkeypatch.setattr(PostgresLink, "fetch", noting)
    monkeypatch.setattr("coatcheck.broker.postgres.publisher._MAX_BYTES", 100)
    monkeypatch.setattr("coatcheck.broker.postgres.publisher._MAX_MESSAGES", 5)

    await send(broker, service_name, *[b"x" * 25] * 10)
    await send(broker, service_name, *[b"x"] * 7)
    await send(broker, service_name, b"x" * 500)

    assert sent == [4, 4, 2, 5, 2, 1]


async def test_row_that_cannot_be_read_arrives_marked_as_broken(
    pg: Rig, sql: asyncpg.Connection, service_name: str
) -> None:
    broker, inbox = await pg.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)

    await sql.execute(
        "INSERT INTO message (queue_id, head, body) SELECT id, $2, 'x' FROM queue WHERE name = $1",
        service_name,
        b"\xc1 not MessagePack",
    )

    assert list((await inbox.take_one()).message.headers) == [BROKEN]
    assert broker.stats.undecodable_count == 1


@pytest.mark.parametrize("way", ["requeued", "cut"])
async def test_message_over_the_delivery_limit_goes_to_the_dead_with_its_reason(
    pg: Rig, sql: asyncpg.Connection, service_name: str, way: str
) -> None:
    broker, inbox, dead = await pg.connect(), Inbox(), Names(service_name).dead
    await broker.declare_service(service_name)
    await sql.execute("UPDATE queue SET delivery_limit = 2 WHERE name = $1", service_name)
    await inbox.consume(broker, service_name)
    await broker.publish([Outgoing(service_name, Message(b"x", headers={"cc-id": "i", "cc-reason": "forged"}))])

    counts = []
    for _ in range(3):
        delivery = await inbox.take_one()
        counts.append(delivery.delivery_count)
        if way == "requeued":
            delivery.requeue()
        else:
            pg.cut()
            await inbox.lost()
    await until_depth(broker, dead, 1)

    assert counts == [1, 2, 3]
    async with broker.browse(dead, 1) as [letter]:
        assert letter.message.headers == {"cc-id": "i", "cc-reason": "delivery_limit", "cc-queue": service_name}
    await until_depth(broker, service_name, 0)


async def test_message_over_the_limit_stays_where_there_is_no_dead_queue(
    pg: Rig, sql: asyncpg.Connection, service_name: str
) -> None:
    broker, inbox = await pg.connect(), Inbox()
    await broker.declare_service(service_name)
    await broker.delete_queue(Names(service_name).dead)
    await sql.execute("UPDATE queue SET delivery_limit = 1 WHERE name = $1", service_name)
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"x")

    for _ in range(4):
        (await inbox.take_one()).requeue()

    assert (await inbox.take_one()).delivery_count == 5


# --- bad networks and servers ---


async def test_nothing_is_lost_while_the_server_ends_our_connections(
    pg: Rig, sql: asyncpg.Connection, service_name: str
) -> None:
    broker, inbox = await pg.connect(), Inbox(is_acking=True)
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    confirmed: set[bytes] = set()

    for count in range(40):
        body = str(count).encode()
        try:
            await send(broker, service_name, body)
            confirmed.add(body)
        except BrokerUnavailable:
            pass
        if count % 10 == 5:
            await sql.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
    arrived: set[bytes] = set()
    while not confirmed <= arrived:
        arrived.add((await inbox.take_one()).message.body)

    assert len(confirmed) >= 30
    assert broker.stats.reconnect_count >= 4


async def test_silent_network_is_noticed_and_what_was_held_comes_again(pg: Rig, service_name: str) -> None:
    broker, inbox = await pg.connect(rpc_timeout=0.5, publish_timeout=0.5, connect_timeout=0.5), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"x")
    first = await inbox.take_one()
    assert pg.proxy is not None

    pg.proxy.blackhole()  # the server sees a client that is there and silent
    await inbox.lost()
    with pytest.raises(BrokerUnavailable):
        await send(broker, service_name, b"never")
    pg.proxy.restore()
    again = await inbox.take_one()

    assert first.is_lost
    assert (again.message.body, again.delivery_count) == (b"x", 2)


async def test_process_that_is_back_needs_not_wait_until_the_server_has_noticed_that_it_was_gone(
    pg: Rig, sql: asyncpg.Connection, service_name: str
) -> None:
    broker, inbox = await pg.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"x")
    await inbox.take_one()

    # Whoever waits for the lock of its session has it next, and so it looks as if that session were alive.
    waiting = asyncio.create_task(sql.execute("SELECT pg_advisory_lock($1, $2)", NAMESPACE, _session(broker)))
    await until(lambda: _is_somebody_waiting(pg))
    pg.cut()
    await waiting

    assert (await inbox.take_one()).delivery_count == 2


async def test_publish_in_doubt_says_so_and_is_not_sent_again(pg: Rig, service_name: str) -> None:
    broker = await pg.connect(publish_timeout=0.5)
    await broker.declare_service(service_name)
    await send(broker, service_name, b"to have the statement prepared")
    assert pg.proxy is not None

    pg.proxy.blackhole(only="down")  # it is done, and nobody hears of it
    with pytest.raises(BrokerUnavailable, match="may or may not have arrived"):
        await send(broker, service_name, b"x")
    async with connect(_without(pg), **QUICK) as other:
        await until_depth(other, service_name, 2)
        pg.proxy.restore()
        await until(lambda: broker.is_connected)
        await send(broker, service_name, b"y")

        assert await other.depth(service_name) == 3


async def test_messages_that_failed_in_an_outage_are_let_go_before_it_ends(pg: Rig, service_name: str) -> None:
    broker = await pg.connect(publish_timeout=0.5)
    await broker.declare_service(service_name)

    pg.go_dark()
    await until(lambda: not broker.is_connected)
    fates = broker.publish_soon([Outgoing(service_name, Message(b"x"))] * 50)
    await asyncio.wait(fates)

    assert all(isinstance(fate.exception(), BrokerUnavailable) for fate in fates)
    assert not broker._publisher._pending  # type: ignore[attr-defined]
    pg.come_back()
    await until(lambda: broker.is_connected)
    assert await send(broker, service_name, b"y") == [Routing.ROUTED]
    assert await broker.depth(service_name) == 1


async def test_cancelled_publisher_leaves_the_others_alone(pg: Rig, service_name: str) -> None:
    broker = await pg.connect()
    await broker.declare_service(service_name)

    publishing = [asyncio.create_task(send(broker, service_name, b"x")) for _ in range(20)]
    await asyncio.sleep(0)
    for task in publishing[::2]:
        task.cancel()
    outcomes = await asyncio.gather(*publishing, return_exceptions=True)

    assert [it for it in outcomes if not isinstance(it, asyncio.CancelledError)] == [[Routing.ROUTED]] * 10
    assert 10 <= (await broker.depth(service_name) or 0) <= 20
    assert broker.is_connected


async def test_consumer_stops_at_once_while_the_server_is_away(pg: Rig, service_name: str) -> None:
    broker, inbox = await pg.connect(publish_timeout=30), Inbox()
    await broker.declare_service(service_name)
    consumer = await inbox.consume(broker, service_name)
    pg.go_dark()
    await inbox.lost()

    await consumer.stop()
    pg.come_back()
    await until_depth(broker, service_name, 0)

    assert await broker.consumer_count(service_name) == 0


@pytest.fixture
def own_postgres() -> Iterator[OwnPostgres]:
    """A server to crash."""
    with ExitStack() as running:
        yield OwnPostgres(running)


async def test_confirmed_messages_survive_a_crash_of_the_server(own_postgres: OwnPostgres) -> None:
    async with connect(as_broker(own_postgres.url), **QUICK) as broker:
        inbox = Inbox()
        await broker.declare_service("research")
        await inbox.consume(broker, "research", prefetch=50)
        await send(broker, "research", *[str(count).encode() for count in range(100)])
        for delivery in (await inbox.take(50))[:20]:
            delivery.ack()
        await inbox.take(20)

        await own_postgres.crash()
        await own_postgres.restart()
        await inbox.lost()
        again: set[int] = set()
        while not again >= set(range(20, 100)):  # of the acks, some may be forgotten
            delivery = await inbox.take_one()
            delivery.ack()
            again.add(int(delivery.message.body))
        await until_depth(broker, "research", 0)


async def test_tables_that_vanish_are_made_again(empty_store_url: str) -> None:
    async with connect(as_broker(empty_store_url), **QUICK) as broker:
        inbox = Inbox(is_acking=True)
        await broker.declare_service("vanishing")
        await inbox.consume(broker, "vanishing")
        admin = await asyncpg.connect(empty_store_url)
        await admin.execute("DROP SCHEMA coatcheck_broker CASCADE")
        await admin.close()

        await inbox.lost()
        await until(lambda: broker.is_connected)
        await until_depth(broker, "vanishing", 0)
        await send(broker, "vanishing", b"x")

        assert (await inbox.take_one()).message.body == b"x"


# --- the house ---


async def test_ten_start_at_once_on_an_empty_database(empty_store_url: str) -> None:
    brokers = [connect(as_broker(empty_store_url), **QUICK) for _ in range(10)]

    try:
        await asyncio.gather(*(broker.start() for broker in brokers))
        await asyncio.gather(*(broker.declare_service("many") for broker in brokers))
        routings = await asyncio.gather(*(send(broker, "many", b"x") for broker in brokers))

        assert routings == [[Routing.ROUTED]] * 10
        assert await brokers[0].depth("many") == 10
    finally:
        await asyncio.gather(*(broker.stop() for broker in brokers))


async def test_broker_that_must_not_declare_says_that_the_tables_are_missing(empty_store_url: str) -> None:
    broker = connect(as_broker(empty_store_url), **QUICK, declares=False)

    with pytest.raises(InvalidSettings, match="run `coatcheck declare`"):
        await broker.start()


async def test_database_that_is_not_there_is_refused_at_once(empty_store_url: str) -> None:
    broker = connect(f"{as_broker(empty_store_url)}_nowhere", connect_budget=3600)

    async with asyncio.timeout(60):
        with pytest.raises(BrokerUnavailable, match="createdb"):
            await broker.start()


async def test_tables_stay_small_while_messages_pass(empty_store_url: str) -> None:
    admin = await asyncpg.connect(empty_store_url)
    async with connect(as_broker(empty_store_url), **QUICK) as broker:
        inbox = Inbox(is_acking=True)
        await broker.declare_service("busy")
        await inbox.consume(broker, "busy", prefetch=200)
        for _ in range(5):
            await send(broker, "busy", *[b"x" * 1000] * 1000)
            await inbox.take(1000)
            await until(lambda: _is_empty(admin))
            await admin.execute("VACUUM coatcheck_broker.message")
        size = await admin.fetchval("SELECT pg_total_relation_size('coatcheck_broker.message')")
        left = await admin.fetchval(
            "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'message' AND schemaname = 'coatcheck_broker'"
        )
    await admin.close()

    assert size < 5_000_000  # five megabytes of bodies have passed, each written twice
    assert left <= 1000


async def _is_empty(admin: asyncpg.Connection) -> bool:
    return await admin.fetchval("SELECT NOT EXISTS (SELECT FROM coatcheck_broker.message)")


async def test_what_a_deleted_queue_held_is_cleared_whoever_held_it(
    pg: Rig, sql: asyncpg.Connection, service_name: str
) -> None:
    broker, inbox = await pg.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name, prefetch=2)
    await send(broker, service_name, *[b"x"] * 5)
    await broker.publish([Outgoing(service_name, Message(b"x"), delay=timedelta(hours=1))])
    await inbox.take(2)
    queue = await sql.fetchval("SELECT id FROM queue WHERE name = $1", service_name)

    await (await pg.connect()).delete_queue(service_name)

    await inbox.lost()
    await until(lambda: _is_cleared(sql, queue))
