"""The service of the trial: one handler for each way of waiting, and a ledger of every effect.

A result is `{"value": …, "tokens": […]}`. The value follows from the request alone, so that whoever checks can compute
it. Each run of a step and each answer of a peer has a token of its own; those that went into a result stand in it, so
that a result built from anything but what was recorded shows. Some handlers keep a full history, some the outcome.
"""

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.books import Book

from coatcheck.worker import App, CallFailed, CallTimedOut, Context, Retry

SERVICE = os.environ.get("CHAOS_SERVICE", "chaos")
LONG_S = float(os.environ.get("CHAOS_LONG_S", "2"))
FOR_EVER_S = 3600
STUBBORN = Retry(attempts=1000, backoff=0.1)

app = App(SERVICE, history="full")
ledger = Book(Path(os.environ.get("CHAOS_EVIDENCE", ".")) / f"ledger-{os.getpid()}-{time.time_ns()}.jsonl")

Answer = dict[str, Any]


def peer(role: str) -> str:
    return f"{SERVICE}-{role}"


def f(n: int) -> int:
    """What a peer answers; computed here too, by tasks that ask nobody."""
    return (n * n + 7) % 100_003


def answer(value: int, *parts: Answer) -> Answer:
    return {"value": value, "tokens": [token for part in parts for token in part["tokens"]]}


class Run:
    """One run of a handler, as the ledger knows it."""

    def __init__(self, ctx: Context) -> None:
        self.id = uuid.uuid4().hex
        self._task = str(ctx.task_id)
        self._about = {"run": self.id, "task": self._task, "identity": ctx.identity}

    def note(self, what: str, *, is_synced: bool = False, **fields: Any) -> None:
        ledger.write(what, is_synced=is_synced, **self._about, **fields)

    def effect(self, key: str) -> list[str]:
        """Leave a mark that cannot be taken back."""
        token = uuid.uuid4().hex
        self.note("effect", is_synced=True, key=key, token=token)
        return [token]

    def add_one(self, key: str, n: int) -> Answer:
        return {"value": n + 1, "tokens": self.effect(key)}

    async def add_one_slowly(self, key: str, n: int, seconds: float) -> Answer:
        tokens = self.effect(key)
        await asyncio.sleep(seconds)
        return {"value": n + 1, "tokens": tokens}


@contextmanager
def running(ctx: Context) -> Iterator[Run]:
    """Book when a handler begins and when it leaves, also by being put down; a killed process books no leaving."""
    run = Run(ctx)
    run.note("begin", attempt=ctx.attempt)
    try:
        yield run
    finally:
        run.note("end")


def call(ctx: Context, role: str, n: int, **options: Any) -> Any:
    return ctx.call(peer(role), {"n": n}, **({"timeout": FOR_EVER_S} | options))


@app.task
async def plain(ctx: Context, n: int) -> Answer:
    with running(ctx):
        return answer(f(n))


@app.task(dedup=True, history="outcome")
async def deduplicated(ctx: Context, n: int) -> Answer:
    with running(ctx) as run:
        return {"value": f(n), "tokens": run.effect("body")}


@app.task(history="outcome")
async def fan1(ctx: Context, n: int) -> Answer:
    with running(ctx):
        got = await call(ctx, "quick", n)
        return answer(got["value"], got)


@app.task
async def fan4(ctx: Context, n: int) -> Answer:
    with running(ctx):
        roles = ("quick", "slow", "twice", "quick")
        got = await ctx.gather(*(call(ctx, role, n + place) for place, role in enumerate(roles)))
        return answer(sum(one["value"] for one in got), *got)


@app.task
async def first(ctx: Context, n: int) -> Answer:
    """The leftovers stay open until the end; the silent one never answers."""
    with running(ctx):
        got = await ctx.first(call(ctx, "slow", n), call(ctx, "silent", n), call(ctx, "quick", n))
        more = await call(ctx, "quick", n + 1)
        return answer(got["value"] + more["value"], got, more)


@app.task(history="outcome")
async def quorum(ctx: Context, n: int) -> Answer:
    with running(ctx):
        roles = ("quick", "slow", "twice", "silent")
        got = await ctx.quorum(2, *(call(ctx, role, n) for role in roles), cancel_rest=bool(n % 2))
        return answer(sum(one["value"] for one in got), *got)


