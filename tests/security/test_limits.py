"""Every limit at its edge: what just fits passes, one more is refused with words that say what to do."""

import asyncio
import gzip
import json
import os
from typing import Any

import cbor2
import msgspec
import pytest
import structlog
import zstandard
from tests.flow.harness import Rig, until
from tests.flow.outages import listen
from tests.flow.test_bad_input import dead_letters

from coatcheck.broker import BodyFormat, Limits, Message, parse_reply, parse_request
from coatcheck.broker.bodies import Body, parse_body
from coatcheck.broker.headers import Head
from coatcheck.broker.topology import takes_replies
from coatcheck.decoding import MOST_EXTREMES
from coatcheck.errors import MalformedMessage, OversizedMessage
from coatcheck.store import TaskState, blobs
from coatcheck.worker import App, Client, Context, TaskFailed

JSON, MSGPACK, CBOR = "application/json", "application/msgpack", "application/cbor"
LIMITS = Limits()


def refusal(raw: bytes, content_type: str | None, **options: Any) -> str:
    with pytest.raises(MalformedMessage) as caught:
        parse_body(raw, content_type, **options)
    return caught.value.code


# --- bodies that arrive ---


@pytest.mark.parametrize("content_type", [JSON, "text/plain", "application/octet-stream", None])
def test_body_of_the_largest_size_passes_and_one_more_byte_does_not(content_type: str | None):
    largest = b'"' + b"x" * (LIMITS.max_body - 2) + b'"'

    assert len(parse_body(largest, content_type).raw) == 1024 * 1024
    assert refusal(largest + b" ", content_type) == "oversized"


@pytest.mark.parametrize(
    ("content_type", "encode"), [(JSON, json.dumps), (MSGPACK, msgspec.msgpack.encode), (CBOR, cbor2.dumps)]
)
@pytest.mark.parametrize("kind", [list, dict])
def test_body_of_the_deepest_nesting_passes_and_one_more_level_does_not(content_type: str, encode: Any, kind: type):
    def nested(depth: int) -> bytes:
        value: Any = kind()
        for _ in range(depth - 1):
            value = [value] if kind is list else {"a": value}
        written = encode(value)
        return written.encode() if isinstance(written, str) else written

    parse_body(nested(LIMITS.max_depth), content_type)

    assert refusal(nested(LIMITS.max_depth + 1), content_type) == "too_deep"
    assert refusal(nested(300), content_type) == "too_deep"


def test_longest_number_passes_and_one_more_digit_does_not():
    assert parse_body(b"9" * 4300, JSON).decode() == 10**4300 - 1
    assert refusal(b"9" * 4301, JSON) == "undecodable"
    assert refusal(b"[" + b"9" * 5000 + b"]", JSON) == "undecodable"
    assert parse_body(b"9" * 4301, None).content_type is BodyFormat.TEXT  # not called a number, and so none


def bignum(size: int) -> bytes:
    return b"\xc2\x5a" + size.to_bytes(4, "big") + b"\xff" + os.urandom(size - 1)


def test_longest_number_in_cbor_passes_and_one_more_byte_does_not():
    for sign in (b"\xc2", b"\xc3"):
        assert isinstance(parse_body(sign + bignum(1785)[1:], CBOR).decode(), int)
        assert refusal(sign + bignum(1786)[1:], CBOR) == "undecodable"
    str(parse_body(bignum(1785), CBOR).decode())  # can be printed, as JSON's can


