"""A call's id is what its answer is believed by: nobody can guess one, and a wrong one changes nothing."""

import os
import time
import uuid
from uuid import UUID

import pytest
from tests.flow.harness import Rig, until
from tests.flow.outages import metric
from tests.flow.test_bad_input import dead_letters

from coatcheck.store import CallState, TaskState
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import CallId, Known, NewCall
from coatcheck.worker import App, Context, Worker
from coatcheck.worker.engine.journal import Ledger


def opened(ledger: Ledger, key: str) -> UUID:
    def make(key: str, call_id: CallId) -> NewCall:
        return NewCall(call_id, key, Kind.CALL, "peer", b"")

    return ledger.open(key, make)


def test_call_id_is_74_bits_of_the_systems_randomness_and_the_time(monkeypatch: pytest.MonkeyPatch):
    """And of nothing else: neither task nor key goes into it."""
    given = [bytes(range(16)), bytes(range(100, 116))]
    asked = list(given)
    monkeypatch.setattr(os, "urandom", lambda count: asked.pop(0)[:count])
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_123_456_789)
    ledger = Ledger(Known(), locate=lambda: "")

    found = [opened(ledger, "a"), opened(ledger, "b")]

    assert asked == []
    for call_id, random in zip(found, given, strict=True):
        assert (call_id.version, call_id.variant, call_id.int >> 80) == (7, uuid.RFC_4122, 1_700_000_000_123)
        free = (1 << 76) - 1 & ~(0b11 << 62)
        assert call_id.int & free == int.from_bytes(random, "big") & free


def test_call_ids_do_not_repeat_for_the_same_task_and_key():
    found = {opened(Ledger(Known(), locate=lambda: ""), "same") for _ in range(1000)}

    assert len(found) == 1000


def acked(worker: Worker) -> int:
    assert worker._broker is not None
    return worker._broker.stats.acked_count


def asking(service: str, peer: str) -> App:
    app = App(service)

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        return await ctx.call(peer, topic, timeout=60)

    return app


async def test_guessed_and_foreign_answers_change_nothing_and_are_accounted_for(rig: Rig):
    """Random ids, ids near a real one, the task's own id, an id in another form; as result, error and progress."""
    peer, requester = await rig.peer(), await rig.requester()
    app = asking(rig.names.new(), peer.queue)
    worker = await rig.replica(app)
    asked_for = await requester.send(app.service, "owls")
    [question] = await peer.asked()
    [task] = await rig.task(TaskState.PARKED)
    real = UUID(question.correlation_id or "")
    near = [str(UUID(int=real.int ^ (1 << bit))) for bit in (0, 1, 63, 127)]
    guesses = [*near, str(uuid.uuid4()), str(task.task_id), "owls", asked_for]
    for guess in guesses:
        await requester.send(app.names.replies, "forged", correlation_id=guess, reply_to=None)
    for kind in ("error", "progress"):
        await requester.send(app.names.replies, {}, correlation_id=near[0], reply_to=None, headers={"cc-kind": kind})

    letters = await dead_letters(rig, app.names.dead, len(guesses) + 2)

    assert {letter.headers["cc-reason"] for letter in letters} == {"unknown_call"}
    assert metric(worker, "dead_letters_total", reason="unknown_call") == len(guesses) + 2
    [untouched] = await rig.task(TaskState.PARKED)
    assert (untouched.epoch, untouched.seq, untouched.checkpoint) == (task.epoch, task.seq, task.checkpoint)
    await question.reply("hoo")
    assert await requester.reply(asked_for) == "hoo"


async def test_first_answer_counts_and_a_second_one_is_counted(rig: Rig):
    peer, requester = await rig.peer(), await rig.requester()
    app = asking(rig.names.new(), peer.queue)
    worker = await rig.replica(app)
    asked_for = await requester.send(app.service, "owls")
    [question] = await peer.asked()

    await question.reply("hoo")
    assert await requester.reply(asked_for) == "hoo"
    await question.reply("forged later")
    await until(lambda: metric(worker, "claims_total", result="duplicate") == 1, what="the second answer is counted")

    [line] = await rig.store.task_lines((await rig.task(TaskState.DONE))[0].task_id)
    assert line.state is CallState.OK
    assert len(requester.finals(asked_for)) == 1


async def test_answer_on_the_queue_of_another_service_is_unknown_there(rig: Rig):
    """Two services on one database: whoever may only write to one cannot answer, resume or cancel for the other."""
    peer, requester = await rig.peer(), await rig.requester()
    mine, other = asking(rig.names.new("mine"), peer.queue), asking(rig.names.new("other"), peer.queue)
    await rig.replica(mine)
    stranger = await rig.replica(other)
    before = acked(stranger)
    asked_for = await requester.send(mine.service, "owls")
    [question] = await peer.asked()
    [task] = await rig.task(TaskState.PARKED)

    await requester.send(other.names.replies, "forged", correlation_id=question.correlation_id, reply_to=None)
    cancel = {"cc-kind": "cancel", "cc-task": str(task.task_id)}
    await requester.send(other.names.control, None, raw=b"", headers=cancel, reply_to=None, content_type=None)
    resume = {"cc-kind": "resume", "cc-task": str(task.task_id), "cc-epoch": task.epoch}
    await requester.send(other.names.replies, None, raw=b"", headers=resume, reply_to=None)
    [letter] = await dead_letters(rig, other.names.dead, 1)

    # The forged answer, the cancel, its own broadcast of the cancel, the resume.
    await until(lambda: acked(stranger) == before + 4, what="the other service has dealt with all of it")
    assert letter.headers["cc-reason"] == "unknown_call"
    [untouched] = await rig.task(TaskState.PARKED)
    assert (untouched.epoch, untouched.seq) == (task.epoch, task.seq)
    await question.reply("hoo")
    assert await requester.reply(asked_for) == "hoo"


async def test_resume_of_a_lease_that_is_over_needs_the_queue_of_its_own_service(rig: Rig):
    requester = await rig.requester()
    mine, other = rig.names.new("mine"), App(rig.names.new("other"))
    ran: list[str] = []

    @other.task(name="ask")
    async def work(ctx: Context) -> None:
        ran.append("by the wrong service")

    stranger = await rig.replica(other)
    before = acked(stranger)
    sql = await rig.sql()
    task_id = uuid.uuid4()
    await sql.execute(
        """INSERT INTO coatcheck.task (id, service, handler, version, state, epoch, digest, request, due_at, look_at)
           VALUES ($1, $2, 'ask', '1', 'running', 1, '', $3, now() - interval '1 h', now() + interval '1 h')""",
        task_id, mine, b"",
    )  # fmt: skip
    resume = {"cc-kind": "resume", "cc-task": str(task_id), "cc-epoch": 1}
    await requester.send(other.names.replies, None, raw=b"", headers=resume, reply_to=None)

    await until(lambda: acked(stranger) == before + 1, what="the other service has dealt with it")
    assert await sql.fetchval("SELECT epoch FROM coatcheck.task WHERE id = $1", task_id) == 1
    assert ran == []
