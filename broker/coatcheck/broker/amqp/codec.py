"""Between our messages and AMQP's bytes: the frames that carry messages, acks and confirms, and nothing else.

A message travels as a method frame, a header frame with its properties, and body frames. Writing them here, a whole
batch into one buffer, costs a tenth of what the driver takes; reading them too. All other methods are the driver's.

Headers are whitelisted in both directions. `CC` and `BCC` make RabbitMQ copy a message to other queues, `x-…` headers
steer the broker, and all else that a peer sends is none of our business. What is none of our business is skipped by
its length and never decoded, so a stranger's impossible date or bottomless table in it cannot hurt; what is ours and
nested is read up to a size.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from pamqp import decode, encode
from pamqp.exceptions import PAMQPException

from coatcheck.broker.headers import BROKEN, MAY_PASS, QUEUE, REASON, SIZE, arriving
from coatcheck.broker.port import HeaderValue, Message

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_END = 0xCE
FRAME_OVERHEAD = 8
HEAD = struct.Struct(">BHI")
METHOD_ID = struct.Struct(">I")
HEARTBEAT_FRAME = HEAD.pack(HEARTBEAT, 0, 0) + bytes((FRAME_END,))

# Methods as class and number together, as they stand at the beginning of a method frame.
RETURN, DELIVER, GET_OK, GET_EMPTY = 0x3C0032, 0x3C003C, 0x3C0047, 0x3C0048
ACK, NACK = 0x3C0050, 0x3C0078
BLOCKED, UNBLOCKED = 0x0A003C, 0x0A003D
CHANNEL_CLOSE, CHANNEL_CLOSE_OK = 0x140028, 0x140029
START, TUNE = 0x0A000A, 0x0A001E
# What a broker may send beside messages and confirms: of connections, channels, exchanges, queues, consumers, confirms.
FROM_BROKERS = frozenset({START, TUNE, 0x0A0029, 0x0A0032, 0x0A0033, BLOCKED, UNBLOCKED, 0x0A0047})
FROM_BROKERS |= {0x14000B, 0x140014, 0x140015, CHANNEL_CLOSE, CHANNEL_CLOSE_OK, 0x28000B, 0x280015, 0x28001F, 0x280033}
FROM_BROKERS |= {0x32000B, 0x320015, 0x32001F, 0x320029, 0x320033, 0x3C000B, 0x3C0015, 0x3C001E, 0x3C001F, 0x3C006F}
FROM_BROKERS |= {0x55000B}
_PUBLISH, _BASIC = 0x3C0028, 60

_PERSISTENT = bytes((2,))
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS, _DELIVERY_MODE, _PRIORITY = 0x8000, 0x4000, 0x2000, 0x1000, 0x0800
_CORRELATION_ID, _REPLY_TO, _EXPIRATION, _MESSAGE_ID = 0x0400, 0x0200, 0x0100, 0x0080
_TIMESTAMP, _TYPE, _USER_ID, _APP_ID, _CLUSTER_ID = 0x0040, 0x0020, 0x0010, 0x0008, 0x0004

_SETTLE = struct.Struct(">BHIIQBB")
_HEADER_START = struct.Struct(">HHQH")
_ANNOUNCED = struct.Struct(">H2xQ")  # the class and the size, in a header frame
_TUNE = struct.Struct(">IHIH")
_HEADER_FRAME = struct.Struct(">BHIHHQ")
_FLAGS, _LONG, _TAG, _TEXT = struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">Q"), struct.Struct(">cI")
_END = bytes((FRAME_END,))
# The size of a table's value by its type, for skipping; None: it begins with its length.
_SIZES: dict[bytes, int | None] = {b"t": 1, b"b": 1, b"B": 1, b"U": 2, b"s": 2, b"u": 2, b"I": 4, b"i": 4, b"f": 4}
_SIZES |= {b"l": 8, b"L": 8, b"d": 8, b"T": 8, b"D": 5, b"V": 0}
_SIZES |= {b"S": None, b"x": None, b"A": None, b"F": None}
# What bytes a stranger wrote are known to raise.
_DECODE_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    OSError,
    RecursionError,
    struct.error,
    PAMQPException,
)

_MOST_HEADERS = 1000
_MOST_NESTED = 8192
"""A stranger's header that takes longer to read than this is not read; RabbitMQ's own are far smaller."""


class ProtocolViolated(ValueError):
    """A broker sent what AMQP does not allow."""


# --- what we write ---


def publish_frames(
    channel: int, message: Message, message_id: str, *, exchange: str, routing_key: str, mandatory: bool, frame_max: int
) -> bytes:
    """Write a publish with its header and body. Persistent always: a transient message is gone with a restart.

    Raises ValueError for what AMQP cannot carry.
    """
    try:
        properties = _properties(message, message_id)
    except (TypeError, OverflowError, RecursionError, struct.error) as exc:
        raise ValueError(str(exc)) from exc
    if frame_max and len(properties) + FRAME_OVERHEAD + 12 > frame_max:
        raise ValueError(f"its properties have {len(properties)} bytes; a frame takes {frame_max}")
    method = _publish_method(channel, exchange, routing_key, mandatory)
    size = len(message.body)
    header = _HEADER_FRAME.pack(HEADER, channel, 12 + len(properties), _BASIC, 0, size)
    return b"".join((method, header, properties, _END, *_body_frames(channel, message.body, frame_max)))


def _body_frames(channel: int, body: bytes, frame_max: int) -> Sequence[bytes]:
    """The parts of as many frames as a body takes, which most often is one."""
    size = len(body)
    room = frame_max - FRAME_OVERHEAD if frame_max else size
    if 0 < size <= room:
        return HEAD.pack(BODY, channel, size), body, _END
    parts: list[bytes] = []
    for start in range(0, size, room or 1):
        piece = body[start : start + room]
        parts += (HEAD.pack(BODY, channel, len(piece)), piece, _END)
    return parts


def ack_frame(channel: int, tag: int, *, multiple: bool = False) -> bytes:
    return _SETTLE.pack(METHOD, channel, 13, ACK, tag, multiple, FRAME_END)


def requeue_frame(channel: int, tag: int) -> bytes:
    return _SETTLE.pack(METHOD, channel, 13, NACK, tag, 2, FRAME_END)  # 2: requeue, and not multiple


def method_frame(channel: int, payload: bytes) -> bytes:
    return HEAD.pack(METHOD, channel, len(payload)) + payload + _END


@lru_cache(maxsize=1024)
def _publish_method(channel: int, exchange: str, routing_key: str, mandatory: bool) -> bytes:
    payload = struct.pack(">IH", _PUBLISH, 0) + _short(exchange) + _short(routing_key) + bytes((mandatory,))
    return method_frame(channel, payload)


def _properties(message: Message, message_id: str) -> bytes:
    """Flags, then what they announce, in the order of the flags."""
    flags, content, reply_to, type_ = _common_properties(
        message.content_type, message.content_encoding, message.reply_to, message.type
    )
    table = correlation_id = b""
    if message.headers and (table := _table(message.headers)):
        flags |= _HEADERS
        table = _LONG.pack(len(table)) + table
    if message.correlation_id:
        flags |= _CORRELATION_ID
        correlation_id = _short(message.correlation_id)
    parts = (_FLAGS.pack(flags), content, table, _PERSISTENT, correlation_id, reply_to, _short(message_id), type_)
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _common_properties(
    content_type: str | None, content_encoding: str | None, reply_to: str | None, type_: str | None
) -> tuple[int, bytes, bytes, bytes]:
    """What many messages have in common: flags, then both properties of the content, then `reply_to`, then `type`."""
    flags = _DELIVERY_MODE | _MESSAGE_ID
    flags |= _CONTENT_TYPE if content_type else 0
    flags |= _CONTENT_ENCODING if content_encoding else 0
    flags |= _REPLY_TO if reply_to else 0
    flags |= _TYPE if type_ else 0
    content = _short_if_any(content_type) + _short_if_any(content_encoding)
    return flags, content, _short_if_any(reply_to), _short_if_any(type_)


def _short_if_any(text: str | None) -> bytes:
    return _short(text) if text else b""


def _table(headers: Mapping[str, HeaderValue]) -> bytes:
    parts: list[bytes] = []
    for name, value in headers.items():
        written = _HEADER_NAMES.get(name)
        if written is None:
            continue
        if type(value) is str:
            text = value.encode()
            parts += (written, _TEXT.pack(b"S", len(text)), text)
        else:
            parts += (written, encode.encode_table_value(_wired(value)))
    return b"".join(parts)


def _wired(value: HeaderValue) -> Any:
    # pamqp knows bytearray only, and writes floats with 32 bits.
    if isinstance(value, bytes):
        return bytearray(value)
    if isinstance(value, float):
        return repr(value)
    return value


def _short(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > 255:
        raise ValueError(f"a property of {len(raw)} bytes; AMQP takes 255")
    return _BYTES[len(raw)] + raw


_BYTES = [bytes((each,)) for each in range(256)]
_HEADER_NAMES = {name: _short(name) for name in MAY_PASS}

# --- what we read ---

_CUT_OFF = (struct.error, IndexError)


def read_body_size(header: bytes) -> int:
    """How large a body a content header announces."""
    try:
        kind, size = _ANNOUNCED.unpack_from(header)
    except struct.error as exc:
        raise ProtocolViolated(f"a content header of {len(header)} bytes") from exc
    if kind != _BASIC:
        raise ProtocolViolated(f"a content header of class {kind}")
    return int(size)


def tune(payload: bytes, least: int, most: int) -> tuple[bytes, int]:
    """A broker's tune with a limit for frames that we can live with, and that limit. The broker's 0 means none."""
    try:
        method, channel_max, frame_max, heartbeat = _TUNE.unpack(payload)
    except struct.error as exc:
        raise ProtocolViolated(f"a tune of {len(payload)} bytes") from exc
    if 0 < frame_max < least:
        raise ProtocolViolated(f"frames of at most {frame_max} bytes are offered; AMQP's least is {least}")
    frame_max = min(frame_max or most, most)
    return _TUNE.pack(method, channel_max, frame_max, heartbeat), frame_max


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A message off a queue, and what the broker says of it."""

    message: Message
    tag: int
    is_redelivered: bool
    delivery_count: int
    broken: str | None
    """Why its properties could not be read; its message says so too."""


