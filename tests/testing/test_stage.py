"""Tasks on a stage: groups, cancelling, deploys, dead letters, several apps; and stages one after the other."""

import asyncio
import gc
import warnings
from typing import NotRequired, TypedDict

import pytest
import structlog

from coatcheck.broker.port import Message, Outgoing
from coatcheck.errors import UsageError
from coatcheck.testing import Stage, Stuck
from coatcheck.worker import App, Caller, Context, TaskCancelled, Unauthorized

app = App("office")
ended: list[str] = []


@pytest.fixture(autouse=True)
def _fresh():
    ended.clear()


@app.task
async def gather(ctx: Context, n: int) -> list:
    ctx.progress(0, n, "asking")
    return await ctx.gather(*(ctx.call(f"peer{k}", k, timeout=60) for k in range(n)))


@app.task
async def first(ctx: Context, n: int) -> object:
    return await ctx.first(*(ctx.call(f"peer{k}", k, timeout=60) for k in range(n)), cancel_rest=True)


@app.task
async def quorum(ctx: Context, n: int) -> list:
    return await ctx.quorum(2, *(ctx.call(f"peer{k}", k, timeout=60) for k in range(n)))


@app.task
async def wait(ctx: Context, _: None) -> str:
    try:
        return await ctx.call("peer0", timeout=3600)
    finally:
        ended.append("finally")


@app.task
async def plain(ctx: Context, value: int) -> int:
    return value + 1


def double(value: int) -> int:
    return 2 * value


@app.task
async def steps(ctx: Context, value: int) -> int:
    doubled = await ctx.step(double, value)
    return doubled + await ctx.call("peer0", doubled)


async def test_gather_waits_for_all(coatcheck):
    for n in range(3):
        coatcheck.peer(f"peer{n}").after(seconds=n).replies(10 * n)
    await coatcheck.run(app)
    ticket = await coatcheck.submit("office", 3, task="gather")

    await coatcheck.advance(seconds=1)
    assert ticket.waits_for == ["peer2"]
    await coatcheck.advance(seconds=1)

    assert await ticket.result() == [0, 10, 20]
    assert [(told.done, told.total, told.message) for told in ticket.progress] == [(0, 3, "asking")]


async def test_first_takes_the_fastest_and_cancels_the_rest(coatcheck):
    coatcheck.peer("peer0").never()
    coatcheck.peer("peer1").fails("broken")
    coatcheck.peer("peer2").after(seconds=5).replies("fast")
    await coatcheck.run(app)
    ticket = await coatcheck.submit("office", 3, task="first")

    assert await ticket.result(timeout=5) == "fast"
    assert coatcheck.peer("peer0").cancelled == [0]
    assert coatcheck.peer("peer1").cancelled == []


async def test_quorum_in_the_order_in_which_they_ended(coatcheck):
    for n, after_s in enumerate((3, 2, 1)):
        coatcheck.peer(f"peer{n}").after(seconds=after_s).replies(n)
    await coatcheck.run(app)
    ticket = await coatcheck.submit("office", 3, task="quorum")

    assert await ticket.result(timeout=60) == [2, 1]


async def test_cancelled_task_tells_its_peers(coatcheck):
    coatcheck.peer("peer0").never()
    await coatcheck.run(app)
    ticket = await coatcheck.submit("office", task="wait")

    await ticket.cancel("not wanted")

    assert ticket.state == "cancelled"
    assert coatcheck.peer("peer0").cancelled == [None]
    with pytest.raises(TaskCancelled, match="not wanted"):
        await ticket.result()


async def test_what_a_ticket_shows(coatcheck):
    coatcheck.peer("peer0").after(seconds=5).replies(1)
    await coatcheck.run(app)
    ticket = await coatcheck.submit("office", 4, task="steps")
    assert (ticket.state, ticket.checkpoints, ticket.attempt, ticket.is_done) == ("parked", 2, 1, False)
    assert [(entry.kind, entry.key, entry.value) for entry in ticket.journal] == [
        ("step", "double", 8),
        ("call", "peer0", None),
    ]

    assert await ticket.result(timeout=5) == 9

    assert (ticket.state, ticket.checkpoints, ticket.is_done) == ("done", 3, True)
    assert [(entry.key, entry.state, entry.value) for entry in ticket.journal] == [
        ("double", "ok", 8),
        ("peer0", "ok", 1),
    ]
    assert [task.handler for task in coatcheck.tasks] == ["steps"]


