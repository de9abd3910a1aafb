"""Partial results: peers that fail, take too long, died or never existed, and how a handler copes with each.

    python -m examples.partial_results

Look at the three ways to wait. `gather(return_exceptions=True)` returns the offers it got, with an error in the place
of each missing one. `retry=` asks a flaky shop again, and the pauses in between are durable. `quorum(2, …)` returns
with the first two, and `cancel_rest=True` tells the other shops to stop. No timeout here holds a process: the task is
a row, and the sweeper sends the timeout as a message.
"""

import os
import sys
from collections import Counter

from coatcheck.worker import App, CallFailed, Client, Context, Retry
from examples.stage import Stage, play

PREFIX = os.environ.get("EXAMPLES_PREFIX", "")  # for a broker that has other queues of the same names
SHOPS, DEAD, NOWHERE = f"{PREFIX}shops", f"{PREFIX}dead-shop", f"{PREFIX}no-such-shop"
PATIENCE_S = 3.0
MODULE = "examples.partial_results"

app = App(f"{PREFIX}buyer")
shops = App(SHOPS)
dead_shop = App(DEAD)


@app.task
async def all_offers(ctx: Context, item: str) -> dict[str, str]:
    """Ask every shop once, the flaky one up to three times. A shop that does not answer in time costs one line."""
    calls = {
        "prompt": ctx.call(SHOPS, item, task="prompt", timeout=PATIENCE_S),
        "flaky": ctx.call(SHOPS, item, task="flaky", timeout=PATIENCE_S, retry=Retry(attempts=3, backoff=0.2)),
        "slow": ctx.call(SHOPS, item, task="slow", timeout=PATIENCE_S),
        "dead": ctx.call(DEAD, item, timeout=PATIENCE_S),
        "nowhere": ctx.call(NOWHERE, item, timeout=PATIENCE_S),
    }
    answers = await ctx.gather(*calls.values(), return_exceptions=True)
    return {shop: describe(answer) for shop, answer in zip(calls, answers, strict=True)}


def describe(answer: object) -> str:
    return f"no offer: {answer.code}" if isinstance(answer, CallFailed) else f"{answer} coins"


@app.task
async def two_offers(ctx: Context, item: str) -> list[int]:
    """Return the first two offers. The calls may take an hour, and the task still ends in a moment."""
    calls = [ctx.call(SHOPS, item, task=name, timeout=3600) for name in ("prompt", "slow", "cheap")]
    return sorted(await ctx.quorum(2, *calls, cancel_rest=True))


# --- the shops, which do not know how the handler waits for them ---

asked: Counter[str] = Counter()


@shops.task
async def prompt(ctx: Context, item: str) -> int:
    return len(item)


@shops.task
async def cheap(ctx: Context, item: str) -> int:
    return len(item) - 1


@shops.task
async def flaky(ctx: Context, item: str) -> int:
    """Fails twice for each item, then answers. (It counts in RAM; your peer would fail for better reasons.)"""
    asked[item] += 1
    if asked[item] < 3:
        raise ConnectionError("the price list cannot be reached")
    return 2 * len(item)


@shops.task
async def slow(ctx: Context, item: str) -> int:
    await ctx.sleep(3600)
    return 3 * len(item)


@dead_shop.task
async def never(ctx: Context, item: str) -> int:
    """Its replica is killed before the first question."""
    return 0


async def main() -> None:
    async with Stage() as stage:
        _, _, dead = await stage.workers(f"{MODULE}:app", f"{MODULE}:shops", f"{MODULE}:dead_shop")
        await dead.kill()  # its queue stays, and takes questions that get no answer
        async with Client() as client:
            print(f"every offer for a lamp that comes within {PATIENCE_S:g} seconds:")
            for shop, offer in (await client.call(app.service, "lamp", task="all_offers", timeout=60)).items():
                print(f"  {shop:8} {offer}")
            print("the first two offers for a chair:")
            print(" ", await client.call(app.service, "chair", task="two_offers", timeout=60))


if __name__ == "__main__":
    sys.exit(play(main()))
