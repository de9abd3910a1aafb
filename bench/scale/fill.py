"""Many parked tasks in a short time: a worker parks one task for real, and its rows are copied with new ids.

So the copies have the shape that the store itself writes, and no dead row versions beside them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

import asyncpg
from bench.scale.rig import Rig, make_request, until

CHUNK = 50_000
CALLS_EACH = 4
_AGE_MS = 3_600_000
"""How far back in time the copies seem to have arrived."""

# The ids are made from numbers, so that each can be named without reading it.
TASK_ID = "md5('task ' || n.number)::uuid"
RANDOM_CALL_ID = "md5('call ' || n.number || ' ' || {place})::uuid"
TIMED_CALL_ID = """
    (lpad(to_hex({begun_ms} + n.number * {age_ms} / {count}), 12, '0') || '7'
     || substr(md5('call ' || n.number || ' ' || {place}), 1, 3) || '8'
     || substr(md5('call ' || n.number || ' ' || {place}), 5, 15))::uuid
"""
CORRELATION_ID = "md5('correlation ' || n.number)::uuid::text"
DUE_AT = (
    "now() + interval '1 day' + (('x' || substr(md5('due ' || n.number), 1, 6))::bit(24)::integer) * interval '0.1 s'"
)

TASK_VALUES = {
    "id": TASK_ID,
    "identity": "md5('identity ' || n.number)",
    "correlation_id": CORRELATION_ID,
    "addresses": f"jsonb_build_array(jsonb_build_array(t.addresses -> 0 ->> 0, {CORRELATION_ID}))",
    "created_at": "now() - interval '1 hour'",
    "updated_at": "now() - interval '1 hour'",
}
CALL_VALUES = {
    "task_id": TASK_ID,
    "headers": f"replace(c.headers::text, c.task_id::text, {TASK_ID}::text)::jsonb",
    "hard_due_at": DUE_AT,
    "due_at": DUE_AT,
    "look_at": DUE_AT,
    "opened_at": "now() - interval '1 hour'",
}


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies: how many tasks, and how the ids of their calls are made."""

    task_count: int
    call_id: str

    async def call_ids(self, sql: asyncpg.Connection, numbers: list[int], place: int) -> list[UUID]:
        query = (
            f"SELECT {self.call_id.format(place=place)} AS id FROM unnest($1::bigint[]) WITH ORDINALITY AS n(number, o)"
        )
        return [row["id"] for row in await sql.fetch(f"{query} ORDER BY o", numbers)]


async def park_one(rig: Rig, *, size: int) -> UUID:
    """Let a running worker park one task, and wait until its calls are known to be sent."""
    await rig.request("wait4", make_request(1, size), reply_to=f"{rig.service[:-1]}a.replies")
    await until(lambda: rig.sql.fetchval("SELECT count(*) = 4 FROM coatcheck.call WHERE is_sent"))
    found: UUID = await rig.sql.fetchval("SELECT id FROM coatcheck.task WHERE state = 'parked'")
    return found


async def copy(sql: asyncpg.Connection, template: UUID, *, count: int) -> Copies:
    """Make `count` copies of this task and its calls. Returns how to find them."""
    sample: UUID = await sql.fetchval("SELECT id FROM coatcheck.call WHERE task_id = $1 LIMIT 1", template)
    begun_ms = (sample.int >> 80) - _AGE_MS
    call_id = RANDOM_CALL_ID if sample.version == 4 else TIMED_CALL_ID
    call_id = call_id.replace("{begun_ms}", str(begun_ms)).replace("{age_ms}", str(_AGE_MS))
    call_id = call_id.replace("{count}", str(count))
    waits = ", ".join(call_id.format(place=place) for place in range(1, CALLS_EACH + 1))
    task = await _insert(sql, "task", TASK_VALUES | {"wait_calls": f"ARRAY[{waits}]"})
    place = "array_position(t.wait_calls, c.id)"
    call = await _insert(sql, "call", CALL_VALUES | {"id": call_id.format(place=place)})
    for first in range(1, count + 1, CHUNK):
        last = min(first + CHUNK - 1, count)
        async with sql.transaction():
            # The foreign key of a call need not be checked four million times.
            await sql.execute("SET LOCAL session_replication_role = replica")
            await sql.execute(f"{task} WHERE t.id = $1", template, first, last)
            await sql.execute(f"{call} WHERE c.task_id = $1 ORDER BY n.number", template, first, last)
    await sql.execute("VACUUM (ANALYZE) coatcheck.task, coatcheck.call, coatcheck.journal")
    return Copies(count, call_id)