async def test_apps_on_one_stage_call_each_other(coatcheck):
    front = App("front")

    @front.task
    async def ask(ctx: Context, value: int) -> int:
        return await ctx.call("office", value, task="plain") + await ctx.call("office", value, task="steps")

    coatcheck.peer("peer0").replies(100)
    await coatcheck.run(app)
    await coatcheck.run(front)

    assert await (await coatcheck.submit("front", 1)).result() == 2 + 102
    assert {task.service for task in coatcheck.tasks} == {"front", "office"}


async def test_app_that_is_gone_is_named(coatcheck):
    replica = await coatcheck.run(app)
    await replica.stop()
    ticket = await coatcheck.submit("office", 1, task="plain")

    with pytest.raises(Stuck, match="no replica has it"):
        await ticket.result()
    await coatcheck.run(app)

    assert await ticket.result() == 2


async def test_service_nobody_runs_is_named(coatcheck):
    with pytest.raises(UsageError, match="no service 'nowhere'"):
        await coatcheck.submit("nowhere", 1)
    with pytest.raises(UsageError, match="needs an App"):
        await coatcheck.run("office")


async def test_deploy_that_does_not_fit_holds_the_task(coatcheck):
    def make(body: str) -> App:
        version = App("shop")

        @version.task
        async def order(ctx: Context, _: None) -> str:
            return await ctx.call("peer0", body)

        return version

    coatcheck.peer("peer0").after(minutes=1).replies("x")
    old = await coatcheck.run(make("a"))
    ticket = await coatcheck.submit("shop")
    await old.stop()
    await coatcheck.run(make("b"))

    await coatcheck.advance(minutes=1)

    assert ticket.state == "held"
    with pytest.raises(Stuck, match="it is held: the journal does not fit the code"):
        await ticket.result()


async def test_parked_task_goes_on_with_another_replica(coatcheck):
    coatcheck.peer("peer0").after(minutes=1).replies(7)
    old = await coatcheck.run(app)
    ticket = await coatcheck.submit("office", 1, task="steps")
    await old.stop()
    assert old.is_gone
    await coatcheck.run(app)

    assert await ticket.result(timeout=60) == 9


async def test_bad_message_becomes_a_dead_letter(coatcheck):
    await coatcheck.run(app)
    bad = Message(b"{", type="plain", content_type="application/json")
    coatcheck.scene.route(Outgoing("office", bad))

    await coatcheck.settle()

    (letter,) = coatcheck.dead_letters
    assert (letter.queue, letter.reason, letter.body) == ("office", "undecodable", b"{")


async def test_caller_is_who_the_token_says(coatcheck):
    def identify(token):
        if token != "right":
            raise Unauthorized("wrong token")
        return Caller("ada")

    guarded = App("guarded", identify=identify)

    @guarded.task
    async def who(ctx: Context, _: None) -> str:
        return ctx.caller.subject if ctx.caller else ""

    await coatcheck.run(guarded)

    assert await (await coatcheck.submit("guarded", token="right")).result() == "ada"
    with pytest.raises(Exception, match="wrong token"):
        await (await coatcheck.submit("guarded", token="wrong")).result()


async def test_the_environment_is_not_read(coatcheck, monkeypatch):
    monkeypatch.setenv("COATCHECK_CALL_TIMEOUT", "1s")
    monkeypatch.setenv("COATCHECK_HEALTH_PORT", "1")

    replica = await coatcheck.run(app, max_fan_out=3)

    assert replica.worker.settings.call_timeout.total_seconds() == 3600
    assert replica.worker.settings.health_port is None
    assert replica.worker.settings.max_fan_out == 3


# --- one after the other ---


@pytest.mark.parametrize("turn", [1, 2])
async def test_stages_know_nothing_of_each_other(coatcheck, turn):
    assert coatcheck.tasks == []
    coatcheck.peer("peer0").never()
    await coatcheck.run(app)

    ticket = await coatcheck.submit("office", turn, task="steps", identity="the same")

    assert coatcheck.peer("peer0").asked == [2 * turn]
    assert ticket.state == "parked"


