"""What the sweeper reads and moves: everything whose time to be looked at has come.

`look_at` is pushed forward in the same statement that reads a row, so two sweepers never emit for the same row at once,
and one that dies after reading loses nothing: the row comes up again. Rows locked elsewhere are skipped, never waited
for; so these statements, which take calls without their tasks, cannot close a circle of locks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import text

from coatcheck.store.blobs import is_damaged
from coatcheck.store.postgres.connection import Connection
from coatcheck.store.postgres.database import rows
from coatcheck.store.postgres.records import (
    PEER_COLUMNS,
    TASK_COLUMNS,
    addresses_json,
    peer_of,
    readable,
    task_of,
    to_json,
)
from coatcheck.store.rows import ALONE, FINAL_STATES, MOST_ADDRESSES, Address, CallId, Peer, Task, TaskId, TaskState

LONGEST_AGAIN = timedelta(hours=1)
SHORTEST_RESEND = timedelta(seconds=2)
LONGEST_RESEND = timedelta(minutes=5)


def _again(due_at: str) -> str:
    """How long a row stays out of the way: `again`, or as long as it has been due. What was emitted lies in a durable
    queue; where nobody takes it from there, saying so every half minute would fill the queue, and not help.
    """
    age = f"coalesce(clock_timestamp() - {due_at}, interval '0')"
    longest = f"interval '{LONGEST_AGAIN.total_seconds():.0f} s'"
    return f"greatest(CAST(:again_s AS float8) * interval '1 s', least({age}, {longest}))"


def _resend(since: str) -> str:
    """How long a row stays out of the way whose message is to be sent again: half as long as it has waited. A queue
    that refuses it may do so for hours, or have room in a moment.
    """
    age = f"coalesce(clock_timestamp() - {since}, interval '0') / 2"
    shortest = f"least(CAST(:again_s AS float8), {SHORTEST_RESEND.total_seconds()}) * interval '1 s'"
    return f"greatest({shortest}, least({age}, interval '{LONGEST_RESEND.total_seconds():.0f} s'))"


# What an index is to be cut off at is compared with `statement_timestamp()`: `clock_timestamp()` may change from row to
# row, so Postgres would read the index to its end, past everything that is not due for hours.
LOOK_AT_CALLS = text(f"""
    WITH picked AS MATERIALIZED (
        SELECT id FROM coatcheck.call
         WHERE state = 'open' AND look_at <= statement_timestamp()
         ORDER BY look_at LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED)
    UPDATE coatcheck.call c
       SET look_at = CASE WHEN c.is_sent AND c.due_at > clock_timestamp() THEN c.due_at
                          WHEN c.due_at IS NULL OR c.due_at > clock_timestamp()
                          THEN least(c.due_at, clock_timestamp() + {_resend("c.opened_at")})
                          ELSE clock_timestamp() + {_again("c.due_at")} END
      FROM coatcheck.task t
     WHERE c.id = ANY(ARRAY(SELECT id FROM picked)) AND t.id = c.task_id
    RETURNING {PEER_COLUMNS}, c.due_at <= clock_timestamp() AS is_due, NOT c.is_sent AND c.kind <> 'timer' AS is_unsent,
              extract(epoch FROM clock_timestamp() - c.due_at)::float8 AS overdue_s
""")
# A final reply is tried until its task's time to be kept is over, and once more; with `look_at` gone the row may go.
LOOK_AT_TASKS = text(f"""
    WITH picked AS MATERIALIZED (
        SELECT id FROM coatcheck.task
         WHERE look_at <= statement_timestamp()
         ORDER BY look_at LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED)
    UPDATE coatcheck.task t
       SET look_at = CASE WHEN t.state NOT IN ('done', 'failed', 'cancelled')
                          THEN clock_timestamp() + {_again("t.due_at")}
                          WHEN t.due_at > clock_timestamp() THEN clock_timestamp() + {_resend("t.finished_at")} END
     WHERE t.id = ANY(ARRAY(SELECT id FROM picked))
    RETURNING {TASK_COLUMNS}, extract(epoch FROM clock_timestamp() - t.due_at)::float8 AS overdue_s
