"""Names, digests, and which recorded entry answers to which piece of code."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import warnings
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from tests.worker.fake_port import Desk, keys_of

from coatcheck.errors import UsageError
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import CallId, CallState, Known, OpenCall, Recorded
from coatcheck.worker.engine.keys import NO_DIGEST, Journal, Scope, Wanted, digest_of, escape_name
from coatcheck.worker.engine.run_port import Held, Parked

RAN: list[Any] = []


@pytest.fixture(autouse=True)
def _forget():
    RAN.clear()


def plan(topic: str = "") -> str:
    RAN.append(f"plan {topic}")
    return f"plan of {topic}"


def audit(*what: str) -> str:
    RAN.append("audit")
    return "fine"


def make_plan(topic: str = "") -> str:
    RAN.append("make_plan")
    return "other"


def test_scope_numbers_by_name():
    scope = Scope()
    assert [scope.number("a"), scope.number("b"), scope.number("a")] == ["a", "b", "a#2"]
    child = scope.child("fetch")
    assert [child.number("a"), scope.child("fetch").number("a")] == ["fetch/a", "fetch#2/a"]
    assert child.child("deeper").number("a") == "fetch/deeper/a"


def test_names_cannot_forge_a_path():
    scope = Scope()
    assert scope.number(escape_name("a/b")) == "a%2Fb"
    assert scope.number(escape_name("a#2")) == "a%232"
    assert scope.child("x/y").number("a") == "x%2Fy/a"


def test_explicit_key_shares_the_names():
    scope = Scope()
    assert scope.take("plan") == "plan"
    assert scope.number("plan") == "plan#2"
    with pytest.raises(UsageError, match="used twice"):
        scope.take("plan#2")
    with pytest.raises(UsageError, match="used twice"):
        scope.take("plan")


@dataclasses.dataclass
class Point:
    x: int
    y: int


def test_digest_rules():
    def digest(value):
        return digest_of(value)

    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest([1, 2]) != digest([2, 1])
    assert digest(Point(1, 2)) == digest(Point(1, 2))
    assert digest(datetime(2024, 1, 1, tzinfo=UTC)) == digest(datetime(2024, 1, 1, tzinfo=UTC))
    with pytest.raises(UsageError, match="sorted"):
        digest({1, 2})
    with pytest.raises(UsageError, match="sorted"):
        digest([{"deep": frozenset({1})}])
    with pytest.raises(UsageError, match="key="):
        digest(object())


def entry(key, name, arguments, seq=1, kind=Kind.STEP):
    return Recorded(key, kind, name, digest_of(arguments), seq, CallState.OK, b"")


def want(key, name, arguments, *, is_explicit=False, kind=Kind.STEP):
    return Wanted(key, kind=kind, name=name, digest=digest_of(arguments), is_explicit=is_explicit)


def test_journal_lookup_order():
    journal = Journal(Known((entry("a", "a", 1), entry("a#2", "a", 2, 2), entry("a#3", "a", 3, 3))))

    assert journal.find(want("a", "a", 2))[0] == "a#2"  # not its occurrence, but its arguments
    assert journal.find(want("a#2", "a", 1))[0] == "a"
    assert journal.find(want("a#3", "a", 3))[0] == "a#3"
    assert not journal.unread
    assert journal.find(want("a#4", "a", 4)) == ("a#4", None, True)


def test_journal_mismatch_shows_both_sides():
    journal = Journal(Known((entry("a", "a", 1),)))

    with pytest.raises(UsageError) as caught:
        journal.find(want("a", "a", 2))

    text = str(caught.value)
    assert digest_of(1).hex()[:8] in text
    assert digest_of(2).hex()[:8] in text
    assert "key='a'" in text


def test_one_entry_never_answers_twice():
    journal = Journal(Known((entry("a", "a", 1), entry("a#2", "a", 2, 2))))
    assert journal.find(want("a", "a", 2))[0] == "a#2"

    with pytest.raises(UsageError, match="asked for already"):
        journal.find(want("a#2", "a", 2))


def test_another_kind_is_a_mismatch():
    journal = Journal(Known((), (OpenCall(CallId(UUID(int=1)), "a", Kind.CALL, "a", NO_DIGEST, None),)))

    with pytest.raises(UsageError, match="call 'a'"):
        journal.find(want("a", "a", 1))


# --- changes of code under a parked task ---


async def begun_then(before, after):
    """Park a task on `before`, then run it once on `after`."""
    desk = Desk(before)
    await desk.parked()
    desk.handler = after
    return desk


async def original(ctx):
    first = await ctx.step(plan, "a")
    second = await ctx.step(audit, "b")
    return [first, second, await ctx.call("search", "q")]


async def test_added_work_runs_and_the_rest_is_remembered():
    async def added(ctx):
        await ctx.step(make_plan, "something else")
        return await original(ctx)

    desk = await begun_then(original, added)
    RAN.clear()
    await desk.parked()
    desk.ok("search", "hit")

    assert await desk.finished() == ["plan of a", "fine", "hit"]
    assert RAN == ["make_plan"]


async def test_removed_work_is_kept_and_shown():
    async def removed(ctx):
        return [await ctx.step(plan, "a"), await ctx.call("search", "q")]

    desk = await begun_then(original, removed)
    desk.ok("search", "hit")

    assert await desk.finished() == ["plan of a", "hit"]
    assert desk.run.unread_keys == ("audit",)


async def test_reordered_work_is_found():
    async def reordered(ctx):
        third = asyncio.create_task(ctx.call("search", "q"))
        second = await ctx.step(audit, "b")
        first = await ctx.step(plan, "a")
        return [first, second, await third]

    desk = await begun_then(original, reordered)
    RAN.clear()
    desk.ok("search", "hit")

    assert await desk.finished() == ["plan of a", "fine", "hit"]
    assert RAN == []


async def test_renamed_step_is_held_with_the_fix():
    async def renamed(ctx):
        first = await ctx.step(make_plan, "a")
        return [first, await ctx.step(audit, "b"), await ctx.call("search", "q")]

    desk = await begun_then(original, renamed)
    RAN.clear()
    outcome = await desk.once()

    assert isinstance(outcome, Held)
    assert "key='plan'" in str(outcome.error)
    assert RAN == []


async def test_renamed_step_with_the_old_key_goes_on():
    async def renamed(ctx):
        first = await ctx.step(make_plan, "a", key="plan")
        return [first, await ctx.step(audit, "b"), await ctx.call("search", "q")]

    desk = await begun_then(original, renamed)
    desk.ok("search", "hit")

    assert await desk.finished() == ["plan of a", "fine", "hit"]
    assert desk.log.lines == []


async def test_renamed_branch_is_held():
    async def fetch(ctx):
        return await ctx.call("search", "q")

    async def fetch_all(ctx):
        return await ctx.call("search", "q")

    async def before(ctx):
        return await asyncio.gather(fetch(ctx))

    async def after(ctx):
        return await asyncio.gather(fetch_all(ctx))

    desk = await begun_then(before, after)
    outcome = await desk.once()

    assert isinstance(outcome, Held)
    assert len(desk.rows.sent) == 1


async def test_call_added_beside_calls_with_the_same_body_is_no_rename():
    async def before(ctx):
        return await ctx.gather(ctx.call("flights", "trip"), ctx.call("hotels", "trip"))

    async def after(ctx):
        return await ctx.gather(ctx.call("cars", "trip"), ctx.call("flights", "trip"), ctx.call("hotels", "trip"))

    desk = await begun_then(before, after)
    desk.ok("hotels", 1)
    await desk.parked()

    assert sorted(desk.rows.open_calls) == ["cars", "flights"]


async def test_explicit_key_tolerates_other_arguments_with_a_warning():
    async def before(ctx):
        return [await ctx.step(plan, "a", key="the-plan"), await ctx.call("x")]

    async def after(ctx):
        return [await ctx.step(plan, "b", key="the-plan"), await ctx.call("x")]

    desk = await begun_then(before, after)
    desk.ok("x", 1)

    assert await desk.finished() == ["plan of a", 1]
    assert desk.log.events() == ["recorded_arguments_differ"]


async def test_changed_timeout_is_no_mismatch():
    async def before(ctx):
        return [await ctx.call("a", 1, timeout=5), await ctx.sleep(5)]

    async def after(ctx):
        return [await ctx.call("a", 1, timeout=50, idle_timeout=3), await ctx.sleep(500)]

    desk = await begun_then(before, after)
    desk.ok("a", 1)
    await desk.parked()
    desk.handler = before
    desk.ok("@sleep")

    assert await desk.finished() == [1, None]


# --- what has no stable name ---


def closure():
    captured = 1

    def inner():
        return captured

    return inner


@pytest.mark.parametrize(
    "make",
    [lambda: lambda: 1, lambda: functools.partial(plan, "a"), closure],
    ids=["lambda", "partial", "closure"],
)
async def test_function_without_a_stable_name_needs_a_key(make):
    async def unnamed(ctx):
        await ctx.step(make())

    async def named(ctx):
        return await ctx.step(make(), key="mine")

    assert "key=" in str(await Desk(unnamed).raised())
    assert await Desk(named).finished() in (1, "plan of a")


async def test_coroutine_instead_of_function_teaches():
    async def work():
        pass

    async def handler(ctx):
        await ctx.step(work())

    assert "ctx.step(fn, arg)" in str(await Desk(handler).raised())


async def test_keys_are_those_of_a_plain_await():
    async def handler(ctx):
        tasks = [asyncio.create_task(ctx.call("a", n), name=f"named {n}") for n in range(2)]
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.call("b"))
            group.create_task(ctx.sleep(1))
        return await asyncio.gather(*tasks, ctx.call("a", 2))

    desk = Desk(handler)
    await desk.parked()

    assert sorted(desk.rows.open_calls) == ["@sleep", "a", "a#2", "b"]


async def test_key_used_twice_teaches():
    async def handler(ctx):
        await ctx.call("a", key="x")
        await ctx.call("b", key="x")

    desk = Desk(handler)
    await desk.parked()
    desk.ok("x")

    assert "used twice" in str(await desk.raised())


async def test_never_awaited_work_is_named():
    async def handler(ctx):
        ctx.call("search", 1)
        return 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await Desk(handler).finished()

    assert [each.category for each in caught] == [RuntimeWarning]
    assert "ctx.call('search') was never awaited" in str(caught[0].message)


async def test_work_given_away_before_it_is_awaited_teaches():
    async def handler(ctx):
        first = ctx.call("search", 1)
        try:
            await ctx.call("rank", {"found": [first]})
        finally:
            first.close()

    error = str(await Desk(handler).raised())

    assert error.startswith("ctx.call('rank') got arguments")
    assert "before it is awaited: write `await ctx.call(...)`" in error


async def test_work_awaited_twice_teaches():
    async def handler(ctx):
        work = ctx.step(plan, "a")
        await work
        await work

    assert "create_task" in str(await Desk(handler).raised())


async def test_branch_names_are_stable_across_replays():
    async def leaf(ctx, n):
        return await ctx.call("x", n)

    async def node(ctx, n):
        return await asyncio.gather(leaf(ctx, n), leaf(ctx, n + 1))

    async def handler(ctx):
        return await asyncio.gather(node(ctx, 0), node(ctx, 10))

    desk = Desk(handler)
    await desk.parked()
    keys = sorted(keys_of(desk.rows.open_calls))
    assert keys == ["node#2/leaf#2/x", "node#2/leaf/x", "node/leaf#2/x", "node/leaf/x"]
    outcomes = []
    for key in keys:
        desk.ok(key, key)
        outcomes.append(await desk.once())

    assert outcomes[:-1] == [Parked()] * 3
    assert outcomes[-1].value == [["node/leaf/x", "node/leaf#2/x"], ["node#2/leaf/x", "node#2/leaf#2/x"]]


async def test_scope_roots_keys_at_the_task_whatever_tasks_lie_between():
    async def agent(ctx, number):
        with ctx.scope(f"agent:{number}"):
            async with asyncio.TaskGroup() as tools:
                tools.create_task(ctx.call("search", number))
            return await ctx.call("model", number)

    async def handler(ctx):
        await ctx.call("plan")
        return await asyncio.gather(*(asyncio.create_task(agent(ctx, number), name="inner") for number in (1, 2)))

    desk = Desk(handler)
    await desk.parked()
    desk.ok("plan")
    await desk.parked()

    assert sorted(desk.rows.open_calls) == ["agent:1/search", "agent:2/search"]

    for number in (1, 2):
        desk.ok(f"agent:{number}/search")
    await desk.parked()
    assert sorted(desk.rows.open_calls) == ["agent:1/model", "agent:2/model"]
    for number in (1, 2):
        desk.ok(f"agent:{number}/model", number)
    assert await desk.finished() == [1, 2]


async def test_work_after_a_scope_is_numbered_in_its_branch_again():
    async def handler(ctx):
        for _ in range(2):
            with ctx.scope("agent"):
                await ctx.call("search")
        await ctx.call("search")

    desk = Desk(handler)
    for key in ("agent/search", "agent#2/search", "search"):
        await desk.parked()
        assert keys_of(desk.rows.open_calls) == [key]
        desk.ok(key)

    assert await desk.finished() is None


@pytest.mark.parametrize("name", ["", 7])
async def test_scope_without_a_name_is_refused(name):
    async def handler(ctx):
        with ctx.scope(name):
            await ctx.call("search")

    error = await Desk(handler).raised()

    assert isinstance(error, UsageError)
    assert "needs a name" in str(error)


async def test_scope_in_a_step_is_refused():
    async def step(ctx) -> None:
        with ctx.scope("agent"):
            pass

    async def handler(ctx):
        async def inside() -> None:
            await step(ctx)

        await ctx.step(inside, key="inside")

    error = await Desk(handler).raised()

    assert "outside its handler" in str(error)
