"""Our reading and writing of AMQP's message frames, beside pamqp's, which does the same the long way."""

import asyncio
import datetime as dt
import struct
from typing import Any

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel, Queue
from pamqp.header import ContentHeader

from coatcheck.broker import Message
from coatcheck.broker import amqp_codec as codec
from coatcheck.broker.amqp_wire import Receiver, Wire

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
    assert codec.BODY_SIZE.unpack_from(header) == (len(message.body),)


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


class Collecting(Receiver):
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
            codec.HEARTBEAT_FRAME,
            pamqp.frame.marshal(Channel.Close(406, "no", 0, 0), 7),
        ],
    )
    for tag in (1, 2):
        mine.append(pamqp.frame.marshal(Basic.Deliver("c", tag, False, "", "q"), 7))
        mine.append(pamqp.frame.marshal(ContentHeader(body_size=5000, properties=Basic.Properties()), 7))
        mine += [pamqp.frame.marshal(ContentBody(body[start : start + 2000]), 7) for start in (0, 2000, 4000)]
    mine.append(pamqp.frame.marshal(Basic.Ack(5, True), 7))
    mine.append(pamqp.frame.marshal(Basic.Ack(6, True), 8))  # of a channel that nobody listens to
    whole = [mine[0], others[0], *mine[1:4], others[1], *mine[4:], others[2]]
    return b"".join(whole), b"".join(others)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 100, 2015, 100_000])
async def test_frames_are_told_apart_however_the_bytes_are_cut(size: int) -> None:
    reader, collecting, alarms = asyncio.StreamReader(), Collecting(), list[bool]()
    wire = Wire(reader, alarms.append)
    wire.attach(7, collecting)
    whole, others = stream()

    for start in range(0, len(whole), size):
        wire.data_received(whole[start : start + size])
    reader.feed_eof()

    assert collecting.heard == [(1, b"y" * 5000), (2, b"y" * 5000), (5, True), "closed"]
    assert await reader.read() == others


async def test_server_of_another_protocol_is_left_to_the_driver() -> None:
    reader = asyncio.StreamReader()
    wire = Wire(reader, lambda _: None)

    wire.data_received(b"AMQP\0\0\x09\x01")
    wire.data_received(b"HTTP")
    reader.feed_eof()

    assert await reader.read() == b"AMQP\0\0\x09\x01HTTP"


async def test_driver_hears_of_a_line_that_carries_only_our_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the connection for dead: the broker sends no heartbeats where there is traffic."""
    monkeypatch.setattr("coatcheck.broker.amqp_wire._HEARTBEAT_EVERY_S", -1.0)
    reader, collecting = asyncio.StreamReader(), Collecting()
    wire = Wire(reader, lambda _: None)
    wire.attach(7, collecting)

    wire.data_received(pamqp.frame.marshal(Basic.Ack(5, True), 7))
    reader.feed_eof()

    assert await reader.read() == codec.HEARTBEAT_FRAME
