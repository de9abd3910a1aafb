"""A task on a stage, as the test sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from coatcheck.broker.wire import Progress
from coatcheck.errors import TaskFailed
from coatcheck.store import blobs
from coatcheck.store.memory.queries import task_lines
from coatcheck.store.rows import CallState, Kind, TaskId, TaskState
from coatcheck.store.views import Line
from coatcheck.testing.errors import Stuck
from coatcheck.testing.scripts import seconds_of
from coatcheck.testing.stuck import explain
from coatcheck.worker import client

if TYPE_CHECKING:
    from coatcheck.testing.stage_parts import Scene

__all__ = ["Entry", "Ticket"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a task's journal: a step, a call, a timer, a message sent, or a note such as `ctx.now()`."""

    key: str
    kind: Kind
    name: str
    state: CallState
    value: Any
    """The result, or the problem of a failure; None while it is open."""


class Ticket:
    """What a test keeps of a task it submitted."""

    def __init__(self, submitted: client.Ticket, scene: Scene) -> None:
        self.progress: list[Progress] = []
        """What the task told of its progress so far."""
        self._submitted = submitted
        self._scene = scene
        self._outcome = scene.spawn(submitted.result())
        scene.spawn(self._follow())

    def __repr__(self) -> str:
        return f"Ticket({self.service!r}, {str(self.task_id)!r}, {self.state or 'no row'})"

    @property
    def task_id(self) -> TaskId:
        return self._submitted.task_id

    @property
    def service(self) -> str:
        return self._submitted.service

    async def result(self, timeout: float | timedelta | None = None) -> Any:
        """The task's result. Raises TaskFailed, TaskCancelled; NotFaked; or Stuck, which says what it waits for.

        Time stands still meanwhile, unless it may pass: with a `timeout`, as far as the result needs and no further.
        """
        pace = self._scene.pace
        await pace.rest()
        self._scene.check()
        if timeout is not None:
            await pace.advance(seconds_of(timeout), until=self._outcome.done)
            self._scene.check()
        if not self._outcome.done():
            raise Stuck(explain(self._scene, self.task_id, self.service))
        return self._result()

    async def cancel(self, reason: str | None = None) -> None:
        """Ask for the task to be cancelled, and let everything come to rest."""
        await self._scene.spawn(self._submitted.cancel(reason))
        await self._scene.pace.rest()
        self._scene.check()

    # --- looking ---

    @property
    def is_done(self) -> bool:
        """Whether the final reply has come."""
        return self._outcome.done()

    @property
    def state(self) -> TaskState | None:
        """`"parked"`, `"done"` and so on; None for a task that no row knows: it has not waited so far."""
        row = self._scene.tables.tasks.get(self.task_id)
        return None if row is None else row.task.state

    @property
    def checkpoints(self) -> int:
        """How often something was committed for the task."""
        row = self._scene.tables.tasks.get(self.task_id)
        return 0 if row is None else row.task.checkpoint

    @property
    def attempt(self) -> int:
        """Which attempt of the task this is, from 1."""
        row = self._scene.tables.tasks.get(self.task_id)
        return 1 if row is None else row.task.attempt

    @property
    def journal(self) -> list[Entry]:
        """What the task has learned, in the order in which it ended; what is open stands last."""
        return [_entry(line) for line in task_lines(self._scene.tables, self.task_id)]

    @property
    def waits_for(self) -> list[str]:
        """The keys it waits for: open calls and sleeps."""
        return [entry.key for entry in self.journal if entry.state is CallState.OPEN and entry.kind is not Kind.SEND]

    # --- inside ---

    @property
    def scene(self) -> Scene:
        return self._scene

    async def _follow(self) -> None:
        async for progress in self._submitted.progress():
            self.progress.append(progress)

    def _result(self) -> Any:
        error = asyncio.CancelledError() if self._outcome.cancelled() else self._outcome.exception()
        row = self._scene.tables.tasks.get(self.task_id)
        if isinstance(error, TaskFailed) and row is not None and row.task.traceback and not hasattr(error, "__notes__"):
            error.add_note(f"The handler's own traceback:\n{row.task.traceback}")
        return self._outcome.result()


def _entry(line: Line) -> Entry:
    value = None if line.value is None or line.kind is Kind.TIMER else blobs.decode(line.value)
    return Entry(line.key, line.kind, line.name, line.state, value)
