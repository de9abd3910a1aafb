"""A whole installation in one process: rows and messages at `memory://`, no server anywhere."""

import asyncio
from datetime import timedelta
from uuid import uuid4

import pytest

from coatcheck.errors import InvalidSettings
from coatcheck.store import Store, TaskId, TaskState, migrate, newest_version
from coatcheck.worker import App, Client, Context, NoSuchTask, Settings, Sweeper, Ticket, Worker

app = App("cctest-tea")
STORY = ["accepted", "parked", "resumed", "finished"]


@app.task
async def nap(ctx: Context, seconds: float) -> str:
    await ctx.sleep(timedelta(seconds=seconds))
    return "rested"


def make_settings(**others: object) -> Settings:
    address = f"memory://{uuid4()}"
    return Settings.load(broker=address, store=address, environ={}, **others)


async def seen(client: Client, ticket: Ticket) -> None:
    """Return when the task has a row."""
    async with asyncio.timeout(30):
        while await client.find(ticket.task_id) is None:
            await asyncio.sleep(0.01)


async def finish(settings: Settings, task_ids: list[TaskId]) -> list[object]:
    async with Sweeper(settings), Worker(app, settings), Client(settings) as client:
        return [await client.result(task_id, timeout=30) for task_id in task_ids]


async def test_task_parks_and_goes_on_without_any_server() -> None:
    settings = make_settings(history="full")
    async with Sweeper(settings), Worker(app, settings), Client(settings) as client:
        ticket = await client.submit(app.service, {"seconds": 0.2})

        assert await ticket.result(timeout=30) == "rested"
        kinds = [line.kind for line in await client.history(ticket.task_id)]
        assert [kind for kind in kinds if kind in STORY] == STORY


async def test_two_clients_of_one_address_see_the_same_tasks() -> None:
    settings = make_settings()
    async with Sweeper(settings), Worker(app, settings), Client(settings) as one, Client(settings) as other:
        ticket = await one.submit(app.service, {"seconds": 0.01})

        assert await ticket.result(timeout=30) == "rested"
        assert await other.result(ticket.task_id, timeout=30) == "rested"
        assert [task.task_id for task in await other.list()] == [ticket.task_id]


async def test_another_name_has_other_tasks() -> None:
    settings = make_settings()
    async with Sweeper(settings), Worker(app, settings), Client(settings) as client:
        ticket = await client.submit(app.service, {"seconds": 0.01})
        await ticket.result(timeout=30)

    async with Client(make_settings()) as stranger:
        with pytest.raises(NoSuchTask):
            await stranger.get(ticket.task_id)


def test_rows_and_messages_outlive_workers_and_event_loops_of_one_process() -> None:
    settings = make_settings()

    async def begin() -> list[TaskId]:
        async with Worker(app, settings), Client(settings) as client:
            parked = await client.submit(app.service, {"seconds": 0.2}, reply=False)
            await seen(client, parked)
        async with Client(settings) as client:
            assert (await client.get(parked.task_id)).state is TaskState.PARKED
            unread = await client.submit(app.service, {"seconds": 0.01}, reply=False)
        return [parked.task_id, unread.task_id]

    assert asyncio.run(finish(settings, asyncio.run(begin()))) == ["rested", "rested"]


# --- a part of a program ---


async def test_error_of_the_block_leaves_it_as_it_is_once_the_worker_has_stopped() -> None:
    worker = Worker(app, make_settings())

    async def fail() -> None:
        async with worker:
            assert worker.is_ready
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await fail()
    assert not worker.is_ready


async def test_worker_that_cannot_start_says_why() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with Worker(app, make_settings(declare=False)):
            pytest.fail("it has no queues")

    assert caught.group_contains(InvalidSettings, match="told not to make them")


async def test_block_is_cancelled_when_its_worker_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fail: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    sweeper = Sweeper(make_settings())
    monkeypatch.setattr(sweeper, "_sweep_on", lambda *_: fail)

    async def wait_for_ever() -> None:
        async with sweeper:
            fail.set_exception(InvalidSettings("on the way"))
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await wait_for_ever()
    assert caught.group_contains(InvalidSettings, match="on the way")


# --- its address ---


async def test_tables_in_memory_need_no_migration() -> None:
    assert await migrate(f"memory://{uuid4()}") == newest_version()


@pytest.mark.parametrize("address", ["memory://a/b", "memory://me:secret@host", "memory://a b", "memory://?a"])
async def test_name_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InvalidSettings, match="letters, digits"):
        Store(address)
