"""The store by itself: one entry appended, a large checkpoint saved, a long one restored. One operation at a time."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta

from bench.crew import Crew
from bench.probes import Cost
from bench.rows import Row
from bench.storms import Storm

from coatcheck.store import Store, decode, encode
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import (
    Birth,
    Changes,
    Going,
    HistoryLevel,
    NewEntry,
    Put,
    PutDone,
    TaskId,
    Verdict,
    Wake,
)

SERVICE = "bench-store"
# The sweeper of the run would look after what no worker runs.
LEAVE_ALONE = "UPDATE coatcheck.task SET due_at = now() + '1 day', look_at = now() + '1 day' WHERE service = $1"
LARGE = 100 * 1024
ENTRY_COUNT = 1000
LEASE = timedelta(minutes=10)
AT_ONCE = timedelta()

Operation = Callable[[], Awaitable[None]]


async def measure_store(crew: Crew, row: Row, *, count: int) -> Storm:
    """Do so many operations of a row, one after the other, and time each."""
    store = Store(crew.bench.store, lease=AT_ONCE, replica="bench-1")
    try:
        operation = await OPERATIONS[row.handler or ""](store)
        await operation()  # the first one pays for the connection and for plans
        before, begun_s, taken_ms = await crew.read(row.role, settle_s=0), time.perf_counter(), []
        for _ in range(count):
            one_s = time.perf_counter()
            await operation()
            taken_ms.append((time.perf_counter() - one_s) * 1000)
        per_second = count / (time.perf_counter() - begun_s)
        return Storm(per_second, Cost.between(before, await crew.read(row.role, settle_s=0), count), taken_ms)
    finally:
        await store.close()
        await crew.sql.execute(LEAVE_ALONE, SERVICE)


async def _append(store: Store) -> Operation:
    """What `ctx.record` costs: a note of the journal and its entry in the history."""
    note = encode({"choice": "ship", "item": "a lamp"})
    writer = Writer(store)

    async def append() -> None:
        await writer.write(NewEntry(writer.next_key(), Kind.NOTE, "user:decision", b"", True, note))

    return append


async def _save(store: Store) -> Operation:
    """A step with a result that does not compress."""
    large = encode(os.urandom(LARGE))
    writer = Writer(store)

    async def save() -> None:
        await writer.write(NewEntry(writer.next_key(), Kind.STEP, "step", b"digest", True, large))

    return save


async def _restore(store: Store) -> Operation:
    """What a run begins with, when a task is picked up: the row and all of its entries, decoded."""
    writer, value = Writer(store), encode({"text": "x" * 100})
    keys = [writer.next_key() for _ in range(ENTRY_COUNT)]
    written = await writer.write(
        *(NewEntry(key, Kind.STEP, "step", b"digest", True, value) for key in keys), lease=AT_ONCE
    )
    epoch = written.epoch

    async def restore() -> None:
        nonlocal epoch
        ruling = await store.resume(Wake(writer.task_id, epoch))
        assert ruling.verdict is Verdict.GRANTED, ruling.verdict
        assert ruling.task is not None
        assert len([decode(entry.value) for entry in ruling.known.recorded]) == ENTRY_COUNT
        epoch = ruling.task.epoch

    return restore


OPERATIONS: dict[str, Callable[[Store], Awaitable[Operation]]] = {
    "append": _append,
    "save": _save,
    "restore": _restore,
}


class Writer:
    """A run of one task, which records entries one checkpoint after the other."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: PutDone | None = None
        self._count = 0
        self.task_id = TaskId(uuid.uuid4())

    def next_key(self) -> str:
        self._count += 1
        return f"entry#{self._count}"

    async def write(self, *entries: NewEntry, lease: timedelta = LEASE) -> PutDone:
        """Record these in one checkpoint; the first one makes the task's row."""
        changes, last = Changes(entries=entries), self._last
        if last is None:
            request = encode({"text": "x"})
            birth = Birth(self.task_id, SERVICE, "h", "1", request, b"digest", history=HistoryLevel.OUTCOME)
            put = Put(self.task_id, 0, 0, 0, changes, Going(lease), birth=birth)
        else:
            put = Put(self.task_id, last.epoch, last.checkpoint, last.seq, changes, Going(lease), chain=last.chain)
        done = await self._store.put(put)
        assert isinstance(done, PutDone)
        self._last = done
        return done
