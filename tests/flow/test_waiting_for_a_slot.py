"""A granted task waits until a handler may run, or runs for long: what happens to it meanwhile is not lost on it."""

import asyncio
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from tests.flow.harness import Process, Rig, until
from tests.flow.test_killing import Fleet

from coatcheck.store import CallId, CallState, TaskId, TaskState
from coatcheck.store.blobs import encode
from coatcheck.store.rows import Arrival, Verdict
from coatcheck.worker import App, Context
from coatcheck.worker.phases import Phase
from coatcheck.worker.runtime import LiveRuns
from coatcheck.worker.task_run import TaskRun


async def test_neighbours_of_a_killer_are_answered_however_often_they_died_with_it(rig: Rig, tmp_path: Path) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    ledger = tmp_path / "ledger"
    limit = 2
    first = await fleet.start("victim", COATCHECK_MAX_PICKUPS=str(limit), FLOW_STEP_S="1")

    async def keep_alive(replica: Process) -> None:
        while True:
            await replica.process.wait()
            replica = await fleet.start_unseen("victim", COATCHECK_MAX_PICKUPS=str(limit), FLOW_STEP_S="1")

    supervisor = asyncio.create_task(keep_alive(first))
    # Each takes longer than the killer lets them live, so all come to their last attempt together.
    harmless = [
        await requester.send(fleet.service, str(tmp_path / f"step-{number}"), type="slow_step") for number in range(6)
    ]
    deadly = await requester.send(fleet.service, str(ledger), type="killer")
    problem = await requester.reply(deadly, within_s=90)
    answers = [await requester.reply(each, within_s=90) for each in harmless]
    supervisor.cancel()

    assert problem["code"] == "crashed_repeatedly"
    assert answers == ["victim"] * 6


async def test_run_that_waited_for_its_slot_beyond_its_lease_does_not_begin(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())
    effects: list[str] = []
    blocked, go = asyncio.Event(), asyncio.Event()

    @app.task
    async def blocking(ctx: Context, topic: str) -> str:
        blocked.set()
        await go.wait()
        return topic

    @app.task
    async def working(ctx: Context, topic: str) -> str:
        answer: str = await ctx.call(peer.queue, topic, timeout=60)
        await ctx.step(effects.append, answer, key="work")
        return answer

    lives: dict[TaskId, TaskRun] = {}
    add = LiveRuns.add
    monkeypatch.setattr(LiveRuns, "add", lambda self, live: (lives.update({live.task_id: live}), add(self, live)))
    await rig.replica(app, concurrency=1, lease=30)
    asked_for = await requester.send(app.service, "owls", type="working")
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    other = await requester.send(app.service, "bats", type="blocking")
    async with asyncio.timeout(20):
        await blocked.wait()
    await question.reply("hoo")  # granted, and the only slot is taken
    (waiting,) = await rig.task(TaskState.RUNNING)
    live = await until(lambda: (it := lives[waiting.task_id]).epoch == waiting.epoch and it, what="it waits")
    live.renewed_s -= 30  # what a slot that takes half a minute to come makes of it
    sql = await rig.sql()
    await sql.execute(  # another replica has taken it over, and dies
        "UPDATE coatcheck.task SET epoch = epoch + 1, due_at = now() + $2, look_at = now() + $2 WHERE id = $1",
        waiting.task_id,
        timedelta(seconds=1),
    )
    go.set()

    assert await requester.reply(other) == "bats"
    await until(lambda: live.phase is Phase.SETTLED, what="it has let go")
    assert effects == []
    await rig.sweeper()
    assert await requester.reply(asked_for) == "hoo"
    assert effects == ["hoo"]


async def test_reply_that_a_detach_reads_reaches_the_run(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())
    go = asyncio.Event()

    @app.task
    async def working(ctx: Context, topic: str) -> list[str]:
        async def work() -> str:
            await go.wait()
            return "worked"

        return await ctx.gather(ctx.call(peer.queue, topic, timeout=60), ctx.step(work, key="work"))

    await rig.replica(app, long_run_limit=1.0)
    asked_for = await requester.send(app.service, "owls", type="working")
    (question,) = await peer.asked()
    assert question.correlation_id is not None
    # Another replica claims the reply, and its word to this one is lost.
    claimed = await rig.store.claim(Arrival(CallId(UUID(question.correlation_id)), CallState.OK, encode("hoo")))
    sql = await rig.sql()
    await until(lambda: sql.fetchval("SELECT trigger IS NULL FROM coatcheck.task"), what="the run is detached")
    go.set()

    assert claimed.verdict is Verdict.RECORDED
    assert await requester.reply(asked_for) == ["hoo", "worked"]
