"""An agent with peer agents: a planner that lets a researcher, a writer and a critic work until the critic is content.

    python -m examples.agents "an article about octopuses"

Look at the loop in `plan`. Each decision of the model is a step and each tool is a call, so both are recorded: after
a crash no answer of the model is paid for twice. While the other agents work, the planner is a row in Postgres, for an
hour or a week. Each tool is a service with its own queue: scale, deploy or replace each by itself.
"""

import json
from dataclasses import dataclass

from coatcheck.worker import App, Context, Retry
from examples.agents.model import Role, get_model

TOOLS = ("researcher", "writer", "critic")
MOST_ROUNDS = 10
PATIENCE_S = 7 * 86_400.0
ASK_AGAIN = Retry(attempts=3, backoff=1)

PLANNER = Role(
    "planner",
    'You have an article written by the tools "researcher", "writer" and "critic". You see the goal and what the tools '
    'said so far, one line each. Answer with JSON only: {"tool": NAME, "inputs": [TEXT, ...]} for the tool to use '
    'next, once for each input; or {"tool": "finish", "inputs": [ARTICLE]} when the critic has said "good".',
)

planner = App("planner")


@dataclass(frozen=True)
class Move:
    tool: str
    inputs: list[str]


@planner.task
async def plan(ctx: Context, goal: str) -> dict[str, object]:
    transcript = [f"goal: {goal}"]
    for number in range(MOST_ROUNDS):
        move = await ctx.step(decide, transcript, retry=ASK_AGAIN)
        if move.tool == "finish":
            return {"article": move.inputs[0], "rounds": number}
        if move.tool not in TOOLS:  # the model must not choose any other queue
            transcript.append(f"planner: there is no tool {move.tool!r}")
            continue
        ctx.progress(number, message=f"asks the {move.tool}: {'; '.join(move.inputs)}")
        ctx.record("decision", tool=move.tool, inputs=len(move.inputs))  # `coatcheck history` shows it
        calls = [ctx.call(move.tool, text, timeout=PATIENCE_S, returns=str) for text in move.inputs]
        answers = await ctx.gather(*calls)
        transcript += [f"{move.tool}: {' '.join(answer.split())}" for answer in answers]
    raise RuntimeError(f"no article after {MOST_ROUNDS} rounds")


def decide(transcript: list[str]) -> Move:
    answer = json.loads(get_model().complete(PLANNER, "\n".join(transcript)))
    return Move(str(answer["tool"]), [str(text) for text in answer["inputs"]])


def make_agent(name: str, instructions: str) -> App:
    """A service that does one thing, by asking the model once."""
    agent = App(name)

    @agent.task
    async def work(ctx: Context, text: str) -> str:
        return await ctx.step(think, name, instructions, text, retry=ASK_AGAIN)

    return agent


def think(name: str, instructions: str, text: str) -> str:
    return get_model().complete(Role(name, instructions), text)


researcher = make_agent("researcher", "Tell one fact about the subject you are given, in one line.")
writer = make_agent("writer", "Write or improve a very short article from what you are given.")
critic = make_agent("critic", 'Answer "good" if the article is lively; else say in one line what it lacks.')
