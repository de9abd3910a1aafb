"""Orders on real servers: a task is taken back, forked, retried, paused, and ends as it should."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from uuid import UUID

import pytest
from tests.flow.harness import Asked, Rig, until

from coatcheck.store import TaskState
from coatcheck.worker import App, Client, Context

EXPECTED = "5:a b c d e; hoo, hoo, branch"


def app_for(service: str, peer: str, effects: Counter[str], fails: set[str] | None = None) -> App:
    """Five steps, calls, a timer and a branch; each effect is counted."""
    app = App(service)

    def do(name: str) -> str:
        effects[name] += 1
        if fails and name in fails:
            raise ValueError(name)
        return name

    @app.task(on_damage="redo")
    async def research(ctx: Context, count: int) -> str:
        async def branch() -> str:
            await ctx.call(peer, "branch", timeout=60)
            return await ctx.step(do, "branch", key="branch")

        beside = asyncio.create_task(branch())
        done = [await ctx.step(do, "a", key="a")]
        one = await ctx.call(peer, str(ctx.uuid("one")), timeout=60)
        done.append(await ctx.step(do, "b", key="b"))
        await ctx.sleep(0.05)
        done.append(await ctx.step(do, "c", key="c"))
        two = await ctx.call(peer, ctx.random(), timeout=60)
        done += [await ctx.step(do, "d", key="d"), await ctx.step(do, "e", key="e")]
        return f"{count}:{' '.join(done)}; {one}, {two}, {await beside}"

    return app


async def answering(asked: Asked) -> None:
    await asked.reply("hoo")


async def answering_texts(asked: Asked) -> None:
    """All but the last call, whose body is a number."""
    if isinstance(asked.body, str):
        await asked.reply("hoo")
    else:
        asked.peer.arrived.put_nowait(asked)


async def finished(client: Client, task_id: UUID) -> Any:
    return await client.result(task_id, timeout=40)


@pytest.fixture
async def scene(rig: Rig) -> Any:
    service, peer, effects = rig.names.new(), await rig.peer(), Counter[str]()
    peer.answer = answering
    fails: set[str] = set()
    await rig.replica(app_for(service, peer.queue, effects, fails))
    await rig.sweeper()
    async with Client(rig.settings) as client:
        yield rig, client, service, peer, effects, fails


async def test_fork_at_every_checkpoint_gives_the_same_result_and_does_only_what_is_later(scene: Any) -> None:
    _, client, service, _, effects, _ = scene
    ticket = await client.submit(service, 5)
    assert await ticket.result(timeout=40) == EXPECTED
    task = await client.get(ticket.task_id)
    lines = await client.lines(task.task_id)

    for number in range(task.checkpoint + 1):
        kept = {line.key.rpartition("/")[2] for line in lines if line.checkpoint <= number and line.kind == "step"}
        effects.clear()
        done = await client.fork(task.task_id, number)

        assert done.new_task_id is not None
        assert await finished(client, done.new_task_id) == EXPECTED
        assert effects.keys().isdisjoint(kept)
        assert effects.keys() | kept == {"a", "b", "c", "d", "e", "branch"}
        assert set(effects.values()) <= {1}


async def test_waiting_task_is_rewound_at_every_checkpoint_and_does_only_what_is_later(scene: Any) -> None:
    _, client, service, peer, effects, _ = scene
    number = last = 0
    while number <= last:
        peer.answer = answering_texts
        ticket = await client.submit(service, 5, reply=False)
        (question,) = await peer.asked()
        await until(lambda: _is(client, ticket.task_id, TaskState.PARKED), what="it waits")  # noqa: B023 - at once
        last = (await client.get(ticket.task_id)).checkpoint  # one less, where two things were ready at once
        number = min(number, last)
        steps = [line for line in await client.lines(ticket.task_id) if line.kind == "step"]
        kept = {line.key.rpartition("/")[2] for line in steps if line.checkpoint <= number}
        effects.clear()
        peer.answer = answering

        await client.rewind(ticket.task_id, number)

        await question.reply("hoo")
        assert await finished(client, ticket.task_id) == EXPECTED
        assert effects == Counter({"a", "b", "c", "d", "e", "branch"} - kept)
        number += 1


async def test_failed_task_is_rewound_at_every_checkpoint(scene: Any) -> None:
    _, client, service, _, effects, fails = scene
    fails.add("e")
    ticket = await client.submit(service, 5, reply=False)
    await until(lambda: _is(client, ticket.task_id, TaskState.FAILED), what="it fails")
    last = (await client.get(ticket.task_id)).checkpoint

    for number in range(last):
        await client.rewind(ticket.task_id, number)
        await until(lambda: _is(client, ticket.task_id, TaskState.FAILED), what="it fails again")
    fails.clear()
    effects.clear()
    done = await client.retry(ticket.task_id)

    assert done.discarded == ("e",)
    assert await finished(client, ticket.task_id) == EXPECTED
    assert effects == {"e": 1}
    assert (await client.get(ticket.task_id)).revision == last + 1


async def test_calls_made_anew_have_another_key(scene: Any) -> None:
    _, client, service, peer, _, _ = scene
    peer.answer = None
    ticket = await client.submit(service, 5, reply=False)
    before = {asked.body: asked.message.headers["cc-key"] for asked in await peer.asked(2)}

    await client.rewind(ticket.task_id, "start")

    again = {asked.body: asked.message.headers["cc-key"] for asked in await peer.asked(2)}
    assert again == {body: f"{key}:1" for body, key in before.items()}
    peer.answer = answering
    assert {await peer.cancels.get() for _ in before}


async def test_paused_task_goes_on_where_it_was(scene: Any) -> None:
    _, client, service, peer, effects, _ = scene
    peer.answer = None
    ticket = await client.submit(service, 5, reply=False)
    questions = await peer.asked(2)
    await until(lambda: _is(client, ticket.task_id, TaskState.PARKED), what="it waits")
    await client.pause(ticket.task_id)

    for question in questions:
        await question.reply("hoo")
    await until(lambda: _answered(client, ticket.task_id), what="the replies are recorded")
    assert (await client.get(ticket.task_id)).state is TaskState.PAUSED
    assert effects == {"a": 1}

    peer.answer = answering
    await client.resume(ticket.task_id)
    assert await finished(client, ticket.task_id) == EXPECTED


async def test_running_task_pauses_at_its_next_write(rig: Rig) -> None:
    service, may_end, begun = rig.names.new(), asyncio.Event(), asyncio.Event()
    app = App(service)

    async def slow() -> int:
        begun.set()
        await may_end.wait()
        return 1

    @app.task
    async def work(ctx: Context, count: int) -> int:
        return await ctx.step(slow, key="slow") + await ctx.step(slow, key="slower") + count

    await rig.replica(app)
    await rig.sweeper()
    async with Client(rig.settings) as client:
        ticket = await client.submit(service, 40, reply=False)
        await begun.wait()
        await client.pause(ticket.task_id)
        may_end.set()
        await until(lambda: _is(client, ticket.task_id, TaskState.PAUSED), what="it pauses")

        await client.resume(ticket.task_id)

        assert await finished(client, ticket.task_id) == 42


@pytest.mark.parametrize(("table", "where"), [("journal", "key = 'a'"), ("call", "state = 'ok' AND kind = 'call'")])
async def test_damaged_value_is_done_anew(scene: Any, table: str, where: str) -> None:
    rig, client, service, peer, _, _ = scene
    peer.answer = None
    sql = await rig.sql()
    ticket = await client.submit(service, 5, reply=False)
    questions = await peer.asked(2)
    first = next(asked for asked in questions if asked.body == "branch")
    await first.reply("hoo")
    await until(lambda: _answered(client, ticket.task_id, count=1), what="one reply is recorded")
    await until(lambda: _is(client, ticket.task_id, TaskState.PARKED), what="it waits")
    flipped = f"UPDATE coatcheck.{table} SET value = set_byte(value, 8, get_byte(value, 8) # 4)"
    await sql.execute(f"{flipped} WHERE task_id = $1 AND {where}", ticket.task_id)
    peer.answer = answering
    for asked in questions:
        if asked is not first:
            await asked.reply("hoo")

    assert await finished(client, ticket.task_id) == EXPECTED
    assert any(line.is_forgotten for line in await client.lines(ticket.task_id))


async def _is(client: Client, task_id: UUID, state: TaskState) -> bool:
    task = await client.find(task_id)
    return task is not None and task.state is state


async def _answered(client: Client, task_id: UUID, count: int = 2) -> bool:
    return sum(line.kind == "call" and line.state == "ok" for line in await client.lines(task_id)) >= count