""")
# One for each state: they are kept for different times, and each is read off the end of the index.
RETIRE_TASKS = {
    state: text(f"""
    SELECT id FROM coatcheck.task
     WHERE state = '{state}' AND finished_at <= statement_timestamp() - CAST(:keep_s AS float8) * interval '1 s'
       AND look_at IS NULL
       AND NOT EXISTS (SELECT FROM coatcheck.call c WHERE c.task_id = task.id AND c.state = 'open')
     ORDER BY finished_at LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED
""")
    for state in sorted(FINAL_STATES)
}
DELETE_CALLS = text("DELETE FROM coatcheck.call WHERE task_id = ANY(CAST(:ids AS uuid[]))")
DELETE_JOURNAL = text("DELETE FROM coatcheck.journal WHERE task_id = ANY(CAST(:ids AS uuid[]))")
DELETE_TASKS = text("DELETE FROM coatcheck.task WHERE id = ANY(CAST(:ids AS uuid[]))")
# Not min(): where it expects few rows the planner adds up the whole index instead of reading its first entry.
NEXT_LOOK = text("""
    SELECT extract(epoch FROM least(
        (SELECT look_at FROM coatcheck.call WHERE state = 'open' AND look_at IS NOT NULL ORDER BY look_at LIMIT 1),
        (SELECT look_at FROM coatcheck.task WHERE look_at IS NOT NULL ORDER BY look_at LIMIT 1)
        ) - clock_timestamp())::float8 AS in_s
""")
PARKED_AFTER = text("""
    SELECT id FROM coatcheck.task
     WHERE id > CAST(:after AS uuid) AND state = 'parked'
       AND updated_at < clock_timestamp() - CAST(:quiet_s AS float8) * interval '1 s'
     ORDER BY id LIMIT CAST(:limit AS integer)
""")
# OFFSET 0 keeps the planner from joining a page of tasks with the whole table of calls.
WITHOUT_WAKER = text("""
    SELECT t.id FROM coatcheck.task t
     WHERE t.id = ANY(CAST(:ids AS uuid[])) AND t.state = 'parked'
       AND NOT EXISTS (SELECT FROM coatcheck.call c WHERE c.task_id = t.id AND c.id = ANY(t.wait_calls)
                                                      AND c.state = 'open' AND c.due_at IS NOT NULL OFFSET 0)
""")
ALL_WITHOUT_WAKER = text("""
    SELECT t.id FROM coatcheck.task t
     WHERE (t.state = 'parked' AND NOT EXISTS (
                SELECT FROM coatcheck.call c WHERE c.task_id = t.id AND c.id = ANY(t.wait_calls) AND c.state = 'open'
                                               AND c.due_at IS NOT NULL AND c.look_at IS NOT NULL))
        OR (t.state IN ('running', 'retrying', 'held') AND (t.due_at IS NULL OR t.look_at IS NULL))
     LIMIT CAST(:limit AS integer)
""")
MET = text("""
    SELECT DISTINCT counted.id FROM (
        SELECT t.id, t.wait_needs[w.number] AS need,
               count(*) FILTER (WHERE c.state = 'ok') AS ok, count(*) FILTER (WHERE c.state = 'open') AS still_open
          FROM coatcheck.task t, unnest(t.wait_calls, t.wait_groups) AS w(call_id, number), coatcheck.call c
         WHERE t.id = ANY(CAST(:ids AS uuid[])) AND c.id = w.call_id
         GROUP BY t.id, w.number, t.wait_needs[w.number]) AS counted
     WHERE CASE WHEN need IS NULL THEN still_open = 0 ELSE ok >= need OR ok + still_open < need END
""")
REWAKE = text("""
    UPDATE coatcheck.task
       SET state = 'running', due_at = clock_timestamp(), look_at = clock_timestamp(), trigger = NULL,
           wait_calls = NULL, wait_groups = NULL, wait_needs = NULL, updated_at = clock_timestamp()
     WHERE id IN (SELECT id FROM coatcheck.task WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'parked'
                   ORDER BY id FOR UPDATE SKIP LOCKED)
    RETURNING id
