"""Points in a task's story to go back to, and what lies behind each. Nothing here does I/O.

What goes with a rewind to checkpoint N: what was recorded or opened after N. The reply of a call that was opened at or
before N stays, whenever it came. `before:NAME` goes to the commit that recorded or opened NAME, and of that commit:

    a step   takes itself along, and what stands behind it in the order; the calls of the commit did not know its value
    a call   takes itself along, and its later tries; nothing else of the commit knew of it
    a note   takes itself along, what stands behind it, and the calls of the commit, which may have used it

A call that was given up after that point is forgotten too, so that it is made anew: a run that comes to it again would
wait for an answer that never comes. When it was given up is known by its place in the order alone; in doubt it counts
as later.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from coatcheck.store.kinds import Kind
from coatcheck.store.rows import CallId, CallState, Task

MOST_NAMED = 50
MOST_DIGITS = 18


class Place(NamedTuple):
    """A row of the journal or a call, as these rules see it. `value` is there for the note ORIGINS alone."""

    key: str
    kind: Kind
    name: str
    state: CallState
    seq: int | None
    call_id: CallId | None
    is_forgotten: bool
    checkpoint: int
    value: bytes | None = None

    @property
    def is_open_wait(self) -> bool:
        return self.state is CallState.OPEN and self.kind.is_awaited

    @property
    def is_failure(self) -> bool:
        return self.state in (CallState.FAILED, CallState.TIMED_OUT)

    @property
    def base(self) -> str:
        """What all tries of a call have in common."""
        return self.key.partition("~")[0]


class Cut(NamedTuple):
    """A point in a task's story, and what lies behind it."""

    checkpoint: int
    gone: list[Place]


class NotOrdered(Exception):
    """The order is refused: code and detail."""


def story_order(place: Place) -> tuple[int, int, int, str]:
    """The order in which things were recorded and opened: in a commit the entries first."""
    is_call = not place.kind.is_entry
    return place.checkpoint, is_call, 0 if is_call else place.seq or 0, str(place.call_id or "")


def cut_at(to: int | str | None, task: Task, live: Sequence[Place]) -> Cut:
    """The point that was named, and what lies behind it."""
    word = str(to).strip()
    if word == "start":
        return _behind(0, live)
    if word == "latest":
        return Cut(task.checkpoint, [])
    if word.isdecimal() and len(word) <= MOST_DIGITS:
        number = int(word)
        if number > task.checkpoint:
            raise NotOrdered("unknown_checkpoint", _no_checkpoint(number, task, live))
        return _behind(number, live)
    prefix, _, name = word.partition(":")
    if prefix != "before" or not name:
        raise NotOrdered(
            "unknown_target",
            f"{word[:MOST_NAMED]!r} is no point of a task: give a checkpoint's number, start, latest, before:NAME or "
            "before:last-failure",
        )
    if name == "last-failure":
        failures = sorted((one for one in live if one.is_failure), key=lambda one: one.seq or 0)
        return _before(_first_try(failures[-1], live), live) if failures else Cut(task.checkpoint, [])
    return _before(_find(name, live), live)


def _behind(number: int, live: Sequence[Place]) -> Cut:
    return Cut(number, [one for one in live if one.checkpoint > number])


def _before(place: Place, live: Sequence[Place]) -> Cut:
    """Of its own commit only what the head of this file says, of all later ones everything."""
    gone = [one for one in live if one.checkpoint > place.checkpoint or one is place or _depends(one, place)]
    return Cut(place.checkpoint, gone)


def _depends(one: Place, place: Place) -> bool:
    """Tell whether a row goes with another one of its own commit."""
    if one.checkpoint != place.checkpoint:
        return False
    if not place.kind.is_entry:
        return one.base == place.base and one.key.startswith(f"{place.key}~")
    if one.kind.is_entry:
        return (one.seq or 0) > (place.seq or 0)
    return place.kind is Kind.NOTE


def _find(name: str, live: Sequence[Place]) -> Place:
    """The last piece of work of that key or name."""
    named = [one for one in live if one.key == name] or [one for one in live if one.name == name]
    if not named:
        raise NotOrdered("unknown_name", _unknown(name, live))
    last = named[-1]
    return last if last.key == name else _first_try(last, live)


def _first_try(place: Place, live: Sequence[Place]) -> Place:
    """A call that is tried several times is asked anew from its first try on."""
    return next(one for one in live if one.base == place.base)


def cut_after(sets: Mapping[str, bytes], live: Sequence[Place]) -> Cut:
    """The point just after what is to be set; of several, after the first."""
    found = [next((one for one in live if one.key == key), None) or _exactly(key, live) for key in sets]
    for one in found:
        if one.kind in (Kind.TIMER, Kind.SEND):
            raise NotOrdered("not_a_value", f"{one.key!r} is a {one.kind}, which has no value to set")
    checkpoint = min(one.checkpoint for one in found)
    first = [one for one in found if one.checkpoint == checkpoint]
    gone = [
        one
        for one in live
        if one not in first
        and (
            one.checkpoint > checkpoint
            or any(one.key.startswith(f"{each.key}~") for each in first)
            or any(each.kind is Kind.NOTE and _depends(one, each) for each in first)
        )
    ]
    lost = [one.key for one in found if one in gone]
    if lost:
        raise NotOrdered(
            "set_later",
            f"{', '.join(lost)} came after {first[0].key}, and goes when that is set. "
            "Set it alone, or in a rewind of its own once the task has come there again",
        )
    return Cut(checkpoint, gone)


def _exactly(key: str, live: Sequence[Place]) -> Place:
    named = [one for one in live if one.name == key]
    if named:
        raise NotOrdered("unknown_name", f"--set takes a key; of that name there are {_listed(o.key for o in named)}")
    raise NotOrdered("unknown_name", _unknown(key, live))


def with_given_up(cut: Cut, task: Task, live: Sequence[Place]) -> Cut:
    """And the calls that were given up behind the cut, or by the end of the task."""
    if not cut.gone and not task.state.is_final:
        return cut
    gone = {id(one) for one in cut.gone}
    kept = [one for one in live if id(one) not in gone]
    last = max((one.seq or 0 for one in kept if not one.kind.is_awaited), default=0)
    given_up = [one for one in kept if one.state is CallState.CLOSED and (one.seq or 0) > last]
    return Cut(cut.checkpoint, sorted((*cut.gone, *given_up), key=story_order))


def _unknown(name: str, live: Sequence[Place]) -> str:
    names = list(dict.fromkeys(word for one in live for word in (one.name, one.key)))
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? There are" if near else "there are"
    return f"the task has recorded nothing of the name or key {name!r}; {hint} {_listed(o.key for o in live)}"


def _no_checkpoint(number: int, task: Task, live: Sequence[Place]) -> str:
    numbers = sorted({one.checkpoint for one in live})
    return (
        f"task {task.task_id} has no checkpoint {number}: it stands at {task.checkpoint}, "
        f"and recorded or opened something at {_listed(map(str, numbers))}; see coatcheck checkpoints {task.task_id}"
    )


def _listed(words: Iterable[str]) -> str:
    found = list(dict.fromkeys(words))
    shown = ", ".join(found[:MOST_NAMED])
    return f"{shown}, and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else shown or "none"
