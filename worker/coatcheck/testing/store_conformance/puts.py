"""What a run writes: fenced by epoch and checkpoint, repeatable, and never parked on a wait that is over."""

import asyncio
from datetime import timedelta

import pytest
from msgspec.structs import replace

from coatcheck.errors import Rejected
from coatcheck.store import CallState, Kind, TaskState, decode, encode
from coatcheck.store.rows import Changes, Finish, Park, PutDone, PutRefused, Request, TaskId, Verdict, Wake
from coatcheck.store.views import Renewal
from coatcheck.testing.store_conformance.kit import (
    AT_ONCE,
    DAY,
    MINUTE,
    again,
    all_of,
    assert_sound,
    birth,
    birth_put,
    call,
    calls,
    done,
    end_lease,
    entry,
    failed,
    get,
    going,
    hold,
    need,
    new_id,
    ok,
    park,
    parking,
    parking_put,
    put_of,
    resumed,
    send,
    start,
    timer,
    written,
)

# --- fencing ---


async def test_birth_that_parks_leaves_a_parked_row_without_a_trigger(store):
    task_id = await park(store, calls(2), entries=(entry(),))

    task = await get(store, task_id)

    assert (task.state, task.epoch, task.checkpoint, task.trigger) == (TaskState.PARKED, 1, 1, None)


async def test_calls_are_written_as_they_are_whether_or_not_they_are_alike(store, bench):
    alike, unlike = calls(3), [call("a#1"), replace(call("b#1"), name="b", peer="other", hard=2 * MINUTE), timer()]

    await park(store, alike)
    await park(store, unlike)

    rows = (await bench.read())["call"]
    for one in (*alike, *unlike):
        row = rows[one.call_id]
        due_in = row["hard_due_at"] - row["opened_at"]
        assert (row["key"], row["kind"], row["name"], row["peer"]) == (one.key, one.kind, one.name, one.peer)
        assert abs(due_in - one.hard) < timedelta(seconds=5)
        assert (row["headers"], row["checkpoint"], row["state"]) == ({}, 1, CallState.OPEN)


async def test_put_of_an_older_epoch_is_refused_and_writes_nothing(store):
    (one,) = calls(1)
    task_id = await park(store, [one])
    zombie = await resumed(store, one)
    await store.claim(ok(one, is_redelivered=True))

    answer = await store.put(put_of(zombie, done(), entries=(entry(),)))

    assert isinstance(answer, PutRefused)
    assert answer.task is not None
    assert answer.task.epoch == zombie.epoch + 1
    assert [line.key for line in await store.task_lines(task_id)] == ["search#1"]


async def test_put_that_does_not_follow_the_last_checkpoint_is_refused(store):
    task = await start(store)
    await written(store, put_of(task, going(), entries=(entry("a#1"),)))

    answer = await store.put(put_of(task, going(), entries=(entry("b#1"),)))

    assert isinstance(answer, PutRefused)
    assert [line.key for line in await store.task_lines(task.task_id)] == ["a#1"]


async def test_put_for_a_task_without_a_row_is_refused(store):
    task = await start(store)

    assert await store.put(put_of(replace(task, task_id=new_id()), going())) == PutRefused(None)


async def test_put_of_a_finished_task_is_refused(store):
    task = await start(store)
    await written(store, put_of(task, done()))

    answer = await store.put(put_of(replace(task, checkpoint=task.checkpoint + 1), going()))

    assert isinstance(answer, PutRefused)


async def test_put_of_a_parked_task_is_refused(store):
    (one,) = calls(1)
    task = await get(store, await park(store, [one]))

    assert isinstance(await store.put(put_of(task, done())), PutRefused)


async def test_second_birth_of_one_id_is_refused_with_the_row_that_is_there(store, other):
    newborn = birth()
    await written(store, parking_put(newborn, calls(1)))

    answer = await other.put(parking_put(newborn, calls(1)))

    assert isinstance(answer, PutRefused)
    assert answer.task is not None
    assert answer.task.state is TaskState.PARKED


