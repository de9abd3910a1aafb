"""What the sweeper finds: nothing is looked at twice at once, nothing is lost, and only what is over goes."""

import asyncio
import itertools
import uuid
from datetime import timedelta

from msgspec.structs import replace

from coatcheck.store import CallState, TaskState, encode
from coatcheck.store.rows import Address, Answered, Finish, Request, Verdict, Wake
from coatcheck.store.views import Renewal, Retention
from coatcheck.testing.store_conformance.kit import (
    AT_ONCE,
    DAY,
    MINUTE,
    again,
    all_of,
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
    make_due,
    need,
    new_id,
    ok,
    park,
    parking,
    progress,
    put_of,
    resumed,
    send,
    start,
    timeout,
    written,
)

AGAIN = timedelta(seconds=30)
NOWHERE = uuid.UUID(int=0)


async def look(store):
    return await store.look(limit=100, again=AGAIN)


async def minute_passes(bench):
    """Let everything be a minute nearer."""
    await bench.let_pass(timedelta(seconds=61))


# --- calls ---


async def test_call_that_is_due_is_found_once_and_again_after_a_while(store, bench):
    (one,) = calls(1)
    await park(store, [one])
    await make_due(bench, one)

    first, second = await look(store), await look(store)
    await minute_passes(bench)
    third = await look(store)

    assert [peer.call_id for peer in first.due] == [one.call_id]
    assert not second
    assert [peer.call_id for peer in third.due] == [one.call_id]
    assert first.oldest >= timedelta(seconds=1)


async def test_what_nobody_takes_comes_up_ever_more_rarely(store, bench):
    """A service that is down for a night finds some messages for each call, not thousands."""
    (one,) = calls(1)
    await park(store, [one])
    running = await start(store)
    await make_due(bench, one)
    await end_lease(bench, running.task_id)

    found = []
    for minute in range(600):
        looked = await look(store)
        if looked:
            found.append((minute, len(looked.due), len(looked.overdue)))
        await minute_passes(bench)

    assert {each[1:] for each in found} == {(1, 1)}
    assert len(found) < 20
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(found)]
    assert gaps[0] == 1
    assert gaps[:5] == sorted(gaps[:5])
    assert max(gaps) in (59, 60)  # never longer than an hour


async def test_two_sweepers_share_what_is_due(store, other, bench):
    members = calls(40)
    await park(store, members)
    await make_due(bench, *members)

    looks = await asyncio.gather(*(one.look(limit=10, again=AGAIN) for one in (store, other) for _ in range(4)))

    found = [peer.call_id for one in looks for peer in one.due]
    assert len(found) == len(set(found))
    rest = await look(store)
    assert {*found, *(peer.call_id for peer in rest.due)} == {one.call_id for one in members}


async def test_call_not_known_to_be_sent_comes_up_after_a_minute_and_then_again(store, bench):
    one = call(hard=timedelta(hours=1))
    await park(store, [one])
    assert not await look(store)

    await minute_passes(bench)
    first = await look(store)
    await minute_passes(bench)
    second = await look(store)

    assert [peer.call_id for peer in first.unsent] == [one.call_id]
    assert [peer.call_id for peer in second.unsent] == [one.call_id]
    assert first.due == ()


async def test_unsent_call_that_is_looked_at_still_times_out_on_time(store, bench):
    one = call(hard=timedelta(seconds=70))
    await park(store, [one])
    await minute_passes(bench)
    await store.look(limit=10, again=timedelta(hours=1))

    next_look = await store.next_look()

    assert next_look is not None
    assert next_look < timedelta(seconds=10)


async def test_call_that_cannot_leave_as_its_body_is_damaged_is_unsent_and_not_due(store, bench):
    whole = call()
    damaged, sent = (replace(call(f"search#{number}"), body=encode("owls")[:-1]) for number in (2, 3))
    await park(store, [whole, damaged, sent])
    await store.mark_sent([sent.call_id])
    await minute_passes(bench)

    found = await look(store)

    assert {peer.call_id for peer in found.due} == {whole.call_id, sent.call_id}
    assert [peer.call_id for peer in found.unsent] == [damaged.call_id]


