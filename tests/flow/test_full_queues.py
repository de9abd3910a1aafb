"""Queues that refuse what they are sent (`x-overflow: reject-publish`): a property of theirs, and of nothing else."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.broker.rigs import Inbox, until_depth
from tests.flow.harness import Requester, Rig, until

from coatcheck.broker import Message, Outgoing, connect
from coatcheck.broker.memory import MemoryBroker
from coatcheck.store import TaskState
from coatcheck.worker import App, Context, Worker

BRISK: dict[str, Any] = {"concurrency": 40}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of seconds, where the real ones grow to minutes."""
    monkeypatch.setattr("coatcheck.worker.outbox.LONGEST_REFUSAL_S", 1.0)


class Full:
    """A queue with room for one message, which is in it. `drain` takes everything out, from then on."""

    def __init__(self, rig: Rig, name: str) -> None:
        self._rig = rig
        self.name = name
        self.taken: list[Any] = []

    @classmethod
    async def make(cls, rig: Rig, role: str = "full") -> "Full":
        full = cls(rig, rig.names.new(role))
        channel = await rig.channel()
        arguments: Any = {"x-max-length": 1, "x-overflow": "reject-publish"}
        await channel.declare_queue(full.name, durable=True, arguments=arguments)
        await channel.declare_queue(f"{full.name}.control", durable=True)
        await (await rig.wire()).publish(full.name, b'"stopper"')
        return full

    async def drain(self, on_message: Callable[[Any], Awaitable[None]] | None = None) -> None:
        async def take(message: Any) -> None:
            if message.body != b'"stopper"':
                self.taken.append(message)
                if on_message is not None:
                    await on_message(message)

        await (await self._rig.wire()).consume(self.name, take)

    async def answer(self) -> None:
        """Take everything out and answer it."""
        wire = await self._rig.wire()

        async def reply(message: Any) -> None:
            await wire.publish(message.reply_to, message.body, correlation_id=message.correlation_id)

        await self.drain(reply)


def make_app(rig: Rig) -> App:
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, peer: str) -> str:
        await ctx.call(peer, "owls", timeout=300)
        return peer

    @app.task
    async def echo(ctx: Context, topic: str) -> str:
        return topic

    @app.task
    async def leave(ctx: Context, peer: str) -> str:
        await ctx.send(peer, "owls")
        return "left"

    return app


async def answered(requester: Requester, wanted: list[str]) -> None:
    await until(lambda: all(requester.finals(each) for each in wanted), what=f"all of {len(wanted)} are answered")


def check_nothing_came_back(worker: Worker) -> None:
    assert worker._broker is not None
    assert (worker._broker.stats.requeued_count, worker._broker.stats.redelivered_count) == (0, 0)
    assert worker._broker.stats.publish_failure_count == 0


@pytest.mark.timeout(180)
async def test_a_hundred_tasks_on_a_full_peer_hold_up_nobody_and_end_once_it_has_room(rig: Rig) -> None:
    app, full, healthy, requester = make_app(rig), await Full.make(rig), await rig.peer(), await rig.requester()
    healthy.answer = lambda asked: asked.reply("found")
    worker = await rig.replica(app, **BRISK)
    await rig.sweeper()

    stuck = [await requester.send(app.service, full.name, type="ask", message_id=f"s{n}") for n in range(100)]
    others = [
        await requester.send(app.service, healthy.queue if n % 2 else "owls", type="ask" if n % 2 else "echo")
        for n in range(200)
    ]
    await answered(requester, others)
    await rig.task(TaskState.PARKED, 100)

    assert not any(requester.finals(each) for each in stuck)
    check_nothing_came_back(worker)
    await until(lambda: _is_all_acked(worker), what="no request is held")
    await full.answer()
    await answered(requester, stuck)
    assert all(len(requester.finals(each)) == 1 for each in [*stuck, *others])
    assert len({message.headers["cc-id"] for message in full.taken}) == 100
    check_nothing_came_back(worker)
    assert await rig.depth(f"{app.service}.dead") == 0


@pytest.mark.timeout(180)
async def test_ten_full_peers_beside_a_healthy_one(rig: Rig) -> None:
    app, healthy, requester = make_app(rig), await rig.peer(), await rig.requester()
    healthy.answer = lambda asked: asked.reply("found")
    fulls = [await Full.make(rig, f"full{n}") for n in range(10)]
    worker = await rig.replica(app, **BRISK)
    await rig.sweeper()

    stuck = [
        await requester.send(app.service, full.name, type="ask", message_id=f"{full.name}{n}")
        for n in range(5)
        for full in fulls
    ]
    others = [await requester.send(app.service, healthy.queue, type="ask") for _ in range(100)]
    await answered(requester, others)

    check_nothing_came_back(worker)
    for full in fulls:
        await full.answer()
    await answered(requester, stuck)
    assert all(len(requester.finals(each)) == 1 for each in [*stuck, *others])


