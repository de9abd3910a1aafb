"""Why a result is not there, in words that say what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from coatcheck.errors import UsageError
from coatcheck.store import blobs
from coatcheck.store.memory.tables import CallRow, TaskRow
from coatcheck.store.rows import TaskId, TaskState
from coatcheck.worker.engine import classify
from coatcheck.worker.task_run import TaskRun

if TYPE_CHECKING:
    from coatcheck.testing.stage_parts import StageScene

__all__ = ["Stuck", "explain", "explain_held"]

_UNITS = (("days", timedelta(days=1)), ("hours", timedelta(hours=1)), ("minutes", timedelta(minutes=1)))


class Stuck(UsageError, TimeoutError):
    """A result is not there and nothing will bring it, unless time passes or the test does something."""


def explain(scene: StageScene, task_id: TaskId, service: str) -> str:
    """Say what a task waits for, and what would move it."""
    row = scene.tables.tasks.get(task_id)
    live = next((each for each in scene.clock.lives() if each.task_id == task_id), None)
    name = f"task {str(task_id)[:8]} of {service}"
    if live is not None and (row is None or row.task.state is TaskState.RUNNING):
        return _in_ram(name, live)
    if row is None:
        return f"{name} has no result, and no replica has it; does one run? `await stage.run(app)`"
    match row.task.state:
        case TaskState.PARKED:
            waits = [call for call in scene.tables.calls_of[task_id] if call.is_open_wait]
            lines = [f"  - {_wait(scene, call)}" for call in waits]
            return "\n".join([f"{name} has no result: it waits for", *lines])
        case TaskState.RETRYING:
            due = _advice(scene, row)
            return (
                f"{name} has no result: attempt {row.task.attempt} failed ({_problem(row)}), and it tries again {due}"
            )
        case TaskState.HELD:
            return f"{name} has no result, for it is held: {_problem(row)}"
        case TaskState.RUNNING:
            return f"{name} has no result: the replica that ran it is gone; its lease ends {_advice(scene, row)}"
        case state:
            return f"{name} is {state}, and its final reply has not come"


def _wait(scene: StageScene, call: CallRow) -> str:
    due = "" if call.due_at is None else advice(call.due_at - scene.time.now())
    if call.new.kind.rings:
        return f"the end of its {'timeout' if call.new.name == '@timeout' else 'sleep'} {call.new.key!r}: {due}"
    peer = scene.peers.get(call.new.peer)
    if peer is None:
        return f"a reply of {call.new.peer!r}, an app on this stage, to {call.new.key!r}; its timeout comes {due}"
    said = "it has not answered so far" if peer.is_talking(str(call.new.call_id)) else "it was told never to answer"
    return f"a reply of {peer} to {call.new.key!r}, and {said}; its timeout comes {due}"


def advice(delay: timedelta) -> str:
    """When something is due, as the line that brings it."""
    if delay <= timedelta(0):
        return "now: await stage.settle()"
    for unit, size in _UNITS:
        if delay >= size and not delay % size:
            return f"with `await stage.advance({unit}={delay // size})`"
    return f"with `await stage.advance(seconds={delay.total_seconds():.10g})`"


def _advice(scene: StageScene, row: TaskRow) -> str:
    assert row.task.due_at is not None
    return advice(row.task.due_at - scene.time.now())


def _problem(row: TaskRow) -> str:
    problem = {} if row.task.value is None else blobs.decode(row.task.value)
    return str(problem.get("detail") or problem.get("title") or "no reason given")


def _in_ram(name: str, live: TaskRun) -> str:
    if live.run is None:
        return f"{name} has no result: its replica has not begun to run it"
    return (
        f"{name} has no result: its run is kept in RAM by something that neither the stage nor time can end, "
        f"or by a sleep of its own that is longer than a few minutes (`await stage.advance(...)`):{_places(live)}"
    )


def explain_held(lives: Sequence[TaskRun], waited_s: float) -> str:
    """Say which lines keep runs in RAM, and what to write instead."""
    held = "\n".join(f"task {str(live.task_id)[:8]} stands at{_places(live)}" for live in lives)
    return (
        f"a run cannot be parked: for {waited_s:g} s it has waited for something that is neither durable nor a sleep\n"
        f"{held}\n"
        "Await durable work directly, or with asyncio.gather or asyncio.TaskGroup: a task group of another library "
        "hides what it waits for. What talks to the outside belongs in a step: `await ctx.step(...)`"
    )


def _places(live: TaskRun) -> str:
    if live.run is None:
        return ""
    lines = [f"step {key!r} is under way" for key in live.run.steps_in_flight]
    lines += [classify.lines_of(driver) for driver in live.run.tracker.live]
    return "".join(f"\n  - {line}" for line in lines)
