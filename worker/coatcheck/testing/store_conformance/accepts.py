"""Requests whose task may have a row, and `resume`: who gets to run it."""

import asyncio

import pytest
from msgspec.structs import replace

from coatcheck.store import TaskState
from coatcheck.store.rows import MOST_ADDRESSES, Address, Request, Verdict, Wake
from coatcheck.testing.store_conformance.kit import (
    again,
    birth,
    calls,
    cancel_of,
    done,
    end_lease,
    entry,
    get,
    going,
    hold,
    new_id,
    park,
    put_of,
    resumed,
    start,
    written,
)


async def test_request_without_a_row_is_granted_one(store):
    newborn = birth()

    ruling = await store.accept(Request(newborn))

    assert ruling.verdict is Verdict.GRANTED
    task = await get(store, newborn.task_id)
    assert (task.state, task.epoch, task.pickups, task.trigger) == (TaskState.RUNNING, 1, 1, "request")


async def test_request_that_came_back_may_have_been_run_before_without_a_row(store):
    first, back = birth(), birth()

    await asyncio.gather(store.accept(Request(first)), store.accept(Request(back, is_redelivered=True)))

    assert [(await get(store, one.task_id)).pickups for one in (first, back)] == [1, 2]


async def test_copy_of_a_running_request_is_a_duplicate(store):
    newborn = birth()
    await store.accept(Request(newborn))

    assert (await store.accept(Request(newborn))).verdict is Verdict.DUPLICATE


async def test_copy_of_a_parked_request_is_a_duplicate(store):
    newborn = birth()
    await park(store, calls(1), newborn=newborn)

    assert (await store.accept(Request(newborn))).verdict is Verdict.DUPLICATE


async def test_copy_of_a_finished_request_gets_the_stored_answer(store):
    task = await start(store, newborn := birth())
    await written(store, put_of(task, done("answer")))

    ruling = await store.accept(Request(newborn))

    assert ruling.verdict is Verdict.FINISHED
    assert ruling.task is not None
    assert ruling.task.value == done("answer").value


async def test_same_identity_with_another_body_is_a_conflict(store):
    task_id = new_id()
    await store.accept(Request(birth(task_id, body=1)))

    assert (await store.accept(Request(birth(task_id, body=2)))).verdict is Verdict.CONFLICT


async def test_no_more_than_so_many_addresses_wait_for_one_task(store):
    task_id = new_id()
    requests = [Request(birth(task_id, reply_to=f"q{number}")) for number in range(MOST_ADDRESSES)]
    await store.accept(requests[0])
    await asyncio.gather(*map(store.accept, requests[1:]))

    ruling = await store.accept(Request(birth(task_id, reply_to="one too many")))
    together = await asyncio.gather(*(store.accept(Request(birth(task_id, reply_to=f"x{n}"))) for n in range(3)))
    known = await store.accept(Request(birth(task_id, reply_to="q7"), is_redelivered=True))

    assert ruling.verdict is Verdict.CROWDED
    assert {each.verdict for each in together} == {Verdict.CROWDED}
    assert known.verdict is Verdict.GRANTED
    assert len((await get(store, task_id)).addresses) == MOST_ADDRESSES


async def test_same_request_from_another_address_is_answered_there_too(store):
    task_id = new_id()
    await store.accept(Request(birth(task_id, reply_to="first")))

    ruling = await store.accept(Request(birth(task_id, reply_to="second")))

    assert ruling.verdict is Verdict.DUPLICATE
    assert (await get(store, task_id)).addresses == (Address("first", "r1"), Address("second", "r1"))


async def test_conflicting_request_adds_no_address(store):
    task_id = new_id()
    await store.accept(Request(birth(task_id, reply_to="first", body=1)))

    await store.accept(Request(birth(task_id, reply_to="second", body=2)))

    assert (await get(store, task_id)).addresses == (Address("first", "r1"),)


async def test_run_that_writes_learns_of_addresses_that_joined(store):
    task = await start(store, newborn := birth(reply_to="first"))
    await store.accept(Request(birth(newborn.task_id, reply_to="second")))

    answer = await written(store, put_of(task, done()))

    assert [address.reply_to for address in answer.addresses] == ["first", "second"]


async def test_three_copies_in_one_batch_are_granted_once_and_all_addresses_kept(store):
    task_id = new_id()

    rulings = await asyncio.gather(
        *(store.accept(Request(birth(task_id, reply_to=reply_to))) for reply_to in ("a", "b", "c"))
    )

    assert [ruling.verdict for ruling in rulings] == [Verdict.GRANTED, Verdict.DUPLICATE, Verdict.DUPLICATE]
    assert [address.reply_to for address in (await get(store, task_id)).addresses] == ["a", "b", "c"]


async def test_two_bodies_under_one_identity_in_one_batch_conflict(store):
    task_id = new_id()

    rulings = await asyncio.gather(*(store.accept(Request(birth(task_id, body=body))) for body in (1, 2)))

    assert [ruling.verdict for ruling in rulings] == [Verdict.GRANTED, Verdict.CONFLICT]
    assert rulings[0].task is not None
    assert rulings[0].task.request == birth(body=1).request


async def test_one_request_on_two_replicas_at_once_is_granted_once(store, other):
    for _ in range(50):
        newborn = birth()

        rulings = await asyncio.gather(store.accept(Request(newborn)), other.accept(Request(newborn)))

        assert sorted(ruling.verdict for ruling in rulings) == [Verdict.DUPLICATE, Verdict.GRANTED]


