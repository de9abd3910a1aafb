"""The service of the demo: a survey that asks its sources twice and says which replica began it and which ended it."""

import os
from dataclasses import dataclass

from coatcheck.worker import App, CallFailed, Context

# Set by the demo for every replica: names nobody else uses, and how long a source may take.
PREFIX = os.environ.get("DEMO_PREFIX", "demo")
REPLICA = os.environ.get("DEMO_REPLICA", "replica")
PATIENCE_S = float(os.environ.get("DEMO_PATIENCE", "3"))

app = App(f"{PREFIX}-survey")


@dataclass(frozen=True)
class Survey:
    topic: str
    found: dict[str, list[str]]
    missing: list[str]
    began_on: str
    ended_on: str


@app.task
async def survey(ctx: Context, topic: str, sources: list[str]) -> Survey:
    """Ask all sources at once, then the first one again about what they said. A silent source is left out."""
    began_on = await ctx.step(name_replica, key="began")
    asked = [ctx.call(f"{PREFIX}-{name}", topic, timeout=PATIENCE_S, returns=list[str]) for name in sources]
    answers = await ctx.gather(*asked, return_exceptions=True)

    found = {name: it for name, it in zip(sources, answers, strict=True) if not isinstance(it, CallFailed)}
    missing = [name for name in sources if name not in found]
    question = f"{topic}, according to {len(found)} sources"
    found["again"] = await ctx.call(f"{PREFIX}-{sources[0]}", question, timeout=60, returns=list[str])
    return Survey(topic, found, missing, began_on, await ctx.step(name_replica, key="ended"))


def name_replica() -> str:
    """Recorded once, so a replay on another replica still knows where the task was then."""
    return REPLICA
