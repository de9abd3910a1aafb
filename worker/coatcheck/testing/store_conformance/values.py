"""Values that cannot be stored: whoever brings them fails alone, and nobody quotes them."""

import asyncio
from datetime import timedelta

import pytest
from msgspec.structs import replace

from coatcheck.errors import Rejected
from coatcheck.store.rows import Arrival, PutDone, Verdict
from coatcheck.testing.store_conformance.kit import (
    all_of,
    birth,
    birth_put,
    call,
    calls,
    cancel_of,
    done,
    going,
    new_id,
    ok,
    park,
    parking,
    parking_put,
    put_of,
    start,
)


async def test_put_with_a_nul_fails_alone_and_without_quoting_values(store):
    good = [birth() for _ in range(6)]
    bad = replace(birth(body="a secret"), handler="nul \0 here")
    puts = [parking_put(one, calls(1)) for one in (*good[:3], bad, *good[3:])]

    answers = await asyncio.gather(*(store.put(put) for put in puts), return_exceptions=True)

    refused = answers.pop(3)
    assert all(isinstance(answer, PutDone) for answer in answers)
    assert isinstance(refused, Rejected)
    assert "22021" in str(refused)
    assert refused.__cause__ is None
    assert "secret" not in str(refused)
    assert await store.find_task(bad.task_id) is None


async def test_rejection_by_a_constraint_names_it_and_no_values(store):
    task = await start(store)
    secret = replace(call(hard=None), body=b"a secret")

    with pytest.raises(Rejected) as caught:
        await store.put(put_of(task, going(), opens=(secret,)))

    assert "call_open_is_due_or_a_send" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_progress_that_jsonb_refuses_fails_alone(store):
    first, second = calls(2)
    await park(store, [first, second])

    rulings = await asyncio.gather(
        store.claim(Arrival(first.call_id, None, b"", progress={"message": "\0"})),
        store.claim(ok(second)),
        return_exceptions=True,
    )

    assert isinstance(rulings[0], Rejected)
    assert not isinstance(rulings[1], BaseException)
    assert rulings[1].verdict is Verdict.RECORDED


async def test_value_of_the_wrong_type_fails_alone_and_is_not_quoted(store):
    good, bad = birth(), replace(birth(), digest="a secret")

    answers = await asyncio.gather(
        store.put(birth_put(good, going())), store.put(birth_put(bad, going())), return_exceptions=True
    )

    assert isinstance(answers[0], PutDone)
    assert isinstance(answers[1], Rejected)
    assert "secret" not in str(answers[1])


@pytest.mark.parametrize("word", ["nul \0", "half \ud800", 5], ids=["nul", "surrogate", "number"])
async def test_text_that_is_none_fails_alone(store, word):
    good, bad = birth(), replace(birth(), identity=word)

    answers = await asyncio.gather(
        store.put(birth_put(bad, going())), store.put(birth_put(good, going())), return_exceptions=True
    )

    assert isinstance(answers[0], Rejected)
    assert isinstance(answers[1], PutDone)


@pytest.mark.parametrize("delay", [timedelta(days=3_000_000), timedelta.max], ids=["year 10000", "for ever"])
async def test_time_that_could_not_be_read_again_fails_alone(store, delay):
    """Postgres would keep it, and the row would fail whoever reads it, with all that is read beside it."""
    task = await start(store)
    for put in (put_of(task, going(), opens=(call(hard=delay),)), put_of(task, done(keep=delay))):
        with pytest.raises(Rejected):
            await store.put(put)

    with pytest.raises(Rejected):
        await store.cancel(cancel_of(new_id(), keep=delay))

    assert [it.task_id for it in await store.list_tasks()] == [task.task_id]


async def test_call_id_that_exists_already_fails_alone(store):
    (one,) = calls(1)
    await park(store, [one])
    newborn = birth()

    with pytest.raises(Rejected, match="call_pkey"):
        await store.put(birth_put(newborn, parking(all_of([one])), opens=(one,)))

    assert await store.find_task(newborn.task_id) is None
