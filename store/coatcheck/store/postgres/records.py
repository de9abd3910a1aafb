"""Reading rows: the values they become, and the reads that several operations share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from coatcheck.store.decide import TASK_STATES, Closing, Found
from coatcheck.store.documents import from_json, to_json
from coatcheck.store.kinds import KINDS
from coatcheck.store.postgres.connection import Connection, Row
from coatcheck.store.postgres.database import rows
from coatcheck.store.postgres.sql import STATEMENTS
from coatcheck.store.rows import (
    Address,
    Caller,
    CallId,
    CallState,
    HistoryLevel,
    Known,
    OpenCall,
    Peer,
    Recorded,
    Task,
    TaskId,
    Unsent,
)

T = TypeVar("T")

HISTORY_LEVELS = tuple(HistoryLevel)
CALL_STATES: Mapping[str, CallState] = {one.value: one for one in CallState}

UNREADABLE = (LookupError, TypeError, ValueError, msgspec.MsgspecError)
"""What bytes and words that another release or another program wrote are known to raise."""


async def lock_tasks(
    connection: Connection, ids: Iterable[TaskId], *, waits: bool
) -> tuple[dict[TaskId, Found], Collection[TaskId]]:
    """Lock the rows that exist, by id. Unless told to wait, rows locked elsewhere are left out, and named beside."""
    wanted = set(ids)
    if not wanted:
        return {}, ()
    if waits:
        return _found(await rows(connection, STATEMENTS["lock_tasks"], ids=list(wanted))), ()
    found = _found(await rows(connection, STATEMENTS["lock_free_tasks"], ids=list(wanted)))
    missing = list(wanted - found.keys())
    if not missing:
        return found, ()
    return found, {row["id"] for row in await rows(connection, STATEMENTS["existing_tasks"], ids=missing)}


async def read_tasks(connection: Connection, ids: Sequence[TaskId], *, locks: bool) -> dict[TaskId, Found]:
    """Read the rows that exist; and lock them, by id, waiting for each."""
    return _found(await rows(connection, STATEMENTS["lock_tasks" if locks else "read_tasks"], ids=ids))


def _found(found: Iterable[Row]) -> dict[TaskId, Found]:
    return {row["id"]: Found(task_of(row), row["is_due"], row["row_version"]) for row in found}


async def load_known(connection: Connection, ids: Collection[TaskId]) -> Mapping[TaskId, Known]:
    """Everything recorded and open for these tasks; one that has nothing is left out."""
    if not ids:
        return {}
    known: dict[TaskId, list[Row]] = defaultdict(list)
    for row in await rows(connection, STATEMENTS["known_rows"], ids=list(ids)):
        known[row["id"]].append(row)
    return {task_id: known_of(about, {}) for task_id, about in known.items()}


async def load_unsent(connection: Connection, tasks: Collection[Task]) -> Mapping[TaskId, Unsent]:
    """What these tasks have perhaps never sent: looked up only for messages that were delivered before."""
    if not tasks:
        return {}
    calls: dict[TaskId, list[Peer]] = defaultdict(list)
    for row in await rows(connection, STATEMENTS["unsent_calls"], ids=[task.task_id for task in tasks]):
        calls[row["task_id"]].append(peer_of(row))
    return {
        task.task_id: Unsent(tuple(calls[task.task_id]), task.state.is_final and not task.is_final_sent)
        for task in tasks
    }


# --- from rows to values ---


def known_of(about: Iterable[Row], closing: Mapping[CallId, Closing]) -> Known:
    """A task's journal entries and calls in the order of `seq`. A statement that closes calls reads them as they were
    before; so how they are now comes with them.
    """
    recorded, still_open, is_withheld = [], [], False
    for row in about:
        closed = closing.get(row["h_call_id"])
        is_withheld = row["h_is_withheld"]
        # A send counts as done from the moment its row exists: the handler never waits for it.
        if closed is None and row["h_state"] == CallState.OPEN and KINDS[row["h_kind"]].is_awaited:
            still_open.append(_open_call_of(row))
        else:
            ended = recorded_of(row) if closed is None else _closed_of(row, closed)
            recorded.append(msgspec.structs.replace(ended, value=b"") if is_withheld else ended)
    recorded.sort(key=_seq_of)
    return Known(tuple(recorded), tuple(still_open), is_withheld)


_seq_of = attrgetter("seq")


def _open_call_of(row: Row) -> OpenCall:
    kind = KINDS[row["h_kind"]]
    return OpenCall(row["h_call_id"], row["h_key"], kind, row["h_name"], row["h_digest"], row["h_due_at"])


def _closed_of(row: Row, closed: Closing) -> Recorded:
    kind, (call_id, state, seq, value) = KINDS[row["h_kind"]], closed
    return Recorded(row["h_key"], kind, row["h_name"], row["h_digest"], seq, state, value, call_id)


def recorded_of(row: Row) -> Recorded:
    """An entry of the journal, or a call that has ended."""
    kind = KINDS[row["h_kind"]]
    state = CALL_STATES[row["h_state"]] if kind.is_awaited or kind.is_entry else CallState.OK
    value = row["h_value"] or b""
    return Recorded(row["h_key"], kind, row["h_name"], row["h_digest"], row["h_seq"], state, value, row["h_call_id"])


def peer_of(row: Row) -> Peer:
    return Peer(
        call_id=row["id"],
        task_id=row["task_id"],
        service=row["service"],
        kind=KINDS[row["kind"]],
        key=row["key"],
        peer=row["peer"],
        handler=row["handler"],
        body=row["body"],
        headers=from_json(row["headers"]),
        hard_due_at=row["hard_due_at"],
        traceparent=row["traceparent"],
    )


def task_of(row: Row) -> Task:
    subject, progress = row["caller_subject"], row["progress"]
    return Task(
        task_id=row["id"],
        service=row["service"],
        handler=row["handler"],
        version=row["version"],
        state=TASK_STATES[row["state"]],
        epoch=row["epoch"],
        checkpoint=row["checkpoint"],
        seq=row["seq"],
        attempt=row["attempt"],
        pickups=row["pickups"],
        trigger=row["trigger"],
        identity=row["identity"],
        digest=row["digest"],
        correlation_id=row["correlation_id"],
        request=row["request"],
        addresses=addresses_of(row["addresses"]),
        traceparent=row["traceparent"],
        tracestate=row["tracestate"],
        value=row["value"],
        traceback=row["traceback"],
        is_final_sent=row["is_final_sent"],
        progress=None if progress is None else from_json(progress),
        due_at=row["due_at"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        finished_at=row["finished_at"],
        caller=None if subject is None else Caller(subject, from_json(row["caller_claims"]) or {}),
        deadline_at=row["deadline_at"],
        history=HISTORY_LEVELS[row["history"]],
        entry_count=row["entry_count"],
        head=row["head"],
        revision=row["revision"],
        is_pausing=row["is_pausing"],
        forked_from=row["forked_from"],
        forked_at=row["forked_at"],
    )


def readable(found: Iterable[Row], of: Callable[[Row], T]) -> tuple[list[T], list[UUID]]:
    """What the rows become, and the ids of those that this code cannot read: one must not fail the others."""
    values, unreadable = [], []
    for row in found:
        try:
            values.append(of(row))
        except UNREADABLE:
            unreadable.append(row["id"])
    return values, unreadable


def addresses_of(written: Any) -> tuple[Address, ...]:
    return tuple([Address(*pair) for pair in from_json(written)])


def addresses_json(addresses: Iterable[Address]) -> str:
    return to_json([[address.reply_to, address.correlation_id] for address in addresses])
