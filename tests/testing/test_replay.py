"""Journals as files, and whether today's code still fits them."""

import asyncio
import json
from dataclasses import dataclass
from datetime import timedelta

import pytest

from coatcheck.errors import UsageError
from coatcheck.testing import ReplayFailed, Stage, assert_replays, check_replay, record, record_from_store
from coatcheck.worker import App, Caller, CallFailed, Client, Context, NoSuchTask, Settings, Sweeper, Worker

ran: list[str] = []


@pytest.fixture(autouse=True)
def _fresh():
    ran.clear()


@dataclass
class Plan:
    items: list[str]


def plan(topic: str) -> Plan:
    ran.append("plan")
    return Plan([topic, f"{topic}s"])


def make_plan(topic: str) -> Plan:
    return plan(topic)


def write(found: list) -> str:
    ran.append("write")
    return " ".join(found)


def version(handler) -> App:
    """An app whose only handler this is, under one name in every version."""
    app = App("report")
    app.task(name="report")(handler)
    return app


async def begun(ctx: Context, topic: str) -> str:
    made = await ctx.step(plan, topic)
    began_at = ctx.now()
    found = await ctx.gather(*(ctx.call("search", item, timeout=60) for item in made.items))
    text = await ctx.step(write, found)
    return f"{text} {began_at:%Y} {ctx.caller.subject if ctx.caller else 'nobody'}"


async def changed_at_the_end(ctx: Context, topic: str) -> str:
    made = await ctx.step(plan, topic)
    found = await ctx.gather(*(ctx.call("search", item, timeout=999) for item in made.items))
    return await ctx.call("print", found)


async def other_arguments(ctx: Context, topic: str) -> str:
    made = await ctx.step(plan, topic)
    found = await ctx.gather(*(ctx.call("search", item.upper(), timeout=60) for item in made.items))
    return await ctx.step(write, found)


async def renamed_step(ctx: Context, topic: str) -> str:
    made = await ctx.step(make_plan, topic)
    found = await ctx.gather(*(ctx.call("search", item) for item in made.items))
    return await ctx.step(write, found)


async def raises(ctx: Context, topic: str) -> str:
    made = await ctx.step(plan, topic)
    return made.names  # type: ignore[attr-defined]


async def without_the_first_step(ctx: Context, topic: str) -> str:
    found = await ctx.gather(*(ctx.call("search", item) for item in (topic, f"{topic}s")))
    return await ctx.step(write, found)


async def waits_for_nothing(ctx: Context, topic: str) -> None:
    await asyncio.Event().wait()


async def other_arguments_of_its_own(ctx: Context, topic: int) -> None: ...


async def record_at(topic: str = "squid", *, answers: int, app: App | None = None, handler=begun) -> dict:
    """The journal of a task that got so many answers."""
    async with Stage() as stage:
        peer = stage.peer("search")
        match answers:
            case 0:
                peer.never()
            case 1:
                peer.replies("one").then.never()
            case _:
                peer.replies("one", "two")
        await stage.run(app or version(handler))
        ticket = await stage.submit("report", topic)
        journal = record(ticket)
    ran.clear()
    return json.loads(json.dumps(journal))


async def test_journal_fits_the_code_that_wrote_it():
    journal = await record_at(answers=1)

    replay = check_replay(version(begun), journal)

    assert replay.fits
    assert replay.problem is None
    assert replay.next == ("waits for call 'search' under key 'search#2'",)
    assert replay.unread == ()
    assert ran == []


async def test_journal_of_a_finished_task_gives_its_result_again():
    journal = await record_at(answers=2)

    assert check_replay(version(begun), journal).next == ("returns 'one two 2030 nobody'",)
    assert ran == []


async def test_another_result_does_not_fit():
    async def shouting(ctx: Context, topic: str) -> str:
        return (await begun(ctx, topic)).upper()

    journal = await record_at(answers=2)

    replay = check_replay(version(shouting), journal)

    assert replay.problem is not None
    assert "recorded: 'one two 2030 nobody'\n  the code: 'ONE TWO 2030 NOBODY'" in replay.problem


async def test_code_may_change_where_the_journal_has_not_come_yet():
    journal = await record_at(answers=2)

    replay = check_replay(version(changed_at_the_end), journal)

    assert replay.fits
    assert replay.next == ("opens call 'print' under key 'print'",)
    assert set(replay.unread) == {"@now", "write"}


async def test_next_step_is_named_and_not_run():
    journal = await record_at(answers=2, handler=without_the_first_step)
    journal["recorded"] = [line for line in journal["recorded"] if line["key"] != "write"]
    journal["state"] = "running"

    assert check_replay(version(without_the_first_step), journal).next == ("runs step 'write'",)
    assert ran == []


async def test_other_arguments_say_what_a_held_task_says():
    journal = await record_at(answers=1)

    replay = check_replay(version(other_arguments), journal)

    assert replay.problem is not None
    assert "the journal does not fit the code.\n  recorded: call 'search' under key 'search'" in replay.problem
    assert "fix: let tasks that have begun ask for what they recorded" in replay.problem
    assert "test_replay.py" in replay.problem


