"""A task is put down at a peer call and any replica picks it up."""

import asyncio
import random
from collections import Counter

from tests.flow.harness import Asked, Rig, until

from coatcheck.store import TaskState
from coatcheck.worker import App, CallTimedOut, Client, Context


def fan_out(service: str, peer: str, width: int = 4) -> tuple[App, Counter[str]]:
    """An app whose handler asks a peer `width` things; the counter says how often its end was reached, by topic."""
    app, ends = App(service), Counter[str]()

    @app.task
    async def gather(ctx: Context, topic: str) -> list[str]:
        found = await ctx.gather(*(ctx.call(peer, f"{topic}-{number}", timeout=60) for number in range(width)))
        ends[topic] += 1
        return found

    return app, ends


async def test_task_waits_as_rows_only_and_ends_when_all_replies_are_in(rig: Rig) -> None:
    peer = await rig.peer()
    app, _ = fan_out(rig.names.new(), peer.queue)
    worker = await rig.replica(app)
    requester = await rig.requester()

    asked_for = await requester.send(app.service, "owls")
    questions = await peer.asked(4)
    await rig.task(TaskState.PARKED)
    runs_while_waiting = worker.metrics.registry.get_sample_value("coatcheck_tasks_running")
    for question in questions:
        await question.reply(question.body.upper())

    assert await requester.reply(asked_for) == ["OWLS-0", "OWLS-1", "OWLS-2", "OWLS-3"]
    assert runs_while_waiting == 0
    assert len(requester.finals(asked_for)) == 1


async def test_task_that_never_waits_costs_no_database_access(rig: Rig) -> None:
    app = App(rig.names.new())

    @app.task
    async def double(ctx: Context, number: int) -> int:
        return number * 2

    worker = await rig.replica(app)
    requester = await rig.requester()

    replies = [await requester.reply(await requester.send(app.service, number)) for number in range(20)]

    assert replies == [number * 2 for number in range(20)]
    commits = [
        sample.value
        for family in worker.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "coatcheck_commit_seconds_count"
    ]
    assert sum(commits) == 0
    assert await rig.store.count_tasks() == {}


async def test_same_reply_delivered_twice_to_two_replicas_is_applied_once(rig: Rig) -> None:
    peer = await rig.peer()
    app, ends = fan_out(rig.names.new(), peer.queue, width=2)
    await rig.replica(app)
    await rig.replica(app)
    requester = await rig.requester()

    asked_for = await requester.send(app.service, "owls")
    first, second = await peer.asked(2)
    await first.reply("one", times=6)
    await second.reply("two", times=6)

    assert sorted(await requester.reply(asked_for)) == ["one", "two"]
    await until(lambda: _is_drained(rig, app.names.replies), what="all replies are acked")
    assert ends == {"owls": 1}
    assert len(requester.finals(asked_for)) == 1


async def _is_drained(rig: Rig, queue: str) -> bool:
    return await rig.depth(queue) == 0


async def test_last_two_replies_at_the_same_instant_on_two_replicas_resume_once(rig: Rig) -> None:
    peer = await rig.peer()
    app, ends = fan_out(rig.names.new(), peer.queue, width=2)
    await rig.replica(app)
    await rig.replica(app)
    requester = await rig.requester()
    count = 300

    sent = [await requester.send(app.service, f"t{number}") for number in range(count)]
    questions = await peer.asked(2 * count)
    pairs: dict[str, list[Asked]] = {}
    for question in questions:
        pairs.setdefault(question.body.rsplit("-", 1)[0], []).append(question)
    for pair in pairs.values():
        await asyncio.gather(*(question.reply(question.body) for question in pair))
    replies = [await requester.reply(each) for each in sent]

    assert replies == [[f"t{number}-0", f"t{number}-1"] for number in range(count)]
    assert set(ends.values()) == {1}
    assert len(ends) == count


