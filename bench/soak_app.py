"""The service under soak: one handler for each way that a task can go."""

import os

from coatcheck.worker import App, Context, Retry

app = App(os.environ.get("BENCH_SERVICE", "soak"))
PEER = os.environ.get("BENCH_PEER", "soak-echo")


@app.task
async def fan(ctx: Context, text: str) -> str:
    """Four calls, one durable wait."""
    found = await ctx.gather(*(ctx.call(PEER, [text, number]) for number in range(4)))
    return str(found[0][0])


@app.task
async def chain(ctx: Context, text: str) -> str:
    """A step, a call, a step."""
    before = await ctx.step(str.upper, text)
    answer = await ctx.call(PEER, before)
    return await ctx.step(str.lower, answer)


@app.task
async def nap(ctx: Context, text: str) -> str:
    """A timer, so the sweeper has something to do."""
    await ctx.sleep(0.5)
    return text


@app.task(retry=Retry(attempts=2, backoff=0.2))
async def again(ctx: Context, text: str) -> str:
    """Fails, waits, passes."""
    if ctx.attempt == 1:
        raise RuntimeError("not this time")
    return text


@app.task
async def late(ctx: Context, text: str) -> str:
    """Takes the first of two answers; the other one comes too late."""
    return await ctx.first(ctx.call(PEER, text), ctx.call(PEER, text), cancel_rest=True)


@app.task
async def plain(ctx: Context, text: str) -> str:
    """No wait, no row."""
    return text
