"""What is run in the simulation: handlers that wait in every way, and what each must give.

Steps are numbered as they happen, all over the world, and results carry those numbers: two runs of one task that both
got to an end would give two different results, and be found out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from tests.simulation.world import World

from coatcheck.worker import App, CallFailed, CallTimedOut, Context, Retry, TaskFailed

SERVICE = "svc"
PEER = "peer"
QUIET = "quiet"
"""A peer that never answers."""

_current: Callable[[], tuple[World, Callable[[str, str], int]]]


def use(current: Callable[[], tuple[World, Callable[[str, str], int]]]) -> None:
    """Say which world steps have their effects in."""
    global _current  # noqa: PLW0603 - one world at a time
    _current = current


async def effect(task: str, key: str) -> int:
    """Do something to the world that must not be done again once it is recorded; it takes a moment."""
    world, note = _current()
    number = note(task, key)
    await asyncio.sleep(world.rng.random() * 0.05)
    return number


async def slow_effect(task: str, key: str, seconds: float) -> int:
    _, note = _current()
    number = note(task, key)
    await asyncio.sleep(seconds)
    return number


def _call(ctx: Context, n: int, **options: Any) -> Any:
    return ctx.call(PEER, {"n": n}, timeout=options.pop("timeout", 600), **options)


async def plain(ctx: Context, n: int) -> Any:
    return n + 1


async def one(ctx: Context, n: int) -> Any:
    return await _call(ctx, n)


async def careful(ctx: Context, n: int) -> Any:
    """Known by its row from the first delivery on, though it never waits."""
    return n + 2


async def fan(ctx: Context, n: int) -> Any:
    return await ctx.gather(*(_call(ctx, n + each) for each in range(3)))


async def chain(ctx: Context, n: int) -> Any:
    first = await ctx.step(effect, str(ctx.task_id), "first", key="first")
    answer = await _call(ctx, n)
    second = await ctx.step(effect, str(ctx.task_id), "second", key="second")
    return [first, answer, second]


async def race(ctx: Context, n: int) -> Any:
    winner = await ctx.first(_call(ctx, n), ctx.call(QUIET, {"n": n}, timeout=900), _call(ctx, n))
    return [winner, await _call(ctx, n + 1)]


async def majority(ctx: Context, n: int) -> Any:
    found = await ctx.quorum(2, _call(ctx, n), ctx.call(QUIET, {"n": n}, timeout=900), _call(ctx, n))
    return sorted(each for each in found if each is not None)


async def branches(ctx: Context, n: int) -> Any:
    async def left() -> Any:
        first = await _call(ctx, n)
        return [first, await _call(ctx, n + 1)]

    async def right() -> Any:
        number = await ctx.step(effect, str(ctx.task_id), "right", key="right")
        await ctx.sleep(1)
        return [number, await _call(ctx, n + 2)]

    return await asyncio.gather(left(), right())


async def beside(ctx: Context, n: int) -> Any:
    """A step that takes its time beside a call that is answered at once."""
    async with asyncio.TaskGroup() as group:
        step = group.create_task(ctx.step(slow_effect, str(ctx.task_id), "beside", 2.0, key="beside"), name="step")
        call = group.create_task(_call(ctx, n), name="call")
    return [step.result(), call.result()]


async def long(ctx: Context, n: int) -> Any:
    """A run longer than the limit: it lives by its lease, its message acked."""
    answer = await _call(ctx, n)
    return [answer, await ctx.step(slow_effect, str(ctx.task_id), "long", 9.0, key="long")]


async def again(ctx: Context, n: int) -> Any:
    """Fails at first; what was recorded before stays."""
    number = await ctx.step(effect, str(ctx.task_id), "before", key="before")
    answer = await _call(ctx, n)
    if ctx.attempt < 3:
        raise RuntimeError("not yet")
    return [number, answer]


async def refused(ctx: Context, n: int) -> Any:
    """A call whose first try the peer refuses."""
    return await ctx.call(PEER, {"n": n, "refuse": True}, timeout=600, retry=Retry(attempts=3, backoff=0.5))


async def silent(ctx: Context, n: int) -> Any:
    """A peer that never answers, and what is done about it."""
    try:
        await ctx.call(QUIET, {"n": n}, timeout=2)
    except CallTimedOut:
        return ["timed out", await _call(ctx, n)]
    raise AssertionError("a quiet peer has answered")


async def patient(ctx: Context, n: int) -> Any:
    """Progress keeps a slow call alive beyond its idle time."""
    try:
        return await ctx.call(PEER, {"n": n, "progress": True}, idle_timeout=3, timeout=600)
    except CallTimedOut:
        return "timed out"  # when faults kept the progress from being heard; the judge knows whether it was due


async def nap(ctx: Context, n: int) -> Any:
    await ctx.sleep(1.5)
    return await _call(ctx, n)


async def parent(ctx: Context, n: int) -> Any:
    """A service that calls itself."""
    return await ctx.gather(
        ctx.call(SERVICE, n, task="one", timeout=3600), ctx.call(SERVICE, n + 1, task="one", timeout=3600)
    )


async def note(ctx: Context, n: int) -> Any:
    """A message nobody answers, and a call."""
    await ctx.send(PEER, {"n": n, "note": True})
    return await _call(ctx, n)


async def nowhere(ctx: Context, n: int) -> Any:
    """A call to a queue that does not exist comes back at once."""
    try:
        await ctx.call("nobody", {"n": n}, timeout=900)
    except CallFailed as error:
        return [error.code, await _call(ctx, n)]
    raise AssertionError("nobody has answered")


async def unstorable(ctx: Context, n: int) -> Any:
    """Wants something recorded that no row can hold: it fails, and nobody beside it."""
    return await ctx.call(PEER, {"n": n}, task="no\0such", timeout=600)


async def hopeless(ctx: Context, n: int) -> Any:
    """It fails, for people to retry."""
    return await ctx.call(QUIET, {"n": n}, timeout=2)


async def newer(ctx: Context, n: int) -> Any:
    """Known to the second version only: the first holds it."""
    return await _call(ctx, n)


def answer_of(n: int) -> int:
    """What the peer answers."""
    return n * 7 + 1


def _is_numbered(value: Any, *rest: Any) -> bool:
    """A step's number, then what is known."""
    return isinstance(value, list) and isinstance(value[0], int) and value[1:] == list(rest)


