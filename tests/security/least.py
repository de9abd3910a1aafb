"""A service for the roles of docs/security.md: `coatcheck worker tests.security.least:app`."""

from coatcheck.worker import App, Context

app = App("research")


def double(number: int) -> int:
    return 2 * number


@app.task
async def research(ctx: Context, number: int) -> dict:
    """Uses everything that needs a right: a row, a step, a call, a silent peer, a timer, a send, a progress."""
    ctx.progress(1, 2)
    doubled = await ctx.step(double, number)
    found = await ctx.call("search", doubled)
    [silent] = await ctx.gather(ctx.call("search", "say nothing", timeout=0.2), return_exceptions=True)
    await ctx.sleep(0.05)
    await ctx.send("search", "good bye")
    return {"found": found, "silent": silent.code}


@app.task
async def wait(ctx: Context) -> None:
    await ctx.sleep(3600)
