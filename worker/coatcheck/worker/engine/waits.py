"""What a branch waits for in the journal: slots, one for each key, joined in waits; and how the rows see waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from coatcheck.store.rows import CallId, Group, Kind, Recorded
from coatcheck.worker.engine import classify
from coatcheck.worker.engine.keys import Entry
from coatcheck.worker.engine.tracking import Driver, Durable

__all__ = ["Reader", "Slot", "Wait", "Waiter", "groups_of"]


class Waiter(Protocol):
    """Something that an ended entry is handed to."""

    key: str

    @property
    def is_live(self) -> bool:
        """Whether it still waits."""

    def settle(self, recorded: Recorded) -> bool:
        """Take what was recorded; tell whether a branch moves because of it."""


class Reader(Protocol):
    """Turns what was recorded into a value, or into the error to raise."""

    def read(self, recorded: Recorded) -> tuple[Any, Exception | None]: ...


class Slot(msgspec.Struct, eq=False):
    """One key that a branch waits for. `entry` is what the journal had there when the branch asked."""

    key: str
    kind: Kind
    reader: Reader
    entry: Entry | None
    call_id: CallId | None = None
    is_ended: bool = False
    value: Any = None
    error: Exception | None = None
    wait: Wait | None = None

    def __repr__(self) -> str:
        return f"Slot({self.key!r})"  # its value is the users'

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("key", self.key)]

    @property
    def is_live(self) -> bool:
        return self.wait is not None and not self.is_ended

    def settle(self, recorded: Recorded) -> bool:
        assert self.wait is not None
        self.is_ended = True
        self.value, self.error = self.reader.read(recorded)
        return self.wait.add(self)


class Wait:
    """Some slots, and how many of them must succeed; `need=None`: all must end."""

    __slots__ = ("_ok_count", "ended", "future", "need", "slots")

    def __init__(self, slots: Sequence[Slot], need: int | None) -> None:
        self.slots = slots
        self.need = need
        self.ended: list[Slot] = []
        self.future: Durable | None = None
        self._ok_count = 0
        for slot in slots:
            slot.wait = self

    def add(self, slot: Slot) -> bool:
        """Count a slot that has just ended; tell whether this ends the wait."""
        self.ended.append(slot)
        if slot.error is None:
            self._ok_count += 1
        still_open = len(self.slots) - len(self.ended)
        if self.need is None:
            is_over = still_open == 0
        else:
            is_over = self._ok_count >= self.need or self._ok_count + still_open < self.need
        if not is_over:
            return False
        if self.future is not None:
            self.future.settle(None)
        return True

    def group(self) -> Group | None:
        """The wait as the rows see it: what is still open of it. None: nothing is."""
        calls = [slot.call_id for slot in self.slots if slot.call_id is not None and not slot.is_ended]
        if not calls:
            return None
        return Group(tuple(calls), None if self.need is None else self.need - self._ok_count)


def groups_of(drivers: Iterable[Driver]) -> list[Group]:
    """A group for each wait. Tasks that a branch only waits for together make one, so that not every end wakes it."""
    groups: list[Group] = []
    joined: set[int] = set()
    waits: list[object] = []
    for driver in drivers:
        if type(driver.waits_on) is Durable:
            waits.append(driver.waits_on.wait)
        elif (joint := classify.joint_of(driver)) is not None:
            _join(*joint, groups=groups, joined=joined)
    for wait in waits:
        group = wait.group() if isinstance(wait, Wait) and id(wait) not in joined else None
        if group is not None:
            groups.append(group)
    return groups


def _join(tasks: list[Any], need: int | None, *, groups: list[Group], joined: set[int]) -> None:
    """Make one group of tasks that each are one row."""
    waits = [classify.sole_wait_of(task) for task in tasks]
    bare = [each.group() for each in waits if isinstance(each, Wait) and len(each.slots) == 1]
    calls = tuple(call for group in bare if group is not None for call in group.calls)
    if len(calls) == len(tasks) > 1:
        groups.append(Group(calls, need))
        joined.update(map(id, waits))