""")
# By the index of what is looked at, whose few entries hold all that is held.
HASTEN_HELD = text("""
    UPDATE coatcheck.task SET due_at = clock_timestamp(), look_at = clock_timestamp()
     WHERE id IN (SELECT id FROM coatcheck.task
                   WHERE look_at IS NOT NULL AND state = 'held' AND service = CAST(:service AS text)
                   ORDER BY look_at LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED)
    RETURNING id
""")
MARK_SENT = text("""
    UPDATE coatcheck.call SET is_sent = true, look_at = due_at,
           state = CASE WHEN kind = 'send' THEN 'ok' ELSE state END,
           closed_at = CASE WHEN kind = 'send' THEN clock_timestamp() END
     WHERE id IN (SELECT id FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'open' AND NOT is_sent
                   ORDER BY id FOR UPDATE SKIP LOCKED)
""")
# Not where the row has learnt an address meanwhile (RESEND_TO): that one is still to be told.
MARK_FINAL_SENT = text("""
    UPDATE coatcheck.task t SET is_final_sent = true, look_at = NULL
      FROM (SELECT t.id FROM coatcheck.task t
              JOIN unnest(CAST(:ids AS uuid[]), CAST(:told AS text[])) AS u(id, told) ON u.id = t.id
             WHERE t.state IN ('done', 'failed', 'cancelled')
               AND NOT EXISTS (SELECT FROM jsonb_array_elements(t.addresses) AS each
                                WHERE each NOT IN (SELECT jsonb_array_elements(u.told::jsonb)))
             ORDER BY t.id FOR UPDATE OF t SKIP LOCKED) AS told
     WHERE t.id = told.id
""")
RESEND_CALLS = text("""
    UPDATE coatcheck.call
       SET look_at = least(look_at, clock_timestamp() + CAST(:after_s AS float8) * interval '1 s')
     WHERE id IN (SELECT id FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'open' AND NOT is_sent
                   ORDER BY id FOR UPDATE SKIP LOCKED)
""")
# Waited for, not skipped: whoever asks is about to ack the message that would bring the reply back.
RESEND_TO = text("""
    UPDATE coatcheck.task t
       SET is_final_sent = false,
           look_at = least(look_at, clock_timestamp() + CAST(:after_s AS float8) * interval '1 s'),
           addresses = CASE WHEN known.is_known THEN t.addresses
                            ELSE t.addresses || jsonb_build_array(CAST(:address AS jsonb)) END
      FROM (SELECT id, EXISTS (SELECT FROM jsonb_array_elements(addresses) AS each
                                WHERE each = CAST(:address AS jsonb)) AS is_known
              FROM coatcheck.task WHERE id = CAST(:id AS uuid) FOR UPDATE) AS known
     WHERE t.id = known.id AND t.state IN ('done', 'failed', 'cancelled') AND t.due_at > clock_timestamp()
       AND (known.is_known OR jsonb_array_length(t.addresses) < CAST(:most AS integer))
    RETURNING t.id
""")
RENEW = text(f"""
    UPDATE coatcheck.task t
       SET due_at = clock_timestamp() + CAST(:lease_s AS float8) * interval '1 s',
           look_at = clock_timestamp() + CAST(:lease_s AS float8) * interval '1 s',
           pickups = CASE WHEN CAST(:uncounted AS integer) = 0 THEN t.pickups
                          WHEN CAST(:uncounted AS integer) < 0 THEN t.pickups % {ALONE} - CAST(:uncounted AS integer)
                          ELSE greatest(0, t.pickups % {ALONE} - CAST(:uncounted AS integer) % {ALONE}) END,
           trigger = CASE WHEN CAST(:detaches AS boolean) THEN NULL ELSE t.trigger END
      FROM (SELECT t.id FROM coatcheck.task t
              JOIN unnest(CAST(:ids AS uuid[]), CAST(:epochs AS integer[])) AS u(id, epoch)
                ON u.id = t.id AND u.epoch = t.epoch
             WHERE t.state = 'running' ORDER BY t.id FOR UPDATE OF t SKIP LOCKED) AS mine
     WHERE t.id = mine.id
    RETURNING t.id
