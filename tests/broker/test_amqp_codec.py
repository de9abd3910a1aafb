"""Our reading and writing of AMQP's message frames, beside pamqp's, which does the same the long way."""

import asyncio
import datetime as dt
import struct
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel, Connection, Queue
from pamqp.header import ContentHeader

from coatcheck.broker import Message
from coatcheck.broker.amqp import codec
from coatcheck.broker.amqp.socket import ChannelReceiver, Wire

FRAME_MAX = 4096

short_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60)
inner_keys = short_texts.filter(lambda key: len(key.encode()) <= 128)  # the driver cuts longer ones off
header_values = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=100),
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.none(),
    st.lists(st.integers(0, 9), max_size=3),
    st.dictionaries(inner_keys, st.booleans(), max_size=2),
    st.integers(0, 2**31).map(lambda seconds: dt.datetime.fromtimestamp(seconds, dt.UTC)),
)
headers = st.dictionaries(st.sampled_from(["cc-id", "cc-key", "cc-task", "traceparent"]), header_values)
messages = st.builds(
    Message,
    body=st.binary(max_size=3 * FRAME_MAX),
    correlation_id=st.none() | short_texts,
    reply_to=st.none() | short_texts,
    content_type=st.none() | short_texts,
    type=st.none() | short_texts,
    message_id=short_texts,
    headers=headers,
    content_encoding=st.none() | short_texts,
)


def frames_of(raw: bytes) -> list[tuple[int, Any]]:
    found = []
    while raw:
        size, channel, frame = pamqp.frame.unmarshal(raw)
        found.append((channel, frame))
        raw = raw[size:]
    return found


def publish(message: Message, **options: Any) -> bytes:
    given: dict[str, Any] = {
        "exchange": "",
        "routing_key": "queue",
        "mandatory": True,
        "frame_max": FRAME_MAX,
    } | options
    return codec.publish_frames(7, message, message.message_id or "id", **given)


def payload_of(frame: bytes) -> bytes:
    return frame[7:-1]


def deliver(tag: int = 1, *, redelivered: bool = False) -> bytes:
    return payload_of(pamqp.frame.marshal(Basic.Deliver("ctag", tag, redelivered, "", "queue"), 7))


def read(header: bytes, body: bytes = b"", **options: Any) -> codec.Arrived:
    given: dict[str, Any] = {"is_get": False, "is_dead": False} | options
    return codec.read_arrived(deliver(), header, body, **given)


@given(messages)
def test_what_we_write_the_driver_reads(message: Message) -> None:
    (_, method), (channel, header), *bodies = frames_of(publish(message))

    assert (method.exchange, method.routing_key, method.mandatory, channel) == ("", "queue", True, 7)
    properties = header.properties
    assert (properties.delivery_mode, properties.message_id) == (2, message.message_id)
    assert (properties.correlation_id, properties.reply_to) == (message.correlation_id, message.reply_to)
    assert (properties.content_type, properties.message_type) == (message.content_type, message.type)
    assert (properties.headers or {}) == message.headers
    assert b"".join(frame.value for _, frame in bodies) == message.body
    assert header.body_size == len(message.body)
    assert all(len(frame.value) <= FRAME_MAX - 8 for _, frame in bodies)


@given(messages)
def test_what_the_driver_writes_we_read(message: Message) -> None:
    properties = Basic.Properties(
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        headers={**message.headers, "x-other": {"deep": [1, {"er": "?"}]}},
        delivery_mode=1,
        priority=4,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        expiration="60000",
        message_id=message.message_id,
        timestamp=dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
        message_type=message.type,
        user_id="guest",
        app_id="app",
    )
    header = payload_of(pamqp.frame.marshal(ContentHeader(body_size=len(message.body), properties=properties), 7))

    arrived = read(header, message.body)

    assert arrived.message == message
    assert (arrived.tag, arrived.is_redelivered, arrived.delivery_count, arrived.broken) == (1, False, 1, None)
    assert codec.read_body_size(header) == len(message.body)


@given(st.binary(max_size=200))
def test_properties_of_any_bytes_are_read_or_said_to_be_broken(raw: bytes) -> None:
    arrived = read(struct.pack(">HHQ", 60, 0, 3) + raw, b"abc")

    assert arrived.message.body == b"abc"
    assert arrived.broken is None or arrived.message.headers == {"cc-broken": arrived.broken}


