"""What a task's history says: at every level, of everything that can happen to a task, in a chain that holds."""

import hashlib
from asyncio import gather
from datetime import timedelta

import pytest
from msgspec.structs import replace
from tests.store.kit import (
    A_SECOND_AGO,
    AT_ONCE,
    DAY,
    again,
    assert_sound,
    birth,
    birth_put,
    call,
    calls,
    cancel_of,
    done,
    end_lease,
    entry,
    get,
    going,
    hold,
    make_due,
    new_id,
    ok,
    park,
    parking_put,
    put_of,
    resumed,
    start,
    timeout,
    timer,
    written,
)

from coatcheck.errors import CoatcheckError
from coatcheck.store import Store, chain, decode, encode
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import Caller, Chain, HistoryLevel, NewEntry, PutDone, Request, Verdict, Wake

FULL, OUTCOME, OFF = HistoryLevel.FULL, HistoryLevel.OUTCOME, HistoryLevel.OFF


async def story(store: Store, task_id) -> list[str]:
    """The kinds of a task's entries, in a chain that holds."""
    entries = await store.read_history(task_id)
    assert chain.first_bad(task_id, entries) is None
    return [one.kind for one in entries]


async def data(store: Store, task_id, number: int):
    blob = (await store.read_history(task_id))[number - 1].data
    assert blob is not None
    return decode(blob)


async def lived(store: Store, level: HistoryLevel):
    """A task that records, waits, fails once, is resumed and ends."""
    members = [call("search#1"), timer()]
    task_id = await park(store, members, newborn=birth(history=level), entries=(entry(),))
    await store.claim(ok(members[0]))
    task = await resumed(store, members[1])
    await written(store, put_of(task, again()))
    ruling = await store.resume(Wake(task_id, task.epoch))
    assert ruling.task is not None
    await written(store, put_of(ruling.task, done()))
    return task_id


async def test_full_tells_all_that_happened(store, bench):
    task_id = await lived(store, FULL)

    assert await story(store, task_id) == [
        *("accepted", "recorded", "opened", "opened", "parked"),
        *("claimed", "claimed", "resumed", "retried", "resumed", "finished"),
    ]
    await assert_sound(bench)


async def test_outcome_tells_how_a_task_came_failed_and_ended(store, bench):
    task_id = await lived(store, OUTCOME)

    assert await story(store, task_id) == ["accepted", "retried", "finished"]
    await assert_sound(bench)


async def test_off_keeps_nothing(store, bench):
    task_id = await lived(store, OFF)

    assert await story(store, task_id) == []
    assert (await get(store, task_id)).chain == Chain(OFF)
    await assert_sound(bench)


async def test_entries_name_replica_epoch_key_and_actor(bench):
    store = bench.replica(replica="left")
    members = calls(1)
    newborn = birth(history=FULL, caller=Caller("ada"))
    await park(store, members, newborn=newborn)
    await resumed(store, members[0])

    told = [(one.kind, one.replica, one.epoch, one.actor, one.key) for one in await store.read_history(newborn.task_id)]

    assert told == [
        ("accepted", "left", 1, "ada", None),
        ("opened", "left", 1, None, "search#1"),
        ("parked", "left", 1, None, None),
        ("claimed", "left", 1, "search", "search#1"),
        ("resumed", "left", 2, None, "search#1"),
    ]
    await store.close()


async def test_values_are_told_by_size_and_digest(store):
    newborn = birth(history=FULL)
    await store.put(birth_put(newborn, going(), entries=(entry(value="secret"),)))

    told = await data(store, newborn.task_id, 2)

    assert (told["bytes"], told["sha256"][:8]) == (8, hashlib.sha256(b'"secret"').hexdigest()[:8])
    assert "value" not in told


