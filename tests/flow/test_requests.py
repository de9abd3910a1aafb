"""The same request again: redelivered, duplicated, joined by another requester, or in conflict with itself."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta

import aio_pika
import pytest
from tests.flow.harness import PATIENCE_S, Rig, until
from tests.flow.test_bad_input import dead_letters

from coatcheck.store import TaskState
from coatcheck.worker import App, Client, Context, TaskFailed

APP = "tests.flow.flows:app"


def asking(service: str, peer: str, effects: Counter[str]) -> App:
    """An app whose handler leaves an effect, asks, and ends; effects are counted by topic."""
    app = App(service)

    def leave(topic: str) -> str:
        effects[topic] += 1
        return topic

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        await ctx.step(leave, topic, key="leave")
        return await ctx.call(peer, topic, timeout=60)

    return app


async def test_request_duplicated_while_parked_running_and_ended_has_one_effect_and_one_answer(rig: Rig) -> None:
    peer, requester, effects = await rig.peer(), await rig.requester(), Counter[str]()
    app = asking(rig.names.new(), peer.queue, effects)
    await rig.replica(app)
    await rig.replica(app)

    once = {"message_id": "order-1", "correlation_id": "c-1"}
    for _ in range(3):  # the copies race each other to the replicas
        await requester.send(app.service, "owls", **once)
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    await requester.send(app.service, "owls", **once)
    await until(lambda: _is_empty(rig, app.service), what="the duplicate is dealt with")
    await question.reply("hoo")
    first = await requester.reply("c-1")
    await requester.send(app.service, "owls", **once)
    again = await requester.reply("c-1", count=2)

    assert (first, again) == ("hoo", "hoo")
    assert effects == {"owls": 1}
    assert peer.arrived.empty()
    assert set(peer.seen.values()) == {1}
    assert await rig.store.count_tasks() == {TaskState.DONE: 1}


async def _is_empty(rig: Rig, queue: str) -> bool:
    return await rig.depth(queue) == 0


async def test_request_redelivered_while_its_task_is_parked_is_just_acked(rig: Rig) -> None:
    """What a replica's death between commit and ack leaves behind: a parked row and the request, back on its queue."""
    peer, requester, effects = await rig.peer(), await rig.requester(), Counter[str]()
    app = asking(rig.names.new(), peer.queue, effects)
    await rig.replica(app)

    asked_for = await requester.send(app.service, "owls", message_id="order-2")
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    copy = aio_pika.Message(b'"owls"', correlation_id=asked_for, reply_to=requester.queue, message_id="order-2")
    await _send_as_redelivered(rig, app.service, copy)
    await until(lambda: _is_empty(rig, app.service), what="the request is acked")
    await question.reply("hoo")

    assert await requester.reply(asked_for) == "hoo"
    assert effects == {"owls": 1}
    assert set(peer.seen.values()) <= {1, 2}  # an unmarked call may be sent again, under the same id