def read_arrived(method: bytes, header: bytes, body: bytes, *, is_get: bool, is_dead: bool) -> Arrived:
    """Read a message off a queue. From a dead queue, the broker's own reason for a dead letter is read like ours.

    Properties are the bytes that the sender wrote; RabbitMQ does not look. A message whose properties cannot be read
    takes the road of all malformed messages, to the dead-letter queue.
    """
    try:
        start = 4 if is_get else 5 + method[4]  # a delivery names its consumer first
        tag = _TAG.unpack_from(method, start)[0]
        is_redelivered = bool(method[start + 8])
    except _CUT_OFF as exc:
        raise ProtocolViolated("a delivery without its tag") from exc
    broken = None
    try:
        message, count, death = _read_message(header, body, is_dead=is_dead)
    except _DECODE_ERRORS as exc:
        # Its name only: the text of such an error may quote what it could not read, and that may be a secret.
        broken = type(exc.__cause__ or exc).__name__
        message, count, death = Message(body, headers={BROKEN: broken}), None, None
    if death is not None:
        told = {**message.headers, REASON: str(death.get("reason")), QUEUE: str(death.get("queue"))}
        message = msgspec.structs.replace(message, headers=told)
    # On a first delivery a count can only be the sender's own, so it is not believed.
    return Arrived(message, tag, is_redelivered, _count_deliveries(count) if is_redelivered else 1, broken)


