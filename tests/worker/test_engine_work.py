"""Steps, calls with retry, groups, notes, logs: what each promises."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from tests.worker.fake_port import Desk, keys_of

from coatcheck.errors import CallFailed, StepFailed, UsageError
from coatcheck.store import decode
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import CallState, NewCall, TaskId
from coatcheck.worker.engine.run_port import Finished, Held, Parked, Raised
from coatcheck.worker.messages import call_message, peer_of_new
from coatcheck.worker.retry import Retry

RAN: list[Any] = []
COLOUR = contextvars.ContextVar("colour", default="none")


@pytest.fixture(autouse=True)
def _forget():
    RAN.clear()


@dataclass
class Plan:
    topic: str
    at: datetime


# --- steps ---


def in_a_thread(topic: str) -> Plan:
    RAN.append((threading.current_thread() is threading.main_thread(), COLOUR.get()))
    return Plan(topic, datetime(2024, 1, 2, tzinfo=UTC))


async def test_sync_step_runs_in_a_thread_with_its_context_and_comes_back_typed():
    async def handler(ctx):
        COLOUR.set("blue")
        plan = await ctx.step(in_a_thread, "a")
        return [plan, await ctx.call("x")]

    desk = Desk(handler)
    await desk.parked()
    desk.ok("x", 1)

    assert await desk.finished() == [Plan("a", datetime(2024, 1, 2, tzinfo=UTC)), 1]
    assert RAN == [(False, "blue")]


async def lossy() -> object:
    return (1, datetime(2024, 1, 2, tzinfo=UTC))


async def test_step_gives_what_was_recorded_on_the_first_run_too():
    async def handler(ctx):
        return [await ctx.step(lossy), await ctx.step(lossy, returns=tuple[int, datetime])]

    assert await Desk(handler).finished() == [[1, "2024-01-02T00:00:00Z"], (1, datetime(2024, 1, 2, tzinfo=UTC))]


async def broken() -> None:
    RAN.append("broken")
    raise LookupError("no such thing")


async def test_failed_step_is_the_same_failure_on_every_run():
    async def handler(ctx):
        with pytest.raises(StepFailed) as caught:
            await ctx.step(broken)
        error = caught.value
        RAN.append(type(error.__cause__))
        return [[error.type, error.code, str(error)], await ctx.call("x")]

    desk = Desk(handler)
    await desk.parked()
    desk.ok("x")
    value = await desk.finished()

    assert value[0] == ["LookupError", "step_failed", "step 'broken' failed: LookupError: no such thing"]
    assert ["broken", LookupError, type(None)] == RAN


async def unfit() -> int:
    return "not a number"  # type: ignore[return-value]


async def test_result_that_cannot_be_read_back_is_a_failure():
    async def handler(ctx):
        await ctx.step(unfit)

    error = await Desk(handler).raised()

    assert isinstance(error, StepFailed)
    assert "returns=" in str(error)


async def flaky(limit: int) -> int:
    RAN.append("try")
    if len(RAN) < limit:
        raise ConnectionError(f"try {len(RAN)}")
    return len(RAN)


async def test_step_retries_in_ram_and_records_the_last():
    async def handler(ctx):
        return await ctx.step(flaky, 3, retry=Retry(attempts=5, backoff=0))

    desk = Desk(handler)

    assert await desk.finished() == 3
    assert len(desk.rows.recorded) == 1


async def test_step_is_not_retried_for_what_is_ruled_out():
    async def handler(ctx):
        await ctx.step(flaky, 3, retry=Retry(attempts=5, backoff=0, non_retryable=(ConnectionError,)))

    assert isinstance(await Desk(handler).raised(), StepFailed)
    assert RAN == ["try"]


KEPT: dict[str, Any] = {}


async def nested() -> None:
    await KEPT["ctx"].call("x")


def nested_in_a_thread() -> None:
    KEPT["ctx"].now()


@pytest.mark.parametrize("inner", [nested, nested_in_a_thread])
async def test_context_inside_a_step_teaches(inner):
    async def handler(ctx):
        KEPT["ctx"] = ctx
        await ctx.step(inner)

    error = await Desk(handler).raised()

    assert isinstance(error, StepFailed)
    assert error.type == "UsageError"
    assert "inside a step" in str(error)


async def spawner() -> str:
    loop = asyncio.get_running_loop()
    made = loop.create_future()
    loop.call_soon(lambda: made.set_result(loop.create_task(asyncio.sleep(0))))
    task = await made
    await task
    return type(task).__name__


async def test_tasks_made_inside_a_step_are_not_tracked():
    async def handler(ctx):
        return await ctx.step(spawner)

    assert await Desk(handler).finished() == "Task"


async def echo(n: int) -> int:
    RAN.append(n)
    await asyncio.sleep(0)
    return n


async def test_steps_in_branches_run_side_by_side():
    async def handler(ctx):
        return await asyncio.gather(*(ctx.step(echo, n) for n in range(10)))

    desk = Desk(handler)

    assert await desk.finished() == list(range(10))
    assert desk.port.first_effect_count == 1
    assert len(desk.rows.commits) < 10


async def test_cut_off_step_does_not_start_again_on_replay():
    async def handler(ctx):
        task = asyncio.create_task(ctx.step(hang))
        got = await ctx.call("a")
        task.cancel()
        return [got, await ctx.call("b")]

    desk = Desk(handler)
    running = asyncio.create_task(desk.once())
    while "a" not in desk.rows.open_calls:
        await asyncio.sleep(0)
    desk.run.deliver([desk.ok("a", 1)])
    assert await running == Parked()
    desk.ok("b", 2)

    assert await desk.finished() == [1, 2]
    assert RAN == ["hang"]


async def hang() -> None:
    RAN.append("hang")
    await asyncio.Event().wait()


# --- calls ---


def key_sent_with(call: NewCall) -> object:
    peer = peer_of_new(call, datetime.now(UTC), task_id=TaskId(UUID(int=7)), service="svc", traceparent=None)
    return call_message(peer).message.headers["cc-key"]


async def test_call_carries_all_it_was_given():
    async def handler(ctx):
        await ctx.call("docs", {"a": 1}, task="summarise", timeout=30, idle_timeout=timedelta(seconds=5))

    desk = Desk(handler)
    await desk.parked()
    (call,) = desk.rows.sent

    assert (call.peer, call.handler, call.name, call.key) == ("docs", "summarise", "docs:summarise", "docs:summarise")
    assert (call.hard, call.idle) == (timedelta(seconds=30), timedelta(seconds=5))
    assert key_sent_with(call) == f"{UUID(int=7)}:docs:summarise"


async def test_call_without_a_timeout_has_the_default():
    async def handler(ctx):
        await ctx.call("a")

    desk = Desk(handler)
    await desk.parked()

    assert desk.rows.sent[0].hard == timedelta(hours=1)


async def test_reply_is_restored_to_returns():
    async def handler(ctx):
        return await ctx.call("a", returns=Plan)

    desk = Desk(handler)
    await desk.parked()
    desk.ok("a", {"topic": "x", "at": "2024-01-02T00:00:00Z"})

    assert await desk.finished() == Plan("x", datetime(2024, 1, 2, tzinfo=UTC))


async def test_reply_that_does_not_fit_is_a_failed_call():
    async def handler(ctx):
        await ctx.call("a", returns=Plan)

    desk = Desk(handler)
    await desk.parked()
    desk.ok("a", [1])
    error = await desk.raised()

    assert isinstance(error, CallFailed)
    assert error.code == "unexpected_reply"
    assert not error.is_retryable


async def test_call_is_repeated_under_one_cc_key_with_durable_back_off():
    async def handler(ctx):
        return await ctx.call("a", 1, retry=Retry(attempts=3, backoff=7))

    desk = Desk(handler)
    await desk.parked()
    desk.fail("a")
    await desk.parked()
    assert keys_of(desk.rows.open_calls) == ["a~2.wait"]
    assert desk.rows.open_calls["a~2.wait"].hard == timedelta(seconds=7)
    desk.ok("a~2.wait")
    await desk.parked()
    desk.time_out("a~2")
    await desk.parked()
    desk.ok("a~3.wait")
    await desk.parked()
    desk.ok("a~3", "at last")

    assert await desk.finished() == "at last"
    assert keys_of(desk.rows.sent) == ["a", "a~2", "a~3"]
    assert {key_sent_with(call) for call in desk.rows.sent} == {f"{UUID(int=7)}:a"}
    assert len({call.call_id for call in desk.rows.sent}) == 3


async def test_call_that_fails_for_good_is_not_repeated():
    async def handler(ctx):
        await ctx.call("a", 1, retry=Retry(attempts=3, backoff=7))

    desk = Desk(handler)
    await desk.parked()
    desk.fail("a", retryable=False)

    assert isinstance(await desk.raised(), CallFailed)


async def test_raised_names_the_failures_to_forget():
    async def handler(ctx):
        with contextlib.suppress(CallFailed):  # dealt with: it stays
            await ctx.call("a", retry=Retry(attempts=2, backoff=0))
        try:
            await ctx.first(ctx.call("b"), ctx.call("c"))
        except* CallFailed as errors:
            raise ValueError("none of them") from errors

    desk = Desk(handler)
    await desk.parked()
    desk.fail("a")
    await desk.parked()
    desk.ok("a~2.wait")
    await desk.parked()
    desk.fail("a~2")
    await desk.parked()
    desk.fail("c")
    desk.fail("b")
    outcome = await desk.once()

    assert isinstance(outcome, Raised)
    assert sorted(outcome.forget) == ["b", "c"]


async def test_all_tries_of_a_call_are_forgotten_together():
    async def handler(ctx):
        await ctx.call("a", retry=Retry(attempts=2, backoff=0))

    desk = Desk(handler)
    await desk.parked()
    desk.fail("a")
    await desk.parked()
    desk.ok("a~2.wait")
    await desk.parked()
    desk.fail("a~2")

    assert sorted((await desk.once()).forget) == ["a", "a~2", "a~2.wait"]


async def test_cancelled_branch_closes_its_call():
    async def handler(ctx):
        task = asyncio.create_task(ctx.call("a"))
        await ctx.call("b")
        task.cancel()
        return await ctx.call("c")

    desk = Desk(handler)
    await desk.parked()
    desk.ok("b")
    await desk.parked()
    assert keys_of(desk.rows.open_calls) == ["c"]
    assert desk.rows.recorded["a"].state is CallState.CLOSED
    desk.ok("c", 1)

    assert await desk.finished() == 1


async def test_call_cancelled_before_it_left_never_leaves():
    async def handler(ctx):
        task = asyncio.create_task(ctx.call("a"))
        await asyncio.sleep(0)
        task.cancel()
        return await ctx.call("b")

    desk = Desk(handler)
    await desk.parked()

    assert keys_of(desk.rows.sent) == ["b"]


async def test_send_leaves_once_with_the_next_commit():
    async def handler(ctx):
        await ctx.send("mail", "hello")
        await ctx.call("a")
        await ctx.send("mail", "bye")
        return 1

    desk = Desk(handler)
    await desk.parked()
    assert keys_of(desk.rows.sent) == ["mail", "a"]
    desk.ok("a")
    outcome = await desk.once()

    assert isinstance(outcome, Finished)
    assert keys_of(outcome.changes.opens) == ["mail#2"]


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "5", True, timedelta(seconds=-1), 1e12])
async def test_nonsense_durations_name_the_argument(bad):
    async def handler(ctx):
        for attempt in (
            lambda: ctx.call("a", idle_timeout=bad),
            lambda: ctx.call("a", timeout=bad),
            lambda: ctx.sleep(bad),
        ):
            with pytest.raises(UsageError, match=r"timeout=|seconds="):
                attempt()
        return 1

    assert await Desk(handler).finished() == 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda ctx: ctx.call(""), "peer"),
        (lambda ctx: ctx.call("a", task=3), "task"),
        (lambda ctx: ctx.call("a", {1, 2}), "set"),
        (lambda ctx: ctx.call("a", retry=3), "Retry"),
        (lambda ctx: ctx.call("a", key=""), "key"),
        (lambda ctx: ctx.step(echo, {1}), "set"),
        (lambda ctx: ctx.quorum(3, ctx.call("a").close()), "at least"),
        (lambda ctx: ctx.first(), "at least"),
    ],
)
async def test_mistakes_teach(make, match):
    async def handler(ctx):
        with pytest.raises(UsageError, match=match):
            make(ctx)
        return 1

    assert await Desk(handler).finished() == 1


# --- groups ---


async def test_first_takes_the_first_success():
    async def handler(ctx):
        return [await ctx.first(ctx.call("a"), ctx.call("b"), ctx.call("c")), await ctx.call("d")]

    desk = Desk(handler)
    await desk.parked()
    assert desk.rows.groups[0].need == 1
    desk.fail("b")
    assert not desk.rows.is_met()
    desk.ok("c", "c")
    desk.ok("a", "a")
    await desk.parked()
    assert keys_of(desk.rows.open_calls) == ["d"]
    desk.ok("d", "d")

    assert await desk.finished() == ["c", "d"]


async def test_first_without_a_success_raises_all():
    async def handler(ctx):
        try:
            await ctx.first(ctx.call("a"), ctx.call("b"))
        except ExceptionGroup as errors:
            return [type(each).__name__ for each in errors.exceptions]

    desk = Desk(handler)
    await desk.parked()
    desk.time_out("a")
    desk.time_out("b")

    assert await desk.finished() == ["CallTimedOut", "CallTimedOut"]


@pytest.mark.parametrize("cancel_rest", [True, False])
async def test_leftovers_stay_open_unless_told(cancel_rest):
    async def handler(ctx):
        await ctx.first(ctx.call("a"), ctx.call("b"), cancel_rest=cancel_rest)
        await ctx.call("c")

    desk = Desk(handler)
    await desk.parked()
    desk.ok("a")
    await desk.parked()

    assert sorted(desk.rows.open_calls) == (["c"] if cancel_rest else ["b", "c"])


async def test_quorum_returns_in_the_order_of_the_ends():
    async def handler(ctx):
        return await ctx.quorum(2, ctx.call("a"), ctx.call("b"), ctx.call("c"))

    desk = Desk(handler)
    await desk.parked()
    desk.ok("c", "c")
    await desk.parked()
    assert desk.rows.groups[0].need == 1
    assert len(desk.rows.groups[0].calls) == 2
    desk.ok("a", "a")

    assert await desk.finished() == ["c", "a"]


async def test_quorum_that_cannot_be_reached_raises():
    async def handler(ctx):
        await ctx.quorum(2, ctx.call("a"), ctx.call("b"), ctx.call("c"))

    desk = Desk(handler)
    await desk.parked()
    desk.fail("a")
    desk.fail("b")
    error = await desk.raised()

    assert isinstance(error, ExceptionGroup)
    assert len(error.exceptions) == 2


async def test_gather_that_returns_exceptions_waits_for_all():
    async def handler(ctx):
        found = await ctx.gather(ctx.call("a"), ctx.call("b"), ctx.sleep(1), return_exceptions=True)
        return [type(each).__name__ for each in found]

    desk = Desk(handler)
    await desk.parked()
    assert desk.rows.groups[0].need is None
    desk.fail("a")
    desk.ok("@sleep")
    assert not desk.rows.is_met()
    desk.ok("b", 1)

    assert await desk.finished() == ["CallFailed", "int", "NoneType"]


async def test_empty_gather():
    async def handler(ctx):
        return await ctx.gather()

    assert await Desk(handler).finished() == []


async def helper(ctx, n):
    return await ctx.step(echo, n) + await ctx.call("plus", n)


@pytest.mark.parametrize("label", ["gather", "first", "quorum"])
async def test_groups_of_anything_fall_back_to_branches(label):
    async def handler(ctx):
        members = [helper(ctx, 1), ctx.step(echo, 2), ctx.call("x"), asyncio.create_task(helper(ctx, 3), name="third")]
        match label:
            case "gather":
                return await ctx.gather(*members)
            case "first":
                return [await ctx.first(*members, cancel_rest=True), await ctx.call("end")]
            case "quorum":
                return [await ctx.quorum(2, *members, cancel_rest=True), await ctx.call("end")]
            case _:
                raise AssertionError(label)

    desk = Desk(handler)
    await desk.parked()
    if label == "first":
        assert keys_of(desk.rows.open_calls) == ["end"]
        desk.ok("end", 0)
        assert await desk.finished() == [2, 0]
        return
    desk.ok("x", 10)
    await desk.parked()
    if label == "quorum":
        assert keys_of(desk.rows.open_calls) == ["end"]
        desk.ok("end", 0)
        assert await desk.finished() == [[2, 10], 0]
        return
    desk.ok("helper/plus", 100)
    desk.ok("third/plus", 1000)
    assert await desk.finished() == [101, 2, 10, 1003]


async def test_gather_in_branches_raises_the_first_failure():
    async def handler(ctx):
        try:
            await ctx.gather(ctx.call("a"), ctx.step(broken), cancel_rest=True)
        except StepFailed as error:
            return error.type

    assert await Desk(handler).finished() == "LookupError"


# --- notes, logs, progress ---


async def test_now_random_and_uuid_are_the_same_in_replay():
    async def handler(ctx):
        RAN.append((ctx.now(), ctx.random(), ctx.random(), ctx.uuid("x"), ctx.now()))
        await ctx.call("a")

    desk = Desk(handler)
    await desk.parked()
    desk.ok("a")
    await desk.finished()

    assert RAN[0] == RAN[1]
    assert RAN[0][0].tzinfo is not None
    assert RAN[0][1] != RAN[0][2]
    assert [each.kind for each in desk.rows.recorded.values() if each.key.startswith("@")] == [Kind.NOTE, Kind.NOTE]


async def test_what_is_recorded_is_written_once_and_by_its_own_name():
    async def handler(ctx):
        ctx.record("decision", choice=len(RAN))
        RAN.append(ctx.attempt)
        await ctx.call("a")
        ctx.record("decision", choice="late")
        return 1

    desk = Desk(handler)
    await desk.parked()
    desk.ok("a")
    outcome = await desk.once()

    noted = [(each.name, decode(each.value)) for each in desk.rows.recorded.values() if each.kind is Kind.NOTE]
    assert noted == [("user:decision", {"choice": 0})]
    assert isinstance(outcome, Finished)
    assert [decode(each.value) for each in outcome.changes.entries] == [{"choice": "late"}]


async def test_a_record_belongs_into_the_end_of_a_task_that_never_waits():
    async def handler(ctx):
        ctx.record("approval", by="ada")
        return 1

    outcome = await Desk(handler).once()

    assert isinstance(outcome, Finished)
    assert [each.name for each in outcome.changes.entries] == ["user:approval"]


@pytest.mark.parametrize("kind", ["", "two words", "user:x", 5, "x" * 65])
async def test_a_record_of_no_plain_name_is_refused(kind):
    async def handler(ctx):
        ctx.record(kind)

    outcome = await Desk(handler).once()

    assert isinstance(outcome, Raised)
    assert isinstance(outcome.error, UsageError)
    assert "plain name" in str(outcome.error)


async def test_a_record_that_cannot_be_stored_is_refused():
    async def handler(ctx):
        ctx.record("decision", lock=object())

    outcome = await Desk(handler).once()

    assert isinstance(outcome, Raised)
    assert "ctx.record('decision'): cannot store" in str(outcome.error)


async def test_notes_alone_need_no_commit():
    async def handler(ctx):
        ctx.now()
        return 1

    outcome = await Desk(handler).once()

    assert outcome == Finished(1)


async def test_log_and_progress_are_silent_in_replay():
    async def handler(ctx):
        ctx.log.info("begun")
        ctx.progress(1, 3)
        await ctx.step(echo, 1)
        ctx.log.bind(a=1).info("stepped")
        await ctx.call("a")
        ctx.log.info("called")
        ctx.progress(3, 3, "nearly")
        await ctx.call("b")
        ctx.log.info("ended")

    desk = Desk(handler)
    await desk.parked()
    assert desk.port.progressed == [(1, 3, None)]
    desk.ok("a")
    await desk.parked()
    assert desk.port.progressed == [(3, 3, "nearly")]
    desk.ok("b")
    await desk.finished()

    assert desk.log.events() == ["begun", "stepped", "called", "ended"]


async def test_long_asyncio_sleep_is_warned_of():
    async def handler(ctx):
        await asyncio.sleep(3600)

    desk = Desk(handler)
    running = asyncio.create_task(desk.once())
    while not desk.log.lines:
        await asyncio.sleep(0)
    desk.run.abandon()
    await running

    assert "ctx.sleep" in desk.log.lines[0][2]["fix"]
    assert "asyncio.sleep(3600)" in desk.log.lines[0][2]["line"]


async def test_deadlock_in_user_code_is_reported_with_its_lines(monkeypatch):
    monkeypatch.setattr("coatcheck.worker.engine.run.DEADLOCK_S", 0.01)

    async def handler(ctx):
        lock = asyncio.Lock()
        async with lock:
            await lock.acquire()

    desk = Desk(handler)
    running = asyncio.create_task(desk.once())
    while not desk.log.lines:
        await asyncio.sleep(0.001)
    desk.run.abandon()
    await running

    assert desk.log.events() == ["handler_waits_for_nothing"]
    assert "await lock.acquire()" in desk.log.lines[0][2]["lines"][0]


async def test_line_that_keeps_a_run_in_ram_for_long_is_named(monkeypatch):
    monkeypatch.setattr("coatcheck.worker.engine.run.HELD_LONG_S", 0.01)

    async def handler(ctx):
        call = asyncio.create_task(ctx.call("a"))
        await asyncio.get_running_loop().create_future()  # nothing of ours will ever complete it
        await call

    desk = Desk(handler)
    running = asyncio.create_task(desk.once())
    while not desk.log.lines:
        await asyncio.sleep(0.001)
    desk.run.abandon()
    await running

    assert desk.log.events() == ["run_held_in_ram"]
    (line,) = desk.log.lines[0][2]["lines"]
    assert "test_engine_work.py:" in line
    assert "create_future()  # nothing of ours" in line


async def test_spinning_branch_does_not_starve_the_others():
    async def handler(ctx):
        task = asyncio.create_task(ctx.step(echo, 5))
        while not task.done():
            await asyncio.sleep(0)
        return task.result()

    assert await Desk(handler).finished() == 5


# --- long journals ---


@pytest.mark.parametrize("style", ["sequence", "gather", "tasks"])
async def test_journal_of_a_thousand_entries(style, capsys):
    async def handler(ctx):
        match style:
            case "sequence":
                return [await ctx.call("a", n) for n in range(1000)]
            case "gather":
                return await ctx.gather(*(ctx.call("a", n) for n in range(1000)))
            case "tasks":
                return await asyncio.gather(*(ctx.call("a", n) for n in range(1000)))
            case _:
                raise AssertionError(style)

    desk = Desk(handler, parks=style != "sequence")
    if style == "sequence":
        desk.begin()

        def answer(changes, committed):
            asyncio.get_running_loop().call_soon(answer_all)

        def answer_all():
            desk.run.deliver([desk.ok(key, key) for key in list(desk.rows.open_calls)])

        desk.port.after_commit = answer
        await desk.run.execute()
    else:
        await desk.parked()
        for key in list(desk.rows.open_calls):
            desk.ok(key, key)
    begun = time.perf_counter()
    value = await desk.finished()
    took = time.perf_counter() - begun
    with capsys.disabled():
        print(f"\n  1,000 recorded entries, {style}: {took * 1e3:.1f} ms", end="")

    assert len(value) == 1000


@pytest.mark.parametrize("kind", ["gather", "first", "quorum"])
async def test_group_over_steps_looks_at_each_end_once(kind, monkeypatch):
    """With a recount at each end, 4,000 steps took 1.7 s to replay."""
    looks = 0

    def error_of(task):
        nonlocal looks
        looks += 1
        return asyncio.CancelledError() if task.cancelled() else task.exception()

    async def double(number: int) -> int:
        return 2 * number

    async def handler(ctx):
        works = [ctx.step(double, number, key=f"double-{number}") for number in range(200)]
        await (ctx.quorum(100, *works) if kind == "quorum" else getattr(ctx, kind)(*works))
        return await ctx.call("search")

    monkeypatch.setattr("coatcheck.worker.engine.work._error_of", error_of)
    desk = Desk(handler)
    await desk.parked()
    looks = 0
    desk.ok("search", "found")

    assert await desk.finished() == "found"
    assert looks <= 3 * 200


async def test_step_takes_keyword_arguments_and_compares_them_on_replay():
    def greet(name: str, *, greeting: str) -> str:
        return f"{greeting}, {name}"

    async def handler(ctx):
        found = await ctx.step(greet, "you", greeting="Hello")
        await ctx.call("search")
        return found

    async def changed(ctx):
        await ctx.step(greet, "you", greeting="Goodbye")

    desk = Desk(handler)
    await desk.parked()
    held = await Desk(changed, rows=desk.rows).once()
    desk.ok("search")

    assert isinstance(held, Held)
    assert await desk.finished() == "Hello, you"


async def test_step_records_how_long_it_took():
    async def nap() -> None:
        await asyncio.sleep(0.02)

    async def handler(ctx):
        await ctx.step(nap)
        ctx.now()
        await ctx.call("search")

    desk = Desk(handler)
    await desk.parked()
    recorded = [entry for changes in desk.rows.commits for entry in changes.entries]

    assert [entry.took is None for entry in recorded] == [False, True]
    assert (recorded[0].took or timedelta()) >= timedelta(seconds=0.02)
