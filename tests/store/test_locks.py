"""Rows that somebody else holds, values that cannot be stored: whoever is not concerned goes on."""

import asyncio
from contextlib import asynccontextmanager

import asyncpg
import pytest
from tests.store.kit import (
    MINUTE,
    birth,
    birth_put,
    call,
    calls,
    cancel_of,
    done,
    end_lease,
    get,
    going,
    new_id,
    ok,
    park,
    parking_put,
    put_of,
    start,
)

from coatcheck.store import Store, TaskState
from coatcheck.store.batcher import BATCH_ROUNDS, LockTimeout
from coatcheck.store.postgres.database import SERVER_SETTINGS
from coatcheck.store.rows import Answered, Birth, PutDone, PutRefused, Request, Verdict, Wake
from coatcheck.store.views import Renewal

SOON_S = 3.0  # less than `lock_timeout`: whoever waited for the lock would miss it
BLOCKED_BY_US = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"


@asynccontextmanager
async def held(sql: asyncpg.Connection, task_id, *, updates: bool = False):
    """Another replica is in the middle of a transaction on this row."""
    async with sql.transaction():
        if updates:
            await sql.execute("UPDATE coatcheck.task SET updated_at = now() WHERE id = $1", task_id)
        else:
            await sql.execute("SELECT FROM coatcheck.task WHERE id = $1 FOR UPDATE", task_id)
        yield


async def waits_for_lock(sql: asyncpg.Connection) -> None:
    """Return once somebody waits for a lock that `sql` holds."""
    async with asyncio.timeout(5):
        while not await sql.fetchval(BLOCKED_BY_US):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("updates", [False, True], ids=["locked", "updated"])
class TestHeldRow:
    """Items for a row that is held wait for it; items for other rows, submitted together with them, do not."""

    async def test_claim_of_another_task_goes_on(self, store, sql, updates):
        stuck, free = calls(1), calls(1)
        stuck_id = await park(store, stuck)
        await park(store, free)
        async with held(sql, stuck_id, updates=updates):
            waiting = store.claim(ok(stuck[0]))
            async with asyncio.timeout(SOON_S):
                ruling = await store.claim(ok(free[0]))
            assert ruling.verdict is Verdict.GRANTED
            assert not waiting.done()

        assert (await waiting).verdict is Verdict.GRANTED

    async def test_put_of_another_task_goes_on(self, store, sql, updates):
        stuck, free = await start(store), await start(store)
        async with held(sql, stuck.task_id, updates=updates):
            waiting = asyncio.create_task(store.put(put_of(stuck, done())))
            async with asyncio.timeout(SOON_S):
                answer = await store.put(put_of(free, done()))
            assert isinstance(answer, PutDone)
            assert not waiting.done()

        assert isinstance(await waiting, PutDone)

    async def test_birth_of_another_task_goes_on(self, store, sql, updates):
        newborn = birth()
        await start(store, newborn)
        async with held(sql, newborn.task_id, updates=updates):
            waiting = asyncio.create_task(store.put(birth_put(newborn, going())))
            async with asyncio.timeout(SOON_S):
                answer = await store.put(parking_put(birth(), calls(1)))
            assert isinstance(answer, PutDone)
            assert not waiting.done()

        assert isinstance(await waiting, PutRefused)

    async def test_request_of_another_task_goes_on(self, store, sql, updates):
        newborn = birth()
        await start(store, newborn)
        async with held(sql, newborn.task_id, updates=updates):
            waiting = asyncio.create_task(store.accept(Request(newborn)))
            async with asyncio.timeout(SOON_S):
                ruling = await store.accept(Request(birth()))
            assert ruling.verdict is Verdict.GRANTED
            assert not waiting.done()

        assert (await waiting).verdict is Verdict.DUPLICATE

    async def test_cancel_of_another_task_goes_on(self, store, sql, updates):
        stuck, free = await start(store), await start(store)
        async with held(sql, stuck.task_id, updates=updates):
            waiting = asyncio.create_task(store.cancel(cancel_of(stuck.task_id)))
            async with asyncio.timeout(SOON_S):
                ruling = await store.cancel(cancel_of(free.task_id))
            assert ruling.verdict is Verdict.RECORDED
            assert not waiting.done()

        assert (await waiting).verdict is Verdict.RECORDED

    async def test_resume_of_another_task_goes_on(self, store, sql, bench, updates):
        stuck, free = await start(store), await start(store)
        for task in (stuck, free):
            await end_lease(bench, task.task_id)
        async with held(sql, stuck.task_id, updates=updates):
            waiting = asyncio.create_task(store.resume(Wake(stuck.task_id, stuck.epoch)))
            async with asyncio.timeout(SOON_S):
                ruling = await store.resume(Wake(free.task_id, free.epoch))
            assert ruling.verdict is Verdict.GRANTED
            assert not waiting.done()

        assert (await waiting).verdict is Verdict.GRANTED


async def test_many_held_rows_leave_connections_for_the_rest(store, sql):
    """A frozen replica may hold hundreds of rows: the lanes must not eat the pool."""
    members = [call() for _ in range(40)]
    await asyncio.gather(*(park(store, [one]) for one in members))
    runs = await asyncio.gather(*(start(store) for _ in range(40)))
    async with sql.transaction():
        await sql.execute("SELECT FROM coatcheck.task FOR UPDATE")
        waiting = [store.claim(ok(one)) for one in members]
        waiting += [asyncio.create_task(store.put(put_of(task, done()))) for task in runs]
        await asyncio.sleep(0)

        async with asyncio.timeout(SOON_S):
            await store.accept(Request(birth()))
            await store.put(parking_put(birth(), calls(1)))
            await store.ping()

    assert all([await one for one in waiting])