COLLIDING = {(2**61 - 1) * n: 0 for n in range(1, 20)}
HOSTILE = {
    "a fraction that takes half a minute to shorten": b"\xd8\x1e\x82" + bignum(400_000) + bignum(400_000),
    "a decimal that takes a minute to build": b"\xc4\x82\x01" + bignum(900_000),
    "keys whose hashes collide": cbor2.dumps(COLLIDING),
    "members whose hashes collide": cbor2.dumps(set(COLLIDING)),
    "a regular expression": b"\xd8\x23\x65(a+)+",
    "a MIME message": b"\xd8\x24\x64a: b",
    "a list that contains itself": b"\xd8\x1c\x81\xd8\x1d\x00",
    "references to one long text": b"\xd9\x01\x00\x82\x65owls!\xd8\x19\x00",
    "an exponent of 63 bits": b"\xc4\x82\x1b\x7f\xff\xff\xff\xff\xff\xff\xff\x01",
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_cbor_that_would_take_the_cpu_or_memory_is_refused(raw: bytes):
    assert refusal(raw, CBOR) == "undecodable"


def floods(entry: bytes) -> list[bytes]:
    """MessagePack with maps that have one key of the kind: in each size of map, and below another value."""
    alone = [head + entry + b"\x01" for head in (b"\x81", b"\xde\x00\x01", b"\xdf\x00\x00\x00\x01")]
    return [*alone, b"\x92\xa1a" + alone[0], b"\x82\xa1k\x01" + entry + b"\x01", b"\x81\xa1k\x91" + alone[2]]


NOT_A_KEY = {
    "a small number": b"\x07",
    "a negative number": b"\xe0",
    "a long number": b"\xcf" + b"\x01" * 8,
    "a signed number": b"\xd3" + b"\x01" * 8,
    "a fraction": b"\xcb" + b"\x01" * 8,
    "nothing": b"\xc0",
    "a truth": b"\xc3",
    "an array": b"\x91\xa1a",
    "a map": b"\x80",
    "an extension": b"\xd4\x05a",
    "a time": b"\xd6\xff\x00\x00\x00\x00",
}


@pytest.mark.parametrize("entry", NOT_A_KEY.values(), ids=NOT_A_KEY.keys())
def test_key_of_messagepack_is_text_or_bytes(entry: bytes):
    for raw in floods(entry):
        assert refusal(raw, MSGPACK) == "undecodable"
        with pytest.raises(blobs.CorruptBlob, match="neither text nor bytes"):
            blobs.decode(blobs.pack(blobs.Codec.MSGPACK, raw))
        with pytest.raises(MalformedMessage, match="neither text nor bytes"):
            Body(BodyFormat.MSGPACK, raw).decode()  # as from the row of a request that an older release let in


@pytest.mark.parametrize("key", ["a", "é" * 20, "x" * 300, "x" * 70_000, b"a", b"x" * 300, b"x" * 70_000])
def test_text_and_bytes_of_every_size_are_keys(key: str | bytes):
    value: Any = {key: [{key: 1.5, "second": None}, -7, 2**63, b"bytes", True], "last": {}}
    raw = msgspec.msgpack.encode(value)

    assert parse_body(raw, MSGPACK).decode() == value
    assert blobs.decode(blobs.pack(blobs.Codec.MSGPACK, raw)) == value


@pytest.mark.parametrize(("content_type", "codec"), [(JSON, "JSON"), (MSGPACK, "MSGPACK"), (CBOR, "CBOR")])
def test_numbers_as_keys_are_read_from_text_in_every_format(content_type: str, codec: str):
    raw = ENCODERS[content_type]({"1": "one", "-2": "two"})

    assert parse_body(raw, content_type).decode(dict[int, str]) == {1: "one", -2: "two"}
    assert blobs.decode(blobs.pack(blobs.Codec[codec], raw), dict[int, str]) == {1: "one", -2: "two"}


def test_key_of_stored_cbor_is_text_or_bytes():
    with pytest.raises(blobs.CorruptBlob, match="text string or byte string"):
        blobs.decode(blobs.pack(blobs.Codec.CBOR, cbor2.dumps({1: 1})))


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "compress", "GZIP", "gzip, gzip"])
def test_nothing_that_arrives_is_decompressed(encoding: str):
    bomb = gzip.compress(b"0" * 10_000_000)

    assert refusal(bomb, JSON, content_encoding=encoding) == "unsupported_encoding"


def test_stored_value_is_unpacked_up_to_its_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blobs, "MAX_UNPACKED_BYTES", 10_000)
    fits = blobs.pack(blobs.Codec.TEXT, b"0" * 10_000)
    bomb = blobs.pack(blobs.Codec.TEXT, b"0" * 10_001)
    assert len(bomb) < 100

    assert blobs.decode(fits) == "0" * 10_000
    with pytest.raises(blobs.CorruptBlob, match="over the limit of 10000"):
        blobs.decode(bomb)


def test_stored_value_that_lies_about_its_size_is_not_unpacked_beyond_it():
    honest = zstandard.ZstdCompressor(write_content_size=True).compress(b"0" * 5_000_000)
    liar = bytearray(honest)
    field = honest.index((5_000_000).to_bytes(4, "little"))
    liar[field : field + 4] = (1000).to_bytes(4, "little")

    with pytest.raises(blobs.CorruptBlob, match="cannot decompress"):
        blobs._decompress(bytes(liar))


