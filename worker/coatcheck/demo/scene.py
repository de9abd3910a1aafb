"""What there is to see at a moment: the replicas, the peers, how far the asker is, one task's story."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from coatcheck.demo.plan import SOURCES, Plan
from coatcheck.demo.story import Chronicle
from coatcheck.demo.watch import Event


class State(StrEnum):
    STARTING = "starting"
    WORKING = "working"
    KILLED = "killed -9"
    JOINED = "joined"


_COUNTED = {
    "survey_began": "started",
    "task_parked": "parked",
    "task_resumed": "resumed",
    "task_finished": "finished",
}


@dataclass(slots=True)
class Replica:
    """One worker process. Counts are of what it logged itself."""

    name: str
    is_late: bool = False
    """It came in the middle, for the one that was killed."""
    state: State = State.STARTING
    changed_at_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    rss: int | None = None

    def note(self, event: Event) -> None:
        if event.name == "worker_started":
            self.change(State.JOINED if self.is_late else State.WORKING, event.at_s)
        elif event.name in _COUNTED:
            self.counts[_COUNTED[event.name]] += 1

    def change(self, state: State, at_s: float) -> None:
        self.state, self.changed_at_s = state, at_s


@dataclass(slots=True)
class Scene:
    """All that a display needs."""

    plan: Plan
    chronicle: Chronicle
    began_at_s: float
    servers: str = ""
    """Where it runs, in words."""
    replicas: dict[str, Replica] = field(default_factory=dict)
    peers: dict[str, Counter[str]] = field(default_factory=lambda: {source.name: Counter() for source in SOURCES})
    starts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What is being started, in order: a word for the view, and the names of all that belongs to it."""
    ready: dict[str, float] = field(default_factory=dict)
    """What has started, and when: servers and tables as the demo finds them, processes as they say so."""
    asked: int = 0
    answered: int = 0
    now_s: float = 0.0

    def note(self, event: Event) -> None:
        """Take in one line of a log."""
        if event.name in {"worker_started", "sweeper_started", "peer_started"}:
            self.ready.setdefault(event.who, event.at_s)
        if event.who in self.replicas:
            self.replicas[event.who].note(event)
        if event.who in self.peers:
            self.peers[event.who][event.name] += 1
        self.chronicle.add(event)

    def add_replica(self, name: str, *, is_late: bool = False) -> None:
        self.replicas[name] = Replica(name, is_late=is_late)

    def begin(self, word: str, *names: str) -> None:
        """Show from now on that these are being started. Without a name the word is the name."""
        self.starts[word] = names or (word,)

    def find_ready_s(self, word: str) -> float | None:
        """When the last of these had started; None while one is missing."""
        at_s = [self.ready.get(name) for name in self.starts[word]]
        return None if None in at_s else max(it for it in at_s if it is not None)

    def elapsed_s(self, at_s: float | None = None) -> float:
        return max(0.0, (self.now_s if at_s is None else at_s) - self.began_at_s)
