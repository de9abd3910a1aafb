"""Bad input of every kind to every queue: no consumer dies, nothing loops, each ends in the dead-letter queue with a
reason.
"""

import json
import uuid
from typing import Any

import aio_pika
import pytest
from tests.flow.harness import Rig, until

from coatcheck.store import TaskState
from coatcheck.worker import App, Context

DEEP = b"[" * 5000 + b"]" * 5000

BODIES: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "not json": (b"{nonsense", {"content_type": "application/json"}, "undecodable"),
    "cut off json": (b'{"a": [1, 2', {"content_type": "application/json"}, "undecodable"),
    "not a number": (b'{"a": NaN}', {"content_type": "application/json"}, "undecodable"),
    "not utf-8": (b'"\xff\xfe"', {"content_type": "application/json"}, "undecodable"),
    "lone surrogate": (b'"\\ud800"', {"content_type": "application/json"}, "undecodable"),
    "too deep": (DEEP, {"content_type": "application/json"}, "too_deep"),
    "too deep without type": (DEEP, {}, "too_deep"),
    "oversized": (b'"' + b"x" * (1024 * 1024) + b'"', {"content_type": "application/json"}, "oversized"),
    "broken msgpack": (b"\xc1\xc1", {"content_type": "application/msgpack"}, "undecodable"),
    "compressed": (b"\x1f\x8b\x08", {"content_encoding": "gzip"}, "unsupported_encoding"),
    "wrong version": (b"1", {"headers": {"cc-version": 99}}, "wrong_version"),
    "unknown kind": (b"1", {"headers": {"cc-kind": "surprise"}}, "unknown_kind"),
}


def patient(service: str, peer: str) -> App:
    app = App(service)

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        return await ctx.call(peer, topic, timeout=60)

    return app


async def dead_letters(rig: Rig, queue: str, count: int) -> list[aio_pika.abc.AbstractIncomingMessage]:
    async def is_there() -> bool:
        return await rig.depth(queue) >= count

    await until(is_there, what=f"{count} dead letters in {queue}")
    channel = await rig.channel()
    declared = await channel.declare_queue(queue, passive=True)
    letters = []
    while (letter := await declared.get(no_ack=True, fail=False)) is not None:
        letters.append(letter)
    return letters


@pytest.mark.parametrize("suffix", ["", ".replies", ".control"])
async def test_every_bad_body_is_buried_with_its_reason_and_the_consumer_lives(rig: Rig, suffix: str) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app = patient(rig.names.new(), peer.queue)
    worker = await rig.replica(app)

    expected = {}
    for name, (body, properties, reason) in BODIES.items():
        call_id = str(uuid.uuid4())
        kind = {"cc-kind": "cancel"} if suffix == ".control" else {}
        headers = kind | properties.get("headers", {})
        usual = {"content_type": None, "reply_to": None} | properties | {"headers": headers}
        await requester.send(app.service + suffix, None, raw=body, correlation_id=call_id, **usual)
        expected[call_id] = (name, reason)
    letters = await dead_letters(rig, app.names.dead, len(expected))

    found = {letter.correlation_id: letter.headers["cc-reason"] for letter in letters}
    assert found == {call_id: reason for call_id, (_, reason) in expected.items()}
    assert {letter.headers["cc-queue"] for letter in letters} == {app.service + suffix}
    assert all(letter.headers["cc-detail"] for letter in letters)
    assert {letter.body for letter in letters} == {body for body, _, _ in BODIES.values()}
    asked_for = await requester.send(app.service, "owls")
    (question,) = await peer.asked()
    await question.reply("hoo")
    assert await requester.reply(asked_for) == "hoo"
    assert worker.is_ready
    assert await rig.depth(app.service + suffix) == 0