""")
STILL_RUNNING = text("""
    SELECT t.id FROM coatcheck.task t
      JOIN unnest(CAST(:ids AS uuid[]), CAST(:epochs AS integer[])) AS u(id, epoch) ON u.id = t.id AND u.epoch = t.epoch
     WHERE t.state = 'running'
""")


class Renewed(NamedTuple):
    """Whose lease was moved on, and whose row was held by somebody else. The rest is not ours any more."""

    mine: set[TaskId]
    busy: set[TaskId]


@dataclass(frozen=True, slots=True)
class Renewal:
    task_id: TaskId
    epoch: int


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a finished task is kept, counted from its end: what failed, and the rest."""

    results: timedelta
    failures: timedelta

    def of(self, state: TaskState) -> timedelta:
        return self.failures if state is TaskState.FAILED else self.results


@dataclass(frozen=True, slots=True)
class LookedAt:
    """One round of the sweeper: what is due, what was perhaps never sent, what waits for a waker that is over.

    A call that never left as its body is damaged is unsent, and not due: its handler would take a timeout for the
    peer's silence. It leaves once the row is restored, or times out then, if its time is over.
    """

    due: tuple[Peer, ...] = ()
    unsent: tuple[Peer, ...] = ()
    overdue: tuple[Task, ...] = ()
    unsent_finals: tuple[Task, ...] = ()
    oldest: timedelta = timedelta()
    unreadable: tuple[UUID, ...] = ()
    """Rows that this code cannot read, such as those of a newer release; the others are looked at all the same."""

    def __bool__(self) -> bool:
        return bool(self.due or self.unsent or self.overdue or self.unsent_finals)


async def look(connection: Connection, *, limit: int, again: timedelta) -> LookedAt:
    """Take up to `limit` calls and as many tasks whose time has come. They come up again after `again` if still so;
    what has long been due, after as long again, up to LONGEST_AGAIN. What is to be sent comes up again after half as
    long as it has waited, from SHORTEST_RESEND up to LONGEST_RESEND.
    """
    await connection.begin()
    again_s = again.total_seconds()
    calls = await rows(connection, LOOK_AT_CALLS, limit=limit, again_s=again_s)
    tasks = await rows(connection, LOOK_AT_TASKS, limit=limit, again_s=again_s)
    peers, bad_calls = readable([row for row in calls if row.is_due or row.is_unsent], peer_of)
    found, bad_tasks = readable(tasks, task_of)
    due = {row.id for row in calls if row.is_due and not (row.is_unsent and is_damaged(row.body))}
    overdue_s = [row.overdue_s for row in [*calls, *tasks] if row.overdue_s is not None]
    return LookedAt(
        due=tuple(peer for peer in peers if peer.call_id in due),
        unsent=tuple(peer for peer in peers if peer.call_id not in due),
        overdue=tuple(task for task in found if not task.state.is_final),
        unsent_finals=tuple(task for task in found if task.state.is_final and not task.is_final_sent),
        oldest=timedelta(seconds=max([0.0, *overdue_s])),
        unreadable=(*bad_calls, *bad_tasks),
    )


async def next_look(connection: Connection) -> timedelta | None:
    """How long until `look` finds something; negative if it would now, None if nothing waits. Leaves out retention."""
    in_s = await connection.scalar(NEXT_LOOK)
    return None if in_s is None else timedelta(seconds=in_s)


