"""The story of one task: begun on the replica that is killed, finished by others.

It is put together from what the replicas logged about the task, as they log it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from coatcheck.demo.watch import Event

_ENDS = {"result": "reply", "error": "error", "timeout": "timeout"}
_TURNS = {"task_resumed", "task_finished"}


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that happened. `is_turn`: it is what the story is about."""

    at_s: float
    text: str
    is_turn: bool = False


@dataclass(slots=True)
class Chronicle:
    """What happened to every task, so that a story can be told from its beginning once it is chosen."""

    prefix: str
    """What the names of our queues begin with; nobody wants to read that."""
    task_id: str | None = None
    lines: list[Line] = field(default_factory=list)
    _events: defaultdict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))

    def add(self, event: Event) -> None:
        if event.task_id is None:
            return
        self._events[event.task_id].append(event)
        if event.task_id == self.task_id:
            self._tell(event)

    def find_survivor(self, victim: str) -> str | None:
        """A task that this replica began and nobody has finished; best the one it put down last, still waiting for all
        of its calls.
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
        self.lines.append(Line(killed_at_s, f"{victim} is killed with -9", is_turn=True))

    @property
    def is_over(self) -> bool:
        return self.task_id is not None and any(it.name == "task_finished" for it in self._events[self.task_id])

    def _tell(self, event: Event) -> None:
        text = self._text_of(event)
        if text is not None:
            self.lines.append(Line(event.at_s, text, is_turn=event.name in _TURNS))
            self.lines.sort(key=lambda line: line.at_s)  # two replicas may be read a moment apart

    def _text_of(self, event: Event) -> str | None:
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

    def _claim(self, event: Event) -> str:
        peer = str(event.facts["peer"]).removeprefix(self.prefix)
        return f"{peer}'s {_ENDS.get(event.facts['kind'], 'message')} claimed by {event.who}"

    def _find_ending_claim(self, resumed: Event) -> Event | None:
        """The claim that ended the wait and so resumed the task. There is none if a run was taken over."""
        for event in reversed(self._events[str(resumed.task_id)]):
            if event.name == "task_parked":
                return None
            if event.name == "reply_claimed" and event.facts["verdict"] == "granted" and event.who == resumed.who:
                return event
        return None
