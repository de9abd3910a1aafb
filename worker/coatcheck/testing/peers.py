"""Fake peers: they answer as their script says, and remember what they were asked.

A script is a list of answers, one for each call in turn; the last one stays. An answer is a list of acts (progress,
each perhaps after a while) and an end: a reply, an error, or silence. A call that comes again (it was sent twice, as
happens after a crash) is the same call: it gets the same answer, and is counted once.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from typing import Any, Protocol

from coatcheck.broker.bodies import Body
from coatcheck.broker.port import Message, Outgoing
from coatcheck.broker.wire import (
    Progress,
    make_error,
    make_problem,
    make_progress,
    make_result,
    parse_control,
    parse_request,
)
from coatcheck.errors import UsageError, WorkFailed

__all__ = ["Asked", "NotFaked", "Peer", "Script", "seconds_of"]


class NotFaked(UsageError):
    """A peer was asked for which the test has set up no answer."""


# --- what a peer answers, as a test writes it down ---


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


# --- the peer itself ---


@dataclass(slots=True, eq=False)
class Asked:
    """One call to a peer, or one message sent to it that expects no reply."""

    body: Any
    task: str | None
    """The handler it names, as in `ctx.call(peer, body, task=…)`."""
    key: str | None
    """What stays the same over retries: the `cc-key` of the message."""
    is_cancelled: bool = False
    """Whether the peer was told that its answer is not needed any more."""
    call_id: str | None = field(default=None, repr=False)
    reply_to: str | None = field(default=None, repr=False)
    answer: Answer | None = field(default=None, repr=False)
    reply: Message | None = field(default=None, repr=False)


class Wings(Protocol):
    """The way from a peer to its stage."""

    def later(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Do something in the stage's time; at once if there is no delay, but not within the caller."""

    def route(self, outgoing: Outgoing) -> None: ...

    def complain(self, error: Exception) -> None:
        """Raise this out of the test's next wait."""


class Peer(Answering):
    """A fake peer. What it is told to answer holds for the calls to come, and replaces what it was told before."""

    def __init__(self, name: str, wings: Wings) -> None:
        self.name = name
        self.calls: list[Asked] = []
        """Everything it was sent, in order: calls, and messages that expect no reply."""
        self.is_missing = False
        self._wings = wings
        self._script = self._new_script()
        self._by_id: dict[str, Asked] = {}

    def __repr__(self) -> str:
        return f"peer({self.name!r})"

    @property
    def asked(self) -> list[Any]:
        """The bodies it was sent, in order; a call that was sent twice stands here once."""
        return [each.body for each in self.calls]

    @property
    def cancelled(self) -> list[Any]:
        """The bodies of the calls it was told to give up."""
        return [each.body for each in self.calls if each.is_cancelled]

    @property
    def waiting(self) -> list[Asked]:
        """Calls that nothing was set up for."""
        return [it for it in self.calls if it.reply_to is not None and it.answer is None and not it.is_cancelled]

    def is_talking(self, call_id: str) -> bool:
        """Whether it still has something to say to this call."""
        asked = self._by_id.get(call_id)
        acts = [] if asked is None or asked.answer is None else asked.answer.acts
        return not acts or acts[-1].kind is not Says.NOTHING

    # --- what it answers ---

    def missing(self) -> None:
        """Have no queue: a call fails with the code `no_route`, as one to a peer that was never started."""
        self._script_to_write()
        self.is_missing = True

    def _script_to_write(self) -> Script:
        self.is_missing = False
        self._script = self._new_script()
        return self._script

    def _new_script(self) -> Script:
        # Later: a script is written in one breath, and calls that wait for it get the whole of it.
        return Script(lambda: self._wings.later(0.0, self._answer_waiting))

    # --- what it is sent ---

    def on_message(self, message: Message) -> None:
        """Take a call, or a message that expects no reply."""
        request = parse_request(message)
        known = self._by_id.get(request.identity or "")
        if known is not None:
            if known.reply is not None:
                self._send(known, known.reply)
            return
        asked = Asked(request.body.decode(), request.handler, request.key)
        asked.call_id, asked.reply_to = request.correlation_id, request.reply_to
        self.calls.append(asked)
        if request.identity is not None:
            self._by_id[request.identity] = asked
        self._answer_waiting()

    def on_control(self, message: Message) -> None:
        """Hear that an answer is not needed any more."""
        order = parse_control(message)
        asked = self._by_id.get(order.identity or "")
        if asked is not None:
            asked.is_cancelled = True

    def _answer_waiting(self) -> None:
        for asked in [] if self._script.is_empty else self.waiting:
            asked.answer = self._script.next_answer() or self._complain_of(asked)
            self._go_on(asked, 0)

    def _complain_of(self, asked: Asked) -> Answer:
        count = self._script.count
        text = (
            f"{self} was asked {count + 1} times and has {count} replies: the last call was {asked.body!r}. "
            "Give it one reply more, or a single one for every call"
        )
        self._wings.complain(UsageError(text))
        return Answer()

    def _go_on(self, asked: Asked, place: int) -> None:
        """Wait for the next act of an answer, if there is one."""
        assert asked.answer is not None
        if place < len(asked.answer.acts):
            self._wings.later(asked.answer.acts[place].after_s, self._act, asked, place)

    def _act(self, asked: Asked, place: int) -> None:
        assert asked.answer is not None
        act = asked.answer.acts[place]
        match act.kind:
            case Says.PROGRESS:
                self._send(asked, make_progress(act.said, asked.call_id or ""))
                self._go_on(asked, place + 1)
            case Says.VALUE:
                self._reply(asked, act.said)
            case Says.PROBLEM:
                self._end(asked, make_error(act.said, asked.call_id))
            case Says.NOTHING:
                return

    def _reply(self, asked: Asked, value: Any) -> None:
        try:
            said = value(asked.body) if callable(value) else value
            if inspect.iscoroutine(said):
                said.close()
                raise UsageError(f"{self}.replies() got an async function; give it a plain one")
            self._end(asked, make_result(Body.of(said), asked.call_id))
        except WorkFailed as error:
            self._end(asked, make_error({"detail": str(error), **error.problem}, asked.call_id))
        except Exception as error:  # noqa: BLE001 - the test's own code: the test's next wait raises it
            error.add_note(f"while {self} answered {asked.body!r}")
            self._wings.complain(error)

    def _end(self, asked: Asked, reply: Message) -> None:
        asked.reply = reply
        self._send(asked, reply)

    def _send(self, asked: Asked, message: Message) -> None:
        if asked.reply_to is not None and not asked.is_cancelled:
            self._wings.route(Outgoing(asked.reply_to, message))
