"""Journals as files, and whether today's code still fits them.

A journal is what a task was asked and what it has learned, in JSON that can be read and kept in git. To try today's
code, the handler runs on it as on a resume, and nothing has an effect.
"""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

import msgspec
from structlog.testing import capture_logs

from coatcheck.errors import InvalidArguments, UsageError
from coatcheck.store import blobs
from coatcheck.store.blobs import Codec
from coatcheck.store.kinds import Kind
from coatcheck.store.memory import Tables
from coatcheck.store.rows import (
    Caller,
    CallId,
    CallState,
    Changes,
    Committed,
    Known,
    OpenCall,
    Recorded,
    Task,
    TaskId,
    TaskState,
)
from coatcheck.testing.stage import FIRST_DAY, Ticket
from coatcheck.testing.stage_clock import StageClock
from coatcheck.testing.virtual_time import StagePart, Time, run_apart, unwrap, wrap
from coatcheck.worker.app import App
from coatcheck.worker.binding import Bound
from coatcheck.worker.client import Client
from coatcheck.worker.engine.context import Context
from coatcheck.worker.engine.run import Run
from coatcheck.worker.engine.run_port import Finished, Held, Outcome, Raised, Superseded
from coatcheck.worker.messages import to_body

__all__ = ["Journal", "Replay", "ReplayFailed", "assert_replays", "check_replay", "record", "record_from_store"]

Journal: TypeAlias = dict[str, Any]
"""A task's journal, fit for JSON."""

FORMAT = "coatcheck-journal/1"
PATIENCE_S = 2.0
"""How long, really, a handler may wait for something that is neither recorded nor new work."""


class ReplayFailed(AssertionError):
    """Today's code does not fit a recorded journal."""


def record(ticket: Ticket) -> Journal:
    """The journal of a task on a stage, as it stands. Raises UsageError for a task that has none: it never waited."""
    row = ticket.scene.tables.tasks.get(ticket.task_id)
    if row is None:
        raise UsageError(f"{ticket} has no journal: it has not waited for anything, and no step of it was recorded")
    return journal_of(row.task, ticket.scene.tables.known(ticket.task_id))


async def record_from_store(store_url: str, task_id: UUID | str) -> Journal:
    """The journal of a task in a real store. It only reads. Raises NoSuchTask."""
    async with Client(store=store_url) as client:
        task = await client.get(task_id if isinstance(task_id, UUID) else UUID(task_id))
        return journal_of(task, await client.store.find_known(task.task_id))


def load(source: Journal | Path | str) -> Journal:
    """A journal, from a file if a path is given. Raises UsageError for what is none, or of a release to come."""
    journal = source if isinstance(source, dict) else json.loads(Path(source).read_text(encoding="utf-8"))
    if not isinstance(journal, dict) or journal.get("format") != FORMAT:
        found = journal.get("format") if isinstance(journal, dict) else type(journal).__name__
        raise UsageError(f"not a journal of the format {FORMAT!r} but {found!r}; make one with `record(ticket)`")
    return journal


def journal_of(task: Task, known: Known) -> Journal:
    """The journal of a task whose rows were read. Raises CorruptBlob if a value of it cannot be."""
    caller = task.caller
    return {
        "format": FORMAT,
        "service": task.service,
        "handler": task.handler,
        "version": task.version,
        "task_id": str(task.task_id),
        "identity": task.identity,
        "attempt": task.attempt,
        "caller": None if caller is None else {"subject": caller.subject, "claims": dict(caller.claims)},
        "state": task.state.value,
        "request": _readable(task.request),
        "outcome": _readable(task.value) if task.state.is_final and task.value is not None else None,
        "recorded": [_line(entry) | {"seq": entry.seq, "state": entry.state.value} for entry in known.recorded],
        "open": [_line(entry) for entry in known.open_calls],
    }


