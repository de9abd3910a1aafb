"""Cancelling: a task that waits, runs elsewhere, has not begun, or is just ending. One final state, first commit
wins.
"""

import asyncio

import aio_pika
from tests.flow.harness import Rig, until

from coatcheck.store import TaskState
from coatcheck.store.blobs import decode
from coatcheck.worker import App, Client, Context, TaskCancelled


def waiting(service: str, peer: str) -> App:
    app = App(service)

    @app.task
    async def ask(ctx: Context, topic: str) -> list[str]:
        return await ctx.gather(*(ctx.call(peer, f"{topic}-{number}", timeout=60) for number in range(3)))

    return app


async def test_cancel_of_a_parked_task_closes_its_calls_and_tells_the_peers(rig: Rig) -> None:
    peer = await rig.peer()
    app = waiting(rig.names.new(), peer.queue)
    await rig.replica(app)

    async with Client(rig.settings) as client:
        ticket = await client.submit(app.service, "owls")
        questions = await peer.asked(3)
        await rig.task(TaskState.PARKED)
        await questions[0].reply("in time")
        await until(lambda: _closed_count(rig, ticket.task_id, 1), what="the first reply is in")
        await ticket.cancel("changed my mind")
        outcome = await _outcome(ticket)
        cancelled = {await asyncio.wait_for(peer.cancels.get(), 20) for _ in range(2)}
        await questions[1].reply("too late")
        task = await client.get(ticket.task_id)

    assert isinstance(outcome, TaskCancelled)
    assert "changed my mind" in str(outcome)
    assert cancelled == {question.correlation_id for question in questions[1:]}
    assert task.state is TaskState.CANCELLED
    assert peer.cancels.empty()


async def _closed_count(rig: Rig, task_id, count: int) -> bool:
    return sum(line.seq is not None for line in await rig.store.task_lines(task_id)) == count


async def _outcome(ticket) -> object:
    try:
        return await ticket.result(20)
    except TaskCancelled as error:
        return error