async def test_values_are_told_in_full_when_asked_for(bench):
    store = bench.replica(keeps_values=True)
    members = calls(1)
    task_id = await park(store, members, newborn=birth(history=FULL), entries=(entry(value={"a": [1]}),))
    await store.claim(ok(members[0], "answer"))

    assert (await data(store, task_id, 2))["value"] == {"a": [1]}
    assert (await data(store, task_id, 5))["value"] == "answer"
    await store.close()


async def test_what_a_user_records_is_kept_at_outcome_in_full(store):
    newborn = birth(history=OUTCOME)
    note = NewEntry("@record#1", Kind.NOTE, "user:approval", b"", True, encode({"by": "ada"}))
    await store.put(birth_put(newborn, going(), entries=(entry(), note)))

    assert await story(store, newborn.task_id) == ["accepted", "user:approval"]
    assert await data(store, newborn.task_id, 2) == {"by": "ada"}


async def test_a_reply_that_ends_no_wait_tells_of_no_grant(store, bench):
    members = calls(2)
    task_id = await park(store, members, newborn=birth(history=FULL))

    await store.claim(ok(members[0]))
    assert (await story(store, task_id))[-1] == "claimed"
    await store.claim(ok(members[1]))

    assert (await story(store, task_id))[-3:] == ["claimed", "claimed", "resumed"]
    await assert_sound(bench)


async def test_a_call_that_is_not_answered_is_told_as_timed_out(store, bench):
    member = call()
    task_id = await park(store, [member], newborn=birth(history=FULL))
    await make_due(bench, member)

    await store.claim(timeout(member))

    assert (await story(store, task_id))[-2:] == ["timed_out", "resumed"]


async def test_a_run_whose_reply_was_claimed_meanwhile_goes_on_with_the_chain(store, bench):
    member = call()
    task = await start(store, birth(history=FULL))
    await written(store, put_of(task, going(), opens=(member,)))
    seen = await get(store, task.task_id)
    await store.claim(ok(member))

    answer = await written(store, put_of(seen, done()))

    assert (await story(store, task.task_id))[-2:] == ["claimed", "finished"]
    assert answer.chain == (await get(store, task.task_id)).chain
    await assert_sound(bench)


@pytest.mark.parametrize("level", [OUTCOME, FULL])
async def test_a_run_that_is_taken_over_is_told_of(store, bench, level):
    task = await start(store, birth(history=level))
    await end_lease(bench, task.task_id)

    ruling = await store.resume(Wake(task.task_id, task.epoch))

    assert ruling.verdict is Verdict.GRANTED
    assert await story(store, task.task_id) == ["accepted", "taken_over"]
    assert ruling.task is not None
    await written(store, put_of(ruling.task, done()))
    await assert_sound(bench)


async def test_a_request_that_comes_back_takes_over_and_says_so(store, bench):
    newborn = birth(history=OUTCOME)
    await store.accept(Request(newborn))

    await store.accept(Request(newborn, is_redelivered=True))

    assert await story(store, newborn.task_id) == ["accepted", "taken_over"]
    await assert_sound(bench)


async def test_a_held_task_says_why(store, bench):
    newborn = birth(history=OUTCOME)
    await store.put(birth_put(newborn, hold()))

    assert await story(store, newborn.task_id) == ["accepted", "held"]
    assert await data(store, newborn.task_id, 2) == {"code": "unknown_handler"}
    await assert_sound(bench)


async def test_a_cancel_is_told_with_its_reason(store, bench):
    task_id = await park(store, calls(1), newborn=birth(history=OUTCOME))

    await store.cancel(replace(cancel_of(task_id), reason="too late"))

    assert await story(store, task_id) == ["accepted", "cancelled"]
    assert await data(store, task_id, 2) == {"state": "cancelled", "reason": "too late"}
    await assert_sound(bench)


async def test_a_put_that_is_put_again_appends_nothing_and_gives_the_chain(store, bench):
    newborn = birth(history=FULL)
    put = parking_put(newborn, calls(1))
    first = await written(store, put)

    second = await store.put(put)

    assert isinstance(second, PutDone)
    assert second.chain == first.chain
    assert await story(store, newborn.task_id) == ["accepted", "opened", "parked"]
    await assert_sound(bench)


