"""What people order, one task at a time: lock it and its calls, read them, decide, write all of it or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from coatcheck.points import reach
from coatcheck.store import orders
from coatcheck.store.blobs import shrink
from coatcheck.store.history import Author
from coatcheck.store.kinds import KINDS
from coatcheck.store.orders import ORIGINS, Deed, Filter, Fork, Order, OrderDone, OrderRefused, Superseding
from coatcheck.store.postgres.connection import Connection
from coatcheck.store.postgres.database import columns, rows
from coatcheck.store.postgres.histories import Told, tell
from coatcheck.store.postgres.records import CALL_STATES, peer_of, read_tasks
from coatcheck.store.postgres.sql import STATEMENTS
from coatcheck.store.rows import Peer, Task, TaskId
from coatcheck.store.targets import Place

FILTER_PAGE = 1000
RUN_COLUMNS = ("is_pausing", "seq", "entry_count", "head")
TASK_COLUMNS = (
    *("state", "epoch", "checkpoint", "attempt", "pickups", "revision", "is_final_sent", "value", "traceback"),
)


async def order(connection: Connection, order: Order, *, author: Author) -> OrderDone | OrderRefused:
    """Do what a person ordered. If we die before the commit, nothing happened; after it, the sweeper finds the task."""
    await connection.begin()
    found = await read_tasks(connection, [order.task_id], locks=True)
    await rows(connection, STATEMENTS["lock_calls_of"], id=order.task_id)
    deed = orders.decide(order, found.get(order.task_id), await _places(connection, order.task_id))
    if isinstance(deed, OrderRefused) or order.is_dry_run:
        return deed if isinstance(deed, OrderRefused) else deed.done
    reach("before_order")
    entries, chain = author.tell(deed.task.task_id, deed.drafts, at=deed.task.chain, epoch=deed.task.epoch)
    task = replace(deed.task, entry_count=chain.count, head=chain.head)
    if isinstance(order, Fork):
        done = await _fork(connection, deed, task, order, author.replica)
    else:
        cancels = await _forget(connection, deed)
        await _supersede(connection, deed.superseding, task, author.replica)
        await _write(connection, deed, task)
        done = replace(deed.done, cancels=tuple(cancels))
    if isinstance(done, OrderDone):
        await tell(connection, [Told(task.task_id, entry) for entry in entries])
    return done


async def find_for_order(connection: Connection, wanted: Filter, *, limit: int) -> list[TaskId]:
    """The oldest tasks that a filter lets pass. Failures are read a page at a time: there may be millions."""
    await connection.begin_survey()
    asked: dict[str, Any] = {
        "states": [str(state) for state in wanted.states] or None,
        "service": wanted.service,
        "handler": wanted.handler,
        "since": wanted.since,
        "until": wanted.until,
        "has_values": wanted.code is not None,
        "limit": FILTER_PAGE,
        "after_at": None,
        "after_id": None,
    }
    found: list[TaskId] = []
    while len(found) < limit:
        page = await rows(connection, STATEMENTS["find_for_order"], **asked)
        found += [row["id"] for row in page if wanted.has_code(row["value"])]
        if len(page) < FILTER_PAGE:
            break
        asked |= {"after_at": page[-1]["created_at"], "after_id": page[-1]["id"]}
    return found[:limit]


async def _places(connection: Connection, task_id: TaskId) -> list[Place]:
    return [
        Place(
            row["key"],
            KINDS[row["kind"]],
            row["name"],
            CALL_STATES[row["state"]],
            row["seq"],
            row["call_id"],
            row["is_forgotten"],
            row["checkpoint"],
            row["value"],
        )
        for row in await rows(connection, STATEMENTS["places"], id=task_id, origins=ORIGINS)
    ]


async def _forget(connection: Connection, deed: Deed) -> list[Peer]:
    """Forget entries and calls. Gives the calls that were open, whose peers should hear of it."""
    if deed.entries:
        forgotten = {"id": deed.task.task_id, "seqs": list(deed.entries)}
        await connection.execute(STATEMENTS["forget_entries"], forgotten)
    if not deed.calls:
        return []
    written = await connection.execute(STATEMENTS["forget_calls"], columns(("ids", "seqs"), list(deed.calls)))
    closed = [peer_of(row) for row in written if row["is_closed"] and KINDS[row["kind"]].has_listener]
    return sorted(closed, key=lambda peer: peer.call_id)


async def _supersede(connection: Connection, superseding: Sequence[Superseding], task: Task, replica: str) -> None:
    by = {"checkpoint": task.checkpoint, "epoch": task.epoch, "replica": replica}
    entries = [(one.place.seq, one.seq, one.value) for one in superseding if one.call_id is None]
    calls = [(one.place.call_id, one.call_id, one.seq, one.value) for one in superseding if one.call_id is not None]
    if entries:
        values = columns(("old", "seq", "value"), entries) | {"id": task.task_id}
        await connection.execute(STATEMENTS["set_entries"], values | by)
    if calls:
        await connection.execute(STATEMENTS["set_calls"], columns(("old", "call_id", "seq", "value"), calls) | by)


async def _write(connection: Connection, deed: Deed, task: Task) -> None:
    values: dict[str, Any] = {name: getattr(task, name) for name in RUN_COLUMNS} | {"id": task.task_id}
    if deed.due is None:
        await connection.execute(STATEMENTS["order_run"], values)
        return
    values |= {name: getattr(task, name) for name in TASK_COLUMNS}
    values |= {"request": shrink(task.request), "due_s": deed.due.total_seconds()}
    await connection.execute(STATEMENTS["order_task"], values)


async def _fork(connection: Connection, deed: Deed, task: Task, order: Fork, replica: str) -> OrderDone | OrderRefused:
    values: dict[str, Any] = {name: getattr(task, name) for name in ("checkpoint", "seq", "entry_count", "head")}
    values |= {"id": order.task_id, "new_id": order.new_task_id, "request": shrink(task.request)}
    if not await connection.execute(STATEMENTS["fork_task"], values):
        detail = f"there is a task {order.new_task_id} already; give the fork another id"
        return OrderRefused(order.task_id, "exists", detail)
    to = {"id": order.task_id, "new_id": order.new_task_id}
    seqs = [place.seq for place, call_id in deed.copies if call_id is None]
    calls = [(place.call_id, call_id) for place, call_id in deed.copies if call_id is not None]
    if seqs:
        await connection.execute(STATEMENTS["copy_entries"], to | {"seqs": seqs})
    if calls:
        copied = columns(("old", "call_id"), calls) | {"new_id": order.new_task_id}
        await connection.execute(STATEMENTS["copy_calls"], copied)
    if deed.origins is not None:
        note = {"id": order.new_task_id, "key": ORIGINS, "value": deed.origins, "replica": replica}
        await connection.execute(STATEMENTS["note_origins"], note)
    return deed.done
