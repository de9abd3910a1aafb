"""A handler is killed at each of its checkpoints, once per play, and must come to the same end every time.

A play is a stage of its own on an event loop of its own. The replica dies at a named point of the protocol, just before
a commit, just after it, or when all is said and only the ack is missing; then another replica takes over. What a dead
replica was about to do never happens: no `finally` runs, nothing is written, no message leaves.

A step that was cut off before it was recorded runs again, and may well give another result (a model, a price): that is
no mistake. So in every play a step's result is recorded as it was in the first one, and what differs then is the
handler's own doing.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from msgspec.structs import replace
from structlog.testing import capture_logs

from coatcheck import points
from coatcheck.errors import TaskFailed, UsageError
from coatcheck.store import blobs
from coatcheck.store.front import Store
from coatcheck.store.kinds import Kind
from coatcheck.store.memory import MemoryStore
from coatcheck.store.rows import NewEntry, Put, PutDone, PutRefused, TaskState
from coatcheck.testing.stage import Stage, Ticket
from coatcheck.testing.stage_clock import StageClock
from coatcheck.testing.stage_parts import Replica, StageScene
from coatcheck.testing.stuck import explain
from coatcheck.testing.virtual_time import Died, current_part, run_apart
from coatcheck.worker.app import App

__all__ = ["Crash", "CrashReport", "CrashesDiffer", "Difference", "Peers", "crash_at_every_checkpoint"]

Peers: TypeAlias = Mapping[str, Any] | Callable[[Stage], object]
"""What peers answer: a value or a function of the body by name; or a function that sets up a stage."""

IDENTITY = "crash-at-every-checkpoint"
"""One identity for all plays, so that they have one task id, and `ctx.random()` and `ctx.uuid()` the same values."""
MOST_SKIPS = 10_000
_COMMITS = ("first_row", "record", "park", "retry", "finish")
_POINTS = frozenset({f"{when}_{commit}" for when in ("before", "after") for commit in _COMMITS} | {"before_ack"})

_graveyard: list[asyncio.Task[Any]] = []
"""What was under way in dead replicas. It is kept: a coroutine that is freed goes on to clean up after itself."""
# Even when the interpreter ends, and clears every module.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_graveyard))


def crash_at_every_checkpoint(
    app: App,
    body: Any = None,
    *,
    task: str | None = None,
    peers: Peers | None = None,
    apps: Sequence[App] = (),
    compare: Callable[[Any], Any] | None = None,
    **settings: Any,
) -> CrashReport:
    """Run a task of the app to its end, then once more for each way to die at each of its commits, and compare.

    `peers` say what peers answer: `{"search": [1, 2], "price": lambda body: ...}`, or a function that gets each play's
    stage. `apps` are others that run beside it, and are left alone. `compare` takes a result and returns what of it
    must be the same, if not all of it. Time passes as far as the task needs. Raises CrashesDiffer, an AssertionError
    that shows each difference; UsageError if the task does not even end without a crash.

    Each play has an event loop of its own, so this can be called from any test, and must not be awaited.
    """
    plays = _Plays(app, body, task, peers, apps, compare or (lambda result: result), settings)
    with capture_logs():
        report = plays.run()
    if report.differences:
        raise CrashesDiffer(report)
    return report


class CrashesDiffer(AssertionError):
    """A crash changed what a task came to. `report` holds all that was seen."""

    def __init__(self, report: CrashReport) -> None:
        super().__init__(str(report))
        self.report = report


class StepMemory:
    """What the steps of the first play came to, by key and in order."""

    def __init__(self) -> None:
        self.is_full = False
        self._entries: defaultdict[str, list[NewEntry]] = defaultdict(list)

    def opening(self, scene: StageScene) -> Callable[..., Store]:
        """A way to open stores that share this memory, for one play."""
        counts: Counter[str] = Counter()

        def open_store(_url: str, *, pool_size: int = 0, **options: Any) -> Store:
            return _RememberingStore(self, counts, scene=scene, **options)

        return open_store

    def learn(self, entry: NewEntry) -> None:
        if not self.is_full:
            self._entries[entry.key].append(entry)

    def recall(self, entry: NewEntry, number: int) -> NewEntry:
        """The entry as it was the first time, if this is the same work."""
        known = self._entries[entry.key][number : number + 1] if self.is_full else []
        return next((each for each in known if each.digest == entry.digest), entry)


class _RememberingStore(MemoryStore):
    def __init__(self, memory: StepMemory, counts: Counter[str], *, scene: StageScene, **options: Any) -> None:
        super().__init__(scene.tables, **options)
        self._memory = memory
        self._counts = counts

    async def put(self, put: Put) -> PutDone | PutRefused:
        steps = [entry for entry in put.changes.entries if entry.kind is Kind.STEP]
        known = {entry.key: self._memory.recall(entry, self._counts[entry.key]) for entry in steps}
        entries = tuple(known.get(entry.key, entry) for entry in put.changes.entries)
        done = await super().put(replace(put, changes=replace(put.changes, entries=entries)))
        if isinstance(done, PutDone):
            for entry in steps:
                self._counts[entry.key] += 1
                self._memory.learn(entry)
        return done


@dataclass(slots=True)
class Play:
    """What one play came to."""

    state: TaskState
    outcome: Any
    checkpoints: int
    asked: dict[str, list[str]]
    steps: Counter[str]
    points: list[Crash]
    has_died: bool


@dataclass(slots=True)
class _Plays:
    """All plays of one handler."""

    app: App
    body: Any
    task: str | None
    peers: Peers | None
    apps: Sequence[App]
    compare: Callable[[Any], Any]
    settings: dict[str, Any]
    memory: StepMemory = field(default_factory=StepMemory)

    def run(self) -> CrashReport:
        first = run_apart(partial(self._play, None))
        self.memory.is_full = True
        differences = self._try_without_crash(first)
        crashes: list[Crash] = []
        repeated: Counter[str] = Counter()
        for crash in first.points if not differences else []:
            play = run_apart(partial(self._play, crash))
            if play.has_died:
                crashes.append(crash)
                repeated |= Counter({key: count for key, count in play.steps.items() if count > first.steps[key]})
                differences += self._differences(first, play, crash)
        return CrashReport(
            handler=self.task or self.app.service,
            result=first.outcome if first.state == TaskState.DONE else None,
            checkpoints=first.checkpoints,
            crashes=tuple(crashes),
            steps=dict(first.steps),
            repeated=dict(repeated),
            differences=tuple(differences),
        )

    def _try_without_crash(self, first: Play) -> list[Difference]:
        """Whether the handler agrees with itself, before a replica dies."""
        if first.state is TaskState.HELD:
            return [Difference(None, "the handler does not fit its own journal", "it ran up to a wait", first.outcome)]
        if not first.state.is_final:
            raise UsageError(f"without a crash the task does not come to an end: {first.outcome}")
        return self._differences(first, run_apart(partial(self._play, None)), None)

    def _differences(self, first: Play, play: Play, crash: Crash | None) -> list[Difference]:
        found = []
        expected, outcome = self._shown(first), self._shown(play)
        if expected != outcome:
            found.append(Difference(crash, "another end", expected, outcome))
        for peer in sorted(first.asked.keys() | play.asked.keys()):
            before, now = sorted(first.asked.get(peer, [])), sorted(play.asked.get(peer, []))
            if before != now:
                what = f"peer {peer!r} was asked something else"
                found.append(Difference(crash, what, "\n".join(before), "\n".join(now)))
        return found

    def _shown(self, play: Play) -> str:
        value = self.compare(play.outcome) if play.state == TaskState.DONE else play.outcome
        return f"{play.state}: {_pretty(value)}"

    async def _play(self, crash: Crash | None) -> Play:
        stage = Stage()
        scene = stage.scene
        scene.server.is_sorting = True
        scene.open_store = self.memory.opening(scene)
        try:
            self._set_up(stage)
            for other in self.apps:
                await stage.run(other)
            victim = await stage.run(self.app, **self.settings)
            watch = CrashWatch(scene, victim, crash)
            points.arm(watch)
            return await self._perform(stage, watch)
        finally:
            points.arm(None)
            # Before the stage lets go of the loop: a thread that ends must not wake a run that died waiting for it.
            await asyncio.get_running_loop().shutdown_default_executor()
            await stage.close()
            _bury()

    def _set_up(self, stage: Stage) -> None:
        if callable(self.peers):
            self.peers(stage)
        elif self.peers is not None:
            for name, value in self.peers.items():
                stage.peer(name).replies(value)

    async def _perform(self, stage: Stage, watch: CrashWatch) -> Play:
        scene = stage.scene
        ticket = await stage.submit(self.app.service, self.body, task=self.task, identity=IDENTITY)
        is_replaced = False
        for _ in range(MOST_SKIPS):
            scene.check()
            if watch.has_died and not is_replaced:
                is_replaced = True
                await stage.run(self.app, **self.settings)
            elif ticket.is_done or ticket.state is TaskState.HELD or not await scene.clock.skip():
                break
        state, outcome = await _outcome_of(ticket, scene)
        asked = {name: [_pretty(body) for body in peer.asked] for name, peer in scene.peers.items()}
        return Play(state, outcome, ticket.checkpoints, asked, watch.steps, watch.points, watch.has_died)


async def _outcome_of(ticket: Ticket, scene: StageScene) -> tuple[TaskState, Any]:
    if not ticket.is_done:
        return ticket.state or TaskState.RUNNING, explain(scene, ticket.task_id, ticket.service)
    try:
        return TaskState.DONE, await ticket.result()
    except TaskFailed as error:
        told = {name: error.problem.get(name) for name in ("code", "exception", "detail")}
        return ticket.state or TaskState.FAILED, told


class CrashWatch:
    """Told of every point of the protocol; ends the victim at one of them."""

    def __init__(self, scene: StageScene, victim: Replica, crash: Crash | None) -> None:
        self.points: list[Crash] = []
        self.steps: Counter[str] = Counter()
        self.has_died = False
        self._clock: StageClock = scene.clock
        self._victim = victim
        self._crash = crash
        self._counts: Counter[str] = Counter()

    def __call__(self, point: str) -> None:
        if point == "before_step":
            self._count_step()
        if current_part.get() is not self._victim.part or point not in _POINTS:
            return
        self._counts[point] += 1
        here = Crash(point, self._counts[point])
        self.points.append(here)
        if here == self._crash and not self.has_died:
            self.has_died = True
            _bury()
            self._victim.kill()
            raise Died

    def _count_step(self) -> None:
        current = asyncio.current_task()
        runs = [live.run for live in self._clock.lives() if live.run is not None]
        self.steps.update(key for run in runs for key, task in run.steps_in_flight.items() if task is current)


def _bury() -> None:
    """Keep what is under way on this loop from being freed, and from complaining about it."""
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            _graveyard.append(task)
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - no public way to say so


def _pretty(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return blobs.canonical(value).decode()
    except (TypeError, UnicodeDecodeError):
        return repr(value)


# --- what was seen, in words ---


@dataclass(frozen=True, slots=True, order=True)
class Crash:
    """Where the replica died: the point, and how many times it had come there."""

    point: str
    number: int

    def __str__(self) -> str:
        return f"{self.point}:{self.number} ({points.POINTS[self.point]})"


@dataclass(frozen=True, slots=True)
class Difference:
    """A play that came to something else than the first one."""

    crash: Crash | None
    """None: no replica died, and the handler came to something else all the same."""
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        where = "without any crash, the second time" if self.crash is None else f"killed at {self.crash}"
        return "\n".join(
            [
                f"{where}: {self.what}",
                "  the first time, without a crash:",
                *_indented(self.expected),
                "  this time:",
                *_indented(self.found),
            ]
        )


@dataclass(frozen=True, slots=True)
class CrashReport:
    """What was seen of a handler that was killed at each of its checkpoints."""

    handler: str
    result: Any
    """The result without a crash; None if the task did not end well."""
    checkpoints: int
    """How many commits the task needs without a crash."""
    crashes: tuple[Crash, ...]
    steps: Mapping[str, int]
    """How often each step ran without a crash, by key."""
    repeated: Mapping[str, int]
    """Steps that ran more often in a play with a crash, and how often at most: their effects must bear it."""
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.handler}: {self.checkpoints} checkpoints, killed {len(self.crashes)} times, "
            + (f"{len(self.differences)} differences" if self.differences else "the same end every time")
        ]
        if self.repeated:
            told = ", ".join(f"{key} ({count} times)" for key, count in self.repeated.items())
            lines.append(f"steps that ran again, cut off before they were recorded: {told}")
        for difference in self.differences:
            lines += ["", str(difference)]
        if self.differences:
            lines += ["", _ADVICE]
        return "\n".join(lines)


_ADVICE = (
    "A handler runs again from the top at every resume. What is not the same each time belongs in `ctx.step`, or "
    "is asked of `ctx.now()`, `ctx.random()`, `ctx.uuid(name)`."
)


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines() or [""]]
