"""A run that something else than the stage keeps in RAM: the kit says at which line, and never hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from coatcheck.testing import Stage, Stuck
from coatcheck.worker import App, Context

app = App("held")


@asynccontextmanager
async def group() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as tasks:
        yield tasks


@app.task
async def in_context_manager(ctx: Context) -> Any:
    async with group() as tasks:
        found = [tasks.create_task(_ask(ctx, number)) for number in (1, 2)]
    return [each.result() for each in found]


async def answers(ctx: Context) -> AsyncIterator[Any]:
    done, _ = await asyncio.wait([asyncio.create_task(_ask(ctx, number)) for number in (1, 2)])
    for each in sorted(task.result() for task in done):
        yield each


@app.task
async def in_generator(ctx: Context) -> Any:
    return [each async for each in answers(ctx)]


@app.task
async def in_anyio_group(ctx: Context) -> list[Any]:
    found: list[Any] = []

    async def ask(number: int) -> None:
        found.append(await _ask(ctx, number))

    async with anyio.create_task_group() as tasks:
        for number in (1, 2):
            tasks.start_soon(ask, number)
    return sorted(found)


@app.task
async def on_a_future_of_its_own(ctx: Context) -> Any:
    return await asyncio.get_running_loop().create_future()


async def _ask(ctx: Context, number: int) -> Any:
    return await ctx.call("search", number)


@pytest.mark.parametrize("task", ["in_context_manager", "in_generator", "in_anyio_group"])
async def test_wait_behind_a_librarys_frames_is_parked(coatcheck: Stage, task: str):
    coatcheck.peer("search").after(minutes=30).replies(lambda body: body * 10)
    await coatcheck.run(app)

    ticket = await coatcheck.submit("held", task=task)
    assert ticket.state == "parked"
    await coatcheck.advance(minutes=30)

    assert await ticket.result() == [10, 20]


@pytest.mark.parametrize(
    ("task", "line"), [("on_a_future_of_its_own", r"test_held\.py:\d+ in on_a_future_of_its_own: return await ")]
)
async def test_run_held_from_outside_is_told_with_its_line(
    coatcheck: Stage, monkeypatch: pytest.MonkeyPatch, task: str, line: str
):
    monkeypatch.setattr("coatcheck.testing.stage_clock.OUTSIDE_S", 0.2)
    coatcheck.peer("search").never()
    await coatcheck.run(app)

    with pytest.raises(Stuck, match=line):
        await coatcheck.submit("held", task=task)


async def test_time_passes_though_a_run_is_held(coatcheck: Stage, monkeypatch: pytest.MonkeyPatch):
    """The wait for what is outside is over once: not at every stop of the clock."""
    monkeypatch.setattr("coatcheck.testing.stage_clock.OUTSIDE_S", 0.2)
    coatcheck.peer("search").never()
    await coatcheck.run(app)
    with pytest.raises(Stuck):
        await coatcheck.submit("held", task="on_a_future_of_its_own")

    async with asyncio.timeout(30):
        await coatcheck.advance(days=3)