async def test_no_wake_up_is_lost_while_branches_wait_on_different_things(rig: Rig) -> None:
    """Replies land while the run is live in a step: the put-down must look at its groups again under the lock."""
    fast, slow = await rig.peer("fast"), await rig.peer("slow")
    app = App(rig.names.new())

    async def think(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @app.task
    async def weave(ctx: Context, number: int) -> int:
        dice = random.Random(number)

        async def left() -> int:
            value = await ctx.call(fast.queue, number, timeout=60)
            await ctx.step(think, dice.random() / 100)
            return value + await ctx.call(slow.queue, 1, timeout=60)

        async def right() -> int:
            await ctx.step(think, dice.random() / 100)
            value = await ctx.call(slow.queue, 2, timeout=60)
            return value + await ctx.call(fast.queue, 3, timeout=60)

        return sum(await asyncio.gather(left(), right()))

    async def at_once(asked: Asked) -> None:
        await asked.reply(asked.body)

    async def soon(asked: Asked) -> None:
        asyncio.get_running_loop().call_later(
            random.random() / 50, lambda: asyncio.ensure_future(asked.reply(asked.body))
        )

    fast.answer, slow.answer = at_once, soon
    await rig.replica(app)
    await rig.replica(app)
    requester = await rig.requester()
    count = 1000

    sent = [await requester.send(app.service, number) for number in range(count)]
    replies = [await requester.reply(each, within_s=90) for each in sent]

    assert replies == [number + 6 for number in range(count)]
    assert await rig.store.without_waker() == []


async def test_reply_after_its_timeout_is_late_and_peer_hears_a_cancel(rig: Rig) -> None:
    peer = await rig.peer()
    app = App(rig.names.new())

    @app.task
    async def impatient(ctx: Context, _: str) -> str:
        try:
            return await ctx.call(peer.queue, "hello", timeout=0.3)
        except CallTimedOut as error:
            await ctx.sleep(0.3)
            return f"gave up: {error.code}"

    worker = await rig.replica(app)
    await rig.sweeper()
    requester = await rig.requester()

    asked_for = await requester.send(app.service, "")
    (question,) = await peer.asked()
    cancelled = await asyncio.wait_for(peer.cancels.get(), 20)
    await question.reply("too late")

    assert await requester.reply(asked_for) == "gave up: timed_out"
    assert cancelled == question.correlation_id
    await until(
        lambda: worker.metrics.registry.get_sample_value("coatcheck_replies_late_total") == 1, what="the reply is late"
    )


async def test_progress_moves_the_idle_deadline_but_never_the_hard_one(rig: Rig) -> None:
    peer = await rig.peer()
    app = App(rig.names.new())

    @app.task
    async def patient(ctx: Context, hard: float) -> str:
        try:
            return await ctx.call(peer.queue, "go", idle_timeout=0.6, timeout=hard)
        except CallTimedOut:
            return "timed out"

    await rig.replica(app)
    await rig.sweeper()
    requester = await rig.requester()

    kept_alive = await requester.send(app.service, 60)
    (question,) = await peer.asked()
    for done in range(6):
        await asyncio.sleep(0.3)
        await question.progress(done, 6)
    await question.reply("worth waiting")
    assert await requester.reply(kept_alive) == "worth waiting"

    cut_off = await requester.send(app.service, 1.0)
    (question,) = await peer.asked()
    for done in range(6):
        await asyncio.sleep(0.3)
        await question.progress(done, 6)
    assert await requester.reply(cut_off) == "timed out"


async def test_peers_error_reaches_the_handler_with_its_problem(rig: Rig) -> None:
    peer = await rig.peer()
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, _: str) -> str:
        return await ctx.call(peer.queue, "?", timeout=30)

    await rig.replica(app)
    requester = await rig.requester()

    asked_for = await requester.send(app.service, "")
    (question,) = await peer.asked()
    await question.fail("out of paper", code="no_paper", retryable=False)
    problem = await requester.reply(asked_for)

    assert problem["code"] == "handler_failed"
    assert problem["cause"]["code"] == "no_paper"
    assert "out of paper" in problem["detail"]
    assert requester.finals(asked_for)[0].content_type == "application/problem+json"
    (failed,) = await rig.task(TaskState.FAILED)
    assert "CallFailed" in (failed.traceback or "")


async def test_call_to_a_queue_that_does_not_exist_fails_with_no_route(rig: Rig) -> None:
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, _: str) -> str:
        return await ctx.call("cctest-nobody-home", "?", timeout=30)

    await rig.replica(app)
    requester = await rig.requester()

    problem = await requester.reply(await requester.send(app.service, ""))

    assert problem["cause"]["code"] == "no_route"


async def test_progress_of_a_task_reaches_whoever_asked(rig: Rig) -> None:
    peer = await rig.peer()
    app = App(rig.names.new())

    @app.task
    async def work(ctx: Context, _: str) -> str:
        ctx.progress(1, 2, "halfway")
        return await ctx.call(peer.queue, "?", timeout=30)

    await rig.replica(app)

    async with Client(rig.settings) as client:
        ticket = await client.submit(app.service, "")
        (question,) = await peer.asked()
        seen = []
        async for progress in ticket.progress():
            seen.append(progress)
            await question.reply("done")
        result = await ticket.result(20)

    assert [(each.done, each.total, each.message) for each in seen] == [(1, 2, "halfway")]
    assert result == "done"


async def test_traceparent_travels_through_the_call(rig: Rig) -> None:
    peer = await rig.peer()
    app, _ = fan_out(rig.names.new(), peer.queue, width=1)
    await rig.replica(app)
    requester = await rig.requester()
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"

    asked_for = await requester.send(app.service, "owls", headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    (question,) = await peer.asked()
    await question.reply("hoo")
    await requester.reply(asked_for)

    assert str(question.message.headers["traceparent"]).split("-")[1] == trace
    (final,) = requester.finals(asked_for)
    assert str(final.headers["traceparent"]).split("-")[1] == trace