async def test_two_stages_on_one_loop_have_their_own_time():
    async with Stage() as one, Stage() as other:
        for stage in (one, other):
            stage.peer("peer0").never()
            await stage.run(app)
        tickets = [await stage.submit("office", task="wait") for stage in (one, other)]

        await one.advance(hours=1)

        assert [ticket.state for ticket in tickets] == ["failed", "parked"]


async def test_closed_stage_leaves_nothing_on_the_loop():
    loop = asyncio.get_running_loop()
    before = dict(loop.__dict__), loop.get_task_factory(), asyncio.all_tasks()
    async with Stage() as stage:
        stage.peer("peer0").never()
        await stage.run(app)
        await stage.submit("office", task="wait")
        assert loop.get_task_factory() is not before[1]

    assert (dict(loop.__dict__), loop.get_task_factory(), asyncio.all_tasks()) == before
    await stage.close()
    with pytest.raises(UsageError, match="closed"):
        await stage.submit("office")


def test_stage_that_nobody_closes_ends_with_its_loop():
    async def leave_it_open() -> Stage:
        stage = Stage()
        stage.peer("peer0").never()
        await stage.run(app)
        await stage.submit("office", task="wait")
        await stage.submit("office", 1, task="steps")
        return stage

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stage = asyncio.run(leave_it_open())
        stage.scene.close_from_outside()
        gc.collect()


def test_stage_belongs_to_one_loop():
    stage = Stage()
    asyncio.run(stage.run(app))

    with pytest.raises(UsageError, match="closed"):
        asyncio.run(stage.run(app))


def test_stage_with_a_run_in_ram_ends_with_its_loop():
    holding = App("holding")

    @holding.task
    async def hold(ctx: Context, _: None) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.5)  # in the stage's time, which nobody moves any more

    async def play() -> None:
        stage = Stage()
        await stage.run(holding)
        await stage.submit("holding")

    for _ in range(10):  # `asyncio.run` cancels tasks in any order
        asyncio.run(play())


def test_stage_in_the_middle_of_its_work_ends_with_its_loop():
    async def play(passes: int) -> None:
        stage = Stage()
        stage.peer("peer0").replies(1)
        await stage.run(app)
        stage.scene.spawn(stage.scene.client.submit("office", 1, task="steps"))
        for _ in range(passes):
            await asyncio.sleep(0)

    for passes in range(60):
        asyncio.run(play(passes))


@pytest.mark.parametrize("factory", ["asyncio", "uvloop"])
def test_stage_on_a_loop_of_plain_asyncio(factory):
    async def play() -> int:
        async with Stage() as stage:
            stage.peer("peer0").after(days=1).replies(1)
            await stage.run(app, call_timeout="2d")
            ticket = await stage.submit("office", 4, task="steps")
            return await ticket.result(timeout=86_400)

    make = asyncio.new_event_loop if factory == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=make) as runner:
        assert runner.run(play()) == 9


# --- bodies ---


class Order(TypedDict):
    item: str
    count: NotRequired[int]


async def test_a_senders_typo_is_logged_once_and_changes_nothing(coatcheck: Stage):
    shop = App("typo-shop")

    @shop.task
    async def order(ctx: Context, order: Order) -> dict:
        return dict(order)

    with structlog.testing.capture_logs() as lines:
        await coatcheck.run(shop)
        tickets = [await coatcheck.submit("typo-shop", {"item": "hat", "coutn": 3}) for _ in range(3)]

        assert [await ticket.result() for ticket in tickets] == [{"item": "hat"}] * 3

    told = [line for line in lines if line["event"] == "body_field_not_read"]
    assert [(line["handler"], line["field"], line["did_you_mean"]) for line in told] == [("order", "coutn", "count")]


async def test_an_object_and_the_value_itself_are_the_same_to_one_plain_parameter(coatcheck: Stage):
    echo = App("echo")

    @echo.task
    async def research(ctx: Context, topic: str) -> str:
        return topic

    await coatcheck.run(echo)

    assert await (await coatcheck.submit("echo", "hats")).result() == "hats"
    assert await (await coatcheck.submit("echo", {"topic": "hats"})).result() == "hats"
