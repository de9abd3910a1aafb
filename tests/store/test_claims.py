"""Replies, progress and timeouts: applied at most once, and the one that ends a wait gets the task."""

import asyncio
import os

import pytest
from tests.store.kit import (
    A_SECOND_AGO,
    DAY,
    MINUTE,
    all_of,
    call,
    calls,
    entry,
    failed,
    get,
    going,
    make_due,
    need,
    ok,
    park,
    parking,
    progress,
    put_of,
    resumed,
    send,
    start,
    timeout,
    timer,
    wake,
    written,
)

from coatcheck.store import CallState, Kind, TaskState, decode
from coatcheck.store.postgres import claims
from coatcheck.store.rows import Verdict


async def test_reply_that_ends_the_wait_is_granted_the_task(store):
    (one,) = calls(1)
    task_id = await park(store, [one])

    ruling = await store.claim(ok(one, "found"))

    assert ruling.verdict is Verdict.GRANTED
    assert ruling.task is not None
    assert (ruling.task.task_id, ruling.task.epoch, ruling.task.state) == (task_id, 2, TaskState.RUNNING)
    assert ruling.task.trigger == str(one.call_id)
    assert [decode(it.value) for it in ruling.known.recorded] == ["found"]


async def test_history_over_its_limit_is_granted_without_its_values(bench):
    store = bench.replica(max_history=1000)
    first, second = calls(2)
    await park(store, [first, second])
    await store.claim(ok(first, os.urandom(1000).hex()))

    ruling = await store.claim(ok(second, "short"))
    await store.close()

    assert ruling.verdict is Verdict.GRANTED
    assert ruling.known.is_withheld
    assert [(it.call_id, it.value) for it in ruling.known.recorded] == [(first.call_id, b""), (second.call_id, b"")]


async def test_reply_that_leaves_the_wait_open_is_recorded(store):
    first, second = calls(2)
    task_id = await park(store, [first, second])

    ruling = await store.claim(ok(first))

    assert ruling.verdict is Verdict.RECORDED
    assert (await get(store, task_id)).state is TaskState.PARKED


async def test_reply_to_an_unknown_call_is_unknown(store):
    assert (await store.claim(ok(call()))).verdict is Verdict.UNKNOWN


async def test_second_reply_is_a_duplicate_and_changes_nothing(store):
    first, second = calls(2)
    task_id = await park(store, [first, second])
    await store.claim(ok(first, "first"))

    ruling = await store.claim(ok(first, "second"))

    assert ruling.verdict is Verdict.DUPLICATE
    assert decode((await store.task_lines(task_id))[0].value or b"") == "first"


async def test_reply_after_its_timeout_is_late(store, bench):
    (one,) = calls(1)
    await park(store, [one])
    await make_due(bench, one)
    assert (await store.claim(timeout(one))).verdict is Verdict.GRANTED

    assert (await store.claim(ok(one))).verdict is Verdict.LATE


async def test_timeout_after_the_reply_is_late(store, bench):
    (one,) = calls(1)
    await park(store, [one])
    await make_due(bench, one)
    await wake(store, one)

    assert (await store.claim(timeout(one))).verdict is Verdict.LATE


async def test_timeout_before_the_call_is_due_is_early(store):
    (one,) = calls(1)
    await park(store, [one])

    assert (await store.claim(timeout(one))).verdict is Verdict.EARLY


async def test_timeout_in_flight_loses_to_a_progress_that_moved_the_due_time(store, bench):
    one = call(idle=call().hard)
    await park(store, [one])
    await make_due(bench, one)

    assert (await store.claim(progress(one))).verdict is Verdict.RECORDED

    assert (await store.claim(timeout(one))).verdict is Verdict.EARLY


async def test_run_that_is_granted_beside_a_progress_knows_the_due_time_it_moved(store, bench):
    first, second = calls(1)[0], call("slow#1", idle=DAY, hard=2 * DAY)
    await park(store, [first, second], all_of([first]))
    await make_due(bench, second)

    _, ruling = await asyncio.gather(store.claim(progress(second)), store.claim(ok(first)))

    assert ruling.verdict is Verdict.GRANTED
    (still_open,) = ruling.known.open_calls
    assert still_open.due_at is not None
    assert still_open.due_at > ruling.task.created_at + DAY / 2


# --- what changes between the look and the write ---


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


async def test_progress_never_moves_the_hard_due_time(store, bench):
    one = call(idle=call().hard, hard=call().hard)
    await park(store, [one])
    await bench.set_calls(hard_due_at=A_SECOND_AGO, due_at=A_SECOND_AGO)

    await store.claim(progress(one))

    assert (await store.claim(timeout(one))).verdict is Verdict.GRANTED


