"""Reading for people: what `ps`, `show`, `doctor` and the client ask. None of it locks anything."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import text

from coatcheck.store.checkpoints import Stored, in_order
from coatcheck.store.documents import from_json
from coatcheck.store.kinds import Kind
from coatcheck.store.postgres.connection import Connection, Row
from coatcheck.store.postgres.database import rows
from coatcheck.store.postgres.records import task_of
from coatcheck.store.postgres.sql import PARTS, STATEMENTS
from coatcheck.store.rows import CallState, Task, TaskId, TaskState
from coatcheck.store.views import Backlog, Late, Line, ServiceCount, Summary

# The newest are picked by their ids alone: sorting whole rows would carry every request of the table along.
LIST = f"""
    SELECT {PARTS["task_columns"]} FROM coatcheck.task t
     WHERE t.id = ANY(ARRAY(SELECT id FROM coatcheck.task {{where}} ORDER BY created_at DESC, id DESC
                             LIMIT CAST(:limit AS integer)))
     ORDER BY t.created_at DESC, t.id DESC
"""
CLOCK = text("SELECT clock_timestamp() AS now")
COUNTS = text("SELECT state, count(*) AS number FROM coatcheck.task GROUP BY state")
# The first row of a checkpoint names its replica.
LINES = text("""
    SELECT seq, key, kind, name, state, value, call_id, peer, due_at, opened_at, closed_at, progress, is_sent,
           is_forgotten, checkpoint, epoch, max(replica) OVER (PARTITION BY checkpoint) AS replica FROM (
    SELECT seq, key, kind, name, CASE WHEN is_ok THEN 'ok' ELSE 'failed' END AS state, value, NULL::uuid AS call_id,
           '' AS peer, NULL::timestamptz AS due_at, recorded_at - coalesce(took, interval '0') AS opened_at,
           recorded_at AS closed_at, NULL::jsonb AS progress, true AS is_sent, is_forgotten, checkpoint,
           epoch, replica
      FROM coatcheck.journal WHERE task_id = CAST(:id AS uuid)
     UNION ALL
    SELECT seq, key, kind, name, state, value, id, peer, due_at, opened_at, closed_at, progress, is_sent, is_forgotten,
           checkpoint, epoch, replica
      FROM coatcheck.call WHERE task_id = CAST(:id AS uuid)) AS line
     ORDER BY seq NULLS LAST, opened_at
""")
STORED = text("""
    SELECT key, kind, CASE WHEN is_ok THEN 'ok' ELSE 'failed' END AS state, seq, digest, value, NULL::bytea AS body,
           NULL::uuid AS call_id, checkpoint, epoch, replica, recorded_at AS opened_at, recorded_at AS closed_at,
           is_forgotten
      FROM coatcheck.journal WHERE task_id = CAST(:id AS uuid)
     UNION ALL
    SELECT key, kind, state, seq, digest, value, body, id, checkpoint, epoch, replica, opened_at, closed_at,
           is_forgotten
      FROM coatcheck.call WHERE task_id = CAST(:id AS uuid)
""")

# The tasks are picked first, so that calls are counted for those few only; payloads stay in the table.
SUMMARIES = """
    SELECT t.*, c.open_count, c.peers, coalesce(c.due_at, t.due_at) AS next_due_at, clock_timestamp() AS seen_at
      FROM (SELECT id, service, handler, version, state, attempt, progress, created_at, updated_at, finished_at,
                   CASE WHEN state IN ('held', 'retrying', 'failed', 'cancelled') THEN value END AS failure,
                   CASE WHEN state IN ('running', 'retrying', 'held') THEN due_at END AS due_at
              FROM coatcheck.task {where} ORDER BY created_at DESC, id DESC LIMIT CAST(:limit AS integer)) t
     CROSS JOIN LATERAL
           (SELECT count(*) AS open_count,
                   array_agg(DISTINCT CASE WHEN kind = 'timer' THEN '(timer)' ELSE peer END) AS peers,
                   CASE WHEN t.state = 'parked' THEN min(due_at) END AS due_at
              FROM coatcheck.call WHERE task_id = t.id AND state = 'open' AND kind <> 'send') c
     ORDER BY t.created_at DESC, t.id DESC
