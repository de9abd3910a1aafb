"""Journals as files: what a task was asked and what it has learned, in JSON that can be read and kept in git."""

from __future__ import annotations

import base64
import json
import uuid
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

import msgspec

from coatcheck.errors import UsageError
from coatcheck.store import blobs
from coatcheck.store.blobs import Codec
from coatcheck.store.rows import Caller, CallId, CallState, History, Kind, OpenCall, Recorded, Task, TaskId
from coatcheck.testing.stage_tasks import Ticket
from coatcheck.worker.client import Client

__all__ = ["Journal", "history_of", "load", "record", "record_from_store"]

Journal: TypeAlias = dict[str, Any]
"""A task's journal, fit for JSON."""

FORMAT = "coatcheck-journal/1"


def record(ticket: Ticket) -> Journal:
    """The journal of a task on a stage, as it stands. Raises UsageError for a task that has none: it never waited."""
    row = ticket.scene.tables.tasks.get(ticket.task_id)
    if row is None:
        raise UsageError(f"{ticket} has no journal: it has not waited for anything, and no step of it was recorded")
    return _journal(row.task, ticket.scene.tables.history(ticket.task_id))


async def record_from_store(store_url: str, task_id: UUID | str) -> Journal:
    """The journal of a task in a real store. It only reads. Raises NoSuchTask."""
    async with Client(store=store_url) as client:
        task = await client.get(task_id if isinstance(task_id, UUID) else UUID(task_id))
        return _journal(task, await client.store.find_history(task.task_id))


def load(source: Journal | Path | str) -> Journal:
    """A journal, from a file if a path is given. Raises UsageError for what is none, or of a release to come."""
    journal = source if isinstance(source, dict) else json.loads(Path(source).read_text(encoding="utf-8"))
    if not isinstance(journal, dict) or journal.get("format") != FORMAT:
        found = journal.get("format") if isinstance(journal, dict) else type(journal).__name__
        raise UsageError(f"not a journal of the format {FORMAT!r} but {found!r}; make one with `record(ticket)`")
    return journal


def _journal(task: Task, history: History) -> Journal:
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
        "recorded": [_line(entry) | {"seq": entry.seq, "state": entry.state.value} for entry in history.recorded],
        "open": [_line(entry) for entry in history.open_calls],
    }


def _line(entry: Recorded | OpenCall) -> dict[str, Any]:
    line = {"key": entry.key, "kind": entry.kind.value, "name": entry.name, "arguments": entry.digest.hex()}
    return line if isinstance(entry, OpenCall) else line | {"value": _readable(entry.value)}


# --- back again ---


def history_of(journal: Journal) -> History:
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
    return History(tuple(recorded), tuple(still_open))


def caller_of(journal: Journal) -> Caller | None:
    caller = journal["caller"]
    return None if caller is None else Caller(caller["subject"], caller["claims"])


def task_id_of(journal: Journal) -> TaskId:
    return TaskId(UUID(journal["task_id"]))


def _call_id(task_id: UUID, line: dict[str, Any]) -> CallId:
    """Some id, the same for the same line: nobody answers a call of a journal."""
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