async def test_call_marked_as_sent_is_next_looked_at_when_it_is_due(store):
    one = call(hard=timedelta(minutes=10))
    await park(store, [one])

    await store.mark_sent([one.call_id])

    next_look = await store.next_look()
    assert next_look is not None
    assert timedelta(minutes=9) < next_look < timedelta(minutes=10)


async def test_progress_moves_what_is_due(store, bench):
    one = call(idle=timedelta(minutes=5))
    await park(store, [one])
    await make_due(bench, one)

    await store.claim(progress(one))

    assert not await look(store)
    next_look = await store.next_look()
    assert next_look is not None
    assert next_look > timedelta(minutes=4)


async def test_answered_call_is_never_looked_at_again(store, bench):
    first, second = call("a#1"), call("b#1", hard=timedelta(hours=1))
    await park(store, [first, second])
    await store.mark_sent([second.call_id])
    await store.claim(ok(first))

    await minute_passes(bench)

    assert not await look(store)


async def test_send_comes_up_until_it_is_marked_and_is_over_then(store, bench):
    note = send()
    task = await start(store)
    await written(store, put_of(task, done(), opens=(note,)))
    await minute_passes(bench)
    assert [peer.call_id for peer in (await look(store)).unsent] == [note.call_id]

    await store.mark_sent([note.call_id])

    await minute_passes(bench)
    assert not await look(store)
    (line,) = await store.task_lines(task.task_id)
    assert (line.state, line.is_sent) == (CallState.OK, True)


async def test_marking_what_is_unknown_or_unfinished_changes_nothing(store, bench):
    task = await start(store)
    before = await bench.read()

    await store.mark_sent([call().call_id])
    await store.mark_final_sent({new_id(): Answered((), 0), task.task_id: task.answered})

    assert await bench.read() == before


# --- tasks ---


async def test_run_whose_lease_is_over_is_found_with_its_epoch(store, bench):
    task = await start(store)
    await end_lease(bench, task.task_id)

    found = await look(store)

    assert [(it.task_id, it.epoch) for it in found.overdue] == [(task.task_id, task.epoch)]
    assert not await look(store)


async def test_task_to_be_tried_again_is_found_when_its_time_comes(store, bench):
    task = await start(store)
    await written(store, put_of(task, again(delay=timedelta(seconds=50))))
    assert not await look(store)

    await minute_passes(bench)

    assert [it.state for it in (await look(store)).overdue] == [TaskState.RETRYING]


async def test_parked_task_itself_is_never_looked_at(store, bench):
    one = call(hard=timedelta(hours=1))
    await park(store, [one])
    await store.mark_sent([one.call_id])

    await minute_passes(bench)

    assert not await look(store)


async def test_final_reply_of_a_detached_run_comes_up_until_it_is_marked(store, bench):
    task = await start(store)
    await written(store, put_of(task, done(is_detached=True)))
    for _ in range(2):
        await minute_passes(bench)
        assert [it.task_id for it in (await look(store)).unsent_finals] == [task.task_id]

    await store.mark_final_sent({task.task_id: task.answered})

    await minute_passes(bench)
    assert not await look(store)
    assert await store.next_look() is None


async def test_what_waits_for_a_queue_that_takes_again_comes_up_at_once(store, bench):
    """Pauses grow with age: what waits for a queue that is full in turns would meet few of its good moments."""
    waiting, sent, other = (call(peer=peer, hard=timedelta(hours=1)) for peer in ("full", "full", "another"))
    await park(store, [waiting, sent, other])
    await store.mark_sent([sent.call_id])
    task = await start(store)
    await written(store, put_of(task, done(is_detached=True)))
    assert await store.hasten_unsent("full") == 0  # it may have left, and not be marked yet
    await minute_passes(bench)
    await look(store)
    assert not await look(store)

    counts = [await store.hasten_unsent(queue) for queue in ("full", task.addresses[0].reply_to, "unknown")]
    looked = await look(store)

    assert counts == [1, 1, 0]
    assert [peer.call_id for peer in looked.unsent] == [waiting.call_id]
    assert [each.task_id for each in looked.unsent_finals] == [task.task_id]


