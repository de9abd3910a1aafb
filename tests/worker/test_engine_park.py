"""A run is put down where it waits, and goes on where it was: every way of waiting."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from typing import Any

import pytest
from tests.worker.fake_port import Desk, keys_of

from coatcheck.errors import CallFailed, CallTimedOut
from coatcheck.store.kinds import Kind
from coatcheck.worker.engine.classify import find_unsupported
from coatcheck.worker.engine.run_port import Finished, Parked


async def test_plain_await_is_parked_and_resumed():
    async def handler(ctx):
        found = await ctx.call("search", {"q": 1})
        return [found, await ctx.call("write", found)]

    desk = Desk(handler)
    await desk.parked()
    assert keys_of(desk.rows.open_calls) == ["search"]
    desk.ok("search", "hit")
    await desk.parked()
    desk.ok("write", "done")

    assert await desk.finished() == ["hit", "done"]
    assert keys_of(desk.rows.sent) == ["search", "write"]


async def test_handler_that_never_waits_commits_nothing():
    async def handler(ctx):
        return 42

    desk = Desk(handler)

    assert await desk.finished() == 42
    assert desk.rows.commits == []


RAN: list[Any] = []


@pytest.fixture(autouse=True)
def _forget_effects():
    RAN.clear()


async def plan(topic: str) -> list[str]:
    RAN.append(topic)
    return [topic, "b"]


async def test_step_is_recorded_once():
    async def handler(ctx):
        found = await ctx.step(plan, "a")
        return await ctx.call("search", found)

    desk = Desk(handler)
    await desk.parked()
    desk.ok("search", 1)

    assert await desk.finished() == 1
    assert RAN == ["a"]
    assert desk.port.first_effect_count == 0


async def test_gather_is_one_group():
    async def handler(ctx):
        return await ctx.gather(*(ctx.call("search", n) for n in range(3)))

    desk = Desk(handler)
    await desk.parked()
    assert [len(g.calls) for g in desk.rows.groups] == [3]
    desk.ok("search#3", "c")
    desk.ok("search", "a")
    assert not desk.rows.is_met()
    desk.ok("search#2", "b")
    assert desk.rows.is_met()

    assert await desk.finished() == ["a", "b", "c"]


async def test_gather_fails_fast():
    async def handler(ctx):
        try:
            return await ctx.gather(ctx.call("a"), ctx.call("b"))
        except CallFailed as error:
            return error.code

    desk = Desk(handler)
    await desk.parked()
    desk.fail("b")
    assert desk.rows.is_met()

    assert await desk.finished() == "peer_error"


async def test_sleep_is_a_timer_row():
    async def handler(ctx):
        await ctx.sleep(60)
        return "late"

    desk = Desk(handler)
    await desk.parked()
    (row,) = desk.rows.open_calls.values()
    assert row.kind is Kind.TIMER
    assert row.hard == timedelta(seconds=60)
    desk.ok(row.key)

    assert await desk.finished() == "late"


async def test_call_that_times_out_raises():
    async def handler(ctx):
        with pytest.raises(CallTimedOut):
            await ctx.call("a", timeout=1)
        return "seen"

    desk = Desk(handler)
    await desk.parked()
    desk.time_out("a")

    assert await desk.finished() == "seen"


async def test_asyncio_gather():
    async def fetch(ctx, n):
        first = await ctx.call("a", n)
        return await ctx.call("b", first)

    async def handler(ctx):
        return await asyncio.gather(fetch(ctx, 1), fetch(ctx, 2))

    desk = Desk(handler)
    await desk.parked()
    assert sorted(desk.rows.open_calls) == ["fetch#2/a", "fetch/a"]
    desk.ok("fetch#2/a", 20)
    await desk.parked()
    assert sorted(desk.rows.open_calls) == ["fetch#2/b", "fetch/a"]
    desk.ok("fetch#2/b", 200)
    await desk.parked()
    desk.ok("fetch/a", 10)
    await desk.parked()
    desk.ok("fetch/b", 100)

    assert await desk.finished() == [100, 200]


async def test_in_ram_mode_goes_on_with_deliver():
    async def handler(ctx):
        return [await ctx.call("a"), await ctx.call("b")]

    desk = Desk(handler, parks=False)
    running = asyncio.create_task(desk.once())
    while "a" not in desk.rows.open_calls:
        await asyncio.sleep(0)
    desk.run.deliver([desk.ok("a", 1)])
    while "b" not in desk.rows.open_calls:
        await asyncio.sleep(0)
    desk.run.deliver([desk.ok("b", 2)])

    assert (await running).value == [1, 2]
    assert desk.runs == 1
    assert len(desk.rows.commits) == 2  # a port that does not park is not asked again and again


# --- every way of asyncio to wait ---


async def test_task_group():
    async def fetch(ctx, name):
        return await ctx.call(name)

    async def handler(ctx):
        async with asyncio.TaskGroup() as group:
            one = group.create_task(fetch(ctx, "a"))
            two = group.create_task(fetch(ctx, "b"), name="second")
        return [one.result(), two.result()]

    desk = Desk(handler)
    await desk.parked()
    assert sorted(desk.rows.open_calls) == ["fetch/a", "second/b"]
    desk.ok("second/b", 2)
    await desk.parked()
    desk.ok("fetch/a", 1)

    assert await desk.finished() == [1, 2]


async def test_task_group_aborts_and_closes_the_other_call():
    async def handler(ctx):
        codes: list[Any] = []
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(ctx.call("a"))
                group.create_task(ctx.call("b"))
        except* CallFailed as errors:
            codes += (str(each) for each in errors.exceptions)
        return [len(codes), await ctx.call("c")]

    desk = Desk(handler)
    await desk.parked()
    desk.fail("a")
    await desk.parked()
    assert keys_of(desk.rows.open_calls) == ["c"]
    desk.ok("c", 3)

    assert await desk.finished() == [1, 3]


async def test_as_completed_replays_the_order_of_replies():
    async def fetch(ctx, n):
        return await ctx.call(f"p{n}")

    async def handler(ctx):
        order = [await each for each in asyncio.as_completed([fetch(ctx, n) for n in range(5)])]
        return [order, await ctx.call("end")]

    desk = Desk(handler)
    await desk.parked()
    assert sorted(desk.rows.open_calls) == [f"fetch.{n + 1}/p{n}" for n in range(5)]
    for n in (3, 0, 4, 1, 2):
        desk.ok(f"fetch.{n + 1}/p{n}", n)
    await desk.parked()
    desk.ok("end", "!")

    assert await desk.finished() == [[3, 0, 4, 1, 2], "!"]


async def test_as_completed_refuses_a_set():
    async def fetch(ctx):
        return await ctx.call("a")

    async def handler(ctx):
        one = fetch(ctx)
        try:
            for each in asyncio.as_completed({one}):
                await each
        finally:
            one.close()

    assert "list" in str(await Desk(handler).raised())


async def test_wait_first_completed_replays_the_winner():
    async def handler(ctx):
        tasks = [asyncio.create_task(ctx.call(name)) for name in "abc"]
        won = []
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            won.append(sorted(task.result() for task in done))
        return won

    desk = Desk(handler)
    await desk.parked()
    assert sorted(desk.rows.open_calls) == ["a", "b", "c"]
    desk.ok("b", "b")
    await desk.parked()
    desk.ok("c", "c")
    desk.ok("a", "a")

    assert await desk.finished() == [["b"], ["c"], ["a"]]


async def test_wait_with_a_timeout_teaches():
    async def handler(ctx):
        await asyncio.wait({asyncio.create_task(ctx.call("a"))}, timeout=60)

    error = await Desk(handler).raised()

    assert "asyncio.timeout" in str(error)
    assert "asyncio.wait(timeout=...)" in str(error)


async def test_wait_for_teaches_or_works():
    async def handler(ctx):
        try:
            return await asyncio.wait_for(ctx.call("a"), 60)
        except TimeoutError:
            return "over"

    desk = Desk(handler)
    if sys.version_info < (3, 12):
        assert "wait_for" in str(await desk.raised())
        return
    await desk.parked()
    assert sorted(desk.rows.open_calls) == ["@timeout", "a"]
    desk.ok("@timeout")
    assert await desk.finished() == "over"


async def test_shield_keeps_the_call_open():
    async def handler(ctx):
        inner = asyncio.create_task(ctx.call("a"))
        try:
            async with asyncio.timeout(60):
                await asyncio.shield(inner)
        except TimeoutError:
            pass
        return await inner

    desk = Desk(handler)
    await desk.parked()
    desk.ok("@timeout")
    await desk.parked()
    assert keys_of(desk.rows.open_calls) == ["a"]
    desk.ok("a", 5)

    assert await desk.finished() == 5


async def test_timeout_around_calls_fires_at_its_place():
    async def handler(ctx):
        got = []
        limit = asyncio.timeout(60)
        try:
            async with limit:
                got.append(await ctx.call("a"))
                got.append(await ctx.call("b"))
        except TimeoutError:
            got.append("over")
        return [got, limit.expired(), await ctx.call("c")]

    desk = Desk(handler)
    await desk.parked()
    assert timedelta(seconds=59) < (desk.rows.open_calls["@timeout"].hard or timedelta()) <= timedelta(seconds=60)
    desk.ok("a", 1)
    await desk.parked()
    desk.ok("@timeout")
    desk.ok("b", 2)  # too late: the timeout has the lower sequence
    await desk.parked()
    assert keys_of(desk.rows.open_calls) == ["c"]
    desk.ok("c", 3)

    assert await desk.finished() == [[1, "over"], True, 3]


async def test_timeout_that_does_not_fire_closes_its_timer():
    async def handler(ctx):
        async with asyncio.timeout(60):
            await ctx.call("a")
        return await ctx.call("b")

    desk = Desk(handler)
    await desk.parked()
    desk.ok("a")
    await desk.parked()
    assert keys_of(desk.rows.open_calls) == ["b"]
    desk.ok("b", 1)

    assert await desk.finished() == 1


async def test_timeout_that_fires_while_live_is_recorded():
    async def handler(ctx):
        try:
            async with asyncio.timeout(0.01):
                await ctx.step(never)
        except TimeoutError:
            RAN.append("over")
        return await ctx.call("a")

    desk = Desk(handler)
    await desk.parked()
    assert sorted(RAN) == ["cut", "never", "over"]
    assert desk.rows.recorded["@timeout"].kind is Kind.NOTE
    desk.ok("a", 1)

    assert await desk.finished() == 1
    assert sorted(RAN) == ["cut", "never", "over", "over"]


async def never() -> None:
    RAN.append("never")
    try:
        await asyncio.Event().wait()
    finally:
        RAN.append("cut")


async def test_rescheduled_timeout():
    async def handler(ctx):
        try:
            async with asyncio.timeout(3600) as limit:
                await ctx.call("a")
                limit.reschedule(asyncio.get_running_loop().time() + 30)
                await ctx.call("b")
        except TimeoutError:
            return "over"

    desk = Desk(handler)
    await desk.parked()
    desk.ok("a")
    await desk.parked()
    assert sorted(desk.rows.open_calls) == ["@timeout#2", "b"]
    assert (desk.rows.open_calls["@timeout#2"].hard or timedelta.max) <= timedelta(seconds=30)
    desk.ok("@timeout#2")

    assert await desk.finished() == "over"


async def test_locks_between_branches():
    async def work(ctx, lock, name):
        async with lock:
            return await ctx.call(name)

    async def handler(ctx):
        lock = asyncio.Semaphore(1)
        return await asyncio.gather(work(ctx, lock, "a"), work(ctx, lock, "b"))

    desk = Desk(handler)
    await desk.parked()
    assert keys_of(desk.rows.open_calls) == ["work/a"]
    desk.ok("work/a", 1)
    await desk.parked()
    assert keys_of(desk.rows.open_calls) == ["work#2/b"]
    desk.ok("work#2/b", 2)

    assert await desk.finished() == [1, 2]


async def test_event_and_queue_between_branches():
    async def source(ctx, queue, event):
        for name in "ab":
            await queue.put(await ctx.call(name))
        event.set()

    async def sink(ctx, queue, event):
        got = [await queue.get(), await queue.get()]
        await event.wait()
        return got

    async def handler(ctx):
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        event = asyncio.Event()
        return (await asyncio.gather(source(ctx, queue, event), sink(ctx, queue, event)))[1]

    desk = Desk(handler)
    await desk.parked()
    desk.ok("source/a", 1)
    await desk.parked()
    desk.ok("source/b", 2)

    assert await desk.finished() == [1, 2]


async def test_calls_leave_while_a_step_runs():
    release = asyncio.Event()
    GATES["step"] = release

    async def handler(ctx):
        return await asyncio.gather(ctx.call("a"), ctx.step(gated))

    desk = Desk(handler)
    running = asyncio.create_task(desk.once())
    while "a" not in desk.rows.open_calls:
        await asyncio.sleep(0)
    assert not release.is_set()
    desk.ok("a", 1)
    release.set()

    assert (await running).value == [1, "stepped"]


GATES: dict[str, asyncio.Event] = {}


async def gated() -> str:
    await GATES["step"].wait()
    return "stepped"


async def test_held_run_sends_its_calls_after_a_while(monkeypatch):
    monkeypatch.setattr("coatcheck.worker.engine.run.HELD_FLUSH_S", 0.01)
    outside = asyncio.get_running_loop().create_future()

    async def wait_outside():
        await outside

    async def handler(ctx):
        return await asyncio.gather(ctx.call("a"), wait_outside())

    desk = Desk(handler)
    running = asyncio.create_task(desk.once())
    while "a" not in desk.rows.open_calls:
        await asyncio.sleep(0.001)
    assert not desk.rows.is_parked
    outside.set_result(None)
    assert await running == Parked()
    desk.ok("a", 1)
    outside = asyncio.get_running_loop().create_future()
    outside.set_result(None)

    assert await desk.finished() == [1, None]


async def test_news_that_land_during_the_put_down_are_taken_without_parking():
    async def branch(ctx, first, second):
        return [await ctx.call(first), await ctx.call(second)]

    async def handler(ctx):
        return await asyncio.gather(branch(ctx, "a", "b"), branch(ctx, "c", "d"))

    desk = Desk(handler)
    await desk.parked()
    desk.ok("branch/a", 1)
    desk.begin()
    desk.port.before_commit = lambda _: desk.ok("branch#2/c", 3) if "branch#2/c" in desk.rows.open_calls else None
    assert await desk.run.execute() == Parked()
    assert sorted(desk.rows.open_calls) == ["branch#2/d", "branch/b"]
    assert desk.runs == 2
    desk.ok("branch/b", 2)
    desk.ok("branch#2/d", 4)

    assert await desk.finished() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("style", ["gather", "group", "mixed"])
async def test_tasks_that_are_only_waited_for_together_make_one_group(style):
    async def handler(ctx):
        match style:
            case "gather":
                return await asyncio.gather(*(ctx.call("a", n) for n in range(3)))
            case "group":
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(ctx.call("a", n)) for n in range(3)]
                return [task.result() for task in tasks]
            case _:
                return (await ctx.gather(*(ctx.call("a", n) for n in range(3)), ctx.step(plan, "b")))[:3]

    desk = Desk(handler)
    await desk.parked()
    assert [(len(group.calls), group.need) for group in desk.rows.groups] == [(3, 3)]
    for key in ("a#2", "a", "a#3"):
        assert not desk.rows.is_met()
        desk.ok(key, key)
    assert desk.rows.is_met()

    assert await desk.finished() == ["a", "a#2", "a#3"]


async def test_gathered_task_that_somebody_else_waits_for_wakes_him():
    async def watcher(ctx, task):
        await task
        return await ctx.call("seen")

    async def handler(ctx):
        task = asyncio.create_task(ctx.call("a"))
        return await asyncio.gather(asyncio.gather(task, ctx.call("b")), watcher(ctx, task))

    desk = Desk(handler)
    await desk.parked()
    desk.ok("a", 1)
    assert desk.rows.is_met()
    await desk.parked()

    assert sorted(desk.rows.open_calls) == ["b", "watcher/seen"]


def test_this_python_is_supported():
    assert find_unsupported() == ()


async def test_news_told_during_a_commit_wait_for_its_lower_numbers():
    async def seen(what, order):
        order.append(await what)

    async def handler(ctx):
        order: list[Any] = []
        await asyncio.gather(seen(ctx.step(plan, "s"), order), seen(ctx.call("a"), order))
        return [order, await ctx.call("end")]

    desk = Desk(handler)
    running = asyncio.create_task(desk.once())
    while not hasattr(desk, "port"):
        await asyncio.sleep(0)

    def claim_at_once(changes, committed):
        if changes.entries:  # the step has its number; the reply gets the next, and is told before the commit returns
            desk.run.deliver([desk.ok("a", "reply")])

    desk.port.after_commit = claim_at_once
    assert await running == Parked()
    assert desk.rows.recorded["plan"].seq < desk.rows.recorded["a"].seq
    desk.ok("end", 0)

    assert await desk.finished() == [[["s", "b"], "reply"], 0]


async def test_reply_told_during_the_put_down_is_not_lost():
    async def handler(ctx):
        return await ctx.call("a")

    desk = Desk(handler)
    await desk.parked()
    desk.begin()  # woken for nothing, say by an expired lease
    desk.port.before_commit = lambda _: desk.run.deliver([desk.ok("a", 1)])
    outcome = await desk.run.execute()

    assert outcome == Finished(1)


@pytest.mark.parametrize("seconds", [1e12, float("inf")])
async def test_timeout_beyond_the_calendar_parks_all_the_same(seconds):
    async def handler(ctx):
        async with asyncio.timeout(seconds):
            return await ctx.call("peer", 1)

    desk = Desk(handler)
    outcome = await desk.once()

    assert outcome == Parked()
    assert all(call.hard is None or call.hard <= timedelta(days=3650) for call in desk.rows.open_calls.values())