async def retire(connection: Connection, *, limit: int, keep: Retention) -> int:
    """Delete finished tasks whose time to be kept is over. Lock order: task, then its calls and journal."""
    await connection.begin()
    ids: list[UUID] = []
    for state, statement in RETIRE_TASKS.items():
        keep_s = keep.of(state).total_seconds()
        ids += [row.id for row in await rows(connection, statement, limit=limit - len(ids), keep_s=keep_s)]
    if ids:
        for statement in (DELETE_CALLS, DELETE_JOURNAL, DELETE_TASKS):
            await connection.execute(statement, {"ids": ids})
    return len(ids)


async def repair(connection: Connection, *, after: UUID, limit: int, quiet: timedelta) -> tuple[int, UUID | None]:
    """Look at the next parked tasks by id and re-wake those that nothing would move. Gives their count, and where to
    go on; None: that were all.
    """
    found = await rows(connection, PARKED_AFTER, after=after, limit=limit, quiet_s=quiet.total_seconds())
    ids = [row.id for row in found]
    if not ids:
        return 0, None
    stuck = {row.id for row in await rows(connection, WITHOUT_WAKER, ids=ids)}
    stuck |= {row.id for row in await rows(connection, MET, ids=ids)}
    woken = await connection.execute(REWAKE, {"ids": sorted(stuck)}) if stuck else ()
    return len(woken), ids[-1]


async def without_waker(connection: Connection, *, limit: int = 100) -> list[TaskId]:
    """Unfinished tasks that nothing in SQL would ever move. It returns nothing; `doctor` asks."""
    await connection.begin_survey()
    return [row.id for row in await rows(connection, ALL_WITHOUT_WAKER, limit=limit)]


async def renew(
    connection: Connection, renewals: Sequence[Renewal], *, lease: timedelta, detaches: bool, uncounted: int = 0
) -> Renewed:
    """Move leases on. Rows that somebody holds are skipped: one of them must not keep the others from being renewed.

    `uncounted` takes pick-ups back that never came to a run, and with them the mark of one that was to run alone;
    minus so many times ALONE sets so many marks, however often it is asked for, and ALONE takes them off.
    """
    asked: dict[str, Any] = {"ids": [one.task_id for one in renewals], "epochs": [one.epoch for one in renewals]}
    options: dict[str, Any] = {"lease_s": lease.total_seconds(), "detaches": detaches, "uncounted": uncounted}
    mine = {row.id for row in await connection.execute(RENEW, asked | options)}
    if len(mine) == len(renewals):
        return Renewed(mine, set())
    return Renewed(mine, {row.id for row in await rows(connection, STILL_RUNNING, **asked)} - mine)


async def hasten_held(connection: Connection, service: str, *, limit: int = 1000) -> int:
    """Let held tasks of a service be tried again now, whatever their pauses. Gives their count."""
    return len(await connection.execute(HASTEN_HELD, {"service": service, "limit": limit}))


async def mark_sent(connection: Connection, calls: Sequence[CallId]) -> None:
    """Note that calls are known to be with the broker; a send is over with that."""
    await connection.execute(MARK_SENT, {"ids": sorted(calls)})


async def mark_final_sent(connection: Connection, told: Mapping[TaskId, Sequence[Address]]) -> None:
    """Note that the final replies of tasks were sent, where all that the row is to tell were told."""
    addresses = [addresses_json(each) for each in told.values()]
    await connection.execute(MARK_FINAL_SENT, {"ids": list(told), "told": addresses})


async def resend_calls(connection: Connection, calls: Sequence[CallId], *, after: timedelta) -> None:
    """Have the sweeper send calls that a queue refused, sooner than it would look at them by itself."""
    await connection.execute(RESEND_CALLS, {"ids": sorted(calls), "after_s": after.total_seconds()})


async def resend_to(connection: Connection, task_id: TaskId, address: Address, *, after: timedelta) -> bool:
    """Have the sweeper send a final reply to an address whose queue refused it; the row learns it if need be. False: it
    has too many, or its time to be kept is over.
    """
    written = to_json([address.reply_to, address.correlation_id])
    values = {"id": task_id, "address": written, "after_s": after.total_seconds(), "most": MOST_ADDRESSES}
    return bool(await connection.execute(RESEND_TO, values))