def read_confirm(method: bytes) -> tuple[int, bool]:
    """The tag of an ack or nack for what we published, and whether it speaks for all before it too."""
    try:
        return _TAG.unpack_from(method, 4)[0], bool(method[12] & 1)
    except _CUT_OFF as exc:
        raise ProtocolViolated("a confirm without its tag") from exc


def read_returned(method: bytes, header: bytes) -> tuple[str, str | None]:
    """The routing key and message_id of a message that comes back because no queue would have it."""
    try:
        at = 6  # method, reply code
        for _ in range(2):  # reply text, exchange
            at += 1 + method[at]
        routing_key = method[at + 1 : at + 1 + method[at]].decode()
        return routing_key, _read_message(header, b"", is_dead=False)[0].message_id
    except _DECODE_ERRORS as exc:  # it is what we wrote
        raise ProtocolViolated("a returned message that cannot be read") from exc


def _read_message(header: bytes, body: bytes, *, is_dead: bool) -> tuple[Message, Any, Mapping[str, Any] | None]:
    """The message, the broker's count of deliveries, and its word on why the message is dead.

    Raises ValueError or LookupError where properties run over the end.
    """
    at, count, death = 14, None, None
    fields: dict[str, Any] = {"body": body}
    _, _, announced, flags = _HEADER_START.unpack_from(header)
    for name, size in _layout(flags):
        if size == _SHORT:
            start = at + 1
            at = start + header[at]
            if name:
                fields[name] = header[start:at].decode()
        elif size == _TABLE:
            start = at + 4
            at = start + _LONG.unpack_from(header, at)[0]
            fields["headers"], count, death = _read_table(header, start, at, is_dead=is_dead)
        else:
            at += size
    if at > len(header):
        raise ValueError("properties end before their time")
    if announced != len(body) and body:  # of what is returned to us no body is kept, and none is missed
        fields["headers"] = {**fields.get("headers", {}), SIZE: announced}
    return Message(**fields), count, death


