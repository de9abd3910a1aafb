"""The service that is measured."""

import os

from coatcheck.worker import App, Context

app = App(os.environ.get("BENCH_SERVICE", "bench"))
PEER = os.environ.get("BENCH_PEER", "bench-echo")


@app.task
async def fan4(ctx: Context, text: str) -> int:
    """One request, four calls to an echo peer, a durable wait, one reply."""
    return len(await ctx.gather(*(ctx.call(PEER, {"text": text, "number": number}) for number in range(4))))


@app.task
async def fan1(ctx: Context, text: str) -> int:
    return len(await ctx.call(PEER, {"text": text}))


@app.task
async def no_wait(ctx: Context, text: str) -> int:
    return len(text)
