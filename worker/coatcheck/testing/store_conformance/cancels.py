"""Cancelling: first commit wins, and an unknown task gets a tombstone."""

import asyncio

from msgspec.structs import replace

from coatcheck.store import TaskState, encode
from coatcheck.store.rows import PutDone, PutRefused, Request, Verdict
from coatcheck.testing.store_conformance.kit import (
    CANCELLED,
    assert_sound,
    birth,
    birth_put,
    calls,
    cancel_of,
    done,
    get,
    going,
    new_id,
    ok,
    park,
    parking_put,
    put_of,
    send,
    start,
    timer,
    written,
)


async def test_tombstone_is_listed_only_among_the_cancelled(store):
    task = await start(store, birth())
    tombstone = new_id()
    await store.cancel(cancel_of(tombstone))

    assert [one.task_id for one in await store.list_tasks()] == [task.task_id]
    assert [one.task_id for one in await store.summarise_tasks()] == [task.task_id]
    assert [one.task_id for one in await store.summarise_tasks(states=[TaskState.CANCELLED])] == [tombstone]


async def test_cancel_ends_a_parked_task_and_names_its_open_calls(store, bench):
    members = calls(3)
    task_id = await park(store, [*members, timer()])
    await store.claim(ok(members[0]))

    ruling = await store.cancel(cancel_of(task_id))

    assert ruling.verdict is Verdict.RECORDED
    assert {peer.call_id for peer in ruling.cancels} == {one.call_id for one in members[1:]}
    assert ruling.unsent.is_final_unsent
    task = await get(store, task_id)
    assert (task.state, task.epoch, task.value) == (TaskState.CANCELLED, 2, CANCELLED)
    await assert_sound(bench)


async def test_cancel_of_a_running_task_fences_its_run(store):
    task = await start(store)

    await store.cancel(cancel_of(task.task_id))

    answer = await store.put(put_of(task, done()))
    assert isinstance(answer, PutRefused)
    assert answer.task is not None
    assert answer.task.state is TaskState.CANCELLED


async def test_cancel_of_a_finished_task_changes_nothing(store):
    task = await start(store)
    await written(store, put_of(task, done()))

    ruling = await store.cancel(cancel_of(task.task_id))

    assert ruling.verdict is Verdict.FINISHED
    assert (await get(store, task.task_id)).state is TaskState.DONE


async def test_cancel_of_an_unknown_task_leaves_a_tombstone_that_never_replies(store):
    task_id = new_id()

    ruling = await store.cancel(cancel_of(task_id))

    assert ruling.verdict is Verdict.UNKNOWN
    tombstone = await get(store, task_id)
    assert tombstone.state is TaskState.CANCELLED
    assert tombstone.is_final_sent


async def test_put_that_meets_a_tombstone_is_refused_with_it(store):
    newborn = birth()
    await store.cancel(cancel_of(newborn.task_id))

    answer = await store.put(parking_put(newborn, calls(1)))

    assert isinstance(answer, PutRefused)
    assert answer.task is not None
    assert answer.task.state is TaskState.CANCELLED


async def test_cancel_by_correlation_id_finds_the_task_of_that_service(store):
    mine, others = birth(correlation_id="c-1"), birth(correlation_id="c-1", service="another")
    for newborn in (mine, others):
        await store.accept(Request(newborn))

    ruling = await store.cancel(cancel_of(new_id(), correlation_id="c-1"))

    assert ruling.verdict is Verdict.RECORDED
    assert (await get(store, mine.task_id)).state is TaskState.CANCELLED
    assert (await get(store, others.task_id)).state is TaskState.RUNNING


async def test_cancel_by_correlation_id_prefers_the_task_that_is_unfinished(store):
    old, new = birth(correlation_id="c-1"), birth(correlation_id="c-1")
    await store.accept(Request(new))
    await written(store, birth_put(old, done()))

    await store.cancel(cancel_of(new_id(), correlation_id="c-1"))

    assert (await get(store, new.task_id)).state is TaskState.CANCELLED
    assert (await get(store, old.task_id)).state is TaskState.DONE


async def test_cancel_by_correlation_id_that_comes_back_finds_what_it_did(store):
    """We died between the commit and the cancels to the peers."""
    members = calls(2)
    task_id = await park(store, members, newborn=birth(correlation_id="c-1"))
    ask = cancel_of(new_id(), correlation_id="c-1")
    await store.cancel(ask)

    ruling = await store.cancel(ask)

    assert ruling.verdict is Verdict.FINISHED
    assert ruling.task is not None
    assert ruling.task.task_id == task_id
    assert len(ruling.cancels) == 2
    assert ruling.unsent.is_final_unsent


