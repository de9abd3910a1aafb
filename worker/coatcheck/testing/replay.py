"""Does today's code still fit a recorded journal? The handler runs on it as on a resume, and nothing has an effect."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from coatcheck.errors import InvalidArguments
from coatcheck.store import blobs
from coatcheck.store.memory import Tables
from coatcheck.store.rows import Changes, Committed, Kind, TaskState
from coatcheck.testing.errors import ReplayFailed
from coatcheck.testing.journals import Journal, blob_of, caller_of, history_of, load, task_id_of
from coatcheck.testing.separate_loop import run_apart
from coatcheck.testing.stage import FIRST_DAY
from coatcheck.testing.stage_clock import Pace
from coatcheck.testing.virtual_time import Part, Time, unwrap, wrap
from coatcheck.worker.app import App
from coatcheck.worker.binding import Bound
from coatcheck.worker.engine.context import Context
from coatcheck.worker.engine.run import Run
from coatcheck.worker.engine.run_port import Finished, Held, Outcome, Raised, Superseded
from coatcheck.worker.messages import to_body

__all__ = ["Replay", "assert_replays", "check_replay"]

PATIENCE_S = 2.0
"""How long, really, a handler may wait for something that is neither recorded nor new work."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of a journal in the hands of today's code."""

    problem: str | None
    """Why it does not fit: what a held task would say. None: it fits."""
    next: tuple[str, ...] = ()
    """What the handler comes to where the journal ends: what it waits for, what it would do, how it ends."""
    unread: tuple[str, ...] = ()
    """Keys of entries that the handler does not ask for any more; harmless, and worth knowing."""

    @property
    def fits(self) -> bool:
        return self.problem is None


def check_replay(app: App, journal: Journal | Path | str) -> Replay:
    """Run today's code on a journal, or on a file that holds one. No step runs, no message leaves, nothing is written.

    It uses an event loop of its own, so it can be called from any test.
    """
    loaded = load(journal)
    with capture_logs():
        return run_apart(lambda: _replay(app, loaded))


def assert_replays(app: App, journal: Journal | Path | str) -> Replay:
    """Raise ReplayFailed, which is an AssertionError, unless today's code fits the journal."""
    replay = check_replay(app, journal)
    if replay.problem is not None:
        name = "the journal" if isinstance(journal, dict) else str(journal)
        raise ReplayFailed(f"{name} does not fit {app!r}: {replay.problem}")
    return replay


class _Audience:
    """The port of such a run: it sees what the run wants to do, and ends it there."""

    def __init__(self, journal: Journal) -> None:
        self.wanted: tuple[str, ...] = ()
        self.run: Run | None = None
        self._open = history_of(journal).open_calls

    async def before_first_effect(self) -> None:
        assert self.run is not None
        new_calls = [f"opens {call.kind} {call.name!r}" for call in self.run.ledger.opens.values()]
        self.wanted = (*(f"runs step {key!r}" for key in self.run.steps_in_flight), *new_calls)
        raise Superseded

    async def commit(self, changes: Changes) -> Committed:
        new = [f"opens {call.kind} {call.name!r} under key {call.key!r}" for call in changes.opens]
        new += [f"records {entry.kind} {entry.key!r}" for entry in changes.entries if entry.kind is not Kind.NOTE]
        waited = {call_id for group in changes.waits or () for call_id in group.calls}
        old = [call for call in self._open if call.call_id in waited]
        self.wanted = (*new, *(f"waits for {call.kind} {call.name!r} under key {call.key!r}" for call in old))
        raise Superseded

    def progress(self, done: float | None, total: float | None, message: str | None) -> None:
        """Nobody asked."""


async def _replay(app: App, journal: Journal) -> Replay:
    handler = app.find_handler(journal["handler"])
    if handler is None:
        return Replay(app.explain_unknown(journal["handler"]))
    try:
        bound = handler.binding.bind(to_body(blob_of(journal["request"])))
    except InvalidArguments as error:
        return Replay(str(error))
    audience = _Audience(journal)
    run = audience.run = Run(
        task_id=task_id_of(journal),
        identity=journal["identity"],
        attempt=journal["attempt"],
        version=journal["version"],
        caller=caller_of(journal),
        invoke=partial(_invoke, handler.binding.function, bound),
        history=history_of(journal),
        port=audience,
        now=lambda: FIRST_DAY,
    )
    outcome = await _execute(run)
    return _judge(outcome, audience, run, journal)


def _invoke(function: Any, bound: Bound, ctx: Context) -> Coroutine[Any, Any, Any]:
    arguments, options = bound
    coroutine: Coroutine[Any, Any, Any] = function(ctx, *arguments, **options)
    return coroutine


async def _execute(run: Run) -> Outcome | None:
    """Run it, and let time pass where it sleeps in RAM. None: it waits for something that is not there."""
    loop = asyncio.get_running_loop()
    time = Time(FIRST_DAY)
    time.start_at(loop.time())
    wrap(loop)
    try:
        pace = Pace(time, Tables(time.now), replicas=())
        running = loop.create_task(run.execute(), context=Part(time).context())
        if await pace.finish(running, patience_s=PATIENCE_S):
            return running.result()
        run.abandon()
        await pace.finish(running)
        return None
    finally:
        unwrap(loop)


def _judge(outcome: Outcome | None, audience: _Audience, run: Run, journal: Journal) -> Replay:
    state = TaskState(journal["state"])
    match outcome:
        case Held(error):
            return Replay(str(error))
        case Finished(value):
            return _judge_result(value, state, run, journal)
        case Raised(error) if state not in (TaskState.FAILED, TaskState.RETRYING):
            text = f"the handler raises {type(error).__name__} where the task was {state.value}: {error}"
            return Replay(text, unread=run.unread_keys)
        case Raised(error):
            return Replay(None, (f"fails with {type(error).__name__}: {error}",), run.unread_keys)
        case None:
            return Replay("the handler waits for something that is neither recorded nor durable", (), run.unread_keys)
        case _:
            return Replay(None, audience.wanted, run.unread_keys)


def _judge_result(value: Any, state: TaskState, run: Run, journal: Journal) -> Replay:
    try:
        result = blobs.decode(blobs.encode(value))
    except (TypeError, ValueError) as error:
        return Replay(f"the handler returns what cannot be sent: {error}")
    expected = blobs.decode(blob_of(journal["outcome"])) if state is TaskState.DONE else None
    if state is TaskState.DONE and result != expected:
        text = f"the handler returns another result.\n  recorded: {expected!r}\n  the code: {result!r}"
        return Replay(text, unread=run.unread_keys)
    return Replay(None, (f"returns {result!r}",), run.unread_keys)