_SHORT, _TABLE = -1, -2
# Properties in their order, as far as we read: flag, name if it is ours to know, size.
_PROPERTIES: tuple[tuple[int, str | None, int], ...] = (
    (_CONTENT_TYPE, "content_type", _SHORT),
    (_CONTENT_ENCODING, "content_encoding", _SHORT),
    (_HEADERS, "headers", _TABLE),
    (_DELIVERY_MODE, None, 1),
    (_PRIORITY, None, 1),
    (_CORRELATION_ID, "correlation_id", _SHORT),
    (_REPLY_TO, "reply_to", _SHORT),
    (_EXPIRATION, None, _SHORT),
    (_MESSAGE_ID, "message_id", _SHORT),
    (_TIMESTAMP, None, 8),
    (_TYPE, "type", _SHORT),
)


@lru_cache(maxsize=256)
def _layout(flags: int) -> tuple[tuple[str | None, int], ...]:
    """Which properties follow such flags: field of a message, if any, and size. Raises ValueError for unknown flags."""
    if flags & 1:
        raise ValueError("more flags than AMQP has properties")
    return tuple((name, size) for flag, name, size in _PROPERTIES if flags & flag)


def _read_table(
    raw: bytes, at: int, end: int, *, is_dead: bool
) -> tuple[Mapping[str, HeaderValue], Any, Mapping[str, Any] | None]:
    """Read the headers that may arrive; all others are skipped by their length."""
    names = _ARRIVING_DEAD if is_dead else _ARRIVING
    headers: dict[str, HeaderValue] = {}
    count, death = None, None
    for _ in range(_MOST_HEADERS):
        if at >= end:
            return headers, count, death
        start = at + 1 + raw[at]
        name, kind = raw[at + 1 : start], raw[start : start + 1]
        size = _SIZES[kind]
        if size is None:
            size = 4 + _LONG.unpack_from(raw, start + 1)[0]
        at = start + 1 + size
        if at > end:
            raise ValueError("a header runs over the end of its table")
        known = names.get(name)
        if known is not None:
            headers[known] = _read_value(kind, raw, start, at)
        elif name == b"x-delivery-count":
            count = _read_value(kind, raw, start, at)
        elif is_dead and name == b"x-death":
            death = _latest_death(_read_value(kind, raw, start, at))
    raise ValueError(f"more than {_MOST_HEADERS} headers")


_ARRIVING, _ARRIVING_DEAD = ({name.encode(): name for name in arriving(is_dead=is_dead)} for is_dead in (False, True))


def _read_value(kind: bytes, raw: bytes, start: int, end: int) -> Any:
    if kind == b"S":
        text = raw[start + 5 : end]
        try:
            return text.decode()
        except UnicodeDecodeError:
            return text
    if end - start > _MOST_NESTED:  # pamqp takes time by the square of it
        raise ValueError(f"a header with {end - start} bytes of more inside")
    return decode.embedded_value(raw[start:end])[1]


def _latest_death(deaths: Any) -> Mapping[str, Any] | None:
    """What the broker wrote when it dead-lettered a message; what we buried ourselves has nothing of the kind.

    The broker puts the latest death in front of what the sender had written there. The `x-first-death-…` headers it
    leaves as they came.
    """
    return deaths[0] if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict) else None


def _count_deliveries(count: Any) -> int:
    """Count how often a redelivered message was delivered, this time included.

    Quorum queues count in `x-delivery-count`, beginning with the second delivery.
    """
    return max(2, count + 1) if isinstance(count, int) and not isinstance(count, bool) else 2
