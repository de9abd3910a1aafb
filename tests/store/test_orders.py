"""What people order: each taken under the task's lock, in both stores."""

import asyncio
from datetime import timedelta

import pytest
from tests.store.kit import (
    DAY,
    all_of,
    assert_sound,
    birth,
    calls,
    cancel_of,
    done,
    entry,
    failed,
    get,
    going,
    hold,
    new_id,
    ok,
    park,
    parking,
    put_of,
    resumed,
    start,
    timer,
    written,
)

from coatcheck.broker.port import Broker
from coatcheck.errors import BrokerUnavailable
from coatcheck.store import CallState, TaskState, encode
from coatcheck.store.orders import Filter, Fork, OrderDone, OrderRefused, Pause, Resume, Retry, Rewind
from coatcheck.store.rows import Finish, HistoryLevel, PutRefused, TaskId, Verdict, Wake
from coatcheck.worker import Client, Settings

FAILED = Finish(TaskState.FAILED, encode({"code": "handler_failed"}), DAY)


async def story(store, newborn=None):
    """A parked task: step a (1), a call that is answered (2), step b (3), an open call and a timer (4)."""
    first, second, sleep = *calls(2), timer()
    task = await start(store, newborn)
    await written(store, put_of(task, parking(all_of([first])), entries=(entry("a"),), opens=(first,)))
    task = await resumed(store, first)
    await written(store, put_of(task, going(), entries=(entry("b"),)))
    task = await get(store, task.task_id)
    await written(store, put_of(task, parking(all_of([second, sleep])), opens=(second, sleep)))
    return await get(store, task.task_id), (first, second, sleep)


async def order(store, kind, task, **options):
    return await store.order(kind(task_id=TaskId(task.task_id), **options))


async def live_keys(store, task_id):
    return {line.key for line in await store.task_lines(task_id) if not line.is_forgotten}


async def test_rewind_keeps_what_was_opened_before_and_closes_what_came_after(store, bench):
    task, (first, second, sleep) = await story(store)

    done = await order(store, Rewind, task, to=2)

    assert set(done.discarded) == {"b", second.key, sleep.key}
    assert [peer.call_id for peer in done.cancels] == [second.call_id]
    assert done.replay_count == 2
    assert await live_keys(store, task.task_id) == {"a", first.key}
    after = await get(store, task.task_id)
    assert (after.state, after.epoch, after.checkpoint) == (TaskState.RUNNING, task.epoch + 1, task.checkpoint + 1)
    assert after.revision == 1
    assert (await store.resume(Wake(task.task_id, after.epoch))).verdict is Verdict.GRANTED
    await assert_sound(bench)


async def test_reply_to_a_call_that_stays_is_kept_whenever_it_came(store):
    first, task = calls(1)[0], await start(store)
    await written(store, put_of(task, going(), opens=(first,)))
    task = await get(store, task.task_id)
    await written(store, put_of(task, going(), entries=(entry("later"),)))
    await store.claim(ok(first, "answer"))

    await order(store, Rewind, task, to=2)

    (line,) = [line for line in await store.task_lines(task.task_id) if not line.is_forgotten]
    assert (line.key, line.state) == (first.key, CallState.OK)


async def test_rewind_fences_the_live_run(store):
    task = await start(store)

    await order(store, Rewind, task, to="start")

    assert isinstance(await store.put(put_of(task, going(), entries=(entry(),))), PutRefused)


async def test_reply_to_a_discarded_call_is_late(store):
    task, (_, second, _) = await story(store)
    await order(store, Rewind, task, to="start")

    assert (await store.claim(ok(second))).verdict is Verdict.LATE


async def test_before_a_name_discards_it_and_what_follows(store):
    task, _ = await story(store)

    done = await order(store, Rewind, task, to="before:b")

    assert "b" in done.discarded
    assert "a" not in done.discarded