async def test_renamed_step_is_found_and_has_its_remedy():
    journal = await record_at(answers=1)

    replay = check_replay(version(renamed_step), journal)

    assert replay.problem is not None
    assert "the journal has work that looks renamed" in replay.problem
    assert "key='plan'" in replay.problem
    assert ran == []


async def test_removed_step_is_unread():
    journal = await record_at(answers=0)

    replay = check_replay(version(without_the_first_step), journal)

    assert replay.fits
    assert set(replay.unread) == {"plan", "@now"}


async def test_handler_that_raises_now_does_not_fit():
    replay = check_replay(version(raises), await record_at(answers=0))

    assert replay.problem == (
        "the handler raises AttributeError where the task was parked: 'Plan' object has no attribute 'names'"
    )


async def test_task_that_failed_may_fail_again():
    async def fail(ctx: Context, topic: str) -> str:
        try:
            return await ctx.call("search", topic)
        except CallFailed as error:
            raise ValueError(error.code) from error

    async with Stage() as stage:
        stage.peer("search").fails("empty")
        await stage.run(version(fail))
        journal = record(await stage.submit("report", "squid"))

    assert check_replay(version(fail), journal).next == ("fails with ValueError: empty",)


async def test_handler_that_waits_for_nothing_does_not_hang(monkeypatch):
    monkeypatch.setattr("coatcheck.testing.journals.PATIENCE_S", 0.01)

    replay = check_replay(version(waits_for_nothing), await record_at(answers=0))

    assert replay.problem == "the handler waits for something that is neither recorded nor durable"


async def test_unknown_handler_and_arguments_that_do_not_fit():
    journal = await record_at(answers=0)
    other = App("report")

    @other.task
    async def reports(ctx: Context, topic: str) -> None: ...

    assert "did you mean 'reports'?" in str(check_replay(other, journal).problem)
    assert "`topic` expected int" in str(check_replay(version(other_arguments_of_its_own), journal).problem)


async def test_caller_is_recorded():
    app = App("report", identify=lambda token: Caller("ada", {"role": "editor"}))
    app.task(name="report")(begun)
    journal = await record_at(answers=2, app=app)

    assert check_replay(app, journal).next == ("returns 'one two 2030 ada'",)


async def test_file_is_read_and_its_name_is_in_the_complaint(tmp_path):
    path = tmp_path / "parked.json"
    path.write_text(json.dumps(await record_at(answers=1)))

    assert assert_replays(version(begun), path).fits
    with pytest.raises(ReplayFailed, match=r"parked\.json does not fit App\('report'(.|\n)*looks renamed"):
        assert_replays(version(renamed_step), str(path))


async def test_values_of_every_kind_come_back():
    async def keep(ctx: Context, topic: str) -> str:
        raw = await ctx.step(lambda: b"\x00\xff", key="raw")
        return f"{raw!r} {await ctx.call('search')}"

    journal = await record_at(answers=2, handler=keep)

    assert check_replay(version(keep), journal).next == ("returns \"b'\\\\x00\\\\xff' one\"",)
    assert {"bytes": "AP8="} in [line["value"] for line in journal["recorded"]]


def test_not_a_journal(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("[]")

    with pytest.raises(UsageError, match="not a journal"):
        check_replay(version(begun), path)
    with pytest.raises(UsageError, match="coatcheck-journal/2"):
        check_replay(version(begun), {"format": "coatcheck-journal/2"})


async def test_task_without_a_row_has_no_journal(coatcheck):
    replica = await coatcheck.run(version(begun))
    await replica.stop()

    with pytest.raises(UsageError, match="has no journal"):
        record(await coatcheck.submit("report", "squid"))


async def test_journal_from_a_real_store_is_the_same(store_url):
    """Written through Postgres by the same engine; only ids and times differ."""
    settings = Settings(broker="memory://replay", store=store_url, sweep_interval=timedelta(seconds=0.1))
    worker, sweeper = Worker(version(begun), settings), Sweeper(settings)
    running = [asyncio.create_task(part.run()) for part in (worker, sweeper)]
    async with Client(settings) as client, asyncio.timeout(60):
        while not worker.is_ready:
            await asyncio.sleep(0.01)
        await (await client.broker()).declare_service("search")
        ticket = await client.submit("report", "squid")
        while (task := await client.find(ticket.task_id)) is None or task.state != "parked":
            await asyncio.sleep(0.01)
        worker.stop()
        sweeper.stop()
        await asyncio.gather(*running)

    journal = await record_from_store(store_url, str(ticket.task_id))

    expected = await record_at(answers=0)
    assert _without_chance(journal) == _without_chance(expected)
    assert check_replay(version(begun), journal).next == (
        "waits for call 'search' under key 'search'",
        "waits for call 'search' under key 'search#2'",
    )
    with pytest.raises(NoSuchTask):
        await record_from_store(store_url, "00000000-0000-0000-0000-000000000000")


def _without_chance(journal: dict) -> dict:
    known = {name: value for name, value in journal.items() if name not in {"task_id", "identity"}}
    lines = [line | {"value": None} if line["key"] == "@now" else line for line in known["recorded"]]
    return known | {"recorded": lines, "open": sorted(known["open"], key=lambda line: line["key"])}