async def test_two_births_of_one_id_at_once_leave_one(store, other, bench):
    for _ in range(50):
        newborn = birth()

        answers = await asyncio.gather(
            store.put(parking_put(newborn, calls(1))), other.put(parking_put(newborn, calls(1)))
        )

        assert sorted(type(answer).__name__ for answer in answers) == ["PutDone", "PutRefused"]
    assert len((await bench.read())["call"]) == 50


async def test_two_births_of_one_id_in_one_batch_leave_the_first(store):
    task_id = new_id()
    first, second = birth(task_id, body="first"), birth(task_id, body="second")

    answers = await asyncio.gather(
        store.find_task(task_id), store.put(birth_put(first, going())), store.put(birth_put(second, going()))
    )

    assert isinstance(answers[1], PutDone)
    assert isinstance(answers[2], PutRefused)
    assert decode((await get(store, task_id)).request) == "first"


async def test_put_of_a_row_that_is_gone_writes_nothing_into_a_birth_of_its_id_in_the_same_batch(store):
    """Retention took the task of a run that had stood still, and its request came again at that very moment."""
    task = await start(store, newborn := birth())
    await written(store, put_of(task, done(keep=timedelta())))
    await store.retire(limit=1, keep=AT_ONCE)

    answers = await asyncio.gather(
        store.put(put_of(task, done("of the old run"))), store.put(birth_put(newborn, going()))
    )

    assert answers[0] == PutRefused(None)
    assert isinstance(answers[1], PutDone)
    assert (await get(store, newborn.task_id)).state is TaskState.RUNNING


async def test_two_different_puts_of_one_run_at_once_let_one_through(store):
    for _ in range(20):
        task = await start(store)

        answers = await asyncio.gather(
            store.put(put_of(task, going(), entries=(entry("a#1"),))),
            store.put(put_of(task, going(), entries=(entry("b#1"),))),
        )

        assert sorted(type(answer).__name__ for answer in answers) == ["PutDone", "PutRefused"]
        assert len(await store.task_lines(task.task_id)) == 1


# --- repeating a put whose outcome was unknown ---


@pytest.mark.parametrize(
    "end",
    [going(), done(), done(is_detached=True), again("plan#1"), hold()],
    ids=["going", "finish", "finish_detached", "retry", "hold"],
)
async def test_put_repeated_after_it_committed_gives_the_same_answer(store, end):
    task = await start(store)
    put = put_of(task, end, entries=(entry(),))
    first = await written(store, put)

    second = await written(store, put)

    assert (second.epoch, second.checkpoint, second.is_parked) == (first.epoch, first.checkpoint, first.is_parked)
    assert second.news == first.news
    assert len(await store.task_lines(task.task_id)) == 1


async def test_park_repeated_after_it_committed_is_parked(store, other):
    task = await start(store)
    (one,) = calls(1)
    put = put_of(task, parking(all_of([one])), opens=(one,))
    await written(store, put)

    answer = await written(other, put)

    assert answer.is_parked
    assert len(await store.task_lines(task.task_id)) == 1


async def test_birth_repeated_after_it_committed_knows_itself_by_its_calls(store, other):
    put = parking_put(birth(), calls(2))
    first = await written(store, put)

    second = await written(other, put)

    assert (second.epoch, second.checkpoint, second.is_parked) == (first.epoch, first.checkpoint, True)


async def test_birth_that_finished_is_known_again_by_its_value(store):
    put = birth_put(birth(), done("the same"))
    await written(store, put)

    assert isinstance(await store.put(put), PutDone)
    assert isinstance(await store.put(replace(put, end=done("another"))), PutRefused)


async def test_birth_without_calls_repeated_after_it_committed_is_resolved_by_a_redelivered_request(store):
    """The rows cannot tell its run from a duplicate's, so it is refused; taking it over by its trigger is safe."""
    newborn = birth()
    put = birth_put(newborn, going(), entries=(entry(),))
    await written(store, put)
    assert isinstance(await store.put(put), PutRefused)

    ruling = await store.accept(Request(newborn, is_redelivered=True))

    assert ruling.verdict is Verdict.GRANTED
    assert [it.key for it in ruling.known.recorded] == ["plan#1"]


