"""Putting a run down: quiet for user code, without leaks, in every state."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any

import pytest
from tests.worker.fake_port import Desk, keys_of

from coatcheck.errors import StoreUnavailable
from coatcheck.worker.engine.run_port import Abandoned, Cancelled, Finished, Held, Parked, Raised, Superseded
from coatcheck.worker.engine.tracking import Driver, PutDown, Tracked

SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _forget():
    SEEN.clear()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_put_down_is_no_exception_and_no_cancellation():
    async def handler(ctx):
        try:
            await ctx.call("a")
        except Exception:  # noqa: BLE001 - what user code may write
            SEEN.append("Exception")
        except asyncio.CancelledError:
            SEEN.append("CancelledError")
        finally:
            SEEN.append("finally")

    await Desk(handler).parked()

    assert SEEN == ["finally"]


async def test_put_down_is_silent_in_groups():
    async def branch(ctx):
        try:
            await ctx.call("a")
        except* Exception:  # noqa: BLE001 - what user code may write
            SEEN.append("Exception")
        except* asyncio.CancelledError:
            SEEN.append("CancelledError")

    async def handler(ctx):
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(branch(ctx))
                group.create_task(branch(ctx))
                await ctx.call("b")
        except* Exception:  # noqa: BLE001 - what user code may write
            SEEN.append("outer")

    desk = Desk(handler)
    await desk.parked()

    assert SEEN == []
    assert desk.log.lines == []


async def test_cleanup_may_await():
    async def handler(ctx):
        try:
            await ctx.call("a")
        finally:
            await asyncio.sleep(0.001)
            async with asyncio.timeout(1):
                await asyncio.sleep(0)
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(0))
            SEEN.append("closed")

    desk = Desk(handler)
    await desk.parked()

    assert SEEN == ["closed"]
    assert desk.log.lines == []


async def test_durable_work_in_finally_raises_put_down():
    async def handler(ctx):
        try:
            await ctx.call("a")
        finally:
            for attempt in (lambda: ctx.call("b"), lambda: ctx.sleep(1), lambda: ctx.gather(ctx.call("c"), noop())):
                with pytest.raises(PutDown):
                    await attempt()
            SEEN.append(ctx.uuid("x"))

    desk = Desk(handler)
    await desk.parked()

    assert keys_of(desk.rows.open_calls) == ["a"]
    assert len(SEEN) == 1


async def noop():
    pass


async def test_error_in_cleanup_of_a_branch_is_logged_and_swallowed():
    async def branch(ctx):
        try:
            await ctx.call("a")
        finally:
            raise ValueError("broken cleanup")

    async def handler(ctx):
        await asyncio.gather(branch(ctx), ctx.call("b"))

    desk = Desk(handler)
    await desk.parked()

    assert desk.log.events() == ["cleanup_raised"]


async def test_user_code_that_swallows_everything_is_left_behind():
    async def handler(ctx):
        while True:
            try:
                await ctx.call("a")
            except BaseException:
                SEEN.append(1)
                if len(SEEN) > 1_000:
                    raise

    desk = Desk(handler)
    await desk.parked()

    assert desk.log.events() == ["branch_left_behind"]
    assert "test_engine_putdown.py" in desk.log.lines[0][2]["line"]


async def test_cleanup_that_hangs_is_left_behind(monkeypatch):
    monkeypatch.setattr("coatcheck.worker.engine.run.UNWIND_S", 0.02)
    forever = asyncio.get_running_loop().create_future()

    async def handler(ctx):
        try:
            await ctx.call("a")
        finally:
            await asyncio.shield(forever)

    desk = Desk(handler)
    await desk.parked()

    assert desk.log.events() == ["branch_left_behind"]
    forever.set_result(None)
    await asyncio.sleep(0)


async def test_swallowed_put_down_ends_parked_all_the_same():
    async def handler(ctx):
        try:
            await ctx.call("a")
        except BaseException:  # noqa: BLE001 - what user code may write
            SEEN.append("swallowed")
        return "returned"

    desk = Desk(handler)

    await desk.parked()
    assert SEEN == ["swallowed"]


async def test_shared_semaphore_is_not_poisoned():
    shared = asyncio.Semaphore(1)

    async def handler(ctx):
        async with shared:
            await ctx.call("a")

    async def other(ctx):
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.call("b"))
            group.create_task(use(shared))

    async def use(semaphore):
        async with semaphore:
            await asyncio.sleep(0)

    one, two = Desk(handler), Desk(other)
    for _ in range(20):
        await asyncio.gather(one.once(), two.once())
        one.rows.open_calls.clear()
        two.rows.open_calls.clear()

    assert not shared.locked()


async def test_answered_waiter_takes_hold_before_it_is_unwound():
    shared = asyncio.Semaphore(1)
    await shared.acquire()

    async def handler(ctx):
        async with shared:
            SEEN.append("held")
            await ctx.call("a")

    desk = Desk(handler)
    running = asyncio.create_task(desk.once())
    await until(lambda: shared._waiters)
    shared.release()
    desk.run.abandon()  # the permit is on its way to the branch, in the same pass of the loop

    assert await running == Abandoned()
    assert SEEN == ["held"]
    assert not shared.locked()


@pytest.mark.parametrize("style", ["await", "gather", "tasks", "group", "first", "timeout"])
async def test_a_thousand_put_downs_make_no_noise(style, caplog, capsys):  # noqa: C901 - one case for each style
    async def one(ctx):
        return await ctx.call("b")

    async def handler(ctx):
        match style:
            case "await":
                await ctx.call("a")
            case "gather":
                await ctx.gather(*(ctx.call("a") for _ in range(3)))
            case "tasks":
                await asyncio.gather(*(asyncio.create_task(ctx.call("a")) for _ in range(3)), one(ctx))
            case "group":
                async with asyncio.TaskGroup() as group:
                    for _ in range(3):
                        group.create_task(one(ctx))
            case "first":
                await ctx.first(one(ctx), ctx.call("a"))
            case "timeout":
                async with asyncio.timeout(5):
                    await ctx.call("a")
            case _:
                raise AssertionError(style)
        return await ctx.call("never")

    gc.collect()
    there_before = _count_branches()  # other tests of this process may keep what they killed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(170):
            await Desk(handler).parked()
        gc.collect()
        await asyncio.sleep(0)
        gc.collect()

    assert [str(each.message) for each in caught] == []
    assert caplog.text == ""
    assert capsys.readouterr().err == ""
    assert _count_branches() - there_before < 20


def _count_branches() -> int:
    return sum(type(each) in (Driver, Tracked) for each in gc.get_objects())


# --- abandon and cancel, in every state ---


async def slow() -> str:
    SEEN.append("started")
    try:
        await asyncio.Event().wait()
    finally:
        SEEN.append("stopped")
    return ""


def waiting_for(state):
    async def handler(ctx):
        SEEN.append("began")
        try:
            match state:
                case "call":
                    await ctx.call("a")
                case "step":
                    await ctx.step(slow)
                case "held":
                    await asyncio.Event().wait()
                case "branches":
                    async with asyncio.TaskGroup() as group:
                        group.create_task(ctx.call("a"))
                        group.create_task(ctx.step(slow))
                case _:
                    raise AssertionError(state)
        except asyncio.CancelledError as error:
            SEEN.append(f"cancelled {error.args}")
            with pytest.raises(asyncio.CancelledError):
                await ctx.call("in vain")
            raise
        finally:
            SEEN.append("finally")

    return handler


STATES = ["call", "step", "held", "branches"]


@pytest.mark.parametrize("state", STATES)
async def test_abandon_commits_nothing_more(state):
    desk = Desk(waiting_for(state), parks=False)
    running = asyncio.create_task(desk.once())
    await until(lambda: "began" in SEEN and (state not in ("step", "branches") or "started" in SEEN))
    if state in ("call", "branches"):
        await until(lambda: desk.rows.open_calls)
    commits = len(desk.rows.commits)
    desk.run.abandon()

    assert await running == Abandoned()
    assert len(desk.rows.commits) == commits
    assert SEEN.count("started") == SEEN.count("stopped")
    assert SEEN[-1] in ("finally", "stopped")
    assert not any("cancelled" in each for each in SEEN)


@pytest.mark.parametrize("state", STATES)
async def test_cancel_reaches_the_handler_as_cancelled_error(state):
    desk = Desk(waiting_for(state), parks=False)
    running = asyncio.create_task(desk.once())
    await until(lambda: "began" in SEEN and (state not in ("step", "branches") or "started" in SEEN))
    desk.run.cancel("the customer left")

    assert await running == Cancelled("the customer left")
    assert any("cancelled" in each for each in SEEN)
    assert SEEN.count("started") == SEEN.count("stopped")


async def test_cancel_and_abandon_before_the_first_step():
    for verb, outcome in ((lambda run: run.cancel("x"), Cancelled("x")), (lambda run: run.abandon(), Abandoned())):
        desk = Desk(waiting_for("call"))
        verb(desk.begin())
        assert await desk.run.execute() == outcome
    assert SEEN == []


@pytest.mark.parametrize("verb", ["cancel", "abandon"])
async def test_cancel_and_abandon_during_a_commit(verb):
    desk = Desk(waiting_for("call"))
    desk.begin()
    desk.port.during_commit = lambda _: desk.run.cancel("x") if verb == "cancel" else desk.run.abandon()

    outcome = await desk.run.execute()

    # The commit was on its way, so its word counts: the row is parked, unless the task was cancelled under it.
    assert outcome in (Parked(), Cancelled("x"))


async def test_handler_that_ignores_a_cancel_is_cancelled_all_the_same(monkeypatch):
    monkeypatch.setattr("coatcheck.worker.engine.run.UNWIND_S", 0.02)

    async def handler(ctx):
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                SEEN.append("ignored")

    desk = Desk(handler)
    running = asyncio.create_task(desk.once())
    await asyncio.sleep(0.001)
    desk.run.cancel("now")

    assert await running == Cancelled("now")


async def test_superseded_in_a_commit_abandons():
    async def handler(ctx):
        await ctx.step(quick)
        SEEN.append("went on")

    desk = Desk(handler)
    desk.begin()
    desk.rows.epoch += 1

    assert await desk.run.execute() == Abandoned()
    assert SEEN == ["quick"]


async def quick() -> None:
    SEEN.append("quick")


async def test_superseded_before_the_first_effect_runs_no_step():
    async def handler(ctx):
        await asyncio.gather(ctx.step(quick), ctx.step(quick))

    desk = Desk(handler)
    desk.begin()
    desk.port.first_effect_error = Superseded()

    assert await desk.run.execute() == Abandoned()
    assert SEEN == []
    assert desk.port.first_effect_count == 1


@pytest.mark.parametrize("where", ["commit", "first effect"])
async def test_error_of_the_port_comes_out_of_execute(where):
    async def handler(ctx):
        try:
            await ctx.step(quick)
        finally:
            SEEN.append("finally")

    def fail(_):
        raise StoreUnavailable("postgres is away")

    desk = Desk(handler)
    desk.begin()
    if where == "commit":
        desk.port.before_commit = fail
    else:
        desk.port.first_effect_error = StoreUnavailable("postgres is away")

    with pytest.raises(StoreUnavailable):
        await desk.run.execute()
    assert SEEN[-1] == "finally"


async def test_worker_that_is_cancelled_puts_its_run_down():
    desk = Desk(waiting_for("step"))
    running = asyncio.create_task(desk.once())
    await until(lambda: "started" in SEEN)
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    assert SEEN[-2:] in (["stopped", "finally"], ["finally", "stopped"])


async def test_leftover_branches_are_put_down_when_the_handler_returns():
    async def leftover(ctx):
        try:
            await ctx.call("a")
        except asyncio.CancelledError:
            SEEN.append("cancelled")
        finally:
            SEEN.append("finally")

    async def handler(ctx):
        task = asyncio.create_task(leftover(ctx))
        await asyncio.sleep(0)
        return task.done()

    desk = Desk(handler)

    assert await desk.finished() is False
    assert SEEN == ["finally"]
    assert desk.rows.open_calls == {}


async def test_branches_that_move_during_the_commit_are_unwound_if_it_parked():
    gate = asyncio.Event()

    async def mover(ctx):
        await gate.wait()
        SEEN.append("moved")
        await ctx.step(quick)

    async def handler(ctx):
        await asyncio.gather(ctx.call("a"), mover(ctx))

    desk = Desk(handler)
    desk.begin()

    async def open_the_gate(changes):
        gate.set()
        for _ in range(5):
            await asyncio.sleep(0)

    desk.port.during_commit = open_the_gate

    assert await desk.run.execute() == Parked()
    assert SEEN == ["moved"]  # the step did not start: the run might be put down any moment


async def test_many_runs_in_one_loop_keep_to_themselves():
    async def one(ctx, n):
        return await ctx.call("b", n)

    def make(n):
        async def handler(ctx):
            return [await asyncio.gather(*(one(ctx, each) for each in range(n % 5))), await ctx.call("a", n)]

        return handler

    desks = [Desk(make(n)) for n in range(100)]
    outcomes = await asyncio.gather(*(desk.once() for desk in desks))
    assert set(outcomes) == {Parked()}
    while any(desk.rows.is_parked for desk in desks):
        for desk in desks:
            for key in list(desk.rows.open_calls):
                desk.ok(key, key)
        outcomes = await asyncio.gather(*(desk.once() for desk in desks))

    assert all(isinstance(outcome, Finished) for outcome in outcomes)
    assert [len(outcome.value[0]) for outcome in outcomes] == [n % 5 for n in range(100)]


async def test_other_tasks_in_the_loop_stay_untouched():
    mine = asyncio.create_task(asyncio.Event().wait())

    async def handler(ctx):
        await ctx.call("a")

    await Desk(handler).parked()

    assert type(mine) is asyncio.Task
    assert not mine.done()
    mine.cancel()


async def test_factory_that_was_set_before_is_chained_to():
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    made = []

    class Mine(asyncio.Task):
        pass

    def factory(loop, coro, **options):
        made.append(coro)
        return Mine(coro, loop=loop, **options)

    loop.set_task_factory(factory)
    try:

        async def handler(ctx):
            await asyncio.gather(ctx.call("a"), ctx.call("b"))

        running = asyncio.create_task(Desk(handler).once())
        assert type(running) is Mine
        assert await running == Parked()
        other = asyncio.create_task(asyncio.sleep(0))
        assert type(other) is Mine
        await other
    finally:
        loop.set_task_factory(before)


async def test_mismatch_is_held_though_user_code_catches_everything():
    async def first(ctx):
        await ctx.call("a", 1)

    async def changed(ctx):
        try:
            await ctx.call("a", 2)
        except Exception:  # noqa: BLE001 - what user code may write
            SEEN.append("caught")

    desk = Desk(first)
    await desk.parked()
    desk.handler = changed
    outcome = await desk.once()

    assert isinstance(outcome, Held)
    assert SEEN == []


async def test_system_exit_in_a_handler_is_its_failure():
    async def handler(ctx):
        raise SystemExit(3)

    outcome = await Desk(handler).once()

    assert isinstance(outcome, Raised)
    assert isinstance(outcome.error, SystemExit)


async def test_what_is_no_coroutine_is_refused():
    async def handler(ctx):
        with pytest.raises(TypeError, match="coroutine"):
            asyncio.get_running_loop().create_task(3)  # type: ignore[arg-type]
        return 1

    assert await Desk(handler).finished() == 1
    assert isinstance((await Desk(lambda ctx: 5).once()).error, TypeError)


async def _measure():
    return 1


async def _returns(ctx):
    return 1


async def _calls(ctx):
    return await ctx.call("a")


async def _gathers(ctx):
    return await ctx.gather(ctx.call("a"), ctx.call("b"))


async def _steps(ctx):
    await ctx.step(_measure)
    return await ctx.call("a")


async def _live_through(handler):
    """Run a task to its end, and let go of everything."""
    desk = Desk(handler)
    outcome = await desk.once()
    while outcome == Parked():
        for key in list(desk.rows.open_calls):
            desk.ok(key)
        desk.port.run = None
        outcome = await desk.once()
    desk.port.run = None
    assert isinstance(outcome, Finished)


@pytest.mark.parametrize("handler", [_returns, _calls, _gathers, _steps])
async def test_run_leaves_nothing_to_the_garbage_collector(handler):
    """Circles would: with hundreds of runs in a second, looking for them costs more than running them."""
    await _live_through(handler)  # whatever is made once is made
    while gc.collect():  # a class that an earlier test made takes Python 3.13 a second round
        pass
    gc.disable()
    try:
        await _live_through(handler)
        await asyncio.sleep(0)

        assert gc.collect() == 0
    finally:
        gc.enable()
