"""A task is taken back to every point of its story, also by replicas that die: one end, only later work is repeated.

The handler has five steps, four calls, a timer and a branch beside them. A play runs it until it waits for one thing,
takes it back, and lets it end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from coatcheck import points
from coatcheck.store import TaskState
from coatcheck.store.memory.queries import task_lines
from coatcheck.store.orders import OrderDone
from coatcheck.testing import Crash, Stage
from coatcheck.testing.crashes import CrashWatch, _bury
from coatcheck.testing.virtual_time import run_apart
from coatcheck.worker import App, Context

STEPS = ("a", "b", "c", "d", "e")
PEERS = ("one", "beside", "two", "approve")
WAITS = ("one", "nap", "two", "approve")
"""What the task is made to wait for when it is taken back, in the order in which it comes there."""
RESULT = "7: a b c d e, one two approve, beside f"
MOST_SKIPS = 200


@dataclass
class Play:
    """What one play saw."""

    result: Any
    checkpoint: int
    names: tuple[str, ...]
    """All that was recorded or open when the task was taken back."""
    kept: frozenset[str]
    """What of it stays."""
    repeated: Counter[str]
    """The steps that ran and the calls that peers were asked after that."""
    points: list[Crash] = field(default_factory=list)
    is_rewound_at: int = 0
    """How many crash points lie before the order."""
    has_died: bool = False


def app_for(done: Counter[str]) -> App:
    app = App("story")

    async def do(name: str) -> str:
        done[name] += 1
        return name

    @app.task
    async def story(ctx: Context, count: int) -> str:
        async def branch() -> str:
            answer = await ctx.call("beside", count, key="beside")
            return f"{answer} {await ctx.step(do, 'f', key='f')}"

        beside = asyncio.create_task(branch())
        steps = [await ctx.step(do, "a", key="a")]
        answers = [await ctx.call("one", str(ctx.uuid("one")), key="one")]
        steps.append(await ctx.step(do, "b", key="b"))
        await ctx.sleep(3600, key="nap")
        steps.append(await ctx.step(do, "c", key="c"))
        answers.append(await ctx.call("two", ctx.random(), key="two"))
        steps += [await ctx.step(do, "d", key="d"), await ctx.step(do, "e", key="e")]
        answers.append(await ctx.call("approve", answers, key="approve"))
        return f"{count}: {' '.join(steps)}, {' '.join(answers)}, {await beside}"

    return app


def play(waits_for: str, to: int | str, crash: Crash | None = None) -> Play:
    return run_apart(partial(_play, waits_for, to, crash))


async def _play(waits_for: str, to: int | str, crash: Crash | None) -> Play:
    done = Counter[str]()
    app, stage = app_for(done), Stage()
    stage.scene.server.is_sorting = True
    for name in PEERS:
        if name != waits_for:
            stage.peer(name).replies(name)
    try:
        watch = CrashWatch(stage.scene, await stage.run(app), crash)
        points.arm(watch)
        return await _perform(stage, app, watch, waits_for=waits_for, to=to, done=done)
    finally:
        points.arm(None)
        await stage.close()
        _bury()


async def _perform(
    stage: Stage, app: App, watch: CrashWatch, *, waits_for: str, to: int | str, done: Counter[str]
) -> Play:
    scene, is_replaced = stage.scene, False
    ticket = await stage.submit(app.service, 7, identity="one")
    ordered: OrderDone | None = None
    seen = Play(None, 0, (), frozenset(), Counter())
    asked = Counter[str]()
    for _ in range(MOST_SKIPS):
        if watch.has_died and not is_replaced:
            is_replaced = True
            await stage.run(app)
        elif ordered is None and ticket.state is TaskState.PARKED and waits_for in ticket.waits_for:
            lines = task_lines(scene.tables, ticket.task_id)
            seen = Play(None, ticket.checkpoints, tuple(line.key for line in lines), frozenset(), Counter())
            seen.is_rewound_at = len(watch.points)
            asked = Counter({name: len(stage.peer(name).asked) for name in PEERS})
            done.clear()
            ordered = await scene.spawn(scene.client.rewind(ticket.task_id, to))
            seen.kept = frozenset(
                line.key.rpartition("/")[2]  # without the branch it belongs to
                for line in task_lines(scene.tables, ticket.task_id)
                if not line.is_forgotten
            )
            if waits_for in PEERS:
                stage.peer(waits_for).replies(waits_for)
            await scene.clock.rest()
        elif ticket.is_done or not await scene.clock.skip():
            break
    seen.result, seen.points, seen.has_died = await ticket.result(), watch.points, watch.has_died
    seen.repeated = done + Counter({name: len(stage.peer(name).asked) for name in PEERS}) - asked
    return seen


def test_it_comes_to_its_end_without_being_taken_back() -> None:
    assert play("approve", "latest").result == RESULT


ALL = {*STEPS, "f", *PEERS}


def points_of(waits_for: str) -> Iterator[int | str]:
    """Every point a task that waits for this can be taken back to."""
    seen = play(waits_for, "latest")
    yield from (*range(seen.checkpoint + 1), "start", "latest")
    yield from (f"before:{name}" for name in seen.names)


@pytest.mark.parametrize("waits_for", WAITS)
def test_taken_back_to_any_point_it_does_only_later_work_again_and_ends_the_same(waits_for: str) -> None:
    for to in points_of(waits_for):
        seen = play(waits_for, to)

        assert seen.result == RESULT, to
        assert seen.repeated == Counter(ALL - seen.kept), to


@pytest.mark.parametrize("waits_for", WAITS)
def test_taken_back_to_any_point_and_killed_at_every_checkpoint_after_it_ends_the_same(waits_for: str) -> None:
    for to in points_of(waits_for):
        whole = play(waits_for, to)
        for crash in whole.points[whole.is_rewound_at :]:
            seen = play(waits_for, to, crash)

            assert_only_later_work_is_repeated(seen)
            assert (seen.repeated - Counter(ALL)).total() <= 2  # steps that were cut off: two run at once
            assert not (seen.repeated - Counter(ALL)).keys() & {*PEERS}


@pytest.mark.parametrize("waits_for", WAITS)
def test_killed_at_every_checkpoint_before_it_is_taken_back_it_ends_the_same(waits_for: str) -> None:
    whole = play(waits_for, "before:one")

    for crash in whole.points[: whole.is_rewound_at]:
        seen = play(waits_for, "before:one", crash)

        assert_only_later_work_is_repeated(seen)
        assert seen.repeated == Counter(ALL - seen.kept)


def assert_only_later_work_is_repeated(seen: Play) -> None:
    assert seen.has_died
    assert seen.result == RESULT
    assert seen.repeated.keys() == ALL - seen.kept