def _line(entry: Recorded | OpenCall) -> dict[str, Any]:
    line = {"key": entry.key, "kind": entry.kind.value, "name": entry.name, "arguments": entry.digest.hex()}
    return line if isinstance(entry, OpenCall) else line | {"value": _readable(entry.value)}


# --- back again ---


def known_of(journal: Journal) -> Known:
    """What the next run of the task would begin with."""
    task_id = UUID(journal["task_id"])
    recorded = [
        Recorded(
            line["key"],
            Kind(line["kind"]),
            line["name"],
            bytes.fromhex(line["arguments"]),
            line["seq"],
            CallState(line["state"]),
            blob_of(line["value"]),
            _call_id(task_id, line),
        )
        for line in journal["recorded"]
    ]
    still_open = [
        OpenCall(
            _call_id(task_id, line),
            line["key"],
            Kind(line["kind"]),
            line["name"],
            bytes.fromhex(line["arguments"]),
            None,
        )
        for line in journal["open"]
    ]
    return Known(tuple(recorded), tuple(still_open))


def caller_of(journal: Journal) -> Caller | None:
    caller = journal["caller"]
    return None if caller is None else Caller(caller["subject"], caller["claims"])


def task_id_of(journal: Journal) -> TaskId:
    return TaskId(UUID(journal["task_id"]))


def _call_id(task_id: UUID, line: dict[str, Any]) -> CallId:
    """Some id, the same for the same line: no peer answers a call of a journal."""
    return CallId(uuid.uuid5(task_id, line["key"]))


# --- values ---


def _readable(blob: bytes) -> dict[str, Any] | None:
    """A value under the name of its codec: as it is where JSON can hold it."""
    if not blob:
        return None
    codec, body = blobs.unpack(blob)
    match codec:
        case Codec.JSON:
            return {"json": msgspec.json.decode(body)}
        case Codec.TEXT:
            return {"text": body.decode()}
        case _:
            return {codec.name.lower(): base64.b64encode(body).decode()}


def blob_of(value: dict[str, Any] | None) -> bytes:
    """The blob a value was made from."""
    if value is None:
        return b""
    ((name, said),) = value.items()
    match Codec[name.upper()]:
        case Codec.JSON:
            return blobs.pack(Codec.JSON, msgspec.json.encode(said))
        case Codec.TEXT:
            return blobs.pack(Codec.TEXT, said.encode())
        case codec:
            return blobs.pack(codec, base64.b64decode(said))


# --- today's code on a journal ---


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


class _ReplayPort:
    """The port of such a run: it sees what the run wants to do, and ends it there."""

    def __init__(self, journal: Journal) -> None:
        self.wanted: tuple[str, ...] = ()
        self.run: Run | None = None
        self._open = known_of(journal).open_calls

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
        """Nothing: no requester listens."""


async def _replay(app: App, journal: Journal) -> Replay:
    handler = app.find_handler(journal["handler"])
    if handler is None:
        return Replay(app.explain_unknown(journal["handler"]))
    try:
        bound = handler.binding.bind(to_body(blob_of(journal["request"])))
    except InvalidArguments as error:
        return Replay(str(error))
    port = _ReplayPort(journal)
    run = port.run = Run(
        task_id=task_id_of(journal),
        identity=journal["identity"],
        attempt=journal["attempt"],
        version=journal["version"],
        caller=caller_of(journal),
        invoke=partial(_invoke, handler.binding.function, bound),
        known=known_of(journal),
        port=port,
        now=lambda: FIRST_DAY,
    )
    outcome = await _execute(run)
    return _judge(outcome, port, run, journal)


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
        clock = StageClock(time, Tables(time.now), replicas=())
        running = loop.create_task(run.execute(), context=StagePart(time).context())
        if await clock.finish(running, patience_s=PATIENCE_S):
            return running.result()
        run.abandon()
        await clock.finish(running)
        return None
    finally:
        unwrap(loop)


def _judge(outcome: Outcome | None, port: _ReplayPort, run: Run, journal: Journal) -> Replay:
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
            return Replay(None, port.wanted, run.unread_keys)


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