async def test_cancel_by_an_unknown_correlation_id_buries_the_task_it_names(store):
    task_id = new_id()

    assert (await store.cancel(cancel_of(task_id, correlation_id="c-none"))).verdict is Verdict.UNKNOWN

    assert (await get(store, task_id)).state is TaskState.CANCELLED


async def test_second_cancel_finds_it_done_until_the_reply_is_marked_as_sent(store):
    task_id = await park(store, calls(1))
    await store.cancel(cancel_of(task_id))

    before = await store.cancel(cancel_of(task_id))
    await store.mark_final_sent({task_id: before.task.answered})
    after = await store.cancel(cancel_of(task_id))

    assert (before.verdict, before.unsent.is_final_unsent, len(before.cancels)) == (Verdict.FINISHED, True, 1)
    assert (after.verdict, after.unsent.is_final_unsent, len(after.cancels)) == (Verdict.FINISHED, False, 0)


async def test_two_cancels_in_one_batch_end_the_task_once_with_the_first_reason(store):
    task_id = await park(store, calls(1))

    rulings = await asyncio.gather(
        store.cancel(cancel_of(new_id())),  # keeps the batcher busy, so that the next two share a batch
        store.cancel(cancel_of(task_id, value=encode("first"))),
        store.cancel(cancel_of(task_id, value=encode("second"))),
    )

    assert [ruling.verdict for ruling in rulings[1:]] == [Verdict.RECORDED, Verdict.FINISHED]
    assert (await get(store, task_id)).value == encode("first")
    assert all(ruling.task is not None and ruling.task.value == encode("first") for ruling in rulings[1:])


async def test_cancel_is_heard_beside_one_that_another_service_asks_for(store):
    task_id = await park(store, calls(1))

    rulings = await asyncio.gather(
        store.cancel(replace(cancel_of(task_id), service="another")), store.cancel(cancel_of(task_id))
    )

    assert [ruling.verdict for ruling in rulings] == [Verdict.UNKNOWN, Verdict.RECORDED]
    assert (await get(store, task_id)).state is TaskState.CANCELLED


async def test_late_reply_to_a_cancelled_task_is_late(store):
    (one,) = calls(1)
    task_id = await park(store, [one])
    await store.cancel(cancel_of(task_id))

    assert (await store.claim(ok(one))).verdict is Verdict.LATE


async def test_sends_of_a_cancelled_task_still_leave(store):
    note, (one,) = send(), calls(1)
    newborn = birth()
    await written(store, parking_put(newborn, [note, one]))

    ruling = await store.cancel(cancel_of(newborn.task_id))

    assert [peer.call_id for peer in ruling.cancels] == [one.call_id]
    again = await store.accept(Request(newborn, is_redelivered=True))
    assert [peer.call_id for peer in again.unsent.calls] == [note.call_id]


async def test_cancel_against_a_finish_at_the_same_instant_leaves_one_final_state(store, other, bench):
    outcomes = set()
    for _ in range(200):
        task = await start(store)
        await written(store, put_of(task, going(), opens=tuple(calls(1))))
        task = await get(store, task.task_id)

        answer, ruling = await asyncio.gather(store.put(put_of(task, done())), other.cancel(cancel_of(task.task_id)))

        ended = await get(store, task.task_id)
        outcomes.add(ended.state)
        is_finished = isinstance(answer, PutDone)
        assert (is_finished, ruling.verdict, ended.state) in [
            (True, Verdict.FINISHED, TaskState.DONE),
            (False, Verdict.RECORDED, TaskState.CANCELLED),
        ]
    await assert_sound(bench)


async def test_cancel_against_a_birth_at_the_same_instant_leaves_one_final_state(store, other):
    for _ in range(50):
        newborn = birth()

        answer, ruling = await asyncio.gather(
            store.put(parking_put(newborn, calls(1))), other.cancel(cancel_of(newborn.task_id))
        )

        assert (await get(store, newborn.task_id)).state is TaskState.CANCELLED
        assert (isinstance(answer, PutDone), ruling.verdict) in [(True, Verdict.RECORDED), (False, Verdict.UNKNOWN)]
