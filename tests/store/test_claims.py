"""The public suite on both stores; and what only Postgres can meet: news between a claim's read and its write."""

import asyncio

import pytest

from coatcheck.store.postgres import claims
from coatcheck.store.rows import Verdict
from coatcheck.testing.store_conformance.claims import *  # noqa: F403
from coatcheck.testing.store_conformance.kit import (
    MINUTE,
    all_of,
    call,
    calls,
    make_due,
    ok,
    park,
    parking,
    progress,
    put_of,
    resumed,
    timeout,
)


@pytest.fixture
def before_the_write(monkeypatch):
    """Let something happen once, after a claim has read how things stand and before it writes."""

    def happens(work):
        write = claims._write

        async def late(*given):
            monkeypatch.setattr(claims, "_write", write)
            await work()
            return await write(*given)

        monkeypatch.setattr(claims, "_write", late)

    return happens


async def test_timeout_that_was_due_loses_to_a_progress_before_it_is_written(
    store_url, store, other, bench, before_the_write
):
    one = call(idle=MINUTE)
    await park(store, [one])
    await make_due(bench, one)

    before_the_write(lambda: other.claim(progress(one)))

    assert (await store.claim(timeout(one))).verdict is Verdict.EARLY


async def test_reply_that_finds_another_one_written_meanwhile_counts_it(store_url, store, other, before_the_write):
    first, second = calls(2)
    await park(store, [first, second])

    before_the_write(lambda: other.claim(ok(second)))

    ruling = await store.claim(ok(first))
    assert ruling.verdict is Verdict.GRANTED
    assert [it.call_id for it in ruling.known.recorded] == [second.call_id, first.call_id]


async def test_trigger_that_came_back_leaves_a_run_that_was_put_down_meanwhile(
    store_url, store, other, before_the_write
):
    (one,) = calls(1)
    await park(store, [one])
    task = await resumed(store, one)
    more = call("more#1")

    before_the_write(lambda: other.put(put_of(task, parking(all_of([more])), opens=(more,))))

    ruling = await store.claim(ok(one, is_redelivered=True))
    assert ruling.verdict is Verdict.DUPLICATE
    assert [it.call_id for it in ruling.unsent.calls] == [more.call_id]


async def test_row_that_this_code_cannot_read_keeps_nobody_elses_grant(store, sql):
    """The write is committed by then: tried again, the others would be duplicates of themselves."""
    asked = [call() for _ in range(6)]
    parked = [await park(store, [one]) for one in asked]
    newer = '[["replies", "1", "a field of a newer release"]]'
    await sql.execute("UPDATE coatcheck.task SET addresses = $1 WHERE id = $2", newer, parked[3])

    first = store.claim(ok(call()))  # while it is under way the others come together
    await asyncio.sleep(0)
    rulings: list = await asyncio.gather(*(store.claim(ok(one)) for one in asked), return_exceptions=True)
    await first

    assert isinstance(rulings.pop(3), TypeError)
    assert [ruling.verdict for ruling in rulings] == [Verdict.GRANTED] * 5