async def test_redelivered_request_takes_over_the_run_it_triggered(store):
    newborn = birth()
    await store.accept(Request(newborn))

    ruling = await store.accept(Request(newborn, is_redelivered=True))

    assert ruling.verdict is Verdict.GRANTED
    assert ruling.task is not None
    assert (ruling.task.epoch, ruling.task.pickups) == (2, 2)


async def test_redelivered_request_does_not_take_over_a_run_that_a_reply_triggered(store):
    (one,) = calls(1)
    await park(store, [one], newborn=(newborn := birth()))
    await resumed(store, one)

    assert (await store.accept(Request(newborn, is_redelivered=True))).verdict is Verdict.DUPLICATE


async def test_redelivered_request_does_not_take_over_a_detached_run(store):
    task = await start(store, newborn := birth())
    await written(store, put_of(task, going(is_detached=True)))

    assert (await store.accept(Request(newborn, is_redelivered=True))).verdict is Verdict.DUPLICATE


async def test_redelivered_request_of_a_parked_task_finds_its_unsent_calls(store):
    members = calls(2)
    await park(store, members, newborn=(newborn := birth()))
    await store.mark_sent([members[0].call_id])

    ruling = await store.accept(Request(newborn, is_redelivered=True))

    assert ruling.verdict is Verdict.DUPLICATE
    assert [peer.call_id for peer in ruling.unsent.calls] == [members[1].call_id]


async def test_redelivered_request_of_a_finished_task_finds_its_reply_unsent_until_it_is_marked(store):
    task = await start(store, newborn := birth())
    await written(store, put_of(task, done()))

    before = await store.accept(Request(newborn, is_redelivered=True))
    await store.mark_final_sent({task.task_id: task.answered})
    after = await store.accept(Request(newborn, is_redelivered=True))

    assert (before.verdict, before.unsent.is_final_unsent) == (Verdict.FINISHED, True)
    assert (after.verdict, after.unsent.is_final_unsent) == (Verdict.FINISHED, False)


async def test_request_that_meets_a_tombstone_is_told_of_the_cancel(store):
    newborn = birth()
    await store.cancel(cancel_of(newborn.task_id))

    ruling = await store.accept(Request(newborn))

    assert ruling.verdict is Verdict.FINISHED
    assert ruling.task is not None
    assert ruling.task.state is TaskState.CANCELLED


# --- resume ---


async def test_resume_takes_a_run_whose_lease_is_over(store, bench):
    task = await start(store)
    await written(store, put_of(task, going(), entries=(entry(),)))
    await end_lease(bench, task.task_id)

    ruling = await store.resume(Wake(task.task_id, task.epoch))

    assert ruling.verdict is Verdict.GRANTED
    assert ruling.task is not None
    assert (ruling.task.epoch, ruling.task.trigger) == (task.epoch + 1, f"resume:{task.epoch}")
    assert [it.key for it in ruling.known.recorded] == ["plan#1"]


async def test_resume_of_a_run_whose_lease_is_not_over_is_early(store):
    task = await start(store)

    assert (await store.resume(Wake(task.task_id, task.epoch))).verdict is Verdict.EARLY


@pytest.mark.parametrize("distance", [-1, 1])
async def test_resume_for_another_epoch_takes_nothing(store, bench, distance):
    task = await start(store)
    await end_lease(bench, task.task_id)

    assert (await store.resume(Wake(task.task_id, task.epoch + distance))).verdict is Verdict.DUPLICATE


async def test_resume_of_a_parked_task_takes_nothing(store):
    task = await get(store, await park(store, calls(1)))

    assert (await store.resume(Wake(task.task_id, task.epoch))).verdict is Verdict.DUPLICATE


async def test_resume_of_an_unknown_task_is_unknown(store):
    assert (await store.resume(Wake(new_id(), 1))).verdict is Verdict.UNKNOWN


async def test_resume_of_a_finished_task_is_told_so(store):
    task = await start(store)
    await written(store, put_of(task, done()))

    assert (await store.resume(Wake(task.task_id, task.epoch))).verdict is Verdict.FINISHED


@pytest.mark.parametrize("end", [again(), hold(delay=again().delay)], ids=["retrying", "held"])
async def test_resume_takes_a_task_whose_time_to_try_again_has_come(store, end):
    task = await start(store)
    await written(store, put_of(task, end))

    assert (await store.resume(Wake(task.task_id, task.epoch))).verdict is Verdict.GRANTED


async def test_redelivered_resume_takes_over_the_run_it_triggered(store, bench):
    task = await start(store)
    await end_lease(bench, task.task_id)
    await store.resume(Wake(task.task_id, task.epoch))

    plain = await store.resume(Wake(task.task_id, task.epoch))
    redelivered = await store.resume(Wake(task.task_id, task.epoch, is_redelivered=True))

    assert plain.verdict is Verdict.DUPLICATE
    assert redelivered.verdict is Verdict.GRANTED


async def test_one_resume_on_two_replicas_at_once_is_granted_once(store, other, bench):
    for _ in range(30):
        task = await start(store)
        await end_lease(bench, task.task_id)

        rulings = await asyncio.gather(
            store.resume(Wake(task.task_id, task.epoch)), other.resume(Wake(task.task_id, task.epoch))
        )

        assert [ruling.verdict for ruling in rulings].count(Verdict.GRANTED) == 1


async def test_copy_in_the_same_batch_is_judged_by_the_row_and_not_by_what_it_would_write(store):
    newborn = birth()

    rulings = await asyncio.gather(
        store.accept(Request(newborn)), store.accept(Request(replace(newborn, handler="nul \0")))
    )

    assert [it.verdict for it in rulings] == [Verdict.GRANTED, Verdict.DUPLICATE]