# --- errors of peers, however they are written ---


ODD_ERRORS = {
    "an extension of MessagePack": (MSGPACK, {"detail": msgspec.msgpack.Ext(5, b"x"), "code": "mine"}),
    "a set": (CBOR, {"detail": {"a"}, "code": "mine"}),
    "undefined": (CBOR, {"more": cbor2.undefined, "code": "mine"}),
    "an unknown tag": (CBOR, {"more": cbor2.CBORTag(4711, "x"), "code": "mine"}),
    "a long number in CBOR": (CBOR, {"detail": 2**14_000, "code": "mine"}),
    "a long number in JSON": (JSON, {"detail": 10**4299, "code": "mine"}),
}
ENCODERS: dict[str, Any] = {MSGPACK: msgspec.msgpack.encode, CBOR: cbor2.dumps, JSON: msgspec.json.encode}


@pytest.mark.parametrize(("content_type", "problem"), ODD_ERRORS.values(), ids=ODD_ERRORS.keys())
def test_error_that_says_more_than_json_is_still_the_error_of_its_call(content_type: str, problem: Any):
    body = ENCODERS[content_type](problem)
    message = Message(body, correlation_id="1", content_type=content_type, headers={"cc-kind": "error"})

    reply = parse_reply(message)

    assert reply.problem is not None
    assert reply.problem["code"] == "mine"
    blobs.encode(reply.problem)  # as it will be stored


@pytest.mark.parametrize("content_type", [MSGPACK, CBOR])
def test_error_that_is_not_read_is_still_the_error_of_its_call(content_type: str):
    body = ENCODERS[content_type]({1: "numbered", "code": "mine"})
    message = Message(body, correlation_id="1", content_type=content_type, headers={"cc-kind": "error"})

    reply = parse_reply(message)

    assert reply.problem is not None
    assert reply.problem["code"] == "peer_error"
    assert "text" in reply.problem["detail"]


# --- headers ---


@pytest.mark.parametrize("header", ["cc-id", "cc-key", "cc-task", "cc-kind"])
def test_header_of_the_largest_size_passes_and_one_more_character_does_not(header: str):
    head = Head(Message(headers={header: "x" * 1024}), LIMITS)
    assert head.find_text(header) == "x" * 1024

    with pytest.raises(MalformedMessage, match="has 1025 characters; the limit is 1024"):
        Head(Message(headers={header: "x" * 1025}), LIMITS).find_text(header)


def test_token_of_the_largest_size_passes_and_one_more_character_is_not_quoted():
    room = 16 * 1024 - len("Bearer ")
    assert Head(Message(headers={"authorization": f"Bearer {'t' * room}"}), LIMITS).find_token() == "t" * room

    for header in (f"Bearer {'t' * (room + 1)}", "Basic tttt", "tttt", ["Bearer tttt"], "Bearer "):
        with pytest.raises(MalformedMessage) as caught:
            Head(Message(headers={"authorization": header}), LIMITS).find_token()
        assert caught.value.code == "bad_header"
        assert "tttt" not in str(caught.value)


async def test_header_that_fills_a_frame_is_buried_and_does_not_come_back(rig: Rig):
    """With the reason added, such a letter would fit into no frame: it must not be tried again for ever."""
    requester = await rig.requester()
    app = App(rig.names.new())
    worker = await rig.replica(app)

    for name in ("cc-id", "cc-deadline", "traceparent"):
        await requester.send(app.service, 1, headers={name: "x" * 130_000}, reply_to=None)
    first, second = await dead_letters(rig, app.names.dead, 2)

    assert {first.headers["cc-reason"], second.headers["cc-reason"]} == {"bad_header"}
    assert {first.headers["cc-broken"], second.headers["cc-broken"]} == {"left out: cc-id", "left out: cc-deadline"}
    assert worker._broker is not None
    assert worker._broker.stats.lost_count == 0
    assert worker._broker.stats.redelivered_count == 0


# --- addresses ---