async def test_progress_after_the_reply_is_a_duplicate(store):
    first, second = calls(2)
    await park(store, [first, second])
    await store.claim(ok(first))

    assert (await store.claim(progress(first))).verdict is Verdict.DUPLICATE


async def test_timer_that_is_due_has_rung(store, bench):
    one = timer()
    await park(store, [one])
    await make_due(bench, one)

    ruling = await store.claim(timeout(one))

    assert ruling.verdict is Verdict.GRANTED
    assert [it.state for it in ruling.known.recorded] == [CallState.OK]


async def test_reply_to_a_send_is_late_and_does_not_move_it_in_the_order(store):
    note, (one,) = send(), calls(1)
    task_id = await park(store, [note, one], all_of([one]))
    before = [it.seq for it in await store.task_lines(task_id) if it.kind is Kind.SEND]

    ruling = await store.claim(ok(note))

    assert ruling.verdict is Verdict.LATE
    assert [it.seq for it in await store.task_lines(task_id) if it.kind is Kind.SEND] == before


async def test_reply_during_a_live_run_is_recorded_for_it(store):
    (one,) = calls(1)
    task = await start(store)
    await written(store, put_of(task, going(), opens=(one,)))

    ruling = await store.claim(ok(one))

    assert ruling.verdict is Verdict.RECORDED
    assert (await get(store, task.task_id)).epoch == task.epoch


# --- groups ---


async def test_group_of_all_waits_for_the_last(store):
    members = calls(3)
    await park(store, members)

    verdicts = [(await store.claim(ok(one))).verdict for one in members]

    assert verdicts == [Verdict.RECORDED, Verdict.RECORDED, Verdict.GRANTED]


async def test_group_of_all_fails_fast(store):
    members = calls(3)
    await park(store, members)

    assert (await store.claim(failed(members[1]))).verdict is Verdict.GRANTED


async def test_group_of_one_success_resumes_at_the_first(store):
    members = calls(3)
    await park(store, members, need(1, members))

    verdicts = [
        (await store.claim(arrival)).verdict for arrival in (failed(members[0]), ok(members[1]), ok(members[2]))
    ]

    assert verdicts == [Verdict.RECORDED, Verdict.GRANTED, Verdict.RECORDED]


async def test_group_of_one_success_resumes_when_all_have_failed(store):
    members = calls(3)
    await park(store, members, need(1, members))

    verdicts = [(await store.claim(failed(one))).verdict for one in members]

    assert verdicts == [Verdict.RECORDED, Verdict.RECORDED, Verdict.GRANTED]


async def test_quorum_resumes_at_its_number_of_successes(store):
    members = calls(5)
    await park(store, members, need(3, members))

    arrivals = [ok(members[0]), failed(members[1]), ok(members[2]), failed(members[3]), ok(members[4])]
    verdicts = [(await store.claim(arrival)).verdict for arrival in arrivals]

    assert verdicts == [Verdict.RECORDED] * 4 + [Verdict.GRANTED]


async def test_quorum_resumes_as_soon_as_it_cannot_be_reached(store):
    members = calls(5)
    await park(store, members, need(3, members))

    verdicts = [(await store.claim(failed(one))).verdict for one in members[:3]]

    assert verdicts == [Verdict.RECORDED, Verdict.RECORDED, Verdict.GRANTED]


async def test_group_without_a_number_waits_until_all_have_ended(store):
    members = calls(3)
    await park(store, members, need(None, members))

    verdicts = [
        (await store.claim(arrival)).verdict for arrival in (failed(members[0]), ok(members[1]), failed(members[2]))
    ]

    assert verdicts == [Verdict.RECORDED, Verdict.RECORDED, Verdict.GRANTED]


async def test_any_of_several_groups_resumes_the_task(store):
    members = calls(3)
    await park(store, members, all_of(members[:2]), all_of(members[2:]))

    assert (await store.claim(ok(members[2]))).verdict is Verdict.GRANTED


async def test_four_replies_of_one_task_in_one_batch_grant_it_once(store):
    members = calls(4)
    await park(store, members)

    rulings = await asyncio.gather(*(store.claim(ok(one)) for one in members))

    assert [ruling.verdict for ruling in rulings].count(Verdict.GRANTED) == 1
    (granted,) = [ruling for ruling in rulings if ruling.verdict is Verdict.GRANTED]
    assert len(granted.known.recorded) == 4
    assert [it.seq for it in granted.known.recorded] == [1, 2, 3, 4]


