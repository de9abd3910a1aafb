"""Interleavings that were once wrong: copies that race, rows that cannot be sent, stops that come at a bad moment."""

import asyncio
from collections import Counter
from datetime import timedelta

import aio_pika
from tests.flow.harness import Rig, until

from coatcheck.store import TaskState
from coatcheck.worker import App, Context, Worker
from coatcheck.worker.outbox import Outbox


async def unacked_count(worker: Worker, name: str) -> int:
    return worker._consumers[name].session.unacked_count  # type: ignore[attr-defined]


async def test_second_requester_that_came_before_the_row_is_answered_too(rig: Rig) -> None:
    peer, app, may_park = await rig.peer(), App(rig.names.new()), asyncio.Event()

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        await may_park.wait()
        return await ctx.call(peer.queue, topic, timeout=60)

    worker = await rig.replica(app)
    first, second = await rig.requester(), await rig.requester()

    await first.send(app.service, "owls", headers={"cc-id": "shared"}, correlation_id="one")
    await until(lambda: _delivered(worker, 1), what="the first copy runs")
    await second.send(app.service, "owls", headers={"cc-id": "shared"}, correlation_id="two")
    await until(lambda: _delivered(worker, 2), what="the second copy is here")
    may_park.set()
    (question,) = await peer.asked()
    await until(lambda: _is_unacked(worker, "requests", 0), what="both copies are acked")
    await question.reply("hoo")

    assert await first.reply("one") == "hoo"
    assert await second.reply("two") == "hoo"


def _delivered(worker: Worker, count: int) -> bool:
    return worker._broker is not None and worker._consumers["requests"].session.unacked_count >= count  # type: ignore[attr-defined]


async def _is_unacked(worker: Worker, name: str, count: int) -> bool:
    return await unacked_count(worker, name) == count


async def test_copies_of_a_reply_that_both_came_back_do_not_chase_each_other(rig: Rig) -> None:
    peer, requester, service, begun = await rig.peer(), await rig.requester(), rig.names.new(), Counter[str]()

    def replica(name: str) -> App:
        app = App(service)

        async def work() -> int:
            begun[name] += 1
            await asyncio.sleep(0.5)
            return 1

        @app.task
        async def ask(ctx: Context, topic: str) -> str:
            answer = await ctx.call(peer.queue, topic, timeout=60)
            await ctx.step(work, key="work")
            return answer

        return app

    workers = [await rig.replica(replica(name)) for name in "ABCDEF"]
    asked_for = await requester.send(service, "owls")
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    for worker in workers:
        await worker._switch("replies", is_on=False)
    await question.reply("hoo", times=2)
    takers = []
    for _ in range(2):  # whoever prefetched the copies dies, one after the other
        connection = await aio_pika.connect(rig.settings.broker)
        queue = await (await connection.channel()).get_queue(f"{service}.replies")
        await until(lambda queue=queue: queue.get(fail=False), what="a copy is taken")
        takers.append(connection)
    for worker in workers:
        await worker._switch("replies", is_on=True)
    for connection in takers:
        await connection.close()

    assert await requester.reply(asked_for) == "hoo"
    assert sum(begun.values()) <= 3
    await until(lambda: _all_acked(workers), what="both copies are acked")


async def _all_acked(workers: list[Worker]) -> bool:
    return sum([await unacked_count(worker, "replies") for worker in workers]) == 0


async def test_overload_is_not_counted_against_tasks_that_never_ran(rig: Rig, monkeypatch) -> None:
    """Resumes without a slot are left to the sweeper again and again; they must not look like tasks that kill."""
    monkeypatch.setattr("coatcheck.worker.arrivals.OVERFLOW_LEASE", timedelta(seconds=0.2))
    peer, requester, may_end = await rig.peer(), await rig.requester(), asyncio.Event()
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        answer = await ctx.call(peer.queue, topic, timeout=60)
        await may_end.wait()
        return answer

    await rig.replica(app, concurrency=1, reply_prefetch=4, max_pickups=2)
    await rig.sweeper()
    sent = [await requester.send(app.service, f"t{number}") for number in range(8)]
    questions = await peer.asked(8)
    await rig.task(TaskState.PARKED, 8)
    for question in questions:
        await question.reply(question.body)
    sql = await rig.sql()
    await until(lambda: sql.fetchval("SELECT max(epoch) >= 5 FROM coatcheck.task"), what="some were handed on often")
    may_end.set()

    assert [await requester.reply(each) for each in sent] == [f"t{number}" for number in range(8)]


