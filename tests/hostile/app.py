"""The services of a hostile run, started as processes of their own. Names come from the environment."""

import contextlib
import hashlib
import os
from typing import Any

from coatcheck.worker import App, Caller, CallFailed, Context, Unauthorized

SERVICE = os.environ.get("HOSTILE_SERVICE", "hostile")
TOKEN = "only the well-behaved know this"

app = App(SERVICE)


def proof(n: int) -> str:
    """What the right answer to `n` contains; a client can tell it from a made-up one."""
    return hashlib.sha256(f"{n}".encode()).hexdigest()


@app.task
async def plain(ctx: Context, n: int) -> dict[str, Any]:
    return {"n": n, "proof": proof(n)}


@app.task
async def distinct(ctx: Context, ns: set[int]) -> int:
    return len(ns)


@app.task
async def ask(ctx: Context, n: int) -> dict[str, Any]:
    """Park on a peer that behaves."""
    return await ctx.call(f"{SERVICE}-good", {"n": n}, timeout=600, returns=dict[str, Any])


@app.task
async def clogged(ctx: Context, n: int) -> dict[str, Any]:
    """Park on a peer whose queue is full most of the time."""
    return await ctx.call(f"{SERVICE}-full", {"n": n}, timeout=3600, returns=dict[str, Any])


@app.task
async def beset(ctx: Context, n: int) -> dict[str, Any]:
    """Ask a peer that attacks, survive its answer, then ask one that behaves."""
    with contextlib.suppress(CallFailed):
        await ctx.call(f"{SERVICE}-evil", {"n": n}, timeout=10)
    return await ctx.call(f"{SERVICE}-good", {"n": n}, timeout=600, returns=dict[str, Any])


@app.task
async def bulky(ctx: Context, n: int) -> str:
    """An answer of 200 KB, for requests that come in many copies."""
    await ctx.call(f"{SERVICE}-good", {"n": n}, timeout=600)
    return "x" * 200_000


def identify(token: str | None) -> Caller:
    if token != TOKEN:
        raise Unauthorized("send the token")
    return Caller(subject="well-behaved")


guarded = App(f"{SERVICE}-guarded", identify=identify)


@guarded.task
async def secret(ctx: Context, n: int) -> dict[str, Any]:
    """Wait for a peer, so that repeats meet a task that is under way."""
    return await ctx.call(f"{SERVICE}-good", {"n": n}, timeout=600, returns=dict[str, Any])
