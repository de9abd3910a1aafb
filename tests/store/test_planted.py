"""Mistakes in the SQL, planted on purpose: what watches over the rows must notice each of them on a real Postgres."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from tests.store.kit import all_of, assert_sound, calls, done, get, going, ok, park, parking, put_of, start, written

from coatcheck.store import decide
from coatcheck.store.postgres import puts
from coatcheck.store.postgres.claims import APPLY_PLAN
from coatcheck.store.postgres.sql import PARTS, STATEMENTS
from coatcheck.store.rows import Park, PutDone, PutRefused, Verdict

ROUNDS = 40


async def answer_the_last_two_at_once(store, other) -> int:
    """How many tasks are woken when the last two replies of each are claimed at one instant on two replicas."""
    woken = 0
    for _ in range(ROUNDS):
        members = calls(2)
        await park(store, members)
        rulings = await asyncio.gather(store.claim(ok(members[0])), other.claim(ok(members[1])))
        woken += sum(ruling.verdict is Verdict.GRANTED for ruling in rulings)
    return woken


async def test_with_the_lock_every_task_is_woken(store_url, store, other, bench):
    assert await answer_the_last_two_at_once(store, other) == ROUNDS
    await assert_sound(bench)


async def test_a_claim_without_the_lock_on_its_task_is_noticed(store_url, store, other, bench, monkeypatch):
    planted: list[tuple[dict[Any, Any], Any, str]] = [
        (APPLY_PLAN, is_telling, "FOR UPDATE OF t SKIP LOCKED") for is_telling in APPLY_PLAN
    ]
    for statements, key, lock in (*planted, (STATEMENTS, "lock_owners", "FOR UPDATE")):
        assert lock in statements[key].text
        monkeypatch.setitem(statements, key, text(statements[key].text.replace(lock, "")))

    woken = await answer_the_last_two_at_once(store, other)

    assert woken < ROUNDS
    with pytest.raises(AssertionError, match=r"given twice|its wait is over"):
        await assert_sound(bench)


async def test_a_put_down_without_a_look_at_its_groups_is_noticed(store_url, store, bench, monkeypatch):
    monkeypatch.setattr(decide, "may_park", lambda put, states: isinstance(put.end, Park))
    monkeypatch.setattr(decide, "waits_for", lambda put: ())
    members = calls(1)
    task = await start(store)
    await written(store, put_of(task, going(), opens=tuple(members)))
    await store.claim(ok(members[0]))

    await written(store, put_of(await get(store, task.task_id), parking(all_of(members))))

    with pytest.raises(AssertionError, match=r"given twice|its wait is over"):
        await assert_sound(bench)


async def test_a_write_without_a_fence_is_noticed(store_url, store, other, monkeypatch):
    members = calls(1)
    await park(store, members)
    ruling = await store.claim(ok(members[0]))
    assert ruling.task is not None
    zombie = put_of(ruling.task, done("zombie"))
    heir = await other.claim(ok(members[0], is_redelivered=True))
    assert heir.task is not None

    assert isinstance(await store.put(zombie), PutRefused)
    fence = "AND t.epoch = u.epoch AND t.checkpoint = u.follows AND t.seq = u.seen"
    assert fence in PARTS["put_held"]
    monkeypatch.setitem(PARTS, "put_held", PARTS["put_held"].replace(fence, ""))
    puts._statement.cache_clear()
    answer = await store.put(zombie)
    puts._statement.cache_clear()

    assert isinstance(answer, PutDone), "the fence is what refused it"
    assert (await get(store, heir.task.task_id)).epoch > ruling.task.epoch