@pytest.mark.parametrize(
    "queue",
    [
        "research.control", "other.control", "research.dead", "other.dead", "research.broadcast", "coatcheck.sweeper",
        "coatcheck.dead", "coatcheck.anything", "amq.rabbitmq.trace", "amq.direct", "amq.", "amq.default",
        f"research.replica.{'0' * 32}", "line\nbreak.control",
    ],
)  # fmt: skip
def test_queue_that_takes_orders_is_no_place_for_replies(queue: str):
    assert not takes_replies(queue)


@pytest.mark.parametrize(
    "queue",
    [
        "research.replies", "other.replies", "amq.gen-JzTY20BRgKO-HjmUJj0wLg", "amq.rabbitmq.reply-to.g1h2A.x==",
        f"coatcheck.private.{'0' * 32}", "my-replies", "control", "dead", "x" * 255, "ümlaut", "a.control.b",
    ],
)  # fmt: skip
def test_queue_of_a_requester_is(queue: str):
    assert takes_replies(queue)


async def test_request_with_a_reply_to_that_must_not_be_published_to_is_buried_and_nobody_told(rig: Rig):
    requester = await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def echo(ctx: Context, value: int) -> int:
        return value

    await rig.replica(app)
    bad = [app.service, app.names.control, app.names.dead, rig.settings.sweeper_queue, "amq.rabbitmq.trace"]
    for reply_to in bad:
        await requester.send(app.service, 1, reply_to=reply_to)
        await requester.send(app.service, None, raw=b"{", reply_to=reply_to)  # malformed: whom would we tell?
    letters = await dead_letters(rig, app.names.dead, 2 * len(bad))

    # A queue with an unusual name is a custom sweeper's, and of a malformed request nobody looks at it.
    reasons = sorted(str(letter.headers["cc-reason"]) for letter in letters)
    assert reasons == ["bad_reply_to"] * len(bad) + ["undecodable"] * len(bad)
    assert await requester.reply(await requester.send(app.service, 2)) == 2
    assert await rig.depth(app.names.dead) == 0
    assert await rig.depth(app.names.control) == 0


async def test_peer_whose_name_no_queue_can_have_is_no_route(rig: Rig):
    requester = await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, size: int) -> str:
        [error] = await ctx.gather(ctx.call("x" * size, 1), return_exceptions=True)
        return error.code

    await rig.replica(app)

    assert await requester.reply(await requester.send(app.service, 255)) == "no_route"
    assert await requester.reply(await requester.send(app.service, 256)) == "no_route"


def test_property_with_a_nul_is_refused():
    for name in ("reply_to", "correlation_id", "type", "message_id"):
        bad: dict[str, Any] = {name: "a\0b"}
        with pytest.raises(MalformedMessage, match=f"{name} contains a NUL"):
            parse_request(Message(b"1", **bad))


# --- what leaves ---


async def test_client_refuses_a_body_over_the_limit_before_it_leaves(rig: Rig):
    app = App(rig.names.new())

    @app.task
    async def measure(ctx: Context, text: str) -> int:
        return len(text)

    await rig.replica(app, max_body=2048)
    async with Client(rig._with({"max_body": 2048})) as client:
        assert await client.call(app.service, "x" * 2046, timeout=20) == 2046
        with pytest.raises(OversizedMessage, match="max_body is 2048"):
            await client.submit(app.service, "x" * 2047)


@pytest.mark.parametrize("mode", ["required", "off"])
async def test_result_call_and_fan_out_at_their_limits(rig: Rig, mode: str):
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def give(ctx: Context, size: int) -> str:
        return "x" * (size - 2)

    @app.task
    async def ask(ctx: Context, size: int) -> None:
        await ctx.call(peer.queue, "x" * (size - 2))

    @app.task
    async def fan(ctx: Context, count: int) -> int:
        return len(await ctx.gather(*(ctx.call(peer.queue, n) for n in range(count))))

    async def answer(asked: Any) -> None:
        await asked.reply(None)

    peer.answer = answer
    await rig.replica(app, max_body=8192, max_fan_out=5, checkpointing=mode)

    async def code(handler: str, argument: int) -> Any:
        reply = await requester.reply(await requester.send(app.service, argument, type=handler))
        return reply["code"] if isinstance(reply, dict) else "fine"

    assert [await code("give", 8192), await code("give", 8193)] == ["fine", "result_too_large"]
    assert [await code("ask", 8192), await code("ask", 8193)] == ["fine", "call_too_large"]
    assert [await code("fan", 5), await code("fan", 6)] == ["fine", "too_many_calls"]