async def test_repeated_put_names_the_calls_it_closed_again(store):
    """Nobody saw the first answer, so nobody has told their peers."""
    task = await start(store)
    (one,) = calls(1)
    await written(store, put_of(task, going(), opens=(one,)))
    put = put_of(await get(store, task.task_id), done())
    first = await written(store, put)
    assert [peer.call_id for peer in first.cancels] == [one.call_id]

    second = await written(store, put)

    assert [peer.call_id for peer in second.cancels] == [one.call_id]


# --- parking and news ---


async def test_park_goes_on_with_the_news_if_its_wait_was_over_before_it_began(store):
    task = await start(store)
    (one,) = calls(1)
    await written(store, put_of(task, going(), opens=(one,)))
    seen = await get(store, task.task_id)
    await store.claim(ok(one, "meanwhile"))

    answer = await written(store, put_of(seen, parking(all_of([one]))))

    assert not answer.is_parked
    assert [(news.key, decode(news.value)) for news in answer.news] == [("search#1", "meanwhile")]
    now = await get(store, task.task_id)
    assert (now.state, now.epoch, now.checkpoint) == (TaskState.RUNNING, seen.epoch, seen.checkpoint + 1)
    assert now.due_at is not None


async def test_park_holds_if_the_news_do_not_end_its_wait(store):
    task = await start(store)
    first, second = calls(2)
    await written(store, put_of(task, going(), opens=(first, second)))
    seen = await get(store, task.task_id)
    await store.claim(ok(first))

    answer = await written(store, put_of(seen, parking(all_of([first, second]))))

    assert answer.is_parked
    assert (await store.claim(ok(second))).verdict is Verdict.GRANTED


async def test_park_counts_what_the_run_had_seen_before_with_the_news(store):
    """Two of three succeeded, one before the run looked and one after: the wait is over, whoever counts."""
    members = calls(3)
    await park(store, members, all_of(members[:1]), need(2, members))
    task = await resumed(store, members[0])
    await store.claim(ok(members[1]))

    answer = await written(store, put_of(task, parking(need(2, members))))

    assert not answer.is_parked
    assert [news.key for news in answer.news] == ["search#2"]


async def test_park_on_a_failure_that_came_meanwhile_goes_on(store):
    task = await start(store)
    members = calls(3)
    await written(store, put_of(task, going(), opens=tuple(members)))
    seen = await get(store, task.task_id)
    await store.claim(failed(members[0]))

    answer = await written(store, put_of(seen, parking(all_of(members))))

    assert [news.state for news in answer.news] == [CallState.FAILED]


async def test_park_against_a_reply_at_the_same_instant_never_strands_the_task(store, other, bench):
    for _ in range(100):
        task = await start(store)
        (one,) = calls(1)
        await written(store, put_of(task, going(), opens=(one,)))
        seen = await get(store, task.task_id)

        answer, ruling = await asyncio.gather(store.put(put_of(seen, parking(all_of([one])))), other.claim(ok(one)))

        assert isinstance(answer, PutDone)
        assert (answer.is_parked, ruling.verdict) in [(True, Verdict.GRANTED), (False, Verdict.RECORDED)]
    await assert_sound(bench)


async def test_news_are_in_order_and_end_with_the_runs_own_entries(store):
    task = await start(store)
    members = calls(2)
    await written(store, put_of(task, going(), opens=tuple(members)))
    seen = await get(store, task.task_id)
    for one in reversed(members):
        await store.claim(ok(one))

    answer = await written(store, put_of(seen, going(), entries=(entry("plan#1"), entry("plan#2"))))

    assert [news.key for news in answer.news] == ["search#2", "search#1", "plan#1", "plan#2"]
    assert [news.seq for news in answer.news] == [1, 2, 3, 4]