async def test_call_that_was_given_up_after_the_point_is_asked_anew(store):
    first, second = calls(2)
    task_id = await park(store, [first, second])
    await store.claim(ok(first))
    await store.claim(failed(second))
    task = await get(store, task_id)
    await written(store, put_of(task, FAILED))

    done = await order(store, Retry, task)

    assert done.discarded == (second.key,)
    assert await live_keys(store, task_id) == {first.key}


async def test_retry_forgets_failures_and_calls_that_the_end_closed(store, bench):
    first, second = calls(2)
    task_id = await park(store, [first, second], all_of([first, second]))
    ruling = await store.claim(failed(first))
    await written(store, put_of(ruling.task, FAILED))

    done = await store.order(Retry(task_id=task_id))

    assert set(done.discarded) == {first.key, second.key}
    task = await get(store, task_id)
    assert (task.state, task.attempt, task.is_final_sent, task.finished_at) == (TaskState.RUNNING, 1, False, None)
    assert task.value is None
    assert task.revision == 1
    await assert_sound(bench)


async def test_end_that_was_told_before_a_retry_does_not_count_for_the_one_after_it(store):
    task = await start(store)
    await written(store, put_of(task, FAILED))
    before = await get(store, task.task_id)
    await order(store, Retry, task)
    task = await get(store, task.task_id)
    await written(store, put_of((await store.resume(Wake(task.task_id, task.epoch))).task, done()))

    await store.mark_final_sent({task.task_id: before.answered})

    task = await get(store, task.task_id)
    assert (task.state, task.is_final_sent) == (TaskState.DONE, False)
    await store.mark_final_sent({task.task_id: task.answered})
    assert (await get(store, task.task_id)).is_final_sent


async def test_retry_lets_a_held_task_go_on_now(store):
    task = await start(store)
    await written(store, put_of(task, hold(DAY)))

    await order(store, Retry, task)

    task = await get(store, task.task_id)
    assert (await store.resume(Wake(task.task_id, task.epoch))).verdict is Verdict.GRANTED


@pytest.mark.parametrize("kind", [Retry, Rewind])
async def test_finished_task_is_forked_and_not_taken_back(store, kind):
    task = await start(store)
    await written(store, put_of(task, done()))

    refused = await order(store, kind, task, **({"to": 1} if kind is Rewind else {}))

    assert isinstance(refused, OrderRefused)
    assert f"coatcheck fork {task.task_id}" in refused.detail


async def test_set_gives_an_entry_another_value(store, bench):
    task, _ = await story(store)

    done = await order(store, Rewind, task, sets={"a": encode("new")})

    assert done.set_keys == ("a",)
    known = await store.find_known(task.task_id)
    assert {one.key: one.value for one in known.recorded}["a"] == encode("new")
    lines = [line for line in await store.task_lines(task.task_id) if line.key == "a"]
    assert sorted(line.is_forgotten for line in lines) == [False, True]
    await assert_sound(bench)


async def test_set_answers_an_open_call(store):
    task, (_, second, _) = await story(store)

    done = await order(store, Rewind, task, sets={second.key: encode("by hand")})

    assert [peer.call_id for peer in done.cancels] == [second.call_id]
    known = await store.find_known(task.task_id)
    assert {one.key: one.value for one in known.recorded}[second.key] == encode("by hand")


async def test_refusals_say_what_there_is(store):
    task, _ = await story(store)

    unknown = await order(store, Rewind, task, to="before:aa")
    assert unknown.code == "unknown_name"
    assert "did you mean 'a'" in unknown.detail
    far = await order(store, Rewind, task, to=99)
    assert (far.code, "stands at 4" in far.detail) == ("unknown_checkpoint", True)
    assert (await order(store, Rewind, task, to=1, input=encode(2))).code == "input"
    assert (await store.order(Pause(task_id=new_id()))).code == "no_such_task"


