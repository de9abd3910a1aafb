"""The broker loses what it was given: queues are deleted, or its disk is gone. Rows remember, and every task ends.

What nobody but the broker knew is lost with it: a request that no replica has taken. Its sender asks again.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import aio_pika
import pytest
from tests.broker.node import Node
from tests.flow.harness import Peer, Requester, Rig, rig_on, until
from tests.flow.outages import listen, metric
from tests.flow.test_bad_input import dead_letters
from tests.flow.test_leases import echo

from coatcheck.broker import Names
from coatcheck.store import Task, TaskState
from coatcheck.store.blobs import decode
from coatcheck.worker import App, CallTimedOut, Context

pytestmark = pytest.mark.timeout(180)

RESEND_AFTER = timedelta(seconds=15)
"""Long enough for a peer to be back before its calls are sent again."""


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    try:
        await node.start()
        yield node
    finally:
        await node.close()


@pytest.fixture
async def own(node: Node, store_url: str, service_names) -> AsyncIterator[Rig]:
    """A rig on a RabbitMQ of its own."""
    async with rig_on(node.url, store_url, service_names) as made:
        yield made


class Asking:
    """An app that asks a peer, with a time limit of its own, and says what came of it."""

    def __init__(self, service: str, peer: str) -> None:
        self.app = App(service)
        self.go = asyncio.Event()
        self.go.set()
        self.is_working, self.is_over = asyncio.Event(), asyncio.Event()
        self.begun: set[str] = set()

        @self.app.task(default=True)
        async def ask(ctx: Context, asked: dict[str, Any]) -> str:
            self.begun.add(asked["topic"])
            await self.go.wait()
            try:
                return await ctx.call(peer, asked["topic"], timeout=asked["timeout"])
            except CallTimedOut:
                return "timed out"

        @self.app.task
        async def nap(ctx: Context, seconds: float) -> str:
            await ctx.sleep(seconds)
            return "rested"

        @self.app.task
        async def work(ctx: Context, _: str) -> str:
            return await ctx.step(self._work, key="work")

        @self.app.task
        async def tell(ctx: Context, queue: str) -> str:
            await ctx.send(queue, "news")
            return "told"

    async def _work(self) -> str:
        self.is_working.set()
        await self.is_over.wait()
        return "worked"


async def delete(rig: Rig, *queues: str) -> None:
    channel = await rig.channel()
    for queue in queues:
        await channel.queue_delete(queue)


async def result_of(rig: Rig, task: Task) -> Any:
    """What a task ended with, by its row: whoever was to be told is gone."""

    async def ended() -> Task | None:
        found = await rig.store.find_task(task.task_id)
        return found if found is not None and found.state.is_final else None

    row = await until(ended, what="the task has ended", within_s=40)
    assert row.state is TaskState.DONE, decode(row.value)
    return decode(row.value)


def topic_of(task: Task) -> Any:
    request = decode(task.request)
    return request["topic"] if isinstance(request, dict) else request


# --- queues are deleted ---


async def test_tasks_end_though_the_queues_of_their_service_were_deleted(rig: Rig) -> None:
    """Replies that are in a queue go with it; those to come find a new one. Nobody is restarted."""
    peer, requester = await rig.peer(), await rig.requester()
    asking = Asking(rig.names.new(), peer.queue)
    names = asking.app.names
    worker = await rig.replica(asking.app, sweep_interval=600)
    await rig.sweeper(sweep_interval=600)  # so nothing but hints wakes it
    lost = [await requester.send(asking.app.service, {"topic": f"lost-{n}", "timeout": 3}) for n in range(5)]
    questions = await peer.asked(5)
    kept = [await requester.send(asking.app.service, {"topic": f"kept-{n}", "timeout": 60}) for n in range(5)]
    later = await peer.asked(5)
    await rig.task(TaskState.PARKED, 10)

    await worker._consumers["replies"].pause()
    for question in questions:
        await question.reply(question.body)
    await until(lambda: _holds(rig, names.replies, 5), what="the replies are in their queue")
    await delete(rig, *names.queues, rig.settings.sweeper_queue)
    await worker._consumers["replies"].resume()
    await are_consumed_again(rig, names)
    for question in later:
        await question.reply(question.body)

    assert [await requester.reply(each) for each in kept] == [f"kept-{n}" for n in range(5)]
    assert [await requester.reply(each) for each in lost] == ["timed out"] * 5
    await all_is_well(rig, asking, requester)
    assert await rig.store.without_waker() == []


async def _holds(rig: Rig, queue: str, count: int) -> bool:
    return await rig.depth(queue) == count


async def _is_parked(rig: Rig, topic: Any) -> bool:
    return topic in [topic_of(task) for task in await rig.store.list_tasks(states=[TaskState.PARKED])]


async def all_is_well(rig: Rig, asking: Asking, requester: Requester) -> None:
    """Requests, replies, cancels, hints and dead letters all have their queues."""
    names, answering = asking.app.names, await rig.peer("other")
    napping = await requester.send(names.requests, 0.3, type="nap")
    telling = await requester.send(names.requests, answering.queue, type="tell")
    waiting = await requester.send(names.requests, 600, type="nap")
    await until(lambda: _is_parked(rig, 600), what="there is something to cancel")
    await requester.send(names.control, {"reason": "enough"}, correlation_id=waiting, headers={"cc-kind": "cancel"})
    broken = await requester.send(names.requests, None, raw=b"{nonsense", type="ask")

    assert await requester.reply(napping) == "rested"
    assert await requester.reply(telling) == "told"
    assert (await requester.reply(waiting))["code"] == "cancelled"
    assert (await requester.reply(broken))["code"] == "malformed_message"
    assert [letter.headers["cc-reason"] for letter in await dead_letters(rig, names.dead, 1)] == ["undecodable"]


async def test_dead_letters_find_a_queue_though_theirs_was_deleted(rig: Rig) -> None:
    """Nobody consumes it, so nobody hears that it is gone before there is something to bury."""
    requester, asking = await rig.requester(), Asking(rig.names.new(), "nobody")
    names = asking.app.names
    await rig.replica(asking.app)

    await delete(rig, names.dead)
    await requester.send(names.requests, None, raw=b"{nonsense")
    (letter,) = await dead_letters_of_a_new_queue(rig, names.dead)
    await delete(rig, names.dead)
    assert await requester.reply(await requester.send(names.requests, "cctest-nobody", type="tell")) == "told"
    (unsent,) = await dead_letters_of_a_new_queue(rig, names.dead)

    assert letter.headers["cc-reason"] == "undecodable"
    assert unsent.headers["cc-reason"] == "no_route"


async def dead_letters_of_a_new_queue(rig: Rig, queue: str) -> list[Any]:
    async def is_there() -> bool:
        return await consumer_count(rig, queue) is not None

    await until(is_there, what=f"{queue} is there again")
    return await dead_letters(rig, queue, 1)


async def consumer_count(rig: Rig, queue: str) -> int | None:
    channel = await rig.channel()
    try:
        declared = await channel.declare_queue(queue, passive=True)
    except aio_pika.exceptions.ChannelNotFoundEntity:
        return None
    await channel.close()
    return declared.declaration_result.consumer_count


async def are_consumed_again(rig: Rig, names: Names) -> None:
    """Wait until replica and sweeper have what they consume."""
    queues = (names.requests, names.replies, names.control, rig.settings.sweeper_queue)

    async def are_consumed() -> bool:
        return all([await consumer_count(rig, queue) for queue in queues])

    await until(are_consumed, what="all queues are there and consumed", within_s=40)


# --- everything is gone ---


@pytest.mark.usefixtures("impatient_broker")
async def test_every_task_ends_though_the_broker_lost_all_it_had(
    own: Rig, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatcheck.store.decide.RESEND_AFTER", RESEND_AFTER)
    peer, requester, log = await own.peer(), await own.requester(), listen(own)
    asking = Asking(own.names.new(), peer.queue)
    worker, sweeper = await own.replica(asking.app), await own.sweeper()
    service = asking.app.service
    for n in range(5):
        await requester.send(service, {"topic": f"lost-{n}", "timeout": 5})
        await requester.send(service, {"topic": f"kept-{n}", "timeout": 90})
    questions = {question.body: question for question in await peer.asked(10)}
    await requester.send(service, 3.0, type="nap")
    await requester.send(service, "still at it", type="work", message_id="id-1")
    sql = await own.sql()
    await until(lambda: _are_marked(sql, 10), what="the calls are known to be sent")
    asking.go.clear()
    for n in range(5):
        await requester.send(service, {"topic": f"unsent-{n}", "timeout": 90})
    await until(lambda: len(asking.begun) == 15 and asking.is_working.is_set(), what="all have begun")
    await worker._consumers["replies"].pause()
    for n in range(5):
        await questions[f"lost-{n}"].reply("never read")

    await node.kill()
    asking.go.set()
    await log.hears("calls_not_sent", count=5)
    shutil.rmtree(node.data)
    await node.start()
    own._connection = None
    answering = await Peer(await own.wire(), peer.queue).start()
    answering.answer = echo
    await worker._consumers["replies"].resume()
    await are_consumed_again(own, asking.app.names)
    asking.is_over.set()
    for n in range(5):
        question = questions[f"kept-{n}"]
        await answering.send(question.reply_to, f'"{question.body}"'.encode(), question.correlation_id)

    tasks = {topic_of(task): await result_of(own, task) for task in await own.store.list_tasks(limit=100)}
    expected: dict[Any, str] = {f"{fate}-{n}": f"{fate}-{n}" for fate in ("kept", "unsent") for n in range(5)}
    expected |= {f"lost-{n}": "timed out" for n in range(5)} | {3.0: "rested", "still at it": "worked"}
    assert tasks == expected
    assert metric(sweeper, "messages_resent_total") == 5
    await all_is_well(own, asking, await own.requester())
    assert await own.store.without_waker() == []


async def _are_marked(sql: Any, count: int) -> bool:
    return await sql.fetchval("SELECT count(*) FROM coatcheck.call WHERE kind = 'call' AND is_sent") == count
