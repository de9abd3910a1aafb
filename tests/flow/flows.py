"""An app for replicas that run as processes of their own; names come from the environment their test gives them."""

import asyncio
import os
import signal
from pathlib import Path

from coatcheck.worker import App, Context, Retry

app = App(os.environ.get("FLOW_SERVICE", "flows"))
PEER = os.environ.get("FLOW_PEER", "peer")
REPLICA = os.environ.get("FLOW_REPLICA", "nobody")


def whoami() -> str:
    return REPLICA


@app.task
async def fan(ctx: Context, topic: str) -> dict[str, object]:
    """Who began, what four calls brought, who ended."""
    began = await ctx.step(whoami, key="began")
    found = await ctx.gather(*(ctx.call(PEER, f"{topic}-{number}", timeout=60) for number in range(4)))
    return {"began": began, "found": found, "ended": REPLICA}


@app.task
async def once(ctx: Context, topic: str) -> str:
    return await ctx.call(PEER, topic, timeout=60)


@app.task
async def slow_step(ctx: Context, path: str) -> str:
    """Leave a mark, then take long: for killing in the middle."""

    async def work() -> str:
        with Path(path).open("a") as ledger:
            ledger.write(f"{REPLICA}\n")
        await asyncio.sleep(float(os.environ.get("FLOW_STEP_S", "30")))
        return REPLICA

    return await ctx.step(work, key="work")


@app.task
async def killer(ctx: Context, path: str) -> str:
    """Takes its process with it, every time."""
    with Path(path).open("a") as ledger:
        ledger.write(f"{REPLICA}\n")
    os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(60)
    return "unreachable"


@app.task(retry=Retry(attempts=3, backoff=0.2))
async def flaky(ctx: Context, path: str) -> int:
    """Fails twice, then passes; its first step runs once."""

    def note() -> str:
        with Path(path).open("a") as ledger:
            ledger.write("noted\n")
        return "noted"

    await ctx.step(note, key="note")
    if ctx.attempt < 3:
        raise RuntimeError(f"attempt {ctx.attempt} was not lucky")
    return ctx.attempt


@app.task(retry=Retry(attempts=2, backoff=0.1), history="full")
async def story(ctx: Context, topic: str) -> list[str]:
    """Something of everything: a step, two calls, a decision, a sleep, and a first attempt that fails."""
    began = await ctx.step(whoami, key="began")
    found = await ctx.gather(*(ctx.call(PEER, f"{topic}-{number}", timeout=60) for number in range(2)))
    ctx.record("decision", choice="go on", began=began)
    await ctx.sleep(0.1)
    if ctx.attempt == 1:
        raise ValueError("not yet")
    return list(found)
