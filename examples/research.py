"""A research service: plan, ask a search peer several questions at once, write a report from the answers.

While the searches run, the task is a row in Postgres. Any replica picks it up when the last answer is there, or when
the time is over; the report names the questions without an answer. The peer speaks AMQP, so this needs RabbitMQ.

    export COATCHECK_BROKER=amqp://guest:guest@localhost/
    coatcheck worker examples.research:app
    python -m examples.search_peer
    coatcheck sweeper
    coatcheck submit research '"octopuses"' --wait
"""

import os
from dataclasses import dataclass

from coatcheck.worker import App, CallFailed, Context

# Variables of this example, not of Coatcheck: which peer to ask, and for how long.
SEARCH = os.environ.get("RESEARCH_PEER", "search")
PATIENCE_S = float(os.environ.get("RESEARCH_PATIENCE", "30"))

app = App(os.environ.get("RESEARCH_SERVICE", "research"))


@dataclass(frozen=True)
class Report:
    topic: str
    text: str
    missing: list[str]
    """Questions the peer did not answer."""


@app.task
async def research(ctx: Context, topic: str) -> Report:
    """Find out about a topic. A question that fails or times out costs only its own part of the report."""
    questions = await ctx.step(make_plan, topic)
    ctx.progress(0, len(questions), "searching")

    searches = [ctx.call(SEARCH, question, timeout=PATIENCE_S, returns=list[str]) for question in questions]
    # Here the task is put down. The line after it may run on another machine, tomorrow.
    answers = await ctx.gather(*searches, return_exceptions=True)

    found = {q: answer for q, answer in zip(questions, answers, strict=True) if not isinstance(answer, CallFailed)}
    missing = [question for question in questions if question not in found]
    ctx.progress(len(found), len(questions), "writing")
    return Report(topic, await ctx.step(write, topic, found), missing)


def make_plan(topic: str) -> list[str]:
    """Think of questions. Imagine a model here: slow, costly, and different each time, so it is a step."""
    return [f"what is known about {topic}", f"who studies {topic}", f"what is new in {topic}"]


def write(topic: str, found: dict[str, list[str]]) -> str:
    """Write the report from what was found."""
    lines = [f"{question.capitalize()}? {'; '.join(findings)}." for question, findings in found.items()]
    return "\n".join([f"# {topic.capitalize()}", *lines])