async def test_number_of_thousands_of_digits_is_no_checkpoint(store):
    task, _ = await story(store)

    refused = await order(store, Rewind, task, to="9" * 5000)

    assert isinstance(refused, OrderRefused)
    assert refused.code == "unknown_target"


async def test_dry_run_changes_nothing(store):
    task, _ = await story(store)

    done = await order(store, Rewind, task, to="start", is_dry_run=True)

    assert done.is_dry_run
    assert len(done.discarded) == 5
    assert await get(store, task.task_id) == task


async def test_fork_begins_with_what_its_origin_had_and_leaves_it_alone(store, bench):
    task, (first, second, _) = await story(store)
    new = new_id()

    done = await order(store, Fork, task, at="latest", new_task_id=new)

    assert done.new_task_id == new
    assert any(second.key in warning for warning in done.warnings)
    assert await get(store, task.task_id) == task
    forked = await get(store, new)
    assert (forked.state, forked.forked_from, forked.addresses, forked.identity) == (
        TaskState.RUNNING,
        task.task_id,
        (),
        None,
    )
    known = await store.find_known(new)
    assert {one.key for one in known.recorded} == {"a", first.key, "b", "@fork"}
    assert (await store.resume(Wake(new, 1))).verdict is Verdict.GRANTED
    await assert_sound(bench)


async def test_finished_task_can_be_forked_with_another_input(store):
    task = await start(store)
    await written(store, put_of(task, done()))
    new = new_id()

    await order(store, Fork, task, at="start", new_task_id=new, input=encode("other"))

    assert (await get(store, new)).request == encode("other")


async def test_paused_task_records_replies_and_goes_on_with_them(store, bench):
    first = calls(1)[0]
    task_id = await park(store, [first])
    await store.order(Pause(task_id=task_id))

    assert (await store.claim(ok(first))).verdict is Verdict.RECORDED
    paused = await get(store, task_id)
    assert paused.state is TaskState.PAUSED
    assert (await store.resume(Wake(task_id, paused.epoch))).verdict is Verdict.DUPLICATE
    await assert_sound(bench)

    await store.order(Resume(task_id=task_id))
    task = await get(store, task_id)
    ruling = await store.resume(Wake(task_id, task.epoch))
    assert ruling.verdict is Verdict.GRANTED
    assert [one.key for one in ruling.known.recorded] == [first.key]


@pytest.mark.parametrize("takes_over", [False, True])
async def test_running_task_is_paused_by_its_next_write(store, takes_over):
    task = await start(store)
    await order(store, Pause, task)
    if takes_over:
        task = await get(store, task.task_id)  # as a run that began after the order sees it

    answer = await written(store, put_of(task, going(), entries=(entry(),)))

    assert answer.is_parked
    task = await get(store, task.task_id)
    assert (task.state, task.is_pausing) == (TaskState.PAUSED, False)


async def test_end_wins_over_a_pause(store):
    task = await start(store)
    await order(store, Pause, task)

    await written(store, put_of(task, done()))

    assert (await get(store, task.task_id)).state is TaskState.DONE


async def test_paused_task_can_be_cancelled(store):
    task_id = await park(store, calls(1))
    await store.order(Pause(task_id=task_id))

    assert (await store.cancel(cancel_of(task_id))).verdict is Verdict.RECORDED


async def test_two_rewinds_at_once_are_one_after_the_other(store, other):
    task, _ = await story(store)

    both = await asyncio.gather(order(store, Rewind, task, to=2), order(other, Rewind, task, to=1))

    assert all(isinstance(one, OrderDone) for one in both)
    after = await get(store, task.task_id)
    assert (after.revision, after.epoch) == (2, task.epoch + 2)


async def test_rewind_and_cancel_at_once_end_in_a_cancelled_task(store, other):
    task, _ = await story(store)

    done, ruling = await asyncio.gather(order(store, Rewind, task, to=2), other.cancel(cancel_of(task.task_id)))

    assert ruling.verdict is Verdict.RECORDED
    assert isinstance(done, OrderDone) or done.code == "finished"
    assert (await get(store, task.task_id)).state is TaskState.CANCELLED


