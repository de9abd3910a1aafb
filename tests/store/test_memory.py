"""The store in memory, as far as Postgres is no example for it: its one seam, its clock, and how it undoes."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from tests.store.bench import MemoryBench
from tests.store.kit import (
    AT_ONCE,
    DAY,
    MINUTE,
    birth,
    birth_put,
    call,
    calls,
    cancel_of,
    done,
    entry,
    get,
    going,
    new_id,
    ok,
    park,
    parking_put,
    put_of,
    start,
    written,
)

from coatcheck.errors import StoreUnavailable
from coatcheck.store import MemoryStore, Tables, TaskState, newest_version
from coatcheck.store.audits import EntryFilter
from coatcheck.store.orders import Filter, Pause
from coatcheck.store.rows import Address, Request, Verdict, Wake
from coatcheck.store.seals import Seal

NOWHERE = UUID(int=0)
SEAL = Seal(1, datetime(2026, 1, 1, tzinfo=UTC), 0, 0, 0, b"", b"", 0, "")
METHODS = {
    "ping": lambda store: store.ping(),
    "read_history": lambda store: store.read_history(new_id()),
    "forget_histories": lambda store: store.forget_histories(limit=1, keep=MINUTE),
    "put": lambda store: store.put(birth_put(birth(), going())),
    "claim": lambda store: store.claim(ok(call())),
    "accept": lambda store: store.accept(Request(birth())),
    "resume": lambda store: store.resume(Wake(new_id(), 1)),
    "cancel": lambda store: store.cancel(cancel_of(new_id())),
    "order": lambda store: store.order(Pause(task_id=new_id())),
    "find_for_order": lambda store: store.find_for_order(Filter(), limit=1),
    "find_task": lambda store: store.find_task(new_id()),
    "renew": lambda store: store.renew([], lease=MINUTE),
    "give_back": lambda store: store.give_back([], lease=MINUTE, detaches=True),
    "hasten_held": lambda store: store.hasten_held("svc"),
    "hasten_unsent": lambda store: store.hasten_unsent("search"),
    "mark_sent": lambda store: store.mark_sent([]),
    "mark_final_sent": lambda store: store.mark_final_sent({}),
    "resend_calls": lambda store: store.resend_calls([], after=MINUTE),
    "resend_to": lambda store: store.resend_to(new_id(), Address("q", "c"), after=MINUTE),
    "look": lambda store: store.look(limit=1, again=MINUTE),
    "next_look": lambda store: store.next_look(),
    "retire": lambda store: store.retire(limit=1, keep=AT_ONCE),
    "repair": lambda store: store.repair(after=NOWHERE, limit=1, quiet=MINUTE),
    "without_waker": lambda store: store.without_waker(),
    "list_tasks": lambda store: store.list_tasks(),
    "count_tasks": lambda store: store.count_tasks(),
    "summarise_tasks": lambda store: store.summarise_tasks(),
    "find_ids": lambda store: store.find_ids("ab"),
    "count_services": lambda store: store.count_services(),
    "find_late": lambda store: store.find_late(grace=MINUTE),
    "find_unsent": lambda store: store.find_unsent(grace=MINUTE),
    "find_known": lambda store: store.find_known(new_id()),
    "read_clock": lambda store: store.read_clock(),
    "task_lines": lambda store: store.task_lines(new_id()),
    "read_stored": lambda store: store.read_stored(new_id()),
    "checkpoints": lambda store: store.checkpoints(new_id()),
    "read_unsealed": lambda store: store.read_unsealed(),
    "add_seal": lambda store: store.add_seal(SEAL, ()),
    "read_seals": lambda store: store.read_seals(),
    "read_leaves": lambda store: store.read_leaves(after=0, last=1, limit=1),
    "read_sinks": lambda store: store.read_sinks(),
    "mark_sink": lambda store: store.mark_sink("log:", 1),
    "read_chains": lambda store: store.read_chains(after=(new_id(), 0), sealed=1, limit=1),
    "find_entries": lambda store: store.find_entries(EntryFilter(), limit=1),
    "count_unchained": lambda store: store.count_unchained(),
    "find_seal_lag": lambda store: store.find_seal_lag(),
}


class Unreliable(MemoryStore):
    """A store whose answers get lost, on the way there or on the way back."""

    fails: str | None = None

    async def _transact(self, work):
        if self.fails == "before":
            raise StoreUnavailable("away")
        result = work(self.tables)
        if self.fails == "after":
            error = StoreUnavailable("lost")
            error.is_in_doubt = True
            raise error
        return result


@pytest.fixture
async def unreliable():
    store = Unreliable(Tables())
    yield store
    await store.close()


def test_every_public_method_is_tried_here():
    without_rows = {"close", "now", "place"}

    assert {name for name in dir(MemoryStore) if not name.startswith("_")} - without_rows == METHODS.keys()


@pytest.mark.parametrize("method", METHODS)
async def test_every_method_goes_by_the_seam(unreliable, method):
    unreliable.fails = "before"
    with pytest.raises(StoreUnavailable, match="away"):
        await METHODS[method](unreliable)

    unreliable.fails = None
    await METHODS[method](unreliable)


async def test_failure_before_the_work_leaves_nothing_and_after_it_all(unreliable):
    put = parking_put(birth(), calls(1))
    unreliable.fails = "before"
    with pytest.raises(StoreUnavailable):
        await unreliable.put(put)
    assert unreliable.tables.tasks == {}

    unreliable.fails = "after"
    with pytest.raises(StoreUnavailable):
        await unreliable.put(put)

    unreliable.fails = None
    assert (await get(unreliable, put.task_id)).state is TaskState.PARKED
    assert (await written(unreliable, put)).is_parked


async def test_operation_that_raises_is_undone_whatever_it_did():
    bench = MemoryBench()
    store, members = bench.replica(), calls(2)
    task_id = await park(store, members, entries=(entry(),))
    ended = await start(store)
    await written(store, put_of(ended, done(keep=timedelta()), entries=(entry(),)))
    before = await bench.read()

    def work(tables: Tables) -> None:
        tables.change(tables.tasks[task_id], look_at=tables.now, waits=())
        tables.change(tables.calls[members[0].call_id], seq=9)
        tables.insert_birth(newborn := birth(), trigger="request", pickups=1, lease=DAY)
        tables.insert_call(newborn.task_id, call(), checkpoint=1, seq=None)
        tables.insert_entry(newborn.task_id, entry(), checkpoint=1, seq=1)
        tables.delete_task(ended.task_id)
        tables.delete_task(task_id)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bench.tables.atomically(work)

    assert await bench.read() == before
    assert (await store.claim(ok(members[0]))).verdict is Verdict.RECORDED
    await store.close()


async def test_time_is_what_the_clock_says():
    now = datetime(2030, 1, 1, tzinfo=UTC)
    tables = Tables(lambda: now)
    store = MemoryStore(tables, lease=MINUTE)
    newborn = birth()
    await store.accept(Request(newborn))

    assert (await store.resume(Wake(newborn.task_id, 1))).verdict is Verdict.EARLY
    now += MINUTE
    assert (await store.resume(Wake(newborn.task_id, 1))).verdict is Verdict.GRANTED

    task = await get(store, newborn.task_id)
    assert (task.created_at, task.due_at) == (now - MINUTE, now + MINUTE)
    await store.close()


async def test_caller_that_leaves_does_not_stop_its_transaction():
    store, reached, goes_on = MemoryStore(Tables()), asyncio.Event(), asyncio.Event()
    original = store._transact

    async def slow(work):
        reached.set()
        await goes_on.wait()
        return await original(work)

    task = await start(store)
    await written(store, put_of(task, done(is_detached=True)))
    store._transact = slow  # type: ignore[method-assign]
    caller = asyncio.create_task(store.mark_final_sent({task.task_id: task.answered}))
    await reached.wait()
    caller.cancel()
    goes_on.set()

    await store.close()

    assert store.tables.tasks[task.task_id].task.is_final_sent


async def test_it_is_at_the_newest_schema_and_says_where_it_is(unreliable):
    assert await unreliable.ping() == newest_version()
    assert unreliable.place == "memory"
