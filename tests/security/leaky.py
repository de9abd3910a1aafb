"""A service whose values are all marked; `coatcheck worker tests.security.leaky:app` must write none of them down."""

import asyncio
import os

import pydantic

from coatcheck.worker import App, Caller, Context, Retry

MARK = "mArK-3d1f"
"""In every payload."""
LOCAL = "lOcAl-77c2"
"""In local variables, which no traceback may show."""
PEER = os.environ.get("COATCHECK_TEST_PEER", "")


def identify(token: str | None) -> Caller | None:
    if token is not None and "bad" in token:
        raise ValueError(f"cannot read {token}")
    return None if token is None else Caller("alice", {"tenant": MARK})


app = App(os.environ.get("COATCHECK_TEST_SERVICE", "leaky"), identify=identify)


class Order(pydantic.BaseModel):
    number: int


def look_up(value: str) -> dict:
    return {"looked up": value}


def stumble(value: str) -> None:
    local = LOCAL  # noqa: F841
    raise LookupError(f"nothing under {value}")


@app.task
async def everything(ctx: Context, value: str) -> dict:
    ctx.progress(1, 2, value)
    found = await ctx.step(look_up, value)
    answer = await ctx.call(PEER, {"value": value, MARK: found})
    await ctx.send(PEER, value)
    return {"answer": answer, MARK: value}


@app.task(retry=Retry(attempts=2, backoff=0.01))
async def fails(ctx: Context, value: str) -> None:
    local = LOCAL + value  # noqa: F841
    raise RuntimeError(f"cannot do {value}")


@app.task
async def step_fails(ctx: Context, value: str) -> None:
    local = LOCAL  # noqa: F841
    await ctx.step(stumble, value)


@app.task
async def call_fails(ctx: Context, value: str) -> None:
    await ctx.call(PEER, value)


@app.task
async def wrong_reply(ctx: Context, value: str) -> None:
    await ctx.call(PEER, [value], returns=int)


@app.task
async def unsendable(ctx: Context, value: str) -> object:
    return {value: object()}


@app.task
async def bad_timer(ctx: Context, value: str) -> None:
    await asyncio.wait({asyncio.ensure_future(ctx.call(PEER, {"value": value}))}, timeout=60)


@app.task
async def orders(ctx: Context, order: Order) -> None:
    pass


@app.task
async def two(ctx: Context, first: int, second: str) -> None:
    pass