async def test_park_on_nothing_is_refused_by_the_database(store):
    task = await start(store)

    with pytest.raises(Rejected, match="task_parked_waits_for_something"):
        await store.put(put_of(task, Park((), MINUTE)))


async def test_call_without_a_due_time_is_refused_by_the_database(store):
    task = await start(store)

    with pytest.raises(Rejected, match="call_open_is_due_or_a_send"):
        await store.put(put_of(task, going(), opens=(call(hard=None),)))


# --- ends ---


async def test_finish_closes_what_is_open_and_names_it_for_cancelling(store, bench):
    task = await start(store)
    members, bell = calls(2), timer()
    await written(store, put_of(task, going(), opens=(*members, bell)))

    answer = await written(store, put_of(await get(store, task.task_id), done(), entries=(entry(),)))

    assert {peer.call_id for peer in answer.cancels} == {one.call_id for one in members}
    states = {line.key: line.state for line in await store.task_lines(task.task_id)}
    assert states == dict.fromkeys(("search#1", "search#2", "sleep#1"), CallState.CLOSED) | {"plan#1": CallState.OK}
    await assert_sound(bench)


async def test_run_may_end_as_cancelled_with_a_row_or_without(store, bench):
    one, end = call(), Finish(TaskState.CANCELLED, encode({"code": "cancelled"}), DAY)
    task = await start(store)
    await written(store, put_of(task, going(), opens=(one,)))

    answer = await written(store, put_of(await get(store, task.task_id), end))
    await written(store, birth_put(newborn := birth(), end))

    assert [peer.call_id for peer in answer.cancels] == [one.call_id]
    for task_id in (task.task_id, newborn.task_id):
        after = await get(store, task_id)
        assert (after.state, after.finished_at is None) == (TaskState.CANCELLED, False)
    await assert_sound(bench)


async def test_finish_opens_no_call_but_lets_a_send_leave(store, bench):
    note = send()
    task = await start(store)

    await written(store, put_of(task, done(), opens=(note, call())))

    assert [(line.kind, line.is_sent) for line in await store.task_lines(task.task_id)] == [(Kind.SEND, False)]
    await assert_sound(bench)


async def test_closing_a_call_that_was_answered_meanwhile_changes_nothing(store):
    task = await start(store)
    first, second = calls(2)
    await written(store, put_of(task, going(), opens=(first, second)))
    await store.claim(ok(first))

    answer = await written(
        store, put_of(await get(store, task.task_id), going(), closes=(first.call_id, second.call_id))
    )

    assert [peer.call_id for peer in answer.cancels] == [second.call_id]
    states = {line.key: line.state for line in await store.task_lines(task.task_id)}
    assert states == {"search#1": CallState.OK, "search#2": CallState.CLOSED}


async def test_sequence_numbers_are_unique_across_all_that_a_task_does(store, bench):
    members = calls(4)
    task_id = await park(store, [*members, send()], need(2, members), entries=(entry("a#1"), entry("b#1")))
    await store.claim(ok(members[0]))
    task = await resumed(store, members[1])
    await written(
        store, put_of(task, going(), entries=(entry("c#1"),), closes=(members[2].call_id,), opens=(send("send#2"),))
    )
    await written(store, put_of(await get(store, task_id), done(), entries=(entry("d#1"),)))

    seqs = [line.seq for line in await store.task_lines(task_id)]

    assert len(seqs) == 10
    assert seqs == sorted(set(seqs))
    await assert_sound(bench)


async def test_finish_keeps_the_value_and_a_printable_traceback(store):
    task = await start(store)

    await written(store, put_of(task, done("result", traceback="half \ud800 and \0 nothing")))

    ended = await get(store, task.task_id)
    assert decode(ended.value or b"") == "result"
    assert ended.traceback == "half ? and ? nothing"
    assert ended.finished_at is not None