async def test_copies_of_one_reply_in_one_batch_are_applied_once(store):
    (one,) = calls(1)
    await park(store, [one])

    rulings = await asyncio.gather(*(store.claim(ok(one)) for _ in range(4)))

    assert sorted(ruling.verdict for ruling in rulings) == [Verdict.DUPLICATE] * 3 + [Verdict.GRANTED]


# --- redelivery ---


async def test_redelivered_trigger_takes_the_run_over(store):
    (one,) = calls(1)
    await park(store, [one])
    first = await resumed(store, one)

    ruling = await store.claim(ok(one, is_redelivered=True))

    assert ruling.verdict is Verdict.GRANTED
    assert ruling.task is not None
    assert ruling.task.epoch == first.epoch + 1
    assert ruling.task.pickups == first.pickups + 1
    assert len(ruling.known.recorded) == 1


async def test_redelivered_timeout_that_was_the_trigger_takes_the_run_over(store, bench):
    (one,) = calls(1)
    await park(store, [one])
    await make_due(bench, one)
    await store.claim(timeout(one))

    assert (await store.claim(timeout(one, is_redelivered=True))).verdict is Verdict.GRANTED


async def test_redelivered_reply_that_is_not_the_trigger_takes_nothing_over(store):
    first, second = calls(2)
    await park(store, [first, second])
    await store.claim(ok(first))
    await store.claim(ok(second))

    assert (await store.claim(ok(first, is_redelivered=True))).verdict is Verdict.DUPLICATE


async def test_trigger_delivered_twice_but_not_redelivered_takes_nothing_over(store):
    (one,) = calls(1)
    await park(store, [one])
    await store.claim(ok(one))

    assert (await store.claim(ok(one))).verdict is Verdict.DUPLICATE


async def test_redelivered_trigger_of_a_run_that_was_put_down_finds_what_is_unsent(store):
    first, second = call("a#1"), call("b#1")
    await park(store, [first])
    task = await resumed(store, first)
    await written(store, put_of(task, parking(all_of([second])), opens=(second,)))

    ruling = await store.claim(ok(first, is_redelivered=True))

    assert ruling.verdict is Verdict.DUPLICATE
    assert [peer.call_id for peer in ruling.unsent.calls] == [second.call_id]


async def test_claim_in_doubt_is_granted_when_repeated_as_redelivered(store):
    """Its answer was lost after the commit: whoever repeats it must get the run."""
    members = calls(2)
    await park(store, members)
    await store.claim(ok(members[0]))
    lost = await store.claim(ok(members[1]))
    assert lost.verdict is Verdict.GRANTED

    repeated = await store.claim(ok(members[1], is_redelivered=True))

    assert repeated.verdict is Verdict.GRANTED
    assert [it.key for it in repeated.known.recorded] == ["search#1", "search#2"]


# --- order ---


async def test_history_is_in_the_order_things_ended(store):
    members = calls(3)
    await park(store, members, entries=(entry("plan#1"),))
    for one in (members[2], members[0]):
        await store.claim(ok(one))

    ruling = await store.claim(ok(members[1]))

    assert [it.key for it in ruling.known.recorded] == ["plan#1", "search#3", "search#1", "search#2"]


async def test_open_calls_are_part_of_the_history(store):
    members = calls(3)
    await park(store, members, need(1, members))

    ruling = await store.claim(ok(members[0]))

    assert {it.call_id for it in ruling.known.open_calls} == {one.call_id for one in members[1:]}


# --- replicas ---


async def test_last_two_replies_on_two_replicas_at_once_resume_exactly_once(store, other):
    for _ in range(300):
        first, second = calls(2)
        await park(store, [first, second])

        rulings = await asyncio.gather(store.claim(ok(first)), other.claim(ok(second)))

        assert sorted(ruling.verdict for ruling in rulings) == [Verdict.GRANTED, Verdict.RECORDED]


@pytest.mark.parametrize("is_redelivered", [False, True])
async def test_same_reply_on_two_replicas_at_once_is_applied_once(store, other, is_redelivered):
    for _ in range(50):
        first, second = calls(2)
        await park(store, [first, second])

        rulings = await asyncio.gather(store.claim(ok(first)), other.claim(ok(first, is_redelivered=is_redelivered)))

        assert sorted(ruling.verdict for ruling in rulings) == [Verdict.DUPLICATE, Verdict.RECORDED]


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