async def _send_as_redelivered(rig: Rig, queue: str, message: aio_pika.Message) -> None:
    """Put a request on the queue, take it before the replica can, and let the broker give it back."""
    connection = await aio_pika.connect(rig.settings.broker)
    taker = await connection.channel()
    taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    taking = await taker.declare_queue(queue, passive=True)
    await taker.set_qos(1)

    async def on_message(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        if not taken.done():
            taken.set_result(None)

    await taking.consume(on_message)
    for _ in range(50):  # the replica competes for it: send until this consumer was the lucky one
        await taker.default_exchange.publish(message, queue)
        await asyncio.wait([taken], timeout=0.1)
        if taken.done():
            break
    assert taken.done(), "the broker never gave it to us"
    await connection.close()


async def test_second_requester_of_the_same_task_is_answered_too(rig: Rig) -> None:
    peer, effects = await rig.peer(), Counter[str]()
    first, second = await rig.requester(), await rig.requester()
    app = asking(rig.names.new(), peer.queue, effects)
    await rig.replica(app)

    await first.send(app.service, "owls", headers={"cc-id": "shared"}, correlation_id="one")
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    await second.send(app.service, "owls", headers={"cc-id": "shared"}, correlation_id="two")
    await until(lambda: _has_addresses(rig, 2), what="the second address is noted")
    await question.reply("hoo")

    assert await first.reply("one") == "hoo"
    assert await second.reply("two") == "hoo"
    assert effects == {"owls": 1}


async def _has_addresses(rig: Rig, count: int) -> bool:
    (task,) = await rig.store.list_tasks()
    return len(task.addresses) == count


async def test_same_identity_with_another_body_is_refused(rig: Rig) -> None:
    peer, requester, effects = await rig.peer(), await rig.requester(), Counter[str]()
    app = asking(rig.names.new(), peer.queue, effects)
    await rig.replica(app)

    await requester.send(app.service, "owls", headers={"cc-id": "same"}, correlation_id="one")
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    await requester.send(app.service, "bats", headers={"cc-id": "same"}, correlation_id="two")
    problem = await requester.reply("two")
    await question.reply("hoo")

    assert problem["code"] == "identity_conflict"
    assert await requester.reply("one") == "hoo"
    assert effects == {"owls": 1}


async def test_duplicate_of_a_task_that_never_waited_runs_again_unless_it_asks_for_dedup(rig: Rig) -> None:
    app, runs = App(rig.names.new()), Counter[str]()

    @app.task
    async def plain(ctx: Context, _: str) -> int:
        runs["plain"] += 1
        return runs["plain"]

    @app.task(dedup=True)
    async def careful(ctx: Context, _: str) -> int:
        runs["careful"] += 1
        return runs["careful"]

    await rig.replica(app)
    requester = await rig.requester()

    answers = {}
    for handler in ("plain", "careful"):
        for number in (1, 2):
            await requester.send(app.service, "", type=handler, message_id=handler, correlation_id=handler)
            answers[handler, number] = await requester.reply(handler, count=number)

    assert answers == {("plain", 1): 1, ("plain", 2): 2, ("careful", 1): 1, ("careful", 2): 1}


async def test_request_that_does_not_fit_is_kept_if_its_result_was_to_be(rig: Rig) -> None:
    app = App(rig.names.new())

    @app.task
    async def order(ctx: Context, item: str, count: int) -> str:
        return item * count

    await rig.replica(app)
    async with Client(rig.settings) as client:
        ticket = await client.submit(app.service, {"item": "coat", "count": "two"}, keep=True)
        with pytest.raises(TaskFailed, match="count"):
            await ticket.result(timeout=PATIENCE_S)

        with pytest.raises(TaskFailed, match="count"):
            await client.result(ticket.task_id, timeout=PATIENCE_S)


async def test_request_that_does_not_fit_gets_a_clear_error(rig: Rig) -> None:
    app = App(rig.names.new())

    @app.task
    async def order(ctx: Context, item: str, count: int) -> str:
        return item * count

    await rig.replica(app)
    requester = await rig.requester()

    problem = await requester.reply(await requester.send(app.service, {"item": "coat", "count": "two"}))

    assert problem["code"] == "invalid_arguments"
    assert problem["status"] == 422
    assert "order" in problem["detail"]
    assert "`count`" in problem["detail"]
    assert await rig.store.count_tasks() == {}


async def test_result_whose_requester_is_gone_stays_fetchable(rig: Rig) -> None:
    app = App(rig.names.new())

    @app.task
    async def double(ctx: Context, number: int) -> int:
        return number * 2

    await rig.replica(app)
    requester = await rig.requester()

    await requester.send(app.service, 21, reply_to="cctest-long-gone", message_id="fetch-me")
    (task,) = await rig.task(TaskState.DONE)

    async with Client(rig.settings) as client:
        assert await client.result(task.task_id) == 42


async def test_submitted_result_is_kept_and_call_returns_it_directly(rig: Rig) -> None:
    app = App(rig.names.new())

    @app.task
    async def double(ctx: Context, number: int) -> int:
        if number < 0:
            raise ValueError("too small")
        return number * 2

    await rig.replica(app)

    async with Client(rig.settings) as client:
        ticket = await client.submit(app.service, 4)
        direct = await ticket.result(20)
        fetched = await client.result(ticket.task_id, timeout=20)
        called = await client.call(app.service, 5, timeout=20)
        with pytest.raises(TaskFailed) as failed:
            await client.call(app.service, -1, timeout=20)

    assert (direct, fetched, called) == (8, 8, 10)
    assert failed.value.code == "handler_failed"
    assert failed.value.type == "ValueError"
    assert failed.value.is_retryable


async def test_unknown_handler_is_held_and_runs_after_a_deploy_that_has_it(rig: Rig) -> None:
    service = rig.names.new()
    old, new = App(service), App(service, version="2")

    @old.task
    async def other(ctx: Context) -> str:
        return "other"

    @new.task
    async def wanted(ctx: Context, topic: str) -> str:
        return topic.upper()

    worker = await rig.replica(old)
    requester = await rig.requester()

    asked_for = await requester.send(service, "owls", type="wanted")
    (held,) = await rig.task(TaskState.HELD)
    worker.stop()
    await rig.sweeper()
    await rig.replica(new)  # whose arrival ends the pause: it would be half a minute

    assert await requester.reply(asked_for) == "OWLS"
    assert b"unknown_handler" in (held.value or b"")


async def test_request_whose_handler_stays_unknown_is_answered_after_a_limit(rig: Rig) -> None:
    app, requester = App(rig.names.new()), await rig.requester()

    @app.task
    async def other(ctx: Context) -> str:
        return "other"

    await rig.replica(app, hold_unknown=1)
    await rig.sweeper()

    asked_for = await requester.send(app.service, "owls", type="wanted", message_id="order-1")
    problem = await requester.reply(asked_for)
    await requester.send(app.service, "owls", type="wanted", message_id="order-1", correlation_id=asked_for)
    again = await requester.reply(asked_for, count=2)
    (task,) = await rig.task(TaskState.FAILED)

    assert problem["code"] == again["code"] == "unknown_handler"
    assert task.epoch > 1  # it was held first
    assert len(requester.finals(asked_for)) == 2


async def test_task_that_has_run_is_held_for_longer_than_the_limit_when_its_handler_is_gone(rig: Rig) -> None:
    service, peer, requester = rig.names.new(), await rig.peer(), await rig.requester()
    old, new = asking(service, peer.queue, Counter()), App(service)

    @new.task
    async def other(ctx: Context) -> str:
        return "other"

    worker = await rig.replica(old)
    asked_for = await requester.send(service, "owls", type="ask")
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    worker.stop()
    without = await rig.replica(new, hold_unknown=0)
    await question.reply("hoo")
    await rig.task(TaskState.HELD)
    without.stop()
    await until(lambda: not without.is_ready, what="it takes nothing more")
    await rig.sweeper()
    await rig.replica(old)

    assert await requester.reply(asked_for) == "hoo"
    assert len(requester.finals(asked_for)) == 1


async def test_request_to_be_kept_is_not_run_again(rig: Rig) -> None:
    requester, runs = await rig.requester(), list[str]()
    app = App(rig.names.new())

    @app.task
    async def at_once(ctx: Context, topic: str) -> int:
        runs.append(topic)
        return len(runs)

    await rig.replica(app)
    kept = {"message_id": "order-1", "headers": {"cc-keep": "1"}, "correlation_id": "c-1"}
    await requester.send(app.service, "owls", **kept)
    first = await requester.reply("c-1")
    await requester.send(app.service, "owls", **kept)
    again = await requester.reply("c-1", count=2)

    assert (first, again) == (1, 1)
    assert runs == ["owls"]


@pytest.mark.parametrize("state", ["running", "parked"])
async def test_only_so_many_requesters_wait_for_one_task_and_the_rest_are_told_so(rig: Rig, monkeypatch, state) -> None:
    for module in ("coatcheck.worker.requests", "coatcheck.store.decide"):
        monkeypatch.setattr(f"{module}.MOST_ADDRESSES", 4)
    peer, requester, going = await rig.peer(), await rig.requester(), asyncio.Event()
    app = asking(rig.names.new(), peer.queue, Counter())

    @app.task
    async def slow(ctx: Context, topic: str) -> str:
        await going.wait()
        return "hoo"

    await rig.replica(app)
    known = {"type": "slow" if state == "running" else "ask", "message_id": "order-1"}
    sent = [await requester.send(app.service, "owls", **known)]
    question = (await peer.asked())[0] if state == "parked" else None
    sent += [await requester.send(app.service, "owls", **known) for _ in range(6)]
    await until(lambda: sum(bool(requester.finals(each)) for each in sent) == 3, what="three too many are told so")
    going.set()
    if question is not None:
        await question.reply("hoo")
    answers = [await requester.reply(each) for each in sent]

    assert answers.count("hoo") == 4
    assert [each["code"] for each in answers if each != "hoo"] == ["too_many_requesters"] * 3


@pytest.mark.parametrize("is_answered", [True, False])
async def test_request_that_is_read_after_its_deadline_is_not_run(rig: Rig, is_answered: bool) -> None:
    app, requester, runs = App(rig.names.new()), await rig.requester(), list[str]()

    @app.task
    async def note(ctx: Context, topic: str) -> None:
        runs.append(topic)

    await rig.replica(app)
    over = {"cc-deadline": (datetime.now(UTC) - timedelta(minutes=1)).isoformat()}
    to = {} if is_answered else {"reply_to": None}
    asked_for = await requester.send(app.service, "late", headers=over, **to)
    if is_answered:
        assert (await requester.reply(asked_for))["code"] == "deadline_exceeded"
    else:
        [letter] = await dead_letters(rig, app.names.dead, 1)
        assert letter.headers["cc-reason"] == "deadline_exceeded"
    assert runs == []
    assert await rig.store.list_tasks() == []


async def test_repeat_after_the_deadline_is_answered_from_its_row(rig: Rig) -> None:
    peer, requester, effects = await rig.peer(), await rig.requester(), Counter[str]()
    app = asking(rig.names.new(), peer.queue, effects)
    await rig.replica(app)
    once = {"message_id": "order-1", "correlation_id": "c-1"}
    await requester.send(app.service, "owls", **once)
    (question,) = await peer.asked()
    await question.reply("hoo")
    await requester.reply("c-1")

    over = {"cc-deadline": (datetime.now(UTC) - timedelta(minutes=1)).isoformat()}
    await requester.send(app.service, "owls", headers=over, **once)

    assert await requester.reply("c-1", count=2) == "hoo"
    assert effects == {"owls": 1}


async def test_deadline_caps_calls_on_another_replica_too(rig: Rig) -> None:
    peer, requester, service = await rig.peer(), await rig.requester(), rig.names.new()
    deadline = datetime.now(UTC) + timedelta(minutes=2)

    def two_calls() -> App:
        app = App(service)

        @app.task
        async def ask(ctx: Context, _: str) -> str:
            await ctx.call(peer.queue, 1, timeout=3600)
            await ctx.call(peer.queue, 2, timeout=3600)
            await ctx.call(peer.queue, 3, timeout=10)
            assert ctx.deadline is not None
            return ctx.deadline.isoformat()

        return app

    worker = await rig.replica(two_calls())
    asked_for = await requester.send(service, "", headers={"cc-deadline": deadline.isoformat()})
    (first,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    worker.stop()
    await rig.replica(two_calls())
    await first.reply(None)
    (second,) = await peer.asked()
    await second.reply(None)
    (third,) = await peer.asked()
    await third.reply(None)

    assert await requester.reply(asked_for) == deadline.isoformat()
    latest = deadline + timedelta(seconds=6)
    said = [datetime.fromisoformat(each.message.headers["cc-deadline"]) for each in (first, second, third)]
    assert deadline < said[0] < latest
    assert deadline < said[1] < latest
    assert said[2] < deadline


async def test_journal_mismatch_is_held_with_both_sides_in_the_reason(rig: Rig) -> None:
    service, peer = rig.names.new(), await rig.peer()

    def version(argument: str) -> App:
        app = App(service)

        @app.task
        async def ask(ctx: Context, _: str) -> str:
            return await ctx.call(peer.queue, argument, timeout=60)

        return app

    worker = await rig.replica(version("before"))
    requester = await rig.requester()
    asked_for = await requester.send(service, "")
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    worker.stop()
    await rig.replica(version("after"))
    await question.reply("hoo")
    (held,) = await rig.task(TaskState.HELD)
    worker_that_fits = await rig.replica(version("before"))

    assert b"journal_mismatch" in (held.value or b"")
    assert requester.finals(asked_for) == []
    assert worker_that_fits.is_ready