async def test_replies_nobody_asked_for_are_buried(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app = patient(rig.names.new(), peer.queue)
    await rig.replica(app)

    await requester.send(app.names.replies, "guess", correlation_id=str(uuid.uuid4()))
    await requester.send(app.names.replies, "guess", correlation_id="not-a-call-id")
    await requester.send(app.names.replies, "guess", correlation_id=None)
    letters = await dead_letters(rig, app.names.dead, 3)

    reasons = sorted(str(letter.headers["cc-reason"]) for letter in letters)
    assert reasons == ["no_correlation_id", "unknown_call", "unknown_call"]


async def test_sender_of_a_malformed_request_is_told_so(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app = patient(rig.names.new(), peer.queue)
    await rig.replica(app)

    asked_for = await requester.send(app.service, None, raw=b"{nonsense")
    problem = await requester.reply(asked_for)

    assert problem["code"] == "malformed_message"
    assert "undecodable" in problem["detail"]
    assert len(await dead_letters(rig, app.names.dead, 1)) == 1


async def test_properties_postgres_would_refuse_do_not_reach_it(rig: Rig) -> None:
    """A NUL in any property that would become a text column: buried, while its neighbours in the same batch go on."""
    peer, requester = await rig.peer(), await rig.requester()
    app = patient(rig.names.new(), peer.queue)
    await rig.replica(app)

    bad: list[dict[str, Any]] = [
        {"message_id": "a\x00b"},
        {"headers": {"cc-id": "a\x00b"}},
        {"correlation_id": "c\x00d"},
        {"type": "ask\x00"},
        {"reply_to": "q\x00"},
    ]
    for properties in bad:
        await requester.send(app.service, "owls", **properties)
        await requester.send(app.service, "bats")
    questions = await peer.asked(len(bad))
    letters = await dead_letters(rig, app.names.dead, len(bad))

    assert {question.body for question in questions} == {"bats"}
    assert {letter.headers["cc-reason"] for letter in letters} == {"bad_property", "bad_header"}


async def test_text_with_a_nul_travels_through_bodies_and_failures(rig: Rig) -> None:
    app = App(rig.names.new())

    @app.task
    async def fail(ctx: Context, text: str) -> str:
        raise ValueError(f"could not take {text}")

    await rig.replica(app)
    requester = await rig.requester()

    problem = await requester.reply(await requester.send(app.service, "a\x00b"))
    (task,) = await rig.task(TaskState.FAILED)

    assert problem["detail"] == "could not take a\x00b"
    assert "could not take a" in (task.traceback or "")


async def test_result_that_cannot_be_encoded_fails_with_the_path(rig: Rig) -> None:
    app = App(rig.names.new())

    @app.task
    async def odd(ctx: Context, _: str) -> dict[str, Any]:
        return {"fine": 1, "odd": [object()]}

    await rig.replica(app)
    requester = await rig.requester()

    problem = await requester.reply(await requester.send(app.service, ""))

    assert "$.odd[0]" in json.dumps(problem)


async def test_send_to_a_queue_that_does_not_exist_is_kept_as_a_dead_letter(rig: Rig) -> None:
    app = App(rig.names.new())

    @app.task
    async def tell(ctx: Context, _: str) -> str:
        await ctx.send("cctest-nobody-home", {"news": 1})
        return "told"

    await rig.replica(app)
    requester = await rig.requester()

    assert await requester.reply(await requester.send(app.service, "")) == "told"
    (letter,) = await dead_letters(rig, app.names.dead, 1)
    assert letter.headers["cc-reason"] == "no_route"
    assert json.loads(letter.body) == {"news": 1}


@pytest.mark.parametrize("inside", [bytearray(b"\xff\xfe"), 1e30, {"a": [1]}], ids=["bytes", "float", "table"])
async def test_header_with_an_inside_is_buried_and_ends_no_replica(rig: Rig, inside: Any) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app = patient(rig.names.new(), peer.queue)
    await rig.replica(app)

    await requester.send(app.service, "owls", headers={"cc-task": [inside]})
    (letter,) = await dead_letters(rig, app.names.dead, 1)
    asked_for = await requester.send(app.service, "owls", type="ask")
    (question,) = await peer.asked()
    await question.reply("hoo")

    assert letter.headers["cc-reason"] == "bad_header"
    assert "cc-task" not in letter.headers
    assert await requester.reply(asked_for) == "hoo"
