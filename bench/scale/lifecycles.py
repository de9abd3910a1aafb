"""Whole lives of tasks in the store alone: parked with four calls, four replies, finished.

They write the same bytes to disk at any speed, so the measurement needs no quiet machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

import asyncpg
from bench.scale.fill import CALLS_EACH, sizes
from bench.scale.report import Line
from bench.scale.rig import Rig, cpu_s, make_request

from coatcheck.store import CallState, Kind, Store, TaskState, encode
from coatcheck.store.blobs import Codec, pack
from coatcheck.store.rows import (
    Address,
    Arrival,
    Birth,
    CallId,
    Changes,
    Finish,
    Group,
    NewCall,
    Park,
    Put,
    PutDone,
    Ruling,
    TaskId,
    Verdict,
)
from coatcheck.worker.ids import new_call_id

LEASE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
_FLUSHED = "SELECT pg_current_wal_flush_lsn()::text"
_WAL = """
    SELECT coalesce(sum(record_length), 0)::bigint AS whole, coalesce(sum(fpi_length), 0)::bigint AS images
      FROM pg_get_wal_records_info($1::text::pg_lsn, $2::text::pg_lsn) WHERE block_ref LIKE $3
"""


@dataclass(slots=True)
class Wal:
    """Bytes of write-ahead log of one database; whole pages are written once after each Postgres checkpoint."""

    records: int = 0
    images: int = 0


@contextlib.asynccontextmanager
async def watch_wal(url: str) -> AsyncIterator[Wal]:
    """Add up what this database writes meanwhile, without the other databases of the server."""
    sql = await asyncpg.connect(url)
    await sql.execute("CREATE EXTENSION IF NOT EXISTS pg_walinspect")
    blocks = f"%/{await sql.fetchval('SELECT oid FROM pg_database WHERE datname = current_database()')}/%"
    found, is_over = Wal(), asyncio.Event()
    reading = asyncio.create_task(_read_wal(sql, blocks, found, is_over))
    try:
        yield found
    finally:
        is_over.set()
        await reading
        await sql.close()


async def _read_wal(sql: asyncpg.Connection, blocks: str, found: Wal, is_over: asyncio.Event) -> None:
    """Read in small pieces: the server removes its log after a while."""
    begun = await sql.fetchval(_FLUSHED)
    is_last = False
    while not is_last:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_over.wait(), 0.5)
        is_last = is_over.is_set()
        ended = await sql.fetchval(_FLUSHED)
        if ended != begun:
            row = await sql.fetchrow(_WAL, begun, ended, blocks)
            # The length of a record includes the page images it carries.
            found.images += row["images"]
            found.records += row["whole"] - row["images"]
            begun = ended


class Lives:
    """Makes tasks, answers their calls, ends them. `keep` says how long a finished one stays."""

    def __init__(self, store: Store, *, request_bytes: int = 1024, reply: bytes = b"", keep: timedelta = HOUR) -> None:
        self._store = store
        self._request_bytes = request_bytes
        self._reply = reply or encode(json.loads(make_request(3, 1024)))
        self._keep = keep

    async def run(self, count: int, *, width: int) -> None:
        """So many lives, `width` of them at a time."""
        left = iter(range(count))

        async def lane() -> None:
            for number in left:
                await self.live(number, width=width)

        await asyncio.gather(*(lane() for _ in range(width)))

    async def live(self, number: int, *, width: int) -> None:
        put = self.park(number)
        await self._store.put(put)
        if width > 1:
            rulings = await asyncio.gather(*(self._answer(call.call_id) for call in put.changes.opens))
        else:
            rulings = [await self._answer(call.call_id) for call in put.changes.opens]
        [task] = [one.task for one in rulings if one.verdict is Verdict.GRANTED]
        assert task is not None
        end = Finish(TaskState.DONE, encode(4), self._keep)
        done = await self._store.put(Put(task.task_id, task.epoch, task.checkpoint, task.seq, Changes(), end))
        assert isinstance(done, PutDone)

    def park(self, number: int) -> Put:
        """Write what a worker writes for a request that made four calls."""
        body, digest = make_request(number, self._request_bytes), uuid.uuid4().bytes
        newborn = Birth(
            task_id=TaskId(uuid.uuid5(uuid.NAMESPACE_OID, uuid.uuid4().hex)),
            service="research",
            handler="answer",
            version="1",
            request=pack(Codec.JSON, body),
            digest=digest * 2,
            identity=uuid.uuid4().hex,
            address=Address("asker.replies", correlation_id := str(uuid.uuid4())),
            correlation_id=correlation_id,
        )
        calls = tuple(
            NewCall(
                new_call_id(),
                f"search#{place}",
                Kind.CALL,
                "search",
                digest,
                "search",
                encode({"part": place}),
                {},
                hard=HOUR,
            )
            for place in range(CALLS_EACH)
        )
        group = Group(tuple(call.call_id for call in calls), CALLS_EACH)
        return Put(newborn.task_id, 0, 0, 0, Changes(opens=calls), Park((group,), LEASE), birth=newborn)

    async def _answer(self, call_id: CallId) -> Ruling:
        return await self._store.claim(Arrival(call_id, CallState.OK, self._reply))


async def cost_lines(rig: Rig, *, count: int) -> list[Line]:
    """What a lifecycle costs the disk and both ends of the connection: busy, when replies share commits, and idle."""
    store = Store(rig.store)
    lives = Lives(store)
    lines = []
    try:
        await lives.run(200, width=50)
        for name, width in (("busy", 200), ("one after the other", 1)):
            number = count if width > 1 else count // 10
            before = await _spent(rig)
            async with watch_wal(rig.store) as wal:
                await lives.run(number, width=width)
            await asyncio.sleep(1.2)  # the statistics are written once a second
            after = await _spent(rig)
            spent = {what: (after[what] - before[what]) / number for what in before}
            lines += [
                Line(f"WAL per lifecycle, {name}", wal.records / number, "B", note="four replies of 1 KB"),
                Line("  and whole pages, after a checkpoint", wal.images / number, "B"),
                Line("  commits", spent["commits"]),
                Line("  CPU of Postgres's backends", spent["backends_s"] * 1e6, "µs"),
                Line("  CPU of the store's side", spent["ours_s"] * 1e6, "µs", note="the benchmark's own included"),
            ]
    finally:
        await store.close()
    await rig.sql.execute("VACUUM FULL coatcheck.task, coatcheck.call")
    task_count = await rig.sql.fetchval("SELECT count(*) FROM coatcheck.task")
    whole = sum((await sizes(rig.sql)).values())
    return [*lines, Line("bytes per finished task", whole / task_count, "B", note="four replies of 1 KB, kept a day")]


async def _spent(rig: Rig) -> dict[str, float]:
    """Commits and CPU so far. Backends on another machine cannot be seen: zero."""
    found = await rig.sql.fetch("SELECT pid FROM pg_stat_activity WHERE application_name = 'coatcheck'"
                                " AND datname = current_database()")  # fmt: skip
    with contextlib.suppress(OSError):
        backends_s = sum(cpu_s(row["pid"]) for row in found)
        commits = await rig.sql.fetchval("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        return {"commits": commits, "backends_s": backends_s, "ours_s": time.process_time()}
    return {"commits": 0, "backends_s": 0, "ours_s": time.process_time()}
