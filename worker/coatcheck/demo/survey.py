"""What is played: the questions of a run, and the service that answers them with surveys of its sources."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

from coatcheck.demo.peer import ARCHIVE, LIBRARY, ORACLE, PATIENCE_S, PRESS, SourceAnswer
from coatcheck.worker import App, CallFailed, Context

FEWEST_TASKS = 10
ASK_PER_S = 55.0
SHORTEST_ASKING_S = 2.5
"""A handful of tasks is asked for slowly enough that some are under way when a replica is killed."""
SECOND_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Question:
    """What the asker wants to know: one survey."""

    topic: str
    sources: list[str]
    patience_s: float = PATIENCE_S


@dataclass(frozen=True, slots=True)
class Survey:
    """What the service answers, and which replicas had a hand in it."""

    topic: str
    found: dict[str, SourceAnswer]
    again: SourceAnswer
    missing: list[str]
    began_on: str
    ended_on: str


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The same seed gives the same questions, the same delays and the same victim. Who does what is up to the race."""

    task_count: int
    replica_count: int
    seed: int

    @property
    def replicas(self) -> list[str]:
        return [f"w{number}" for number in range(1, self.replica_count + 1)]

    @property
    def victim(self) -> str:
        return random.Random(f"{self.seed}:victim").choice(self.replicas)

    @property
    def successor(self) -> str:
        return f"w{self.replica_count + 1}"

    @property
    def ask_per_s(self) -> float:
        return min(ASK_PER_S, self.task_count / SHORTEST_ASKING_S)

    def questions(self) -> Iterator[Question]:
        """All ask two quick sources, each tenth one more: the silent one, or the one that takes its time.

        Those come in the first two thirds, so that a run does not end with waiting for the last of them.
        """
        dice = random.Random(f"{self.seed}:questions")
        share = self.task_count // 10
        numbers = dice.sample(range(self.task_count * 2 // 3), 2 * share)
        extra = dict.fromkeys(numbers[:share], PRESS) | dict.fromkeys(numbers[share:], ORACLE)
        for number in range(self.task_count):
            sources = [LIBRARY, ARCHIVE, *([extra[number]] if number in extra else [])]
            yield Question(f"topic {number + 1}", [source.name for source in sources])


# --- the service ---

# Set by the demo for every replica: names that no other program uses.
PREFIX = os.environ.get("DEMO_PREFIX", "demo")
REPLICA = os.environ.get("DEMO_REPLICA", "replica")

app = App(f"{PREFIX}-survey")


@app.task
async def survey(ctx: Context, topic: str, sources: list[str], patience_s: float) -> Survey:
    """Ask all sources at once, then the first one again about what they said. A source that is silent is left out."""
    ctx.log.info("survey_began")
    began_on = await ctx.step(name_replica, key="began")
    asked = [ctx.call(f"{PREFIX}-{name}", topic, idle_timeout=patience_s, returns=SourceAnswer) for name in sources]
    answers = await ctx.gather(*asked, return_exceptions=True)

    found = {name: it for name, it in zip(sources, answers, strict=True) if not isinstance(it, CallFailed)}
    missing = [name for name in sources if name not in found]
    question = f"{topic}, according to {len(found)} sources"
    again = await ctx.call(f"{PREFIX}-{sources[0]}", question, timeout=SECOND_TIMEOUT_S, returns=SourceAnswer)
    return Survey(topic, found, again, missing, began_on=began_on, ended_on=REPLICA)


def name_replica() -> str:
    """Recorded once, so that a replay on another replica still knows where the task began."""
    return REPLICA