@pytest.mark.timeout(180)
async def test_a_full_reply_queue_gets_its_answers_once_it_has_room_and_each_once(rig: Rig) -> None:
    """Of tasks with a row and without; those of others are not held up."""
    app, full, healthy, requester = make_app(rig), await Full.make(rig), await rig.peer(), await rig.requester()
    healthy.answer = lambda asked: asked.reply("found")
    worker = await rig.replica(app, **BRISK)
    await rig.sweeper()

    for number in range(30):
        handler, body = ("ask", healthy.queue) if number % 2 else ("echo", "owls")
        await requester.send(
            app.service, body, type=handler, reply_to=full.name, message_id=f"m{number}", correlation_id=f"c{number}"
        )
    others = [await requester.send(app.service, healthy.queue, type="ask") for _ in range(100)]
    await answered(requester, others)
    await rig.task(TaskState.DONE, 30)

    await until(lambda: _is_all_acked(worker), what="no request is held")
    check_nothing_came_back(worker)
    await full.drain()
    await until(lambda: len({it.correlation_id for it in full.taken}) == 30, what="all are answered")
    assert max(Counter(it.correlation_id for it in full.taken).values()) == 1
    check_nothing_came_back(worker)
    assert await rig.depth(f"{app.service}.dead") == 0


async def test_one_of_two_who_asked_for_the_same_has_a_full_queue_and_the_other_is_not_told_again_and_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, full, peer, requester = make_app(rig), await Full.make(rig), await rig.peer(), await rig.requester()
    await rig.replica(app, **BRISK)
    await rig.sweeper()

    asked_for = await requester.send(app.service, peer.queue, type="ask", message_id="one")
    (asked,) = await peer.asked()
    await requester.send(app.service, peer.queue, type="ask", message_id="one", reply_to=full.name)
    await until(lambda: _has_addresses(rig, 2), what="both are known")
    await asked.reply("found")
    await requester.reply(asked_for)
    await asyncio.sleep(8)  # the sweeper tries every two or three seconds
    await full.drain()
    await until(lambda: full.taken, what="the other is told")

    assert len(requester.finals(asked_for)) <= 2


async def test_a_send_to_a_full_queue_is_sent_once_it_has_room(rig: Rig) -> None:
    app, full, requester = make_app(rig), await Full.make(rig), await rig.requester()
    await rig.replica(app, **BRISK)
    await rig.sweeper()

    assert await requester.reply(await requester.send(app.service, full.name, type="leave", message_id="one")) == "left"
    await full.drain()

    await until(lambda: full.taken, what="it is sent")
    assert json.loads(full.taken[0].body) == "owls"


async def test_without_rows_a_refused_call_and_answer_are_tried_until_they_are_taken(rig: Rig) -> None:
    app, full, answers, requester = (
        make_app(rig), await Full.make(rig, "peer"), await Full.make(rig, "answers"), await rig.requester(),
    )  # fmt: skip
    worker = await rig.replica(app, checkpointing="off", concurrency=4)

    waiting = await requester.send(app.service, full.name, type="ask")
    for number in range(2):
        await requester.send(app.service, "owls", type="echo", reply_to=answers.name, correlation_id=str(number))
    others = [await requester.send(app.service, "owls", type="echo") for _ in range(20)]
    await answered(requester, others)
    assert not requester.finals(waiting)
    await full.answer()
    await answers.drain()
    await answered(requester, [waiting])

    await until(lambda: len(answers.taken) == 2, what="both are answered")
    await until(lambda: _is_all_acked(worker), what="all are acked")
    check_nothing_came_back(worker)


async def test_an_answer_that_no_row_remembers_is_dropped_in_the_end_and_counted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatcheck.worker.outbox.FIRST_PAUSE_S", 0.01)
    app, full, requester = make_app(rig), await Full.make(rig), await rig.requester()
    worker = await rig.replica(app, **BRISK)

    for number in range(20):
        await requester.send(app.service, None, raw=b"{", type="echo", reply_to=full.name, message_id=str(number))
    asked_for = await requester.send(app.service, "owls", type="echo")

    assert await requester.reply(asked_for) == "owls"
    await until(lambda: _dropped(worker) == 20, what="all are dropped")
    await until(lambda: _is_all_acked(worker), what="all are acked")
    assert await rig.depth(f"{app.service}.dead") == 20
    check_nothing_came_back(worker)


async def test_ten_letters_for_a_full_dead_queue_hold_up_nobody_and_are_buried_once_it_has_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, as an own queue of ours cannot be limited by its arguments."""
    monkeypatch.setattr("coatcheck.worker.outbox.FIRST_PAUSE_S", 0.05)
    app, url = make_app(rig), f"memory://{rig.names.new()}"
    worker = await rig.replica(app, broker=url, checkpointing="off", concurrency=40)
    async with connect(url) as broker:
        assert isinstance(broker, MemoryBroker)
        broker.server.limit(f"{app.service}.dead", 0)
        answers, inbox = await broker.declare_private(), Inbox(is_acking=True)
        await inbox.consume(broker, answers, prefetch=100)

        await broker.publish(
            [Outgoing(app.service, Message(b"{", type="echo", content_type="application/json")) for _ in range(10)]
        )
        await broker.publish(
            [Outgoing(app.service, Message(b'"owls"', type="echo", reply_to=answers)) for _ in range(100)]
        )
        await inbox.take(100)
        check_nothing_came_back(worker)
        broker.server.limit(f"{app.service}.dead", None)

        await until_depth(broker, f"{app.service}.dead", 10)
        check_nothing_came_back(worker)


def _dropped(worker: Worker) -> float | None:
    return worker.metrics.registry.get_sample_value("coatcheck_answers_dropped_total")


def _is_all_acked(worker: Worker) -> bool:
    consumers = [consumer for name, consumer in worker._consumers.items() if name in ("requests", "replies")]
    return all(consumer.session.unacked_count == 0 for consumer in consumers)  # type: ignore[attr-defined]


async def _has_addresses(rig: Rig, count: int) -> bool:
    tasks = await rig.store.list_tasks()
    return len(tasks) == 1 and len(tasks[0].addresses) == count