async def test_mark_leaves_a_final_reply_alone_that_is_to_be_told_elsewhere_too(store, bench):
    """A late duplicate with a full reply queue was acked while the sweeper sent the reply to all it knew of."""
    task = await start(store)
    await written(store, put_of(task, done(is_detached=True)))
    late = Address(task.addresses[0].reply_to, "late")
    assert await store.resend_to(task.task_id, late, after=timedelta())

    await store.mark_final_sent({task.task_id: task.answered})

    await minute_passes(bench)
    (found,) = (await look(store)).unsent_finals
    assert found.addresses == (*task.addresses, late)
    await store.mark_final_sent({task.task_id: Answered([late, *task.addresses], 0)})
    await minute_passes(bench)
    assert not await look(store)


async def test_final_reply_that_its_trigger_brings_back_is_not_the_sweepers(store, bench):
    task = await start(store)
    await written(store, put_of(task, done()))

    await minute_passes(bench)

    assert not await look(store)


async def test_final_reply_of_a_cancelled_task_comes_up(store, bench):
    task_id = await park(store, calls(1))
    await store.cancel(cancel_of(task_id))

    await minute_passes(bench)

    assert [it.task_id for it in (await look(store)).unsent_finals] == [task_id]


async def test_next_look_is_none_when_nothing_waits(store):
    assert await store.next_look() is None


async def test_next_look_ignores_what_waits_for_retention(store, bench):
    task = await start(store)
    await written(store, put_of(task, done(keep=timedelta()), opens=(send(),)))
    await bench.set_calls(look_at=timedelta(hours=1))

    next_look = await store.next_look()

    assert next_look is not None
    assert next_look > MINUTE


async def test_next_look_is_negative_when_something_is_overdue(store, bench):
    (one,) = calls(1)
    await park(store, [one])
    await make_due(bench, one)

    next_look = await store.next_look()

    assert next_look is not None
    assert next_look < timedelta()


# --- leases ---


async def test_renewing_moves_the_lease_of_our_runs_and_tells_which_are_not_ours(store, bench):
    ours, lost = await start(store), await start(store)
    await end_lease(bench, ours.task_id)

    kept = await store.renew([Renewal(ours.task_id, ours.epoch), Renewal(lost.task_id, lost.epoch + 1)], lease=MINUTE)

    assert kept == ({ours.task_id}, set())
    assert (await store.resume(Wake(ours.task_id, ours.epoch))).verdict is Verdict.EARLY


async def test_parked_and_finished_tasks_have_no_lease_to_renew(store):
    parked = await get(store, await park(store, calls(1)))
    ended = await start(store)
    await written(store, put_of(ended, done()))

    kept = await store.renew([Renewal(it.task_id, it.epoch) for it in (parked, ended)], lease=MINUTE)

    assert kept == (set(), set())


async def test_lease_of_zero_lets_another_replica_take_the_run_at_once(store, other):
    task = await start(store)

    await store.renew([Renewal(task.task_id, task.epoch)], lease=timedelta())

    assert [it.task_id for it in (await look(other)).overdue] == [task.task_id]
    assert (await other.resume(Wake(task.task_id, task.epoch))).verdict is Verdict.GRANTED


async def test_detaching_leaves_nothing_for_a_redelivered_trigger_to_take(store):
    task = await start(store, newborn := birth())

    await store.renew([Renewal(task.task_id, task.epoch)], lease=MINUTE, detaches=True)

    assert (await store.accept(Request(newborn, is_redelivered=True))).verdict is Verdict.DUPLICATE
    assert (await get(store, task.task_id)).epoch == task.epoch


async def test_task_given_back_was_never_picked_up(store):
    task = await start(store)

    await store.give_back([Renewal(task.task_id, task.epoch)], lease=timedelta(0), detaches=True)
    found = await store.find_task(task.task_id)

    assert (found.pickups, found.trigger) == (max(0, task.pickups - 1), None)


# --- retention ---