@given(messages, st.data())
def test_properties_cut_short_or_with_one_byte_wrong_never_raise(message: Message, data: st.DataObject) -> None:
    header = bytearray(payload_of(publish(message, frame_max=0).split(b"\xce", 1)[1] + b"\xce"))[: 12 + 300]
    at = data.draw(st.integers(12, max(12, len(header) - 1)))
    if at < len(header):
        header[at] ^= data.draw(st.integers(1, 255))

    assert read(bytes(header[: data.draw(st.integers(12, len(header)))])).tag == 1


@pytest.mark.parametrize(
    "message",
    [
        Message(correlation_id="x" * 256),
        Message(reply_to="ü" * 128),
        Message(type="\ud800"),
        Message(headers={"cc-id": object()}),  # type: ignore[dict-item]
        Message(headers={"cc-id": "x" * FRAME_MAX}),
        Message(headers={"cc-id": [1e300]}),
        Message(headers={"cc-id": dt.datetime(1960, 1, 1, tzinfo=dt.UTC)}),
    ],
)
def test_what_amqp_cannot_carry_is_refused(message: Message) -> None:
    with pytest.raises(ValueError, match=r"."):
        publish(message)


@pytest.mark.parametrize(
    "headers",
    [{"cc-id": [None] * 20_000}, {f"x-{number}": True for number in range(1001)}],
)
def test_headers_that_take_long_to_read_are_not_read(headers: dict[str, Any]) -> None:
    properties = Basic.Properties(headers=headers)
    header = payload_of(pamqp.frame.marshal(ContentHeader(body_size=0, properties=properties), 7))

    assert read(header).broken == "ValueError"


def test_deliveries_are_counted_by_the_broker_only() -> None:
    properties = Basic.Properties(headers={"x-delivery-count": 4})
    header = payload_of(pamqp.frame.marshal(ContentHeader(body_size=0, properties=properties), 7))

    first = codec.read_arrived(deliver(), header, b"", is_get=False, is_dead=False)
    again = codec.read_arrived(deliver(redelivered=True), header, b"", is_get=False, is_dead=False)

    assert (first.delivery_count, again.delivery_count) == (1, 5)


def test_confirms_and_returns_are_read() -> None:
    ack = payload_of(pamqp.frame.marshal(Basic.Ack(2**40, True), 7))
    returned = payload_of(pamqp.frame.marshal(Basic.Return(312, "NO_ROUTE", "", "queue"), 7))
    header = frames_of(publish(Message(message_id="m-1")))[1][1]

    assert codec.read_confirm(ack) == (2**40, True)
    assert codec.read_returned(returned, payload_of(pamqp.frame.marshal(header, 7))) == ("queue", "m-1")


def test_acks_and_requeues_are_what_the_driver_would_write() -> None:
    assert codec.ack_frame(7, 9) == pamqp.frame.marshal(Basic.Ack(9, False), 7)
    assert codec.ack_frame(7, 9, multiple=True) == pamqp.frame.marshal(Basic.Ack(9, True), 7)
    assert codec.requeue_frame(7, 9) == pamqp.frame.marshal(Basic.Nack(9, False, True), 7)


# --- splitting ---


START = pamqp.frame.marshal(Connection.Start(0, 9, {"capabilities": {}}, "PLAIN", "en_US"), 0)


class Collecting(ChannelReceiver):
    takes = frozenset({codec.DELIVER, codec.ACK})
    max_body = 10_000

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_message(self, method: int, args: bytes, header: bytes, body: bytes) -> None:
        arrived = codec.read_arrived(args, header, body, is_get=False, is_dead=False)
        self.heard.append((arrived.tag, arrived.message.body))

    def on_method(self, method: int, args: bytes) -> None:
        self.heard.append(codec.read_confirm(args))

    def on_close(self) -> None:
        self.heard.append("closed")


def stream() -> tuple[bytes, bytes]:
    """Frames as a broker sends them, for several channels in turn; and those of them that are the driver's."""
    body = b"y" * 5000
    mine, others = (
        [],
        [
            pamqp.frame.marshal(Queue.DeclareOk("q", 1, 2), 3),
            pamqp.frame.marshal(Channel.Close(406, "no", 0, 0), 7),
        ],
    )
    for tag in (1, 2):
        mine.append(pamqp.frame.marshal(Basic.Deliver("c", tag, False, "", "q"), 7))
        mine.append(pamqp.frame.marshal(ContentHeader(body_size=5000, properties=Basic.Properties()), 7))
        mine += [pamqp.frame.marshal(ContentBody(body[start : start + 2000]), 7) for start in (0, 2000, 4000)]
    mine.append(pamqp.frame.marshal(Basic.Ack(5, True), 7))
    mine.append(pamqp.frame.marshal(Basic.Ack(6, True), 8))  # of a channel that nobody listens to
    whole = [START, mine[0], others[0], *mine[1:4], codec.HEARTBEAT_FRAME, *mine[4:], others[1]]
    return b"".join(whole), b"".join((START, *others))