async def test_a_put_of_a_replica_that_lost_the_task_appends_nothing(store, bench):
    task = await start(store, birth(history=FULL))
    await end_lease(bench, task.task_id)
    await store.resume(Wake(task.task_id, task.epoch))

    await store.put(put_of(task, done()))

    assert await story(store, task.task_id) == ["accepted", "taken_over"]


async def test_a_put_with_a_stale_head_cannot_be_written_behind_the_chain(store, bench):
    """The last guard: the number is taken."""
    task = await start(store, birth(history=FULL))
    stale = replace(put_of(task, done()), chain=Chain(FULL, 0, None))

    with pytest.raises(CoatcheckError):
        await store.put(stale)

    assert await story(store, task.task_id) == ["accepted"]
    await assert_sound(bench)


async def test_a_history_outlives_its_task_and_says_that_it_was_pruned(store, bench):
    newborn = birth(history=OUTCOME)
    await store.put(birth_put(newborn, done()))
    await bench.set_tasks(finished_at=A_SECOND_AGO, look_at=None)

    assert await store.retire(limit=10, keep=AT_ONCE) == 1

    assert await story(store, newborn.task_id) == ["accepted", "finished", "pruned"]


@pytest.mark.parametrize("level", [OUTCOME, FULL])
async def test_a_task_that_is_asked_for_again_goes_on_with_the_history_that_is_left(store, bench, level):
    newborn = birth(history=level)
    await store.put(birth_put(newborn, done()))
    await bench.set_tasks(finished_at=A_SECOND_AGO, look_at=None)
    await store.retire(limit=10, keep=AT_ONCE)

    ruling = await store.accept(Request(newborn))

    assert ruling.verdict is Verdict.GRANTED
    assert await story(store, newborn.task_id) == ["accepted", "finished", "pruned", "accepted"]
    assert ruling.task is not None
    await written(store, put_of(ruling.task, done()))
    await assert_sound(bench)


async def test_a_write_that_makes_a_row_again_goes_on_with_the_history_too(store, bench):
    newborn = birth(history=FULL)
    await store.put(birth_put(newborn, done()))
    await bench.set_tasks(finished_at=A_SECOND_AGO, look_at=None)
    await store.retire(limit=10, keep=AT_ONCE)

    await written(store, parking_put(newborn, calls(1)))

    assert (await story(store, newborn.task_id))[3:] == ["accepted", "opened", "parked"]
    assert await store.forget_histories(limit=10, keep=timedelta()) == 0
    await assert_sound(bench)


async def test_histories_go_once_their_task_was_removed_for_long_enough(store, bench):
    gone, here = birth(history=OUTCOME), birth(history=OUTCOME)
    await store.put(birth_put(gone, done()))
    await bench.set_tasks(finished_at=A_SECOND_AGO, look_at=None)
    await store.retire(limit=10, keep=AT_ONCE)
    await store.put(birth_put(here, done()))

    assert await store.forget_histories(limit=10, keep=DAY) == 0
    assert await store.forget_histories(limit=10, keep=timedelta()) == 1

    assert await story(store, gone.task_id) == []
    assert await story(store, here.task_id) == ["accepted", "finished"]


async def test_levels_of_tasks_that_share_a_batch_do_not_mix(store, bench):
    levels = [HistoryLevel(number % 3) for number in range(9)]
    tasks = await gather(*(start(store, birth(history=level)) for level in levels))

    await gather(*(written(store, put_of(task, done(), entries=(entry(),))) for task in tasks))

    told = [len(await story(store, task.task_id)) for task in tasks]
    assert told == [{OFF: 0, OUTCOME: 2, FULL: 3}[level] for level in levels]
    await assert_sound(bench)


async def test_a_task_that_no_row_knows_has_no_history(store):
    assert await store.read_history(new_id()) == []