A = answer_of
EXPECTED: Mapping[str, Callable[[int, Any], bool]] = {
    "plain": lambda n, v: v == n + 1,
    "one": lambda n, v: v == A(n),
    "careful": lambda n, v: v == n + 2,
    "fan": lambda n, v: v == [A(n), A(n + 1), A(n + 2)],
    "chain": lambda n, v: isinstance(v, list) and len(v) == 3 and v[1] == A(n) and v[0] < v[2],
    "race": lambda n, v: v == [A(n), A(n + 1)],
    "majority": lambda n, v: v == [A(n), A(n)],
    "branches": lambda n, v: isinstance(v, list) and v[0] == [A(n), A(n + 1)] and _is_numbered(v[1], A(n + 2)),
    "beside": lambda n, v: _is_numbered(v, A(n)),
    "long": lambda n, v: isinstance(v, list) and v[0] == A(n) and isinstance(v[1], int),
    "again": lambda n, v: _is_numbered(v, A(n)),
    "refused": lambda n, v: v == A(n),
    "silent": lambda n, v: v == ["timed out", A(n)],
    "patient": lambda n, v: v in (A(n), "timed out"),
    "nap": lambda n, v: v == A(n),
    "parent": lambda n, v: v == [A(n), A(n + 1)],
    "note": lambda n, v: v == A(n),
    "nowhere": lambda n, v: v == ["no_route", A(n)],
    "unstorable": lambda n, v: isinstance(v, TaskFailed),
    "newer": lambda n, v: v == A(n),
    "hopeless": lambda n, v: isinstance(v, TaskFailed),
}
HANDLERS = (
    plain, one, careful, fan, chain, race, majority, branches, beside, long, again, refused, silent, patient, nap,
    parent, note, nowhere, unstorable,
)  # fmt: skip


def make_app(version: str) -> App:
    app = App(SERVICE, version=version)
    for handler in (*HANDLERS, hopeless, *((newer,) if version == "2" else ())):
        retry = Retry(attempts=5, backoff=0.5) if handler is again else None
        app.task(retry=retry, dedup=handler is careful)(handler)
    return app


APPS = {version: make_app(version) for version in ("1", "2")}
