"""The service that is measured: a handler for each row."""

import os
import time

from coatcheck.worker import App, Context

app = App(os.environ.get("BENCH_SERVICE", "bench"))
PEER = os.environ.get("BENCH_PEER", "bench-echo")
SILENT_PEER = os.environ.get("BENCH_SILENT_PEER", "bench-silent")
STEP_COUNT = 100


@app.task
async def fan4(ctx: Context, text: str) -> int:
    """One request, four calls to an echo peer, a durable wait, one reply."""
    return len(await ctx.gather(*(ctx.call(PEER, {"text": text, "number": number}) for number in range(4))))


# The same, by how much is kept of what happened; `fan4` itself has the default.
for level in ("off", "full"):
    app.task(name=f"fan4_{level}", history=level)(fan4)


@app.task
async def fan1(ctx: Context, text: str) -> int:
    return len(await ctx.call(PEER, {"text": text}))


@app.task
async def no_wait(ctx: Context, text: str) -> int:
    return len(text)


@app.task
async def journal(ctx: Context, text: str) -> int:
    """A hundred steps and a wait: the run that follows replays them all."""
    total = 0
    for number in range(STEP_COUNT):
        total += await ctx.step(_measure, text, number, key=f"step-{number}")
    return total + len(await ctx.call(PEER, {"text": text}))


async def _measure(text: str, number: int) -> int:
    return len(text) + number


@app.task
async def nap(ctx: Context, due_s: float) -> float:
    """Sleep until an instant that the requester chose. A replay does not check how much time is left."""
    await ctx.sleep(max(0.0, due_s - time.time()))
    return due_s


@app.task
async def unanswered(ctx: Context, text: str) -> int:
    """Waits for a peer that never answers, until the task is cancelled."""
    return len(await ctx.call(SILENT_PEER, {"text": text}))
