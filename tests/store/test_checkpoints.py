"""Checkpoints as things, found from rows: what each wrote, when, how large, and whether any of it is left."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.store.bench import Bench
from tests.store.kit import (
    MINUTE,
    again,
    all_of,
    birth,
    birth_put,
    call,
    calls,
    done,
    entry,
    get,
    going,
    need,
    new_id,
    ok,
    parking,
    put_of,
    resumed,
    send,
    start,
    timer,
    written,
)

from coatcheck.store import CallId, CallState, Kind, Store, Task, TaskState, encode
from coatcheck.store.checkpoints import Stored, checkpoints_of, checksum_of

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)


async def test_checkpoints_tell_what_each_commit_recorded_opened_and_gave_up(bench: Bench):
    store = bench.replica(replica="one")
    fast, slow, nap = call("fast#1"), call("slow#1"), timer()
    newborn = birth()
    first = birth_put(
        newborn, parking(need(1, [fast, slow])), entries=(entry(value="plan"),), opens=(fast, slow, send())
    )
    await written(store, first)
    task = await resumed(store, fast)
    await written(store, put_of(task, parking(all_of([nap])), closes=(slow.call_id,), opens=(nap,)))
    (begun, went_on) = await store.checkpoints(newborn.task_id)
    await store.close()

    assert (begun.number, begun.replica, begun.epoch) == (1, "one", 1)
    assert (begun.recorded, begun.opened, begun.closed) == (("plan#1",), ("send#1", "fast#1", "slow#1"), ())
    assert begun.size == sum(map(len, (encode("plan"), encode("fast#1"), encode("slow#1"), encode("note"))))
    assert (went_on.number, went_on.epoch, went_on.event_count) == (2, 2, 1)
    assert (went_on.recorded, went_on.opened, went_on.closed) == ((), ("sleep#1",), ("slow#1",))
    assert begun.at is not None
    assert went_on.at is not None
    assert begun.at < went_on.at


async def test_the_checksum_of_a_checkpoint_stays_when_its_calls_are_answered(store: Store):
    one, two = calls(2)
    newborn = birth()
    await written(store, birth_put(newborn, parking(all_of([one, two])), opens=(one, two)))
    (before,) = await store.checkpoints(newborn.task_id)
    await store.claim(ok(two))
    await store.claim(ok(one))
    (after,) = await store.checkpoints(newborn.task_id)

    assert after.checksum == before.checksum
    assert len(after.checksum) == 32


async def test_the_last_checkpoint_is_known_though_it_recorded_nothing(store: Store):
    newborn = birth()
    await written(store, birth_put(newborn, going(), entries=(entry(),)))
    await written(store, put_of(await get(store, newborn.task_id), going()))
    await written(store, put_of(await get(store, newborn.task_id), done()))
    task = await get(store, newborn.task_id)

    first, last = await store.checkpoints(newborn.task_id)

    assert (first.number, last.number) == (1, 3)  # the second recorded nothing, and no row knows of it
    assert (last.at, last.size, last.is_discarded) == (task.finished_at, 0, False)


async def test_a_checkpoint_is_discarded_once_all_of_it_is_forgotten(store: Store):
    newborn = birth()
    await written(store, birth_put(newborn, going(), entries=(entry("good#1"), entry("bad#1", is_ok=False))))
    await written(store, put_of(await get(store, newborn.task_id), going(), entries=(entry("worse#1", is_ok=False),)))
    await written(store, put_of(await get(store, newborn.task_id), again("bad#1", "worse#1")))

    found = {one.number: one.is_discarded for one in await store.checkpoints(newborn.task_id)}

    assert found == {1: False, 2: True, 3: False}


async def test_a_task_that_no_row_knows_has_no_checkpoints(store: Store):
    assert await store.checkpoints(new_id()) == []
    assert await store.read_stored(new_id()) == []


async def test_stored_rows_keep_damaged_bytes_as_they_are(store: Store):
    newborn = birth()
    broken = msgspec.structs.replace(entry(), value=b"rubbish")
    await written(store, birth_put(newborn, going(), entries=(broken,)))

    (row,) = await store.read_stored(newborn.task_id)

    assert (row.value, row.body, row.written) == (b"rubbish", None, b"rubbish")


async def test_tasks_are_listed_by_handler_and_page_by_page(store: Store):
    ids = [new_id() for _ in range(5)]
    for number, task_id in enumerate(ids):
        newborn = msgspec.structs.replace(birth(task_id), handler="odd" if number % 2 else "even")
        await written(store, birth_put(newborn, going()))

    even = await store.summarise_tasks(handler="even", limit=2)
    rest = await store.summarise_tasks(handler="even", limit=2, after=even[-1].task_id)

    assert [one.task_id for one in even] == [ids[4], ids[2]]
    assert [one.task_id for one in rest] == [ids[0]]
    assert [one.task_id for one in await store.list_tasks(after=ids[1])] == [ids[0]]
    assert await store.list_tasks(after=new_id()) == []


# --- on plain values ---


def stored(key: str, **options: Any) -> Stored:
    values: dict[str, Any] = {
        "kind": Kind.STEP,
        "state": CallState.OK,
        "seq": 1,
        "digest": b"digest",
        "value": encode(key),
        "body": None,
        "call_id": None,
        "checkpoint": 1,
        "epoch": 1,
        "replica": "one",
        "opened_at": NOON,
        "closed_at": NOON,
        "is_forgotten": False,
    }
    return Stored(key=key, **values | options)


@pytest.mark.parametrize("change", [{"key": "b"}, {"kind": Kind.NOTE}, {"seq": 2}, {"digest": b"x"}, {"value": b"x"}])
def test_a_checksum_changes_with_every_field_it_covers(change: dict[str, Any]):
    row = stored("a")

    assert checksum_of([msgspec.structs.replace(row, **change)]) != checksum_of([row])


def test_a_checksum_does_not_depend_on_the_order_in_which_rows_are_read():
    rows = [stored("a"), stored("b", seq=2), stored("c", kind=Kind.CALL, body=b"c"), stored("d", kind=Kind.CALL)]

    assert checksum_of(rows) == checksum_of(reversed(rows))


async def test_a_call_given_up_goes_with_the_commit_of_that_moment(store: Store):
    """Not with one that is minutes away: the commit that gave it up recorded nothing, so no row knows of it."""
    newborn = birth()
    await written(store, birth_put(newborn, going()))
    task: Task = msgspec.structs.replace(await get(store, newborn.task_id), checkpoint=9, state=TaskState.RUNNING)
    waited: dict[str, Any] = {"kind": Kind.CALL, "state": CallState.CLOSED, "call_id": CallId(new_id()), "body": b""}
    rows = [
        stored("a", checkpoint=3, opened_at=NOON),
        stored("near", **waited, checkpoint=3, closed_at=NOON + 3 * MINUTE - timedelta(milliseconds=1)),
        stored("far", **waited, checkpoint=3, closed_at=NOON + MINUTE),
        stored("b", checkpoint=5, opened_at=NOON + 3 * MINUTE),
    ]

    found = {one.number: one.closed for one in checkpoints_of(task, rows)}

    assert found == {3: (), 5: ("near",), 9: ()}


def test_thousands_of_checkpoints_are_listed_in_a_moment():
    times = [NOON + timedelta(seconds=number) for number in range(16001)]
    rows = [
        stored(
            f"c#{number}",
            kind=Kind.CALL,
            state=CallState.OK,
            checkpoint=number + 1,
            opened_at=times[2 * number],
            closed_at=times[2 * number + 1],
        )
        for number in range(8000)
    ]
    fields: dict[str, Any] = dict.fromkeys(Task.__struct_fields__[:26])
    task = Task(**fields | {"state": TaskState.PARKED, "checkpoint": 8000, "epoch": 1})

    began_s = time.process_time()
    found = checkpoints_of(task, rows)

    assert [each.event_count for each in found[:3]] == [0, 1, 1]
    assert time.process_time() - began_s < 3


async def test_line_of_a_step_tells_when_it_began(store):
    task = await start(store)
    slow = msgspec.structs.replace(entry("slow#1"), took=timedelta(seconds=90))
    await written(store, put_of(task, going(), entries=(slow, entry("old#1"))))

    timed, untimed = await store.task_lines(task.task_id)

    assert timed.closed_at - timed.opened_at == timedelta(seconds=90)
    assert untimed.closed_at == untimed.opened_at
