"""The service whose tasks are counted by the million: its handlers wait, and do little else."""

import os

from coatcheck.worker import App, Context

app = App(os.environ.get("BENCH_SERVICE", "scale"))
SILENT = os.environ.get("BENCH_SILENT", "scale-silent")
ECHO = os.environ.get("BENCH_PEER", "scale-echo")
FOR_LONG_S = 30 * 86_400


@app.task
async def wait4(ctx: Context, topic: str, queries: list[str]) -> int:
    """Four calls to a peer that does not answer."""
    calls = (ctx.call(SILENT, {"part": number}, timeout=FOR_LONG_S) for number in range(4))
    return len(await ctx.gather(*calls))


@app.task
async def give_up(ctx: Context, seconds: float) -> int:
    """Four calls that all time out at once, and one run after the last of them."""
    calls = (ctx.call(SILENT, {"part": number}, timeout=seconds) for number in range(4))
    return len(await ctx.gather(*calls, return_exceptions=True))


@app.task
async def fan(ctx: Context, width: int) -> int:
    """As many calls at once as asked for."""
    return len(await ctx.gather(*(ctx.call(ECHO, {"part": number}) for number in range(width))))