class Ears:
    """What a wire says of its broker."""

    def __init__(self, *receivers: ChannelReceiver) -> None:
        self.reader = asyncio.StreamReader()
        self.alarms: list[bool] = []
        self.violations: list[str] = []
        self.wire = Wire(self.reader, on_alarm=self.alarms.append, on_violation=self.violations.append)
        for number, receiver in enumerate(receivers, start=7):
            self.wire.attach(number, receiver)

    def hear(self, data: bytes, size: int = 1 << 16) -> None:
        for start in range(0, len(data), size):
            self.wire.data_received(data[start : start + size])

    async def driver_heard(self) -> bytes:
        self.reader.feed_eof()
        return await self.reader.read()


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 100, 2015, 100_000])
async def test_frames_are_told_apart_however_the_bytes_are_cut(size: int) -> None:
    collecting = Collecting()
    ears = Ears(collecting)
    whole, others = stream()

    ears.hear(whole, size)

    assert collecting.heard == [(1, b"y" * 5000), (2, b"y" * 5000), (5, True), "closed"]
    assert await ears.driver_heard() == others
    assert not ears.violations


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (b"AMQP\0\0\x09\x01", "another version"),
        (b"HTTP/1.1 400 Bad Request", "no frame: b'HTTP/1.1'"),
        (b"\x15\x03\x01\0\x02\x02\x46", "no frame"),
    ],
)
async def test_server_of_another_protocol_is_named_and_not_listened_to(first: bytes, said: str) -> None:
    ears = Ears()

    ears.hear(first)
    ears.hear(b"more")

    assert [said in violation for violation in ears.violations] == [True]
    assert await ears.driver_heard() == b""


