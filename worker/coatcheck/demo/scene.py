"""What there is to see at a moment: the replicas, the peers, how far the asker is, and the story of one task.

All of it is put together from what the processes log, as they log it. Nothing that is shown is made up.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from coatcheck.demo.peer import SOURCES
from coatcheck.demo.survey import DemoPlan

_STARTED = frozenset({"worker_started", "sweeper_started", "peer_started"})
_COUNTED = {"survey_began": "started", "task_parked": "parked", "task_resumed": "resumed", "task_finished": "finished"}
_ENDS = {"result": "reply", "error": "error", "timeout": "timeout"}
_TURNS = frozenset({"task_resumed", "task_finished"})


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One line of a log: who wrote it, when (seconds since the epoch), and what."""

    who: str
    at_s: float
    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def task_id(self) -> str | None:
        return self.facts.get("task_id")


def read_events(who: str, lines: bytes) -> list[LogEvent]:
    """The events among lines of a log. The others, such as a traceback, are for people."""
    found = []
    for line in lines.splitlines():
        try:
            facts = json.loads(line)
            at_s = datetime.fromisoformat(facts["timestamp"]).timestamp()
            found.append(LogEvent(who, at_s, facts["event"], facts))
        except (ValueError, KeyError, TypeError):
            continue
    return found


@dataclass(frozen=True, slots=True)
class StoryLine:
    """One thing that happened. `is_turn`: it is what the story is about."""

    at_s: float
    text: str
    is_turn: bool = False


@dataclass(slots=True)
class Chronicle:
    """What happened to every task, so that the story of one can be told from its beginning once it is chosen.

    It is begun on the replica that is killed, and finished by others.
    """

    prefix: str
    """What the names of our queues begin with; it is left out."""
    task_id: str | None = None
    lines: list[StoryLine] = field(default_factory=list)
    _events: defaultdict[str, list[LogEvent]] = field(default_factory=lambda: defaultdict(list))

    def add(self, event: LogEvent) -> None:
        if event.task_id is None:
            return
        self._events[event.task_id].append(event)
        if event.task_id == self.task_id:
            self._tell(event)

    def find_survivor(self, victim: str) -> str | None:
        """A task that this replica began and that is not finished; best the one it put down last, still waiting for
        all of its calls.
        """
        found: list[tuple[bool, float, str]] = []
        for task_id, events in self._events.items():
            steps = [(event.who, event.name) for event in events]
            if steps[0] == (victim, "survey_began") and steps[-1][1] != "task_finished":
                is_best = steps == [(victim, "survey_began"), (victim, "task_parked")]
                found.append((is_best, events[-1].at_s, task_id))
        return max(found)[2] if found else None

    def begin(self, task_id: str, *, victim: str, killed_at_s: float) -> None:
        """Tell this task's story from now on, and what happened so far."""
        self.task_id = task_id
        for event in self._events[task_id]:
            self._tell(event)
        self.lines.append(StoryLine(killed_at_s, f"{victim} is killed with -9", is_turn=True))

    def _tell(self, event: LogEvent) -> None:
        text = self._text_of(event)
        if text is not None:
            self.lines.append(StoryLine(event.at_s, text, is_turn=event.name in _TURNS))
            self.lines.sort(key=lambda line: line.at_s)  # two replicas may be read a moment apart

    def _text_of(self, event: LogEvent) -> str | None:
        match event.name:
            case "survey_began":
                return f"begun on {event.who}"
            case "task_parked":
                is_first = not any(line.text.startswith("checkpointed") for line in self.lines)
                return f"checkpointed on {event.who}" + (": from here on it is rows, in no RAM" if is_first else "")
            case "reply_claimed" if event.facts["verdict"] == "recorded" and event.facts["kind"] in _ENDS:
                return self._claim(event)
            case "task_resumed":
                ending = self._find_ending_claim(event)
                prefix = f"{self._claim(ending)}, the last one: " if ending is not None else ""
                return f"{prefix}resumed on {event.who}"
            case "task_finished":
                return f"done on {event.who}"
            case _:
                return None

    def _claim(self, event: LogEvent) -> str:
        peer = str(event.facts["peer"]).removeprefix(self.prefix)
        return f"{peer}'s {_ENDS.get(event.facts['kind'], 'message')} claimed by {event.who}"

    def _find_ending_claim(self, resumed: LogEvent) -> LogEvent | None:
        """The claim that ended the wait and so resumed the task. There is none if a run was taken over."""
        for event in reversed(self._events[str(resumed.task_id)]):
            if event.name == "task_parked":
                return None
            if event.name == "reply_claimed" and event.facts["verdict"] == "granted" and event.who == resumed.who:
                return event
        return None


class ReplicaState(StrEnum):
    STARTING = "starting"
    WORKING = "working"
    KILLED = "killed -9"
    JOINED = "joined"


@dataclass(slots=True)
class ReplicaView:
    """One worker process. Counts are of what it logged itself."""

    name: str
    is_late: bool = False
    """It came in the middle, for the one that was killed."""
    state: ReplicaState = ReplicaState.STARTING
    changed_at_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    rss: int | None = None

    def note(self, event: LogEvent) -> None:
        if event.name == "worker_started":
            self.change(ReplicaState.JOINED if self.is_late else ReplicaState.WORKING, event.at_s)
        elif event.name in _COUNTED:
            self.counts[_COUNTED[event.name]] += 1

    def change(self, state: ReplicaState, at_s: float) -> None:
        self.state, self.changed_at_s = state, at_s


@dataclass(slots=True)
class DemoScene:
    """All that a display needs."""

    plan: DemoPlan
    chronicle: Chronicle
    began_at_s: float
    servers: str = ""
    """Where it runs, in words."""
    replicas: dict[str, ReplicaView] = field(default_factory=dict)
    peers: dict[str, Counter[str]] = field(default_factory=lambda: {source.name: Counter() for source in SOURCES})
    starts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What is being started, in order: a word for the view, and the names of all that belongs to it."""
    ready: dict[str, float] = field(default_factory=dict)
    """What has started, and when: servers and tables as the demo finds them, processes as they say so."""
    asked: int = 0
    answered: int = 0
    now_s: float = 0.0

    def note(self, event: LogEvent) -> None:
        """Take in one line of a log."""
        if event.name in _STARTED:
            self.ready.setdefault(event.who, event.at_s)
        if event.who in self.replicas:
            self.replicas[event.who].note(event)
        if event.who in self.peers:
            self.peers[event.who][event.name] += 1
        self.chronicle.add(event)

    def add_replica(self, name: str, *, is_late: bool = False) -> None:
        self.replicas[name] = ReplicaView(name, is_late=is_late)

    def begin(self, word: str, *names: str) -> None:
        """Show from now on that these are being started. Without a name the word is the name."""
        self.starts[word] = names or (word,)

    def find_ready_s(self, word: str) -> float | None:
        """When the last of these had started; None while one is missing."""
        at_s = [self.ready.get(name) for name in self.starts[word]]
        return None if None in at_s else max(it for it in at_s if it is not None)

    def elapsed_s(self, at_s: float | None = None) -> float:
        return max(0.0, (self.now_s if at_s is None else at_s) - self.began_at_s)