async def test_rewind_and_reply_at_once_lose_neither(store, other, bench):
    first, task = calls(1)[0], await start(store)
    await written(store, put_of(task, parking(all_of([first])), opens=(first,)))

    await asyncio.gather(order(store, Rewind, task, to=2), other.claim(ok(first)))

    task = await get(store, task.task_id)
    assert task.state is TaskState.RUNNING
    known = await store.find_known(task.task_id)
    assert [one.key for one in known.recorded] == [first.key]
    await assert_sound(bench)


async def test_filter_finds_tasks_by_state_and_code(store):
    bad, good = await start(store), await start(store)
    await written(store, put_of(bad, FAILED))
    await written(store, put_of(good, done()))

    found = await store.find_for_order(Filter(states=(TaskState.FAILED,), code="handler_failed"), limit=10)

    assert found == [bad.task_id]
    assert await store.find_for_order(Filter(code="other"), limit=10) == []
    assert await store.find_for_order(Filter(since=bad.created_at + timedelta(hours=1)), limit=10) == []


async def test_filter_finds_what_lies_behind_many_that_do_not_fit(store, monkeypatch):
    monkeypatch.setattr("coatcheck.store.postgres.orders.FILTER_PAGE", 2)
    other = Finish(TaskState.FAILED, encode({"code": "other"}), DAY)
    ended = []
    for end in (other, other, FAILED, other, FAILED, FAILED):
        task = await start(store)
        await written(store, put_of(task, end))
        ended.append(task.task_id)

    wanted = Filter(states=(TaskState.FAILED,), code="handler_failed")

    assert await store.find_for_order(wanted, limit=10) == [ended[2], ended[4], ended[5]]
    assert await store.find_for_order(wanted, limit=2) == [ended[2], ended[4]]
    assert await store.find_for_order(Filter(), limit=5) == ended[:5]


async def test_order_is_told_in_the_history(store):
    task = await start(store, birth(history=HistoryLevel.OUTCOME))

    await order(store, Rewind, task, to="start", by="ann", reason="wrong price")

    after = await get(store, task.task_id)
    assert after.entry_count == task.entry_count + 1
    assert after.head is not None


async def test_fork_that_is_refused_leaves_no_entry_in_the_history_of_the_task_that_has_its_id(store):
    task, _ = await story(store, birth(history=HistoryLevel.OUTCOME))
    other = await start(store, birth(history=HistoryLevel.OFF))

    refused = await order(store, Fork, task, at=1, new_task_id=other.task_id)

    assert isinstance(refused, OrderRefused)
    assert refused.code == "exists"
    assert await store.read_history(other.task_id) == []
    assert await get(store, other.task_id) == other


async def test_redo_of_damage_forgets_no_pause(store):
    task = await start(store)
    await written(store, put_of(task, going(), entries=(entry("a"),)))
    task = await get(store, task.task_id)
    await order(store, Pause, task)

    await order(store, Rewind, task, to="before:a", epoch=task.epoch, is_damage=True)

    redone = await get(store, task.task_id)
    assert (redone.state, redone.is_pausing) == (TaskState.RUNNING, True)


async def test_bulk_of_orders_waits_for_a_broker_that_is_away_once(store, bench, monkeypatch):
    """Each try takes seconds, and a bulk may be thousands of tasks."""
    tasks = [await start(store, birth()) for _ in range(3)]
    tries = 0

    async def away(_: Client) -> Broker:
        nonlocal tries
        tries += 1
        raise BrokerUnavailable("it is away")

    monkeypatch.setattr(Client, "broker", away)
    client = Client(Settings(store="postgresql://nowhere"), open_store=lambda *_, **__: store)
    for task in tasks:
        await client.rewind(task.task_id, "start")

    assert tries == 1
    assert {(await get(store, task.task_id)).revision for task in tasks} == {1}