@app.task
async def branches(ctx: Context, n: int) -> Answer:
    """Two branches that wait for different things."""

    async def chain() -> list[Answer]:
        one = await call(ctx, "quick", n)
        return [one, await call(ctx, "slow", one["value"])]

    async def later() -> list[Answer]:
        await ctx.sleep(0.2)
        return [await call(ctx, "twice", n)]

    with running(ctx):
        left, right = await asyncio.gather(chain(), later())
        return answer(left[-1]["value"] + right[-1]["value"], *left, *right)


@app.task
async def beside(ctx: Context, n: int) -> Answer:
    """A step goes on while calls come back."""
    with running(ctx) as run:
        step = ctx.step(run.add_one_slowly, "beside", n, 0.3, key="beside")
        got = await ctx.gather(step, call(ctx, "quick", n), call(ctx, "slow", n))
        return answer(sum(one["value"] for one in got), *got)


@app.task
async def steps(ctx: Context, n: int) -> Answer:
    with running(ctx) as run:
        one = await ctx.step(run.add_one, "one", n, key="one")
        two = await call(ctx, "quick", one["value"])
        three = await ctx.step(run.add_one, "three", two["value"], key="three")
        four = await call(ctx, "twice", three["value"])
        five = await ctx.step(run.add_one, "five", four["value"], key="five")
        return answer(five["value"], one, two, three, four, five)


@app.task(retry=Retry(attempts=3, backoff=0.1), history="outcome")
async def flaky(ctx: Context, n: int) -> Answer:
    """Fails twice; what it recorded before stays recorded."""
    with running(ctx) as run:
        one = await ctx.step(run.add_one, "one", n, key="one")
        two = await call(ctx, "quick", n)
        if ctx.attempt < 3:
            raise RuntimeError(f"attempt {ctx.attempt} was not lucky")
        return answer(one["value"] + two["value"] + ctx.attempt, one, two)


@app.task
async def retried(ctx: Context, n: int) -> Answer:
    """Its peer fails every other call; each try is a call of its own."""
    with running(ctx):
        got = await call(ctx, "failing", n, retry=STUBBORN)
        return answer(got["value"], got)


@app.task
async def failed(ctx: Context, n: int) -> Answer:
    """Ends with an error of its own."""
    with running(ctx):
        got = await call(ctx, "quick", n)
        raise ValueError(f"no luck with {got['value']}")


@app.task
async def progressing(ctx: Context, n: int) -> Answer:
    """Its peer takes longer than the idle limit and says that it is alive; when nobody hears it, it is asked again."""
    with running(ctx):
        ctx.progress(1, 2, "asking")
        got = await call(ctx, "progress", n, idle_timeout=1.5, retry=STUBBORN)
        return answer(got["value"], got)


@app.task
async def sleepy(ctx: Context, n: int) -> Answer:
    with running(ctx):
        await ctx.sleep(0.1 + n % 10 / 10)
        return answer(f(n))


@app.task(history="outcome")
async def silent(ctx: Context, n: int) -> Answer:
    with running(ctx):
        try:
            await call(ctx, "silent", n, timeout=0.5 + n % 10 / 10)
        except CallTimedOut:
            got = await call(ctx, "quick", n)
            return answer(-got["value"], got)
        raise AssertionError("the silent peer has answered")


@app.task
async def refused(ctx: Context, n: int) -> Answer:
    """Calls a queue that does not exist."""
    with running(ctx):
        try:
            await call(ctx, "nowhere", n)
        except CallFailed as error:
            return {"value": -n, "tokens": [], "code": error.code}
        raise AssertionError("nobody has answered, and that was an answer")


@app.task(history="outcome")
async def long(ctx: Context, n: int) -> Answer:
    """A step so long that the run lives by its lease alone."""
    with running(ctx) as run:
        one = await ctx.step(run.add_one_slowly, "one", n, LONG_S, key="one")
        two = await call(ctx, "quick", one["value"])
        return answer(two["value"], one, two)


@app.task
async def calling_itself(ctx: Context, n: int) -> Answer:
    with running(ctx):
        got = await ctx.call(SERVICE, n, task="steps" if n % 2 else "fan1", timeout=FOR_EVER_S)
        return answer(got["value"], got)


@app.task
async def sending(ctx: Context, n: int) -> Answer:
    """One message that expects no reply."""
    with running(ctx):
        await ctx.send(peer("sink"), {"n": n})
        got = await call(ctx, "quick", n)
        return answer(got["value"], got)


@app.task(history="outcome")
async def killer(ctx: Context, n: int) -> Answer:
    """Takes its process with it, every time."""
    with running(ctx) as run:
        run.note("killing")
        os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(FOR_EVER_S)
        return answer(n)
