"""What the sweeper reads and moves: everything whose time to be looked at has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import text

from coatcheck.store import decide, history
from coatcheck.store.blobs import is_damaged
from coatcheck.store.documents import to_json
from coatcheck.store.history import Author
from coatcheck.store.kinds import KINDS
from coatcheck.store.postgres.connection import Connection, Row
from coatcheck.store.postgres.database import rows
from coatcheck.store.postgres.histories import Told, tell
from coatcheck.store.postgres.records import addresses_json, peer_of, readable, task_of
from coatcheck.store.postgres.sql import PARTS, STATEMENTS
from coatcheck.store.rows import ALONE, FINAL_STATES, MOST_ADDRESSES, Address, Answered, CallId, Chain, TaskId
from coatcheck.store.views import LookedAt, Renewal, Renewed, Retention

RETIRE_TASKS = {state: text(PARTS["tasks_to_retire"].replace("{state}", state.value)) for state in sorted(FINAL_STATES)}


async def look(connection: Connection, *, limit: int, again: timedelta) -> LookedAt:
    """Take up to `limit` calls and as many tasks whose time has come. They come up again after `again` if still so;
    what has long been due, after as long again, up to LONGEST_AGAIN. What is to be sent comes up again after half as
    long as it has waited, from SHORTEST_RESEND up to LONGEST_RESEND.
    """
    await connection.begin()
    calls = await rows(connection, STATEMENTS["calls_to_look_at"], limit=limit)
    await _look_again(connection, "look_at_calls_again", [(row["id"], _next_look_at_call(row, again)) for row in calls])
    tasks = await rows(connection, STATEMENTS["tasks_to_look_at"], limit=limit)
    await _look_again(connection, "look_at_tasks_again", [(row["id"], _next_look_at_task(row, again)) for row in tasks])
    never_left = {row["id"] for row in calls if not row["is_sent"] and KINDS[row["kind"]].is_published}
    due = {row["id"] for row in calls if _is_over(row) and not (row["id"] in never_left and is_damaged(row["body"]))}
    peers, bad_calls = readable([row for row in calls if row["id"] in due or row["id"] in never_left], peer_of)
    found, bad_tasks = readable(tasks, task_of)
    overdue_s = [-row["waits_s"] for row in [*calls, *tasks] if row["waits_s"] is not None]
    return LookedAt(
        due=tuple(peer for peer in peers if peer.call_id in due),
        unsent=tuple(peer for peer in peers if peer.call_id not in due),
        overdue=tuple(task for task in found if not task.state.is_final),
        unsent_finals=tuple(task for task in found if task.state.is_final and not task.is_final_sent),
        oldest=timedelta(seconds=max([0.0, *overdue_s])),
        unreadable=(*bad_calls, *bad_tasks),
    )


async def _look_again(connection: Connection, statement: str, pauses: Sequence[tuple[UUID, timedelta | None]]) -> None:
    if pauses:
        pauses_s = [None if pause is None else pause.total_seconds() for _, pause in pauses]
        await connection.execute(STATEMENTS[statement], {"id": [it for it, _ in pauses], "pause_s": pauses_s})


def _is_over(row: Row) -> bool:
    return row["waits_s"] is not None and row["waits_s"] <= 0


def _next_look_at_call(row: Row, again: timedelta) -> timedelta | None:
    return decide.look_at_call_again(
        waits=_span(row["waits_s"]), since=_span(row["since_s"]) or timedelta(), is_sent=row["is_sent"], again=again
    )


def _next_look_at_task(row: Row, again: timedelta) -> timedelta | None:
    return decide.look_at_task_again(
        is_final=row["state"] in FINAL_STATES,
        waits=_span(row["waits_s"]),
        since=_span(row["since_s"]) or timedelta(),
        again=again,
    )


def _span(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


async def next_look(connection: Connection) -> timedelta | None:
    """How long until `look` finds something; negative if it would now, None if nothing waits. Leaves out retention."""
    in_s = await connection.scalar(STATEMENTS["next_look"])
    return None if in_s is None else timedelta(seconds=in_s)


async def retire(connection: Connection, *, limit: int, keep: Retention, author: Author) -> int:
    """Delete finished tasks whose time to be kept is over, and leave their histories. Lock order: task, then its calls
    and journal.
    """
    await connection.begin()
    found: list[Row] = []
    for state, statement in RETIRE_TASKS.items():
        keep_s = keep.of(state).total_seconds()
        found += await rows(connection, statement, limit=limit - len(found), keep_s=keep_s)
    if found:
        await tell(connection, [told for row in found for told in _pruned(row, author)])
        ids = [row["id"] for row in found]
        for name in ("delete_calls", "delete_journal", "delete_tasks"):
            await connection.execute(STATEMENTS[name], {"ids": ids})
    return len(found)


def _pruned(row: Row, author: Author) -> list[Told]:
    chain = Chain(decide.HISTORY_LEVELS[row["history"]], row["entry_count"], row["head"])
    drafts = history.of_pruning(chain.level, row["state"])
    entries, _ = author.tell(row["id"], drafts, at=chain, epoch=row["epoch"])
    return [Told(row["id"], entry) for entry in entries]


async def forget_histories(connection: Connection, *, limit: int, before: datetime) -> int:
    """Delete the histories of tasks that were removed before that time. Gives the count of tasks."""
    await connection.begin()
    found = await rows(connection, STATEMENTS["histories_to_forget"], limit=limit, before=before)
    ids = [row["task_id"] for row in found]
    if ids:
        ids = [row["id"] for row in await rows(connection, STATEMENTS["lock_free_chains"], ids=ids)]
        await connection.execute(STATEMENTS["delete_histories"], {"ids": ids})
    return len(ids)


async def repair(connection: Connection, *, after: UUID, limit: int, quiet: timedelta) -> tuple[int, UUID | None]:
    """Look at the next parked tasks by id and re-wake those that nothing would move. Gives their count, and where to
    go on; None: that were all.
    """
    found = await rows(connection, STATEMENTS["parked_after"], after=after, limit=limit, quiet_s=quiet.total_seconds())
    ids = [row.id for row in found]
    if not ids:
        return 0, None
    stuck = {row.id for row in await rows(connection, STATEMENTS["without_waker"], ids=ids)}
    stuck |= {row.id for row in await rows(connection, STATEMENTS["met"], ids=ids)}
    woken = await connection.execute(STATEMENTS["rewake"], {"ids": sorted(stuck)}) if stuck else ()
    return len(woken), ids[-1]


async def without_waker(connection: Connection, *, limit: int = 100) -> list[TaskId]:
    """Unfinished tasks that nothing in SQL would ever move. It returns nothing; `doctor` asks."""
    await connection.begin_survey()
    return [row.id for row in await rows(connection, STATEMENTS["all_without_waker"], limit=limit)]


async def renew(
    connection: Connection, renewals: Sequence[Renewal], *, lease: timedelta, detaches: bool, uncounted: int = 0
) -> Renewed:
    """Move leases on. Rows that somebody holds are skipped: one of them must not keep the others from being renewed.

    `uncounted` takes pick-ups back that never came to a run, and with them the mark of one that was to run alone;
    minus so many times ALONE sets so many marks, however often it is asked for, and ALONE takes them off.
    """
    asked: dict[str, Any] = {"ids": [one.task_id for one in renewals], "epochs": [one.epoch for one in renewals]}
    options: dict[str, Any] = {"lease_s": lease.total_seconds(), "detaches": detaches, "uncounted": uncounted}
    options["alone"] = ALONE
    mine = {row.id for row in await connection.execute(STATEMENTS["renew"], asked | options)}
    if len(mine) == len(renewals):
        return Renewed(mine, set())
    return Renewed(mine, {row.id for row in await rows(connection, STATEMENTS["still_running"], **asked)} - mine)


async def hasten_held(connection: Connection, service: str, *, limit: int = 1000) -> int:
    """Let held tasks of a service be tried again now, whatever their pauses. Gives their count."""
    return len(await connection.execute(STATEMENTS["hasten_held"], {"service": service, "limit": limit}))


async def hasten_unsent(connection: Connection, queue: str, *, limit: int) -> int:
    """Let calls and final replies that wait for this queue be sent now, the oldest first. Gives their count."""
    await connection.begin()
    longest_s = max(decide.LONGEST_RESEND, decide.RESEND_AFTER).total_seconds()
    from_s = decide.HASTENED_FROM.total_seconds()
    values = {"queue": queue, "limit": limit, "longest_s": longest_s, "from_s": from_s}
    calls = await connection.execute(STATEMENTS["hasten_calls"], values)
    return len(calls) + len(await connection.execute(STATEMENTS["hasten_finals"], values))


async def mark_sent(connection: Connection, calls: Sequence[CallId]) -> None:
    """Note that calls are known to be with the broker; a send is over with that."""
    await connection.execute(STATEMENTS["mark_sent"], {"ids": sorted(calls)})


async def mark_final_sent(connection: Connection, told: Mapping[TaskId, Answered]) -> None:
    """Note that the final replies of tasks were sent, where all that the row is to tell were told."""
    addresses = [addresses_json(each.addresses) for each in told.values()]
    revisions = [each.revision for each in told.values()]
    values = {"ids": list(told), "told": addresses, "revisions": revisions}
    await connection.execute(STATEMENTS["mark_final_sent"], values)


async def resend_calls(connection: Connection, calls: Sequence[CallId], *, after: timedelta) -> None:
    """Have the sweeper send calls that a queue refused, sooner than it would look at them by itself."""
    await connection.execute(STATEMENTS["resend_calls"], {"ids": sorted(calls), "after_s": after.total_seconds()})


async def resend_to(connection: Connection, task_id: TaskId, address: Address, *, after: timedelta) -> bool:
    """Have the sweeper send a final reply to an address whose queue refused it; the row learns it if need be. False: it
    has too many, or its time to be kept is over.
    """
    written = to_json([address.reply_to, address.correlation_id])
    values = {"id": task_id, "address": written, "after_s": after.total_seconds(), "most": MOST_ADDRESSES}
    return bool(await connection.execute(STATEMENTS["resend_to"], values))
