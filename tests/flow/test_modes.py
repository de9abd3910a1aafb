"""Checkpointing off, and preferred: waits in RAM where there is no Postgres, or while it is away."""

import asyncio
from collections import Counter

import pytest
from tests.flow.harness import Asked, Peer, Rig, until
from tests.flow.outages import amqp_proxy, delivered, listen, metric, only_task, store_proxy
from tests.flow.test_killing import Fleet

from coatcheck.store import TaskState
from coatcheck.worker import App, CallTimedOut, Client, Context, Retry, TaskCancelled

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"
OFF = {"checkpointing": "off", "store": NOWHERE}


def acked(worker) -> int:
    return worker._broker.stats.acked_count


async def echo(asked: Asked) -> None:
    await asked.reply(asked.body)


# --- off ---


async def test_off_waits_in_ram_with_the_original_unacked_and_no_postgres(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app, steps = App(rig.names.new()), Counter[str]()

    def note(topic: str) -> str:
        steps[topic] += 1
        return topic.upper()

    @app.task
    async def fan(ctx: Context, topic: str) -> list[str]:
        noted = await ctx.step(note, topic, key="note")
        found = await ctx.gather(*(ctx.call(peer.queue, f"{topic}-{number}", timeout=30) for number in range(3)))
        return [noted, *found, await ctx.call(peer.queue, "last", timeout=30)]

    worker = await rig.replica(app, **OFF)
    asked_for = await requester.send(app.service, "owls")
    questions = await peer.asked(3)
    acked_while_waiting = acked(worker)
    for question in reversed(questions):
        await question.reply(question.body)
    (last,) = await peer.asked()
    await last.reply("end")

    assert await requester.reply(asked_for) == ["OWLS", "owls-0", "owls-1", "owls-2", "end"]
    assert acked_while_waiting == 0
    assert len({question.reply_to for question in questions}) == 1
    assert questions[0].reply_to not in {app.names.replies, None}
    assert steps == {"owls": 1}
    await until(lambda: metric(worker, "tasks_running") == 0 and acked(worker) == 5, what="all is acked")
    assert await rig.store.count_tasks() == {}


async def test_off_keeps_idle_and_hard_deadlines_and_rings_timers(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def patient(ctx: Context, hard: float) -> str:
        await ctx.sleep(0.05)
        try:
            return await ctx.call(peer.queue, "go", idle_timeout=0.5, timeout=hard)
        except CallTimedOut as error:
            return error.code

    await rig.replica(app, **OFF)

    kept_alive = await requester.send(app.service, 30)
    (question,) = await peer.asked()
    for done in range(4):
        await asyncio.sleep(0.3)
        await question.progress(done, 4)
    await question.reply("worth waiting")
    assert await requester.reply(kept_alive) == "worth waiting"

    silent = await requester.send(app.service, 30)
    (question,) = await peer.asked()
    assert await requester.reply(silent) == "timed_out"
    assert await asyncio.wait_for(peer.cancels.get(), 5) == question.correlation_id

    cut_off = await requester.send(app.service, 0.7)
    (question,) = await peer.asked()
    for done in range(4):
        await asyncio.sleep(0.3)
        await question.progress(done, 4)
    await question.reply("too late")
    assert await requester.reply(cut_off) == "timed_out"


async def test_off_reports_progress_and_unroutable_calls(rig: Rig) -> None:
    peer = await rig.peer()
    app = App(rig.names.new())

    @app.task
    async def work(ctx: Context, queue: str) -> str:
        ctx.progress(1, 2, "halfway")
        return await ctx.call(queue, "?", timeout=30)

    await rig.replica(app, **OFF)

    async with Client(rig._with(OFF)) as client:
        ticket = await client.submit(app.service, peer.queue)
        (question,) = await peer.asked()
        seen = []
        async for progress in ticket.progress():
            seen.append((progress.done, progress.total, progress.message))
            await question.reply("done")
        result = await ticket.result(20)
    requester = await rig.requester()
    problem = await requester.reply(await requester.send(app.service, "cctest-nobody-home"))

    assert seen == [(1, 2, "halfway")]
    assert result == "done"
    assert problem["cause"]["code"] == "no_route"


async def test_off_does_not_run_what_was_cancelled_before_it_came(rig: Rig) -> None:
    """Both were queued while no replica ran: the cancel is read first, and no row keeps it."""
    began, app = list[str](), App(rig.names.new())

    @app.task
    async def note(ctx: Context, topic: str) -> str:
        began.append(topic)
        return topic

    await (await rig.broker()).declare_service(app.service)

    async with Client(rig._with(OFF)) as client:
        tickets = [await client.submit(app.service, f"owls-{number}") for number in range(4)]
        for ticket in tickets:
            await ticket.cancel("never mind")
        other = await client.submit(app.service, "another")
        await rig.replica(app, **OFF)
        assert await other.result(20) == "another"
        for ticket in tickets:
            with pytest.raises(TaskCancelled):
                await ticket.result(20)

    assert began == ["another"]


async def test_off_repeats_a_failed_attempt_and_cancels_what_it_left_open(rig: Rig) -> None:
    fast, slow, requester = await rig.peer("fast"), await rig.peer("slow"), await rig.requester()
    app = App(rig.names.new())
    fast.answer = echo

    @app.task(retry=Retry(attempts=3, backoff=0.05))
    async def flaky(ctx: Context, topic: str) -> list[object]:
        won = await ctx.first(ctx.call(fast.queue, topic, timeout=30), ctx.call(slow.queue, topic, timeout=30))
        if ctx.attempt < 3:
            raise RuntimeError(f"attempt {ctx.attempt} was not lucky")
        return [won, ctx.attempt]

    worker = await rig.replica(app, **OFF)
    asked_for = await requester.send(app.service, "owls")

    assert await requester.reply(asked_for) == ["owls", 3]
    left_open = {question.correlation_id for question in await slow.asked(3)}
    assert {await asyncio.wait_for(slow.cancels.get(), 5) for _ in range(3)} == left_open
    assert metric(worker, "tasks_retried_total") == 2
    assert len(requester.finals(asked_for)) == 1


async def test_off_is_cancelled_through_the_control_queue(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        return await ctx.call(peer.queue, topic, timeout=30)

    worker = await rig.replica(app, **OFF)
    asked_for = await requester.send(app.service, "owls")
    (question,) = await peer.asked()
    await requester.send(
        app.names.control, {"reason": "changed my mind"}, correlation_id=asked_for, headers={"cc-kind": "cancel"}
    )

    assert (await requester.reply(asked_for))["code"] == "cancelled"
    assert await asyncio.wait_for(peer.cancels.get(), 5) == question.correlation_id
    await until(lambda: metric(worker, "tasks_running") == 0, what="the run has ended")
    assert len(requester.finals(asked_for)) == 1


@pytest.mark.usefixtures("impatient_broker")
async def test_off_wait_lives_through_a_cut_connection(rig: Rig) -> None:
    """Its request comes back and attaches; its reply is kept on the private queue meanwhile."""
    peer, requester, proxy, log = await rig.peer(), await rig.requester(), await amqp_proxy(rig), listen(rig)
    app, begun = App(rig.names.new()), Counter[str]()

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        begun[topic] += 1
        first = await ctx.call(peer.queue, topic, timeout=30)
        return first + await ctx.call(peer.queue, topic, timeout=30)

    await rig.replica(app, broker=proxy.url, **OFF)
    asked_for = await requester.send(app.service, "owls")
    (question,) = await peer.asked()
    proxy.refuse()
    await question.reply("hoo")
    proxy.accept()
    await log.hears("request_reattached")
    answering = asyncio.create_task(_answer_all(peer))  # a call that was in doubt at the cut may come once more

    assert await requester.reply(asked_for) == "hoohoo"
    answering.cancel()
    assert begun == {"owls": 1}
    assert not log.all("store_lost")


async def _answer_all(peer: Peer) -> None:
    while True:
        (question,) = await peer.asked()
        await question.reply("hoo")


async def test_off_task_of_a_killed_replica_runs_again_elsewhere(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    off = {"COATCHECK_CHECKPOINTING": "off", "COATCHECK_STORE": NOWHERE}
    victim = await fleet.start("victim", **off)

    asked_for = await requester.send(fleet.service, "owls", type="once")
    (lost,) = await peer.asked()
    victim.kill()
    await victim.wait()
    await fleet.start("heir", **off)
    (again,) = await peer.asked()
    await lost.reply("nobody hears this")
    await again.reply("hoo")

    assert await requester.reply(asked_for) == "hoo"
    assert again.correlation_id != lost.correlation_id
    assert len(requester.finals(asked_for)) == 1


async def test_off_draining_gives_a_wait_back_without_asking_postgres(rig: Rig) -> None:
    peer, requester, log = await rig.peer(), await rig.requester(), listen(rig)
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        return await ctx.call(peer.queue, topic, timeout=30)

    first = await rig.replica(app, grace=0.1, **OFF)
    asked_for = await requester.send(app.service, "owls")
    (lost,) = await peer.asked()
    first.stop()
    await log.hears("worker_stopped")
    await rig.replica(app, **OFF)
    (again,) = await peer.asked()
    await again.reply("hoo")

    assert await requester.reply(asked_for) == "hoo"
    assert await asyncio.wait_for(peer.cancels.get(), 5) == lost.correlation_id
    assert not log.all("store_lost")


# --- preferred ---


def asking(service: str, peer: str) -> App:
    app = App(service)

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        noted = await ctx.step(str.upper, topic)
        return noted + await ctx.call(peer, topic, timeout=60)

    return app


@pytest.mark.usefixtures("impatient_store")
@pytest.mark.parametrize("fault", ["refuse", "blackhole"])
async def test_preferred_falls_to_ram_while_postgres_is_away_and_returns_to_rows(rig: Rig, fault: str) -> None:
    peer, requester, proxy, log = await rig.peer(), await rig.requester(), await store_proxy(rig), listen(rig)
    app = asking(rig.names.new(), peer.queue)
    worker = await rig.replica(app, checkpointing="preferred", store=proxy.url)

    in_rows = await requester.send(app.service, "a")
    (first,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    await until(lambda: acked(worker) == 1, what="its request is acked")
    assert first.reply_to == app.names.replies

    getattr(proxy, fault)()
    in_ram = [await requester.send(app.service, topic) for topic in "bcd"]
    questions = await peer.asked(3)
    await first.reply("-in rows")  # a task that has a row waits for Postgres
    assert {question.reply_to for question in questions}.isdisjoint({app.names.replies, None})
    assert acked(worker) == 1
    for question in questions:
        await question.reply("-in ram")
    assert [await requester.reply(each) for each in in_ram] == ["B-in ram", "C-in ram", "D-in ram"]
    assert len(log.all("task_fell_to_ram")) == metric(worker, "tasks_in_ram_total") == 3
    assert not requester.finals(in_rows)

    proxy.accept()
    proxy.restore()
    assert await requester.reply(in_rows) == "A-in rows"
    back_in_rows = await requester.send(app.service, "e")
    (last,) = await peer.asked()
    assert last.reply_to == app.names.replies
    await last.reply("-in rows")
    assert await requester.reply(back_in_rows) == "E-in rows"
    assert len(await rig.task(TaskState.DONE, 2)) == 2
    assert metric(worker, "tasks_in_ram_total") == 3
    assert all(len(requester.finals(each)) == 1 for each in [in_rows, *in_ram, back_in_rows])


@pytest.mark.usefixtures("impatient_store")
async def test_preferred_does_not_wait_for_a_silent_postgres_task_by_task(rig: Rig) -> None:
    """Once it is known to be away, a task falls at once; nobody pays the time limit again."""
    peer, requester, proxy = await rig.peer(), await rig.requester(), await store_proxy(rig)
    app = asking(rig.names.new(), peer.queue)
    peer.answer = echo
    worker = await rig.replica(app, checkpointing="preferred", store=proxy.url)
    proxy.blackhole()
    await requester.reply(await requester.send(app.service, "first"))

    tries = proxy.connection_count
    replies = [await requester.reply(await requester.send(app.service, f"t{number}")) for number in range(10)]
    tries = proxy.connection_count - tries
    proxy.restore()

    assert replies == [f"T{number}t{number}" for number in range(10)]
    assert tries < len(replies), "only the prober asks"
    assert delivered(worker) == 11 + 11


async def test_preferred_run_that_outlives_the_limit_still_falls_to_ram(rig: Rig) -> None:
    """Giving its message back needs Postgres; while it is away the run keeps the message, and is not held up."""
    peer, requester, proxy, log = await rig.peer(), await rig.requester(), await store_proxy(rig), listen(rig)
    app, go, begun = App(rig.names.new()), asyncio.Event(), asyncio.Event()
    peer.answer = echo

    @app.task
    async def think(ctx: Context, topic: str) -> str:
        begun.set()
        await go.wait()
        return await ctx.call(peer.queue, topic, timeout=60)

    proxy.refuse()
    worker = await rig.replica(app, checkpointing="preferred", store=proxy.url, long_run_limit=0.1)
    asked_for = await requester.send(app.service, "owls")
    await begun.wait()
    await asyncio.sleep(0.4)  # the limit has passed, several times
    assert acked(worker) == 0
    go.set()

    assert await requester.reply(asked_for) == "owls"
    assert log.all("task_fell_to_ram")
    assert not log.all("long_run_detached")
    proxy.accept()


@pytest.mark.parametrize("has_step", [True, False])
async def test_preferred_commit_in_doubt_does_not_fall_to_ram(rig: Rig, has_step: bool) -> None:
    """The row may be there, so only the row may be believed."""
    peer, requester, proxy, log = await rig.peer(), await rig.requester(), await store_proxy(rig), listen(rig)
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        if has_step:
            await ctx.step(str.upper, topic)
        return await ctx.call(peer.queue, topic, timeout=60)

    worker = await rig.replica(app, checkpointing="preferred", store=proxy.url)
    proxy.cut_next_commit()
    asked_for = await requester.send(app.service, "owls")
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    await question.reply("hoo")

    assert await requester.reply(asked_for) == "hoo"
    assert proxy.cut_count == 1
    assert metric(worker, "tasks_in_ram_total") == 0
    assert not log.all("task_fell_to_ram")
    assert set(peer.seen.values()) == {1}
    assert (await only_task(rig.store, TaskState.DONE)).state is TaskState.DONE
    assert len(requester.finals(asked_for)) == 1
