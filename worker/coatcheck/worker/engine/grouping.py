"""What the branches of a run wait for, as the rows see it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coatcheck.store.rows import Group
from coatcheck.worker.engine import classify
from coatcheck.worker.engine.tracking import Driver, Durable
from coatcheck.worker.engine.waits import Wait

__all__ = ["groups_of"]


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