async def copy_due(sql: asyncpg.Connection, template: UUID, *, count: int, over_s: float, lead_s: float) -> None:
    """Copy a task whose calls time out, `count` times; the first is due after `lead_s`, the last `over_s` later."""
    begun_at = await sql.fetchval("SELECT clock_timestamp() + $1::float8 * interval '1 s'", lead_s)
    call_id = "md5('due call ' || n.number || ' ' || {place})::uuid"
    task_id = "md5('due task ' || n.number)::uuid"
    due_at = f"'{begun_at.isoformat()}'::timestamptz + {over_s} * n.number / {count} * interval '1 s'"
    waits = ", ".join(call_id.format(place=f"t.wait_calls[{place}]") for place in range(1, CALLS_EACH + 1))
    tasks = {"id": task_id, "identity": "md5('due ' || n.number)", "wait_calls": f"ARRAY[{waits}]"}
    calls = {"id": call_id.format(place="c.id"), "task_id": task_id}
    calls |= dict.fromkeys(("hard_due_at", "due_at", "look_at"), due_at)
    task, call = await _insert(sql, "task", tasks), await _insert(sql, "call", calls)
    for first in range(1, count + 1, CHUNK):
        last = min(first + CHUNK - 1, count)
        async with sql.transaction():
            await sql.execute("SET LOCAL session_replication_role = replica")
            await sql.execute(f"{task} WHERE t.id = $1", template, first, last)
            await sql.execute(f"{call} WHERE c.task_id = $1 ORDER BY n.number", template, first, last)


async def _insert(sql: asyncpg.Connection, table: str, values: Mapping[str, str]) -> str:
    """Copy every column but those that have a value of their own."""
    query = """SELECT attname FROM pg_attribute WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped
                ORDER BY attnum"""
    names = [row["attname"] for row in await sql.fetch(query, f"coatcheck.{table}")]
    chosen = ", ".join(values.get(name, f"{table[0]}.{name}") for name in names)
    source = "coatcheck.task t" if table == "task" else "coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id"
    return (
        f"INSERT INTO coatcheck.{table} ({', '.join(names)}) SELECT {chosen} "
        f"FROM {source} CROSS JOIN generate_series($2::bigint, $3::bigint) AS n(number)"
    )


async def sizes(sql: asyncpg.Connection) -> dict[str, int]:
    """Bytes of each table and index; TOAST and maps count to their table."""
    found = await sql.fetch("""
        SELECT c.relname AS name, pg_table_size(c.oid) AS size FROM pg_class c
         WHERE c.relnamespace = 'coatcheck'::regnamespace AND c.relkind IN ('r', 'i') AND c.relname NOT LIKE 'schema%'
         ORDER BY 2 DESC
    """)
    return {row["name"]: row["size"] for row in found}


async def row_sizes(sql: asyncpg.Connection, task_id: UUID) -> tuple[int, ...]:
    """How long the rows of a task are, with their headers: the task's, then its calls'."""
    found = await sql.fetch(
        "SELECT pg_column_size(t.*) AS size FROM coatcheck.task t WHERE id = $1"
        " UNION ALL (SELECT pg_column_size(c.*) FROM coatcheck.call c WHERE task_id = $1 ORDER BY 1)",
        task_id,
    )
    return tuple(row["size"] for row in found)


def spread(count: int, among: int) -> list[int]:
    """So many different numbers from 1 to `among`, spread over the range, in an order that is bad for an index."""
    step = next(step for step in itertools.count(int(among * 0.618) | 1) if math.gcd(step, among) == 1)
    return [1 + index * step % among for index in range(min(count, among))]
