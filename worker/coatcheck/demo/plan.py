"""What is played: who takes part, what is asked for, and what an answer looks like."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

PATIENCE_S = 2.5
"""How long a source may be silent before its call times out. One of them takes longer and says so on the way."""
FEWEST_TASKS = 10
ASK_PER_S = 55.0
SHORTEST_ASKING_S = 2.5
"""A handful of tasks is asked for slowly enough that some are under way when a replica is killed."""


@dataclass(frozen=True, slots=True)
class Source:
    """A peer that surveys ask: how long an answer takes it, about, and how often it says that it is still at it."""

    name: str
    delay_s: float
    progress_every_s: float = 0.0
    is_silent: bool = False


LIBRARY = Source("library", 0.5)
ARCHIVE = Source("archive", 1.0)
PRESS = Source("press", PATIENCE_S + 1.0, progress_every_s=0.4)
ORACLE = Source("oracle", 0.0, is_silent=True)
SOURCES = (LIBRARY, ARCHIVE, PRESS, ORACLE)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a source answers."""

    text: str
    took_s: float
    progress_count: int = 0


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
    found: dict[str, Finding]
    again: Finding
    missing: list[str]
    began_on: str
    ended_on: str


@dataclass(frozen=True, slots=True)
class Plan:
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

        Those come in the first two thirds, so that nobody has to watch the last of them alone.
        """
        dice = random.Random(f"{self.seed}:questions")
        share = self.task_count // 10
        numbers = dice.sample(range(self.task_count * 2 // 3), 2 * share)
        extra = dict.fromkeys(numbers[:share], PRESS) | dict.fromkeys(numbers[share:], ORACLE)
        for number in range(self.task_count):
            sources = [LIBRARY, ARCHIVE, *([extra[number]] if number in extra else [])]
            yield Question(f"topic {number + 1}", [source.name for source in sources])