async def test_cancel_by_the_requesters_correlation_id_in_plain_amqp(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app = waiting(rig.names.new(), peer.queue)
    await rig.replica(app)

    asked_for = await requester.send(app.service, "owls", message_id="whatever")
    await peer.asked(3)
    await rig.task(TaskState.PARKED)
    await requester.send(app.names.control, {"reason": "no"}, correlation_id=asked_for, headers={"cc-kind": "cancel"})
    problem = await requester.reply(asked_for)
    (task,) = await rig.task(TaskState.CANCELLED)

    assert problem["code"] == "cancelled"
    assert problem["task_id"] == str(task.task_id) == decode(task.value or b"")["task_id"]
    assert len(requester.finals(asked_for)) == 1


async def test_cancel_of_a_task_running_on_another_replica_stops_its_handler(rig: Rig) -> None:
    began, ended = asyncio.Event(), asyncio.Event()
    service = rig.names.new()

    def busy() -> App:
        app = App(service)

        async def work() -> str:
            began.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
            return "done"

        @app.task
        async def long(ctx: Context, _: str) -> str:
            return await ctx.step(work, key="work")

        return app

    for _ in range(3):
        await rig.replica(busy())

    async with Client(rig.settings) as client:
        ticket = await client.submit(service, "")
        await asyncio.wait_for(began.wait(), 20)
        await ticket.cancel()
        outcome = await _outcome(ticket)
        await asyncio.wait_for(ended.wait(), 20)

    assert isinstance(outcome, TaskCancelled)


async def test_cancel_of_a_task_that_has_not_begun_leaves_a_tombstone_that_answers(rig: Rig) -> None:
    peer = await rig.peer()
    app = waiting(rig.names.new(), peer.queue)
    worker = await rig.replica(app)

    async with Client(rig.settings) as client:
        ticket = await client.submit(app.service, "warm up")
        await peer.asked(3)
        await worker._switch("requests", is_on=False)  # requests queue up, orders do not
        late = await client.submit(app.service, "owls")
        await late.cancel("never mind")
        await until(lambda: _has_state(rig, late.task_id, TaskState.CANCELLED), what="the tombstone stands")
        await worker._switch("requests", is_on=True)
        outcome = await _outcome(late)
        await ticket.cancel()

    assert isinstance(outcome, TaskCancelled)
    assert peer.arrived.empty()


async def _has_state(rig: Rig, task_id, state: TaskState) -> bool:
    task = await rig.store.find_task(task_id)
    return task is not None and task.state is state


async def test_cancels_that_wait_beside_their_requests_are_read_first(rig: Rig) -> None:
    """Both were queued while no replica ran."""
    peer, began = await rig.peer(), list[str]()
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        began.append(topic)
        return await ctx.call(peer.queue, topic)

    broker = await rig.broker()
    await broker.declare_service(app.service)

    async with Client(rig.settings) as client:
        tickets = [await client.submit(app.service, f"owls-{number}") for number in range(8)]
        for ticket in tickets:
            await ticket.cancel("never mind")
        other = await client.submit(app.service, "another")
        await rig.replica(app)
        outcomes = [await _outcome(ticket) for ticket in tickets]
        [question] = await peer.asked()
        await question.reply("fine")
        answer = await other.result(20)

    assert [type(outcome) for outcome in outcomes] == [TaskCancelled] * 8
    assert answer == "fine"
    assert set(began) == {"another"}
    assert peer.arrived.empty()


async def test_cancels_that_wait_are_read_first_after_an_outage_too(rig: Rig) -> None:
    began = list[str]()
    app = App(rig.names.new())

    @app.task
    async def note(ctx: Context, topic: str) -> str:
        began.append(topic)
        return topic

    worker = await rig.replica(app)

    async with Client(rig.settings) as client:
        await worker._pause()
        tickets = [await client.submit(app.service, f"owls-{number}") for number in range(8)]
        for ticket in tickets:
            await ticket.cancel("never mind")
        await worker._resume()
        outcomes = [await _outcome(ticket) for ticket in tickets]

    assert [type(outcome) for outcome in outcomes] == [TaskCancelled] * 8
    assert began == []


async def test_requests_do_not_wait_for_ever_for_a_cancel_that_hangs(rig: Rig, monkeypatch) -> None:
    monkeypatch.setattr("coatcheck.worker.worker.ORDERS_FIRST_S", 0.5)
    peer = await rig.peer()
    app = waiting(rig.names.new(), peer.queue)
    first = await rig.replica(app)

    async with Client(rig.settings) as client:
        parked = await client.submit(app.service, "owls")
        await peer.asked(3)
        await rig.task(TaskState.PARKED)
        await first._switch("control", is_on=False)
        await parked.cancel()
        sql = await rig.sql()
        async with sql.transaction():
            await sql.execute("SELECT FROM coatcheck.task WHERE id = $1 FOR UPDATE", parked.task_id)
            await first._switch("requests", is_on=False)
            await rig.replica(app)
            await client.submit(app.service, "newts")
            await peer.asked(3)
        outcome = await _outcome(parked)

    assert isinstance(outcome, TaskCancelled)


async def test_cancel_racing_with_completion_gives_one_final_state_and_one_kind_of_answer(rig: Rig) -> None:
    peer = await rig.peer()
    app = waiting(rig.names.new(), peer.queue)
    await rig.replica(app)
    await rig.replica(app)
    count = 60

    async with Client(rig.settings) as client:
        tickets = [await client.submit(app.service, f"t{number}") for number in range(count)]
        questions = await peer.asked(3 * count)
        await rig.task(TaskState.PARKED, count)
        await asyncio.gather(
            *(question.reply(question.body) for question in questions), *(ticket.cancel() for ticket in tickets)
        )
        outcomes = [await _outcome(ticket) for ticket in tickets]
        states = [(await client.get(ticket.task_id)).state for ticket in tickets]

    for outcome, state in zip(outcomes, states, strict=True):
        assert state is (TaskState.CANCELLED if isinstance(outcome, TaskCancelled) else TaskState.DONE)


async def test_our_own_service_as_a_peer_hears_the_cancel_of_its_caller(rig: Rig) -> None:
    """A cancel travels down: the caller is cancelled, its call's task on the other service is too, and its peer hears
    it.
    """
    peer = await rig.peer()
    inner = waiting(rig.names.new("inner"), peer.queue)
    outer = App(rig.names.new("outer"))

    @outer.task
    async def relay(ctx: Context, topic: str) -> list[str]:
        return await ctx.call(inner.service, topic, timeout=60)

    await rig.replica(inner)
    await rig.replica(outer)

    async with Client(rig.settings) as client:
        ticket = await client.submit(outer.service, "owls")
        questions = await peer.asked(3)
        await rig.task(TaskState.PARKED, 2)
        await ticket.cancel()
        outcome = await _outcome(ticket)
        cancelled = {await asyncio.wait_for(peer.cancels.get(), 20) for _ in range(3)}
        await rig.task(TaskState.CANCELLED, 2)

    assert isinstance(outcome, TaskCancelled)
    assert cancelled == {question.correlation_id for question in questions}
    assert isinstance(questions[0].message, aio_pika.abc.AbstractIncomingMessage)