async def test_claim_waits_in_its_lane_for_a_call_that_a_sweeper_holds(store, sql):
    stuck, free = calls(1), calls(1)
    await park(store, stuck)
    await park(store, free)
    async with sql.transaction():
        await sql.execute("SELECT FROM coatcheck.call WHERE id = $1 FOR UPDATE", stuck[0].call_id)
        waiting = store.claim(ok(stuck[0]))
        async with asyncio.timeout(SOON_S):
            assert (await store.claim(ok(free[0]))).verdict is Verdict.GRANTED
        assert not waiting.done()

    assert (await waiting).verdict is Verdict.GRANTED


async def insert_uncommitted(sql: asyncpg.Connection, newborn: Birth) -> None:
    await sql.execute(
        """INSERT INTO coatcheck.task (id, service, version, state, epoch, digest, request, due_at, look_at)
           VALUES ($1, 'svc', '1', 'running', 1, $2, $3, now() + interval '1 m', now() + interval '1 m')""",
        newborn.task_id,
        newborn.digest,
        newborn.request,
    )


async def test_birth_that_waits_for_another_birth_of_its_id_gives_way_to_it(store, sql):
    newborn = birth()
    async with sql.transaction():
        await insert_uncommitted(sql, newborn)
        waiting = asyncio.create_task(store.accept(Request(newborn)))
        await waits_for_lock(sql)

    assert (await waiting).verdict is Verdict.DUPLICATE


async def test_replies_that_want_the_same_held_row_share_one_transaction(store_url, store, sql):
    sizes = []
    watched = Store(store_url, observe=lambda name, size, seconds: sizes.append(size))
    members = calls(50)
    task_id = await park(store, members)
    async with held(sql, task_id):
        waiting = [watched.claim(ok(one)) for one in members]
        await waits_for_lock(sql)

    verdicts = [(await one).verdict for one in waiting]

    assert verdicts.count(Verdict.GRANTED) == 1
    assert sizes == [50] * (BATCH_ROUNDS + 1)
    await watched.close()


async def test_row_that_stays_locked_is_given_up_as_unavailable(store_url, store, sql, monkeypatch):
    monkeypatch.setitem(SERVER_SETTINGS, "lock_timeout", "200ms")
    impatient = Store(store_url)
    (one,) = calls(1)
    task_id = await park(store, [one])
    async with held(sql, task_id):
        with pytest.raises(LockTimeout, match="stayed locked"):
            await impatient.claim(ok(one))

    assert (await impatient.claim(ok(one))).verdict is Verdict.GRANTED
    await impatient.close()


async def test_lock_that_cannot_be_skipped_delays_the_others_and_fails_none(store_url, sql, monkeypatch):
    """A birth that another replica never commits: the rest of the batch goes on without it."""
    monkeypatch.setitem(SERVER_SETTINGS, "lock_timeout", "200ms")
    impatient = Store(store_url)
    stuck = birth()
    async with sql.transaction():
        await insert_uncommitted(sql, stuck)

        rulings = await asyncio.gather(
            *(impatient.accept(Request(one)) for one in (birth(), stuck, birth(), birth())), return_exceptions=True
        )

        assert isinstance(rulings.pop(1), LockTimeout)
        assert all(not isinstance(it, BaseException) and it.verdict is Verdict.GRANTED for it in rulings)
    await impatient.close()


async def test_renewing_passes_a_held_row_by_and_does_not_give_its_run_up(store, sql):
    stuck, free = await start(store), await start(store)

    async with held(sql, stuck.task_id):
        renewed = await store.renew([Renewal(it.task_id, it.epoch) for it in (stuck, free)], lease=MINUTE)

    assert renewed == ({free.task_id}, {stuck.task_id})


async def test_marking_what_is_locked_or_unknown_waits_for_nobody(store, sql):
    (one,) = calls(1)
    await park(store, [one])
    async with sql.transaction():
        await sql.execute("SELECT FROM coatcheck.call FOR UPDATE")

        async with asyncio.timeout(2):
            await store.mark_sent([one.call_id, call().call_id])
            await store.mark_final_sent({new_id(): Answered((), 0)})


# --- a task that goes while somebody reaches for it ---


async def test_reply_for_a_call_that_retention_takes_is_unknown(store, sql):
    (one,) = calls(1)
    task_id = await park(store, [one])
    async with sql.transaction():
        await sql.execute("DELETE FROM coatcheck.call WHERE task_id = $1", task_id)
        await sql.execute("DELETE FROM coatcheck.task WHERE id = $1", task_id)
        waiting = store.claim(ok(one))
        await waits_for_lock(sql)

    assert (await waiting).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("verb", ["accept", "put", "cancel"])
async def test_birth_that_meets_a_row_which_retention_takes_is_the_first(store, sql, verb):
    newborn = birth()
    task = await start(store, newborn)
    await store.put(put_of(task, done()))
    async with sql.transaction():
        await sql.execute("DELETE FROM coatcheck.task WHERE id = $1", newborn.task_id)
        match verb:
            case "accept":
                waiting = asyncio.create_task(store.accept(Request(newborn)))
            case "put":
                waiting = asyncio.create_task(store.put(parking_put(newborn, calls(1))))
            case _:
                waiting = asyncio.create_task(store.cancel(cancel_of(newborn.task_id)))
        await waits_for_lock(sql)

    await waiting

    state = (await get(store, newborn.task_id)).state
    assert state == {"accept": TaskState.RUNNING, "put": TaskState.PARKED, "cancel": TaskState.CANCELLED}[verb]