async def test_sweeper_survives_a_row_that_cannot_be_sent(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        return await ctx.call(peer.queue, topic, timeout=60)

    await rig.replica(app)
    broken, sound = await requester.send(app.service, "broken"), await requester.send(app.service, "sound")
    await peer.asked(2)
    await rig.task(TaskState.PARKED, 2)
    sql = await rig.sql()
    await sql.execute("UPDATE coatcheck.call SET is_sent = false, look_at = clock_timestamp()")
    await sql.execute("UPDATE coatcheck.call SET body = 'damaged' WHERE position('broken'::bytea IN body) > 0")
    await rig.sweeper()
    (again,) = await peer.asked()
    await again.reply("hoo")

    assert again.body == "sound"
    assert await requester.reply(sound) == "hoo"
    assert requester.finals(broken) == []


async def test_progress_with_a_nul_harms_nobody(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def tell(ctx: Context, _: str) -> str:
        ctx.progress(1, 2, "a\x00b")
        return await ctx.call(peer.queue, "?", timeout=60)

    await rig.replica(app)
    asked_for = await requester.send(app.service, "")
    (question,) = await peer.asked()
    await question.reply("fine")

    assert await requester.reply(asked_for) == "fine"


async def test_result_over_the_limit_is_answered_with_an_error(rig: Rig) -> None:
    app, runs = App(rig.names.new()), Counter[str]()

    @app.task
    async def huge(ctx: Context, size: int) -> str:
        runs["huge"] += 1
        return "x" * size

    await rig.replica(app)
    requester = await rig.requester()

    problem = await requester.reply(await requester.send(app.service, 5_000_000))

    assert problem["code"] == "result_too_large"
    assert runs == {"huge": 1}


async def test_duplicate_that_comes_while_the_answer_leaves_is_answered_itself(rig: Rig, monkeypatch) -> None:
    app, leaving, may_leave = App(rig.names.new()), asyncio.Event(), asyncio.Event()

    @app.task
    async def double(ctx: Context, number: int) -> int:
        return number * 2

    publish = Outbox.publish

    async def slow_publish(self, messages):
        routings = await publish(self, messages)
        leaving.set()
        await may_leave.wait()
        return routings

    worker = await rig.replica(app)
    first, second = await rig.requester(), await rig.requester()
    monkeypatch.setattr(Outbox, "publish", slow_publish)
    await first.send(app.service, 4, headers={"cc-id": "shared"}, correlation_id="one")
    await asyncio.wait_for(leaving.wait(), 20)
    await second.send(app.service, 4, headers={"cc-id": "shared"}, correlation_id="two")
    await until(lambda: _delivered(worker, 2), what="the second copy is here")
    may_leave.set()

    assert await first.reply("one") == 8
    assert await second.reply("two") == 8
    await until(lambda: _is_unacked(worker, "requests", 0), what="nothing is left unacked")


async def test_drain_keeps_to_its_grace_time_with_a_claim_in_flight(rig: Rig) -> None:
    peer, requester, claiming, may_claim = await rig.peer(), await rig.requester(), asyncio.Event(), asyncio.Event()
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, _: str) -> str:
        answer = await ctx.call(peer.queue, "?", timeout=60)
        await asyncio.sleep(60)
        return answer

    worker = Worker(app, rig._with({"grace": 0.5}))
    running = asyncio.create_task(worker.run())
    await until(lambda: worker.is_ready, what="the replica is ready")
    await requester.send(app.service, "")
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    store = next(iter(_stores(worker)))
    claim = store.claim

    async def slow_claim(arrival):
        claiming.set()
        await may_claim.wait()
        return await claim(arrival)

    store.claim = slow_claim
    await question.reply("hoo")
    await asyncio.wait_for(claiming.wait(), 20)
    worker.stop()
    may_claim.set()

    await asyncio.wait_for(running, 15)
    (task,) = await rig.store.list_tasks()
    assert task.state in (TaskState.RUNNING, TaskState.PARKED)


def _stores(worker: Worker):
    """The store a running replica uses."""
    import gc

    from coatcheck.worker.runtime import Runtime

    return [each.store for each in gc.get_objects() if isinstance(each, Runtime) and each.app is worker.app]
