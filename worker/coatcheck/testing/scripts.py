"""What a peer answers, as a test writes it down.

A script is a list of answers, one for each call in turn; the last one stays. An answer is a list of acts (progress,
each perhaps after a while) and an end: a reply, an error, or silence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from typing import Any

from coatcheck.broker.wire import Progress, make_problem
from coatcheck.errors import UsageError

__all__ = ["Answer", "Answering", "Says", "Script", "seconds_of"]


class Says(Enum):
    """What a peer can say, at a time."""

    PROGRESS = auto()
    VALUE = auto()
    PROBLEM = auto()
    NOTHING = auto()  # and nothing more after it


@dataclass(slots=True)
class Act:
    """One thing a peer says to a call, and how long after the last."""

    after_s: float
    kind: Says
    said: Any = None


@dataclass(slots=True)
class Answer:
    acts: list[Act] = field(default_factory=list)
    pause_s: float = 0.0
    """How long it waits before what it says next."""

    @property
    def has_ended(self) -> bool:
        return bool(self.acts) and self.acts[-1].kind is not Says.PROGRESS

    def add(self, kind: Says, said: Any = None) -> None:
        if self.has_ended:
            raise UsageError(
                "this answer has its end already; write `.then` before what the next call gets, "
                "as in peer('search').fails('busy').then.replies([1, 2])"
            )
        self.acts.append(Act(self.pause_s, kind, said))
        self.pause_s = 0.0


class Answering(ABC):
    """The words in which a test says what a peer answers."""

    @abstractmethod
    def _script_to_write(self) -> Script:
        """The script these words belong to."""

    def replies(self, *values: Any) -> Script:
        """Answer with a value. A function is called with the body of each call and returns the value; a `CallFailed`
        that it raises is the peer's error.

        Several values are for as many calls, one each; one call more is an error of the test.
        """
        if not values:
            raise UsageError("replies() needs the value to reply with; replies(None) replies with nothing")
        return self._script_to_write().add_values(values)

    def fails(
        self, code: str = "peer_error", detail: str | None = None, *, retryable: bool = True, **more: Any
    ) -> Script:
        """Answer with an error: in the handler a `CallFailed` with this `code`. More keywords go into its problem."""
        problem = make_problem(code, detail or code, retryable=retryable, **more)
        return self._script_to_write().add(Says.PROBLEM, problem)

    def never(self) -> Script:
        """Take the call and say nothing more."""
        return self._script_to_write().add(Says.NOTHING)

    def progress(self, done: float | None = None, total: float | None = None, message: str | None = None) -> Script:
        """Say how far it is, before this answer ends. It moves the call's idle deadline."""
        return self._script_to_write().add(Says.PROGRESS, Progress(done, total, message))

    def after(
        self,
        delay: float | timedelta | None = None,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> Script:
        """Wait before what comes next, in the stage's time."""
        length_s = seconds_of(delay, days=days, hours=hours, minutes=minutes, seconds=seconds)
        return self._script_to_write().add_pause(length_s)


class Script(Answering):
    """What a peer answers. Each word adds to it and gives it back."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._answers = [Answer()]
        self._on_change = on_change
        self._given_count = 0
        self._is_strict = False

    @property
    def then(self) -> Script:
        """From the next call on."""
        if not self._answers[-1].acts:
            raise UsageError("`.then` comes after an answer: peer('search').fails('busy').then.replies([1, 2])")
        self._answers.append(Answer())
        self._is_strict = False
        return self

    def _script_to_write(self) -> Script:
        return self

    def add(self, kind: Says, said: Any = None) -> Script:
        self._answers[-1].add(kind, said)
        self._on_change()
        return self

    def add_values(self, values: tuple[Any, ...]) -> Script:
        for value in values[:-1]:
            self.add(Says.VALUE, value)
            self._answers.append(Answer())
        self.add(Says.VALUE, values[-1])
        self._is_strict = len(values) > 1
        return self

    def add_pause(self, length_s: float) -> Script:
        self._answers[-1].pause_s += length_s
        return self

    @property
    def is_empty(self) -> bool:
        return not self._answers[0].acts

    @property
    def count(self) -> int:
        return len(self._answers)

    def next_answer(self) -> Answer | None:
        """The answer for one call more; None: there is none left."""
        if self._is_strict and self._given_count >= len(self._answers):
            return None
        self._given_count += 1
        return self._answers[min(self._given_count, len(self._answers)) - 1]


def seconds_of(
    delay: float | timedelta | None, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
) -> float:
    """A length of time as it is given to `advance` and `after`: seconds, a timedelta, or in words."""
    given = delay if isinstance(delay, timedelta) else timedelta(seconds=delay or 0)
    length = given + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if length < timedelta(0):
        raise UsageError(f"time passes in one direction only: {length.total_seconds():g} s")
    return length.total_seconds()