async def test_retry_forgets_failures_and_keeps_successes(store, bench):
    (one,), good = calls(1), entry("good#1")
    await park(store, [one], entries=(good, entry("bad#1", is_ok=False)))
    task = (await store.claim(failed(one))).task
    assert task is not None
    await written(
        store, put_of(task, again("good#1", "bad#1", "search#1", "new#1"), entries=(entry("new#1", is_ok=False),))
    )

    ruling = await _resume(store, bench, task.task_id)

    assert [it.key for it in ruling.known.recorded] == ["good#1"]
    assert ruling.task is not None
    assert ruling.task.attempt == 2


async def test_retry_keeps_calls_open_and_their_replies(store, bench):
    (one,) = calls(1)
    task = await start(store)
    await written(store, put_of(task, again("search#1"), opens=(one,)))

    assert (await store.claim(ok(one))).verdict is Verdict.RECORDED

    ruling = await _resume(store, bench, task.task_id)
    assert [it.key for it in ruling.known.recorded] == ["search#1"]


async def test_hold_keeps_the_task_with_a_time_to_try_again(store):
    task = await start(store)

    await written(store, put_of(task, hold()))

    held = await get(store, task.task_id)
    assert held.state is TaskState.HELD
    assert held.due_at is not None
    assert await store.without_waker() == []


async def test_held_tasks_of_a_service_are_tried_again_when_its_code_may_be_new(store, bench):
    task = await start(store)
    await written(store, put_of(task, hold()))
    wake = Wake(task.task_id, task.epoch)

    assert await store.hasten_held("another") == 0
    assert (await store.resume(wake)).verdict is Verdict.EARLY
    assert await store.hasten_held("svc") == 1
    assert [it.task_id for it in (await store.look(limit=10, again=MINUTE)).overdue] == [task.task_id]
    assert (await store.resume(wake)).verdict is Verdict.GRANTED


async def test_detached_run_has_no_trigger(store):
    task = await start(store)
    assert task.trigger == "request"

    await written(store, put_of(task, going(is_detached=True)))

    assert (await get(store, task.task_id)).trigger is None


async def test_recorded_work_starts_the_count_of_pickups_again(store):
    newborn = birth()
    for is_redelivered in (False, True, True):
        await store.accept(Request(newborn, is_redelivered))
    task = await get(store, newborn.task_id)
    assert task.pickups == 3
    await written(store, put_of(task, going()))
    assert (await get(store, newborn.task_id)).pickups == 3

    await written(store, put_of(await get(store, newborn.task_id), going(), entries=(entry(),)))

    assert (await get(store, newborn.task_id)).pickups == 0


async def test_many_puts_of_many_tasks_are_answered_in_order(store):
    births = [birth() for _ in range(200)]

    answers = await asyncio.gather(*(store.put(parking_put(one, calls(2))) for one in births))

    assert all(isinstance(answer, PutDone) and answer.is_parked for answer in answers)
    assert len(await store.list_tasks(states=[TaskState.PARKED], limit=500)) == 200


async def test_empty_changes_record_a_lease_only(store):
    task = await start(store)

    answer = await written(store, put_of(task, going()))

    assert answer.news == ()
    assert Changes() == Changes((), (), (), None)
    assert (await get(store, task.task_id)).checkpoint == 2


async def _resume(store, bench, task_id: TaskId):
    await end_lease(bench, task_id)
    task = await get(store, task_id)
    ruling = await store.resume(Wake(task_id, task.epoch))
    assert ruling.verdict is Verdict.GRANTED
    return ruling


async def test_end_of_a_run_that_has_just_lost_its_trigger_is_the_sweepers_to_send(store, bench):
    """The broker took the trigger back while the end was on its way: whoever gets it acks it, as it saw a run."""
    task = await start(store)
    ending = put_of(task, done())
    await store.renew([Renewal(task.task_id, task.epoch)], lease=MINUTE, detaches=True)

    await written(store, ending)
    await bench.let_pass(2 * MINUTE)

    assert [one.task_id for one in (await store.look(limit=10, again=MINUTE)).unsent_finals] == [task.task_id]
