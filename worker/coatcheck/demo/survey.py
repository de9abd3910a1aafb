"""The service of the demo: a survey that asks its sources twice and says which replica began it and which ended it."""

from __future__ import annotations

import os

from coatcheck.demo.plan import Finding, Survey
from coatcheck.worker import App, CallFailed, Context

# Set by the demo for every replica: names that nobody else uses.
PREFIX = os.environ.get("DEMO_PREFIX", "demo")
REPLICA = os.environ.get("DEMO_REPLICA", "replica")

SECOND_TIMEOUT_S = 60.0

app = App(f"{PREFIX}-survey")


@app.task
async def survey(ctx: Context, topic: str, sources: list[str], patience_s: float) -> Survey:
    """Ask all sources at once, then the first one again about what they said. A source that is silent is left out."""
    ctx.log.info("survey_began")
    began_on = await ctx.step(name_replica, key="began")
    asked = [ctx.call(f"{PREFIX}-{name}", topic, idle_timeout=patience_s, returns=Finding) for name in sources]
    answers = await ctx.gather(*asked, return_exceptions=True)

    found = {name: it for name, it in zip(sources, answers, strict=True) if not isinstance(it, CallFailed)}
    missing = [name for name in sources if name not in found]
    question = f"{topic}, according to {len(found)} sources"
    again = await ctx.call(f"{PREFIX}-{sources[0]}", question, timeout=SECOND_TIMEOUT_S, returns=Finding)
    return Survey(topic, found, again, missing, began_on=began_on, ended_on=REPLICA)


def name_replica() -> str:
    """Recorded once, so that a replay on another replica still knows where the task began."""
    return REPLICA