"""
IDS_BETWEEN = text("""
    SELECT id FROM coatcheck.task WHERE id BETWEEN CAST(:low AS uuid) AND CAST(:high AS uuid)
     ORDER BY id LIMIT CAST(:limit AS integer)
""")
SERVICES = text("""
    SELECT service, count(*) FILTER (WHERE state NOT IN ('done', 'failed', 'cancelled')) AS unfinished_count,
           count(*) FILTER (WHERE identity IS NULL AND epoch > 0) AS nameless_count
      FROM coatcheck.task GROUP BY service ORDER BY service
""")
# Overdue is what should have moved by now; unlooked is the part of it that no sweeper has even looked at.
LATE = text("""
    SELECT service, count(DISTINCT id) FILTER (WHERE due_at < before) AS overdue_count,
           count(DISTINCT id) FILTER (WHERE look_at < before) AS unlooked_count,
           coalesce(extract(epoch FROM max(clock_timestamp() - due_at)), 0)::float8 AS oldest_s
      FROM (SELECT clock_timestamp() - CAST(:grace_s AS float8) * interval '1 s' AS before) b
     CROSS JOIN LATERAL
           (SELECT id, service, due_at, look_at FROM coatcheck.task
             WHERE state IN ('running', 'retrying', 'held') AND (due_at < before OR look_at < before)
            UNION ALL
            SELECT id, service, NULL, look_at FROM coatcheck.task
             WHERE state IN ('done', 'failed', 'cancelled') AND look_at < before AND due_at > clock_timestamp()
            UNION ALL
            SELECT t.id, t.service, c.due_at, c.look_at FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id
             WHERE c.state = 'open' AND (c.due_at < before OR c.look_at < before)) late
     GROUP BY service ORDER BY service
""")
# A call that left is marked within seconds. A final reply is the sweeper's to look at if a queue refused it, or if its
# run had no trigger left.
BACKLOG = text("""
    SELECT peer, count(*) AS number, extract(epoch FROM max(clock_timestamp() - since))::float8 AS oldest_s
      FROM (SELECT clock_timestamp() - CAST(:grace_s AS float8) * interval '1 s' AS before) b
     CROSS JOIN LATERAL
           (SELECT peer, opened_at AS since FROM coatcheck.call
             WHERE state = 'open' AND look_at IS NOT NULL AND NOT is_sent AND kind <> 'timer' AND opened_at < before
            UNION ALL
            SELECT NULL, finished_at FROM coatcheck.task
             WHERE look_at IS NOT NULL AND state IN ('done', 'failed', 'cancelled') AND NOT is_final_sent
               AND finished_at < before) waiting
     GROUP BY peer ORDER BY peer NULLS LAST
""")


async def find_tasks(connection: Connection, ids: Sequence[TaskId], waits: bool) -> list[Task | None]:
    """The tasks in the order of their ids, None where there is no row."""
    found = {row.id: task_of(row) for row in await rows(connection, STATEMENTS["read_tasks"], ids=sorted(ids))}
    return [found.get(task_id) for task_id in ids]


async def list_tasks(
    connection: Connection,
    *,
    service: str | None,
    states: Collection[TaskState],
    limit: int,
    handler: str | None = None,
    after: UUID | None = None,
) -> list[Task]:
    """The newest tasks first."""
    await connection.begin_survey()
    where, values = _filter(service, states, handler=handler, after=after)
    statement = text(LIST.format(where=where))
    return [task_of(row) for row in await rows(connection, statement, limit=limit, **values)]


async def summarise_tasks(
    connection: Connection,
    *,
    service: str | None,
    states: Collection[TaskState],
    limit: int,
    handler: str | None = None,
    after: UUID | None = None,
) -> list[Summary]:
    """The newest tasks first, without their payloads."""
    await connection.begin_survey()
    where, values = _filter(service, states, handler=handler, after=after)
    statement = text(SUMMARIES.format(where=where))
    return [_summary_of(row) for row in await rows(connection, statement, limit=limit, **values)]


async def find_ids(connection: Connection, *, prefix: str, limit: int) -> list[TaskId]:
    """The tasks whose id begins with these hex digits."""
    low, high = UUID(prefix.ljust(32, "0")), UUID(prefix.ljust(32, "f"))
    return [row.id for row in await rows(connection, IDS_BETWEEN, low=low, high=high, limit=limit)]


async def count_services(connection: Connection) -> list[ServiceCount]:
    """Every service that has a task in the table. It reads the whole table."""
    await connection.begin_survey()
    return [
        ServiceCount(row.service, row.unfinished_count, row.nameless_count) for row in await rows(connection, SERVICES)
    ]


async def find_late(connection: Connection, *, grace: timedelta) -> list[Late]:
    """What should have moved more than `grace` ago, by service. Nothing, while sweeper and workers keep up."""
    await connection.begin_survey()
    found = await rows(connection, LATE, grace_s=grace.total_seconds())
    return [Late(row.service, row.overdue_count, row.unlooked_count, timedelta(seconds=row.oldest_s)) for row in found]


async def find_unsent(connection: Connection, *, grace: timedelta) -> list[Backlog]:
    """What was to be sent more than `grace` ago, by peer. Nothing, while every queue takes what it is sent."""
    await connection.begin_survey()
    found = await rows(connection, BACKLOG, grace_s=grace.total_seconds())
    return [Backlog(row.peer, row.number, timedelta(seconds=row.oldest_s)) for row in found]


async def count_tasks(connection: Connection) -> dict[TaskState, int]:
    await connection.begin_survey()
    return {TaskState(row.state): row.number for row in await rows(connection, COUNTS)}


async def read_clock(connection: Connection) -> datetime:
    """The time by Postgres's clock, which all instants in the rows are of."""
    (row,) = await rows(connection, CLOCK)
    now: datetime = row.now
    return now