@pytest.mark.parametrize("letter", ["x", None], ids=["compressible", "not"])
@pytest.mark.parametrize("is_live", [False, True], ids=["parked", "live"])
async def test_replies_of_one_task_are_bounded_together(rig: Rig, letter: str | None, is_live: bool):
    """Also while a step keeps the run in RAM; a run that is resumed is not even given what is too much."""
    peer, requester, going = await rig.peer(), await rig.requester(), asyncio.Event()
    app, size = App(rig.names.new()), 8192

    async def linger() -> None:
        await going.wait()

    @app.task
    async def fan(ctx: Context, count: int) -> int:
        calls = ctx.gather(*(ctx.call(peer.queue, n) for n in range(count)))
        return len((await asyncio.gather(calls, ctx.step(linger, key="linger")))[0] if is_live else await calls)

    async def answer(asked: Any) -> None:
        await asked.reply(letter * size if letter else os.urandom(size // 2).hex())

    peer.answer = answer
    worker = await rig.replica(app, max_history=4 * size + 1000)
    answers = []
    for count in (4, 5):
        going.clear()
        asked_for = await requester.send(app.service, count)
        if is_live:
            await until(lambda: applied(worker) >= sum(range(4, count + 1)), what="all replies are in")  # noqa: B023
            going.set()
        answers.append(await requester.reply(asked_for))

    assert answers[0] == 4
    assert answers[1]["code"] == "history_too_large"
    assert "COATCHECK_MAX_HISTORY" in answers[1]["detail"]


def applied(worker: Any) -> float:
    found = [worker.metrics.registry.get_sample_value("coatcheck_claims_total", {"result": it}) for it in APPLIED]
    return sum(each or 0.0 for each in found)


APPLIED = ("recorded", "woke")


async def test_checkpoint_is_warned_of_and_refused_at_its_limits(rig: Rig):
    heard = listen(rig)
    requester = await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def record(ctx: Context, size: int) -> int:
        return len(await ctx.step(os.urandom, size - 8, returns=bytes))  # a blob has a head of 8 bytes

    await rig.replica(app, checkpoint_warn=2000, checkpoint_refuse=4000)

    async def reply(size: int) -> Any:
        return await requester.reply(await requester.send(app.service, size))

    assert await reply(2000) == 1992
    assert heard.all("checkpoint_large") == []
    assert await reply(2001) == 1993
    assert await reply(4000) == 3992
    assert len(heard.all("checkpoint_large")) == 2
    problem = await reply(4001)
    assert problem["code"] == "checkpoint_too_large"
    assert problem["detail"] == (
        "a commit of 4,001 bytes is over the limit of 4,000; keep large values elsewhere and pass references, "
        "or raise COATCHECK_CHECKPOINT_REFUSE"
    )
    structlog.reset_defaults()


async def test_progress_message_is_cut(rig: Rig):
    app = App(rig.names.new())

    @app.task
    async def tell(ctx: Context) -> None:
        ctx.progress(1, 2, "x" * 100_000)
        await ctx.sleep(3600)

    await rig.replica(app)
    async with Client(rig.settings) as client:
        ticket = await client.submit(app.service)
        progress = await anext(ticket.progress())
        [task] = await rig.task(TaskState.PARKED)

    assert progress.message == "x" * 500
    assert task.progress is not None
    assert task.progress["message"] == "x" * 500


async def test_client_hears_what_was_too_large(rig: Rig):
    app = App(rig.names.new())

    @app.task
    async def give(ctx: Context) -> str:
        return "x" * 3000

    await rig.replica(app, max_body=2048)
    async with Client(rig.settings) as client:
        with pytest.raises(TaskFailed, match="a result of 3,002 bytes; the limit is 2,048"):
            await client.call(app.service, timeout=20)


def test_body_of_numbers_that_are_slow_to_read_is_refused_and_a_few_are_read() -> None:
    few, many = [f"[{'1e308,' * count}1e-320]".encode() for count in (MOST_EXTREMES - 1, 100_000)]

    with pytest.raises(MalformedMessage, match="exponents") as refusal:
        parse_body(many, "application/json")

    assert refusal.value.code == "undecodable"
    assert len(parse_body(few, "application/json").decode(list[float])) == MOST_EXTREMES