async def test_finished_task_goes_when_its_time_to_be_kept_is_over(store, bench):
    (one,) = calls(1)
    await park(store, [one], entries=(entry(),))
    task = await resumed(store, one)
    await written(store, put_of(task, done(keep=timedelta())))

    assert await store.retire(limit=10, keep=AT_ONCE) == 1

    assert await bench.read() == {"task": {}, "call": {}, "journal": {}, "history": {}}


async def test_finished_task_stays_while_it_is_to_be_kept(store):
    task = await start(store)
    await written(store, put_of(task, done()))

    assert await store.retire(limit=10, keep=Retention(MINUTE, timedelta())) == 0


async def test_changed_policy_applies_to_tasks_that_ended_before(store, bench):
    """Whatever was the time to be kept when they ended."""
    ended, failed = await start(store), await start(store)
    await written(store, put_of(ended, done(keep=timedelta())))
    await written(store, put_of(failed, Finish(TaskState.FAILED, encode({}), DAY)))
    await bench.let_pass(MINUTE)

    assert await store.retire(limit=10, keep=Retention(2 * MINUTE, 2 * MINUTE)) == 0
    assert await store.retire(limit=10, keep=Retention(results=2 * MINUTE, failures=MINUTE / 2)) == 1
    assert await store.find_task(failed.task_id) is None
    assert await store.retire(limit=10, keep=Retention(results=MINUTE / 2, failures=DAY)) == 1
    assert await store.find_task(ended.task_id) is None


async def test_tombstone_goes_when_its_time_is_over(store, bench):
    await store.cancel(cancel_of(new_id()))
    assert await store.retire(limit=10, keep=Retention(MINUTE, timedelta())) == 0
    await bench.let_pass(2 * MINUTE)

    assert await store.retire(limit=10, keep=Retention(MINUTE, timedelta())) == 1


async def test_unfinished_tasks_never_go(store, bench):
    await park(store, calls(1))
    running, retrying = await start(store), await start(store)
    await written(store, put_of(retrying, again()))
    await bench.set_tasks(look_at=timedelta(days=-365), due_at=timedelta(days=-365))

    assert await store.retire(limit=10, keep=AT_ONCE) == 0
    assert (await get(store, running.task_id)).state is TaskState.RUNNING


async def test_finished_task_with_a_send_that_never_left_stays(store):
    task = await start(store)
    await written(store, put_of(task, done(keep=timedelta()), opens=(note := send(),)))
    assert await store.retire(limit=10, keep=AT_ONCE) == 0

    await store.mark_sent([note.call_id])

    assert await store.retire(limit=10, keep=AT_ONCE) == 1


async def test_final_reply_that_was_never_tried_keeps_its_task_though_its_time_is_over(store, bench):
    task = await start(store)
    await written(store, put_of(task, done(keep=timedelta(), is_detached=True)))
    assert await store.retire(limit=10, keep=AT_ONCE) == 0
    await minute_passes(bench)

    found = await look(store)

    assert [it.task_id for it in found.unsent_finals] == [task.task_id]
    assert await store.retire(limit=10, keep=AT_ONCE) == 1


async def test_retiring_stops_at_its_limit(store):
    for _ in range(3):
        await written(store, birth_put(birth(), done(keep=timedelta())))

    assert [await store.retire(limit=2, keep=AT_ONCE) for _ in range(3)] == [2, 1, 0]


async def test_request_that_comes_again_after_retention_is_a_new_task(store):
    newborn = birth()
    await written(store, birth_put(newborn, done(keep=timedelta())))
    await store.retire(limit=1, keep=AT_ONCE)

    assert (await store.accept(Request(newborn))).verdict is Verdict.GRANTED


# --- repair ---


async def test_sound_tasks_all_have_a_waker(store):
    await park(store, calls(2))
    await start(store)
    await written(store, put_of(await start(store), again()))

    assert await store.without_waker() == []
    assert (await store.repair(after=NOWHERE, limit=10, quiet=timedelta()))[0] == 0


async def test_parked_task_whose_calls_were_closed_by_hand_is_found_and_woken(store, bench):
    members = calls(2)
    task_id = await park(store, members)
    await bench.set_calls(state=CallState.FAILED, seq=1, look_at=None)
    assert await store.without_waker() == [task_id]

    woken, _ = await store.repair(after=NOWHERE, limit=10, quiet=timedelta())

    assert woken == 1
    assert await store.without_waker() == []
    (overdue,) = (await look(store)).overdue
    assert (await store.resume(Wake(task_id, overdue.epoch))).verdict is Verdict.GRANTED