async def task_lines(connection: Connection, task_id: UUID) -> Sequence[Line]:
    """A task's story in the order things ended; open calls last."""
    return [_line_of(row) for row in await rows(connection, LINES, id=task_id)]


async def read_stored(connection: Connection, task_id: TaskId) -> list[Stored]:
    """A task's journal and calls with their bytes, by checkpoint. Nothing of them is read, so nothing can be wrong."""
    return sorted((_stored_of(row) for row in await rows(connection, STORED, id=task_id)), key=in_order)


def _filter(
    service: str | None, states: Collection[TaskState], *, handler: str | None = None, after: UUID | None = None
) -> tuple[str, dict[str, Any]]:
    """`after`: those older than this task. Without states: all that ever was a task. A tombstone is a cancel that no
    request has met yet, or whose request never became a task; it shows among the cancelled ones, for those who ask for
    them.
    """
    conditions, values = [] if states else ["epoch > 0"], dict[str, Any]()
    if service is not None:
        conditions.append("service = :service")
        values["service"] = service
    if handler is not None:
        conditions.append("handler = :handler")
        values["handler"] = handler
    if after is not None:
        conditions.append("(created_at, id) < (SELECT created_at, id FROM coatcheck.task WHERE id = :after)")
        values["after"] = after
    if states:
        conditions.append("state = ANY(CAST(:states AS text[]))")
        values["states"] = [str(state) for state in states]
    return (f"WHERE {' AND '.join(conditions)}" if conditions else ""), values


def _summary_of(row: Row) -> Summary:
    return Summary(
        task_id=row.id,
        service=row.service,
        handler=row.handler,
        version=row.version,
        state=TaskState(row.state),
        attempt=row.attempt,
        open_count=row.open_count,
        peers=tuple(row.peers or ()),
        next_due_at=row.next_due_at,
        progress=from_json(row.progress) if row.progress is not None else None,
        failure=row.failure,
        created_at=row.created_at,
        updated_at=row.updated_at,
        finished_at=row.finished_at,
        seen_at=row.seen_at,
    )


def _stored_of(row: Row) -> Stored:
    return Stored(
        row.key,
        Kind(row.kind),
        CallState(row.state),
        row.seq,
        row.digest,
        row.value,
        row.body,
        row.call_id,
        row.checkpoint,
        row.epoch,
        row.replica,
        row.opened_at,
        row.closed_at,
        row.is_forgotten,
    )


def _line_of(row: Row) -> Line:
    return Line(
        row.key,
        Kind(row.kind),
        row.name,
        CallState(row.state),
        row.seq,
        row.value,
        row.call_id,
        row.peer,
        row.due_at,
        row.opened_at,
        row.closed_at,
        from_json(row.progress) if row.progress is not None else None,
        row.is_sent,
        row.is_forgotten,
        row.checkpoint,
        row.epoch,
        row.replica,
    )
