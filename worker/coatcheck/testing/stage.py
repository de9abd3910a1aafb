"""A stage: the real engine in the test's own process, with fake peers and a clock that the test moves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

from coatcheck.broker.bodies import parse_body
from coatcheck.broker.headers import DETAIL, QUEUE, REASON
from coatcheck.broker.port import Message
from coatcheck.broker.wire import Progress
from coatcheck.errors import MalformedMessage, TaskFailed, UsageError
from coatcheck.store import blobs
from coatcheck.store.kinds import Kind
from coatcheck.store.memory.queries import task_lines
from coatcheck.store.rows import CallState, Task, TaskId, TaskState
from coatcheck.store.views import Line
from coatcheck.testing.peers import Peer, seconds_of
from coatcheck.testing.stage_parts import Replica, StageScene
from coatcheck.testing.stuck import Stuck, explain
from coatcheck.worker import client
from coatcheck.worker.app import App

__all__ = ["FIRST_DAY", "DeadLetter", "Entry", "Stage", "Ticket"]

FIRST_DAY = datetime(2030, 1, 1, tzinfo=UTC)
"""When a stage begins unless told otherwise: the same for every test, so that results with dates can be compared."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that no app could take: the queue it was on, and why it is here."""

    queue: str
    reason: str
    detail: str
    body: Any


class Stage:
    """Apps under test, their fake peers, and the time they live in.

        async with Stage() as stage:
            await stage.run(app)
            stage.peer("search").replies(["a finding"])
            ticket = await stage.submit("research", "octopuses")
            assert await ticket.result() == ...

    Worker, sweeper and client are the real ones, on a broker and a store in memory. Time stands still but for
    `advance`. A stage belongs to the event loop it is first used on, and ends with it at the latest.
    """

    def __init__(self, *, now: datetime = FIRST_DAY) -> None:
        self._scene = StageScene(_checked(now))

    async def __aenter__(self) -> Self:
        await self._scene.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop everything and give the event loop back. Repeating it is harmless."""
        await self._scene.close()

    @property
    def scene(self) -> StageScene:
        """What stands behind it: for the kit's own use."""
        return self._scene

    # --- setting the stage ---

    @property
    def now(self) -> datetime:
        """What the clock shows, to handlers as `ctx.now()`. It can be set before anything runs."""
        return self._scene.time.now()

    @now.setter
    def now(self, instant: datetime) -> None:
        if self._scene.has_begun:
            raise UsageError("the clock can be set before the first app runs; from then on it is moved with `advance`")
        self._scene.time.start = _checked(instant)

    def peer(self, name: str) -> Peer:
        """The fake peer of this name. Tell it what to answer with `replies`, `fails`, `never`, `progress`, `after`."""
        if name in self._scene.server.queues:
            raise UsageError(f"{name!r} is an app that runs on this stage; a fake would never be asked")
        return self._scene.peers.setdefault(name, Peer(name, self._scene))

    async def run(self, app: App, **settings: Any) -> Replica:
        """Start a replica of an app: the real worker. The same app again is one replica more.

        Keywords override the app's own settings; the environment is not read, so that no test depends on it.
        """
        if not isinstance(app, App):
            raise UsageError(f"run() needs an App, got {app!r}")
        replica = await self._scene.start(app, settings)
        await self._scene.clock.rest()
        return replica

    # --- playing ---

    async def submit(
        self,
        service: str,
        body: Any = None,
        *,
        task: str | None = None,
        identity: str | None = None,
        token: str | None = None,
    ) -> Ticket:
        """Hand a request in, as `Client.submit` does, and let everything come to rest: when this returns, the task
        waits for something or has ended.
        """
        await self._scene.begin()
        if service not in self._scene.server.queues:
            raise UsageError(f"there is no service {service!r} on this stage; run its app first: await stage.run(app)")
        asking = self._scene.client.submit(service, body, task=task, identity=identity, token=token)
        ticket = Ticket(await self._scene.spawn(asking), self._scene)
        await self._scene.clock.rest()
        return ticket

    async def settle(self) -> None:
        """Return when nothing goes on by itself: every task waits for something, or has ended.

        Raises NotFaked if a peer was asked and nothing says what it answers.
        """
        await self._scene.begin()
        await self._scene.clock.rest()
        self._scene.check()

    async def advance(
        self,
        delay: float | timedelta | None = None,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Let time pass. Timeouts, sleeps, retries and deadlines on the way happen, each at its own time.

        Raises NotFaked if a peer was asked and nothing says what it answers.
        """
        length_s = seconds_of(delay, days=days, hours=hours, minutes=minutes, seconds=seconds)
        await self.settle()
        await self._scene.clock.advance(length_s)
        self._scene.check()

    # --- looking ---

    @property
    def tasks(self) -> list[Task]:
        """Every task that has a row, the oldest first; also those that apps of this stage asked of each other."""
        return [row.task for row in reversed(self._scene.tables.newest_first())]

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """What the apps of this stage could not take, by app and the oldest first."""
        names = dict.fromkeys(replica.app.names.dead for replica in self._scene.replicas)
        queues = self._scene.server.queues
        return [_read_letter(entry.message) for name in names for entry in queues[name].ready]


def _read_letter(letter: Message) -> DeadLetter:
    headers = letter.headers
    try:
        body = parse_body(letter.body, letter.content_type).decode()
    except MalformedMessage:
        body = letter.body  # that may be why it is here
    return DeadLetter(str(headers.get(QUEUE, "")), str(headers.get(REASON, "")), str(headers.get(DETAIL, "")), body)


def _checked(now: datetime) -> datetime:
    if now.tzinfo is None:
        raise UsageError(f"{now!r} has no time zone; write datetime(..., tzinfo=UTC)")
    return now


# --- a task on a stage, as the test sees it ---


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

    def __init__(self, submitted: client.Ticket, scene: StageScene) -> None:
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
        clock = self._scene.clock
        await clock.rest()
        self._scene.check()
        if timeout is not None:
            await clock.advance(seconds_of(timeout), until=self._outcome.done)
            self._scene.check()
        if not self._outcome.done():
            raise Stuck(explain(self._scene, self.task_id, self.service))
        return self._result()

    async def cancel(self, reason: str | None = None) -> None:
        """Ask for the task to be cancelled, and let everything come to rest."""
        await self._scene.spawn(self._submitted.cancel(reason))
        await self._scene.clock.rest()
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
        return [entry.key for entry in self.journal if entry.state is CallState.OPEN and entry.kind.is_awaited]

    # --- inside ---

    @property
    def scene(self) -> StageScene:
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
    value = None if line.value is None or line.kind.rings else blobs.decode(line.value)
    return Entry(line.key, line.kind, line.name, line.state, value)