async def test_parked_task_whose_wait_is_over_is_woken_though_other_calls_are_open(store, bench):
    waited, other_call = calls(2)
    task_id = await park(store, [waited, other_call], all_of([waited]))
    await bench.set_calls(waited.call_id, state=CallState.OK, seq=1, look_at=None)

    assert await store.without_waker() == [task_id]
    assert (await store.repair(after=NOWHERE, limit=10, quiet=timedelta()))[0] == 1


async def test_parked_task_whose_wait_was_ended_by_hand_is_woken_though_it_has_a_waker(store, bench):
    members = calls(2)
    await park(store, members, need(1, members))
    await bench.set_calls(members[0].call_id, state=CallState.OK, seq=1, look_at=None)

    assert await store.without_waker() == []
    assert (await store.repair(after=NOWHERE, limit=10, quiet=timedelta()))[0] == 1


async def test_repair_goes_through_the_tasks_in_portions(store):
    ids = sorted([await park(store, calls(1)) for _ in range(5)])

    _, first = await store.repair(after=NOWHERE, limit=3, quiet=timedelta())
    assert first is not None
    _, second = await store.repair(after=first, limit=3, quiet=timedelta())
    assert second is not None
    end = await store.repair(after=second, limit=3, quiet=timedelta())

    assert (first, second, end) == (ids[2], ids[4], (0, None))


async def test_repair_leaves_tasks_alone_that_moved_a_moment_ago(store, bench):
    await park(store, calls(1))
    await bench.set_calls(state=CallState.FAILED, seq=1, look_at=None)

    assert (await store.repair(after=NOWHERE, limit=10, quiet=MINUTE))[0] == 0


# --- for people ---


async def test_listing_and_counting_tell_tasks_by_service_and_state(store):
    await park(store, calls(1))
    await start(store, birth(service="another"))

    assert await store.count_tasks() == {TaskState.PARKED: 1, TaskState.RUNNING: 1}
    assert [it.service for it in await store.list_tasks(service="another")] == ["another"]
    assert [it.state for it in await store.list_tasks(states=[TaskState.PARKED])] == [TaskState.PARKED]


async def test_lines_tell_a_tasks_story_with_open_calls_last(store):
    first, second = calls(2)
    task_id = await park(store, [first, second], entries=(entry(),))
    await store.claim(progress(second))
    await store.claim(ok(first))

    lines = await store.task_lines(task_id)

    assert [(line.key, line.state) for line in lines] == [
        ("plan#1", CallState.OK),
        ("search#1", CallState.OK),
        ("search#2", CallState.OPEN),
    ]
    assert lines[2].progress == {"done": 1}


async def test_find_gives_none_for_a_task_without_a_row(store):
    assert await store.find_task(new_id()) is None


async def test_task_comes_back_as_it_was_written(store):
    newborn = birth(traceparent="00-trace", tracestate="a=b")
    await store.put(birth_put(newborn, parking(all_of([one := call()])), opens=(one,)))

    task = await get(store, newborn.task_id)

    assert (task.service, task.handler, task.version) == ("svc", "handler", "1")
    assert (task.request, task.digest, task.identity) == (newborn.request, newborn.digest, "identity")
    assert task.addresses == (Address("asker", "r1"),)
    assert (task.traceparent, task.tracestate) == ("00-trace", "a=b")


async def test_timeout_emitted_twice_is_applied_once(store, bench):
    (one,) = calls(1)
    await park(store, [one])
    await make_due(bench, one)

    verdicts = [(await store.claim(timeout(one))).verdict for _ in range(2)]

    assert verdicts == [Verdict.GRANTED, Verdict.LATE]


async def test_detached_going_keeps_its_lease(store):
    task = await start(store)
    await written(store, put_of(task, going(is_detached=True)))

    assert await store.without_waker() == []
    assert (await get(store, task.task_id)).due_at is not None