async def test_driver_hears_of_a_line_that_carries_only_our_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the connection for dead: the broker sends no heartbeats where there is traffic."""
    monkeypatch.setattr("coatcheck.broker.amqp.socket._HEARTBEAT_EVERY_S", -1.0)
    ears = Ears(Collecting())

    ears.hear(START)
    ears.hear(pamqp.frame.marshal(Basic.Ack(5, True), 7))

    assert await ears.driver_heard() == START + 2 * codec.HEARTBEAT_FRAME


# --- what no broker may send ---


def content(size: int, *pieces: bytes, tag: int = 1, kind: int = 60) -> bytes:
    header = struct.pack(">HHQH", kind, 0, size, 0)
    frames = [codec.HEAD.pack(codec.HEADER, 7, len(header)) + header + b"\xce"]
    frames += [codec.HEAD.pack(codec.BODY, 7, len(piece)) + piece + b"\xce" for piece in pieces]
    return pamqp.frame.marshal(Basic.Deliver("c", tag, False, "", "q"), 7) + b"".join(frames)


BODY_FRAME = pamqp.frame.marshal(ContentBody(b"stray"), 7)
VIOLATIONS = {
    "a body of no message": BODY_FRAME,
    "an empty body of no message": codec.HEAD.pack(codec.BODY, 7, 0) + b"\xce",
    "a body before its header": pamqp.frame.marshal(Basic.Deliver("c", 1, False, "", "q"), 7) + BODY_FRAME,
    "a header of no message": pamqp.frame.marshal(ContentHeader(body_size=0), 7),
    "two headers": content(5) + content(5)[len(pamqp.frame.marshal(Basic.Deliver("c", 1, False, "", "q"), 7)) :],
    "more body than announced": content(5, b"123456"),
    "half a message and the next": content(5, b"123") + content(1, b"x", tag=2),
    "half a message and a confirm": content(5, b"123") + pamqp.frame.marshal(Basic.Ack(1), 7),
    "a body that never ends": content(2**63),
    "a content of another class": content(1, b"x", kind=50),
    "a header cut short": pamqp.frame.marshal(Basic.Deliver("c", 1, False, "", "q"), 7)
    + codec.HEAD.pack(codec.HEADER, 7, 5)
    + b"\0\x3c\0\0\0\xce",
    "a delivery without its tag": codec.method_frame(7, struct.pack(">IB", codec.DELIVER, 255) + b"c")
    + content(0)[len(pamqp.frame.marshal(Basic.Deliver("c", 1, False, "", "q"), 7)) :],
    "a confirm without its tag": codec.method_frame(7, struct.pack(">I", codec.ACK)),
    "a method cut short": codec.method_frame(7, b"\0\x3c"),
    "a method of an unknown class": codec.method_frame(7, struct.pack(">I", 0x630001)),
    "a method that is for brokers": pamqp.frame.marshal(Queue.Declare(queue="q", arguments={"a": [1] * 1000}), 7),
    "what this channel did not ask for": pamqp.frame.marshal(Basic.GetEmpty(), 7),
    "a second greeting": START,
    "a frame over the limit": codec.HEAD.pack(codec.BODY, 7, 1 << 17),
    "a frame of 4 GiB": codec.HEAD.pack(codec.METHOD, 7, 0xFFFFFFFF),
    "a frame of an unknown kind": codec.HEAD.pack(4, 7, 1) + b"x\xce",
    "a frame without its end": codec.HEAD.pack(codec.METHOD, 7, 1) + b"xx",
    "a tune to tiny frames": codec.method_frame(0, struct.pack(">IHIH", codec.TUNE, 0, 1, 0)),
    "a tune cut short": codec.method_frame(0, struct.pack(">IH", codec.TUNE, 0)),
}


@pytest.mark.parametrize("size", [1, 1 << 16])
@pytest.mark.parametrize("data", VIOLATIONS.values(), ids=VIOLATIONS.keys())
async def test_what_no_broker_may_send_ends_the_connection_and_delivers_nothing(data: bytes, size: int) -> None:
    collecting = Collecting()
    ears = Ears(collecting)

    ears.hear(START + data + content(1, b"x", tag=9), size)

    assert [violation.startswith("the broker broke AMQP: ") for violation in ears.violations] == [True]
    assert collecting.heard == []


@pytest.mark.parametrize("frame", [codec.HEARTBEAT_FRAME, pamqp.frame.marshal(Queue.DeclareOk("q", 1, 2), 3)])
async def test_flood_of_what_comes_now_and_then_ends_the_connection(frame: bytes) -> None:
    ears, now_s = Ears(), 0.0
    ears.wire._clock_loop = SimpleNamespace(time=lambda: now_s)  # type: ignore[assignment]
    ears.wire._counted_s = now_s
    ears.hear(START + frame * 4900)
    now_s = 1.5
    ears.hear(frame * 4900)
    assert not ears.violations

    ears.hear(frame * 5000)

    assert "more than 5000 heartbeats and answers within a second" in ears.violations[0]


async def test_greeting_with_a_table_that_takes_long_to_read_is_not_read() -> None:
    ears = Ears()

    ears.hear(pamqp.frame.marshal(Connection.Start(0, 9, {"a": [None] * 20_000}, "PLAIN", "en_US"), 0))

    assert "a greeting of" in ears.violations[0]
    assert await ears.driver_heard() == b""


@pytest.mark.parametrize(("offered", "taken"), [(0, 1 << 22), (1 << 30, 1 << 22), (1 << 17, 1 << 17), (4096, 4096)])
async def test_largest_frame_is_what_the_broker_offers_within_reason(offered: int, taken: int) -> None:
    ears = Ears()

    ears.hear(START + codec.method_frame(0, struct.pack(">IHIH", codec.TUNE, 7, offered, 9)))

    heard = (await ears.driver_heard())[len(START) :]
    assert heard == codec.method_frame(0, struct.pack(">IHIH", codec.TUNE, 7, taken, 9))


# --- bodies over the limit ---


async def test_body_over_the_limit_is_dropped_as_it_comes_and_the_next_one_is_whole() -> None:
    """Peak memory is far below the body, whichever way its frames are cut."""
    collecting, piece, count = Collecting(), b"z" * 100_000, 300
    ears = Ears(collecting)
    ears.hear(START + content(len(piece) * count))
    frame = codec.HEAD.pack(codec.BODY, 7, len(piece)) + piece + b"\xce"
    tracemalloc.start()
    try:
        for _ in range(count):
            ears.hear(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    ears.hear(content(3, b"abc", tag=2))

    assert not ears.violations
    assert collecting.heard == [(1, b"z" * 4096), (2, b"abc")]
    assert peak < 2_000_000  # of 30,000,000


def test_body_that_came_without_its_end_says_how_long_it_was() -> None:
    header = struct.pack(">HHQH", 60, 0, 500, 0)

    assert read(header, b"beginning").message.headers == {"cc-size": 500}
    assert read(header, b"x" * 500).message.headers == {}
