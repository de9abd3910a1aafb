"""Messages that went wrong somewhere: valid ones of every kind, then broken in ways that AMQP still carries.

Message number `n` of a seed is always the same but for the ids of calls and tasks, which only the world knows: those
are asked of `Ids` when it is made.
"""

from __future__ import annotations

import random
import string
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Protocol

import cbor2
import msgspec
from msgspec.structs import replace

from coatcheck.broker import wire
from coatcheck.broker.bodies import Body, BodyFormat
from coatcheck.broker.port import Message

QUEUES = ("requests", "replies", "control", "hints")
MARK = "tracestate"
"""The one header that reaches every queue, the dead letters too, and that nobody acts on."""

Dice = random.Random


class Ids(Protocol):
    """What a sender may have come to know."""

    sink: str
    service: str

    def open_call(self, dice: Dice) -> str: ...

    def closed_call(self, dice: Dice) -> str: ...

    def task(self, dice: Dice) -> str: ...

    def identity(self, dice: Dice) -> str: ...


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """One message and where it goes. `number` is in its mark."""

    number: int
    queue: str
    message: Message
    how: tuple[str, ...] = field(default=())
    """The kind it began as, and what was done to it."""

    def __str__(self) -> str:
        fields = {name: getattr(self.message, name) for name in PROPERTIES}
        said = ", ".join(f"{name}={value!r}" for name, value in fields.items() if value is not None)
        headers = ", ".join(f"{name!r}: {_short(value)}" for name, value in self.message.headers.items())
        lines = (
            f"number {self.number} to {self.queue}, {' + '.join(self.how)}:",
            f"properties {said or 'none'}",
            f"headers {{{headers}}}",
            f"body {_short(self.message.body, 1500)} ({len(self.message.body)} bytes)",
        )
        return "\n    ".join(lines)


def _short(value: Any, most: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def fuzzed(seed: int, number: int, ids: Ids) -> Fuzzed:
    """Message `number` of a seed."""
    dice = Dice(f"{seed}:{number}")
    kind = dice.choice(list(KINDS))
    queue, message = HOME[kind], KINDS[kind](dice, ids)
    how = [kind]
    for _ in range(dice.choices((0, 1, 2, 3), (1, 6, 3, 2))[0]):
        name = dice.choices(list(MUTATIONS), list(_WEIGHTS))[0]
        message = MUTATIONS[name](message, dice, ids)
        how.append(name)
    if dice.random() < 0.15:
        queue = dice.choice(QUEUES)
        how.append("misdirected")
    marked = replace(message, headers={**message.headers, MARK: mark(number)})
    return Fuzzed(number, queue, marked, tuple(how))


def mark(number: int) -> str:
    return f"fuzz={number}"


def find_mark(message: Message) -> int | None:
    value = message.headers.get(MARK)
    return int(value[5:]) if isinstance(value, str) and value.startswith("fuzz=") else None


# --- valid messages of every kind ---


def _request(dice: Dice, ids: Ids, handler: str | None, value: Any) -> Message:
    form = dice.choice((BodyFormat.JSON, BodyFormat.JSON, BodyFormat.MSGPACK, BodyFormat.TEXT, BodyFormat.BYTES))
    if form in (BodyFormat.TEXT, BodyFormat.BYTES):
        value = "words" if form is BodyFormat.TEXT else b"\x00\x01"
    return wire.make_request(
        Body.of(value, form),
        _fresh(dice),
        reply_to=ids.sink,
        handler=handler,
        identity=dice.choice((None, _fresh(dice))),
        key=dice.choice((None, "a:b")),
        task=dice.choice((None, ids.task(dice))),
        deadline=dice.choice((None, datetime(2031, 1, 2, tzinfo=UTC))),
        traceparent=dice.choice((None, f"00-{dice.getrandbits(128):032x}-{dice.getrandbits(64):016x}-01")),
        keep=dice.random() < 0.2,
    )


def _answer(dice: Dice, ids: Ids) -> Message:
    return wire.make_result(Body.of(_value(dice)), ids.open_call(dice))


def _error(dice: Dice, ids: Ids) -> Message:
    return wire.make_error(wire.make_problem("broken", "it broke"), ids.open_call(dice))


def _progress(dice: Dice, ids: Ids) -> Message:
    return wire.make_progress(wire.Progress(1.0, 3.0, "on it"), ids.open_call(dice))


def _hint(dice: Dice, ids: Ids) -> Message:
    return Message(body=str(dice.choice((0.0, 0.5, 30, 1e9))).encode())


KINDS: Mapping[str, Callable[[Dice, Ids], Message]] = {
    "request echo": lambda dice, ids: _request(dice, ids, "echo", _value(dice)),
    "request ask": lambda dice, ids: _request(dice, ids, "ask", _value(dice)),
    "request strict": lambda dice, ids: _request(dice, ids, "strict", {"topic": "owls", "count": 3}),
    "request default": lambda dice, ids: _request(dice, ids, None, _value(dice)),
    "request known": lambda dice, ids: replace(_request(dice, ids, "echo", 1), message_id=ids.identity(dice)),
    "result": _answer,
    "result bare": lambda dice, ids: Message(body=b"42", correlation_id=ids.open_call(dice)),
    "error": _error,
    "progress": _progress,
    "late result": lambda dice, ids: wire.make_result(Body.of(1), ids.closed_call(dice)),
    "timeout": lambda dice, ids: wire.make_timeout(dice.choice((ids.open_call, ids.closed_call))(dice)),
    "resume": lambda dice, ids: wire.make_resume(ids.task(dice), dice.choice((0, 1, 2, 3, 10**6))),
    "cancel task": lambda dice, ids: wire.make_cancel(task=ids.task(dice), reason="enough"),
    "cancel identity": lambda dice, ids: wire.make_cancel(identity=ids.identity(dice), reason="enough"),
    "cancel call": lambda dice, ids: wire.make_cancel(correlation_id=_fresh(dice), identity=_fresh(dice)),
    "hint": _hint,
}
HOME = {
    kind: "requests" if kind.startswith("request") else "control" if kind.startswith("cancel") else "replies"
    for kind in KINDS
} | {"hint": "hints"}


def _value(dice: Dice) -> Any:
    return dice.choice(
        (None, True, 0, -1, 2**63, 1.5, "", "owls", "a\x00b", [], {}, [1, [2, [3]]], {"a": {"b": None}}, "é" * 50)
    )


def _fresh(dice: Dice) -> str:
    return f"id-{dice.getrandbits(64):016x}"


# --- what may go wrong ---


PROPERTIES = ("correlation_id", "reply_to", "content_type", "content_encoding", "type", "message_id")
_SHORT_LIMIT = 255
_HEADERS = (
    "cc-kind", "cc-id", "cc-key", "cc-task", "cc-deadline", "cc-keep", "cc-epoch", "cc-version", "cc-broken",
    "cc-reason", "cc-detail", "cc-queue", "cc-dead-at", "traceparent", "authorization", "cc-", "CC-KIND", "CC", "BCC",
    "x-death", "x-delivery-count", "x-first-death-reason",
)  # fmt: skip
_CONTENT_TYPES = (
    "application/json", "text/json", "application/problem+json", "application/msgpack", "application/x-msgpack",
    "application/cbor", "application/vnd.api+cbor", "text/plain", "text/html; charset=utf-16", "application/JSON ;",
    "application/json; charset=latin-1", "text/plain; charset=\"", "application/octet-stream", "image/png", "+json",
    "+cbor", ";", "application/pickle", "application/x-python-serialize", "text/", "multipart/mixed",
)  # fmt: skip
_KIND_WORDS = ("request", "result", "error", "progress", "timeout", "resume", "cancel", "poke", "RESULT")
_ENCODINGS = ("gzip", "deflate", "br", "zstd", "identity", "utf-8", " UTF-8 ", "x" * 200)


def _short_text(dice: Dice, ids: Ids) -> str:
    """Text as a property may hold it: at most 255 bytes of UTF-8."""
    text = dice.choice(
        (
            lambda: "",
            lambda: " ",
            lambda: "\x00",
            lambda: "a\x00b",
            lambda: "x" * 255,
            lambda: "é" * 127,
            lambda: "\U0001f9e5" * 60,
            lambda: "\u202e\ufeff\u2028",
            lambda: "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r",
            lambda: "://a:" * 50,
            lambda: "password=" * 28,
            lambda: "'; DROP TABLE coatcheck.task; --",
            lambda: "../../etc/passwd",
            lambda: "%s%n{}{0.__class__}",
            lambda: "NaN",
            lambda: "-1",
            lambda: "null",
            lambda: ids.open_call(dice),
            lambda: ids.open_call(dice).upper(),
            lambda: "{" + ids.open_call(dice) + "}",
            lambda: "urn:uuid:" + ids.open_call(dice),
            lambda: ids.open_call(dice).replace("-", ""),
            lambda: ids.open_call(dice)[:-1],
            lambda: ids.closed_call(dice),
            lambda: ids.task(dice),
            lambda: ids.identity(dice),
            lambda: ids.service,
            lambda: f"{ids.service}.replies",
            lambda: f"{ids.service}.control",
            lambda: f"{ids.service}.dead",
            lambda: "coatcheck.sweeper",
            lambda: "amq.rabbitmq.reply-to.g1h2AA5yZXBseUAxMjM.fake==",
            lambda: ids.sink,
            lambda: "cctest-no-such-queue",
            lambda: "".join(dice.choices(string.printable, k=dice.randrange(1, 60))),
            lambda: "".join(
                chr(dice.choice((dice.randrange(1, 0xD800), dice.randrange(0xE000, 0x110000)))) for _ in range(9)
            ),
            lambda: str(dice.getrandbits(400)),
        )
    )()
    return text.encode()[:_SHORT_LIMIT].decode(errors="ignore")


def _header_value(dice: Dice, ids: Ids, depth: int = 0) -> Any:
    """A value as an AMQP table may hold it."""
    choices: list[Callable[[], Any]] = [
        lambda: _short_text(dice, ids),
        lambda: None,
        lambda: dice.choice((True, False)),
        lambda: dice.choice((0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63), 99)),
        lambda: dice.choice((0.0, -1.5, 1e30)),
        lambda: Decimal("1.50"),
        lambda: datetime(dice.choice((1970, 2026, 9999)), 1, 1, tzinfo=UTC),
        lambda: bytearray(dice.randbytes(dice.randrange(9))),
        lambda: "x" * dice.choice((1024, 1025, 5000)),
        lambda: dice.choice(_KIND_WORDS),
        lambda: dice.choice(("1", "true", "2026-01-01", "2026-01-01T00:00:00+99:00", "0001-01-01T00:00:00+23:59")),
        lambda: "9" * 19,
        lambda: f"00-{'1' * 32}-{'2' * 16}-01-" + dice.choice(("\x00", "\x1b[2J", "\u202e", "x", "\n")),
    ]
    if depth < 3:
        choices.append(lambda: [_header_value(dice, ids, depth + 1) for _ in range(dice.randrange(4))])
        choices.append(lambda: {key: _header_value(dice, ids, depth + 1) for key in "abc"[: dice.randrange(4)]})
    return dice.choice(choices)()


def _set_property(message: Message, dice: Dice, ids: Ids) -> Message:
    changed: dict[str, Any] = {dice.choice(PROPERTIES): None if dice.random() < 0.3 else _short_text(dice, ids)}
    return replace(message, **changed)


def _set_content_type(message: Message, dice: Dice, ids: Ids) -> Message:
    return replace(message, content_type=dice.choice((None, *_CONTENT_TYPES)))


def _set_encoding(message: Message, dice: Dice, ids: Ids) -> Message:
    return replace(message, content_encoding=dice.choice(_ENCODINGS))


def _set_header(message: Message, dice: Dice, ids: Ids) -> Message:
    name = dice.choice(_HEADERS) if dice.random() < 0.9 else "".join(dice.choices(string.printable, k=12))
    return replace(message, headers={**message.headers, name: _header_value(dice, ids)})


def _drop_header(message: Message, dice: Dice, ids: Ids) -> Message:
    if not message.headers:
        return message
    gone = dice.choice(sorted(message.headers))
    return replace(message, headers={name: value for name, value in message.headers.items() if name != gone})


def _many_headers(message: Message, dice: Dice, ids: Ids) -> Message:
    return replace(message, headers={**message.headers, **{f"cc-{number}": "x" for number in range(200)}})


def _truncate(message: Message, dice: Dice, ids: Ids) -> Message:
    return replace(message, body=message.body[: dice.randrange(len(message.body) + 1)])


def _flip_bits(message: Message, dice: Dice, ids: Ids) -> Message:
    body = bytearray(message.body or b"{}")
    for _ in range(dice.randrange(1, 4)):
        body[dice.randrange(len(body))] ^= 1 << dice.randrange(8)
    return replace(message, body=bytes(body))


def _insert_bytes(message: Message, dice: Dice, ids: Ids) -> Message:
    at = dice.randrange(len(message.body) + 1)
    return replace(message, body=message.body[:at] + dice.randbytes(dice.randrange(1, 9)) + message.body[at:])


def _replace_body(message: Message, dice: Dice, ids: Ids) -> Message:
    return replace(message, body=dice.choice(_BODIES)(dice))


def _deep_json(dice: Dice) -> bytes:
    depth = dice.choice((63, 64, 65, 300, 3000))
    opening, closing = dice.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"[", b""), (b"", b"]")))
    return opening * depth + b"1" + closing * depth


def _nested(pack: bytes, depth: int) -> bytes:
    return pack * depth + b"\x01"


def _slow_to_read(dice: Dice) -> bytes:
    """What took some reader minutes: escapes, quotes and brackets, thousands of them."""
    unit = dice.choice((b'\\"', b"\\", b'"', b'"a",', b"[]", b"[" * 60 + b"]" * 60 + b",", b"9", b" ", b"\x1b[31m"))
    opening = dice.choice((b"[" * 65 + b'"', b"[" * 65, b'"', b"[", b""))
    return (
        opening + unit * (dice.choice((1_000, 60_000)) // len(unit)) + dice.choice((b"", b'"', b"]", b'"' + b"]" * 65))
    )


def _colliding_keys(dice: Dice) -> bytes:
    """A map of a thousand keys of one hash, in MessagePack or CBOR: numbers, or arrays of them."""
    modulus = 2**61 - 1
    if dice.random() < 0.5:
        return cbor2.dumps(dict.fromkeys((modulus * number for number in range(1, 1001)), 1))
    numbers = ([number & 7, number >> 3 & 7, number >> 6 & 7, number >> 9] for number in range(1000))
    keys = (b"\x94" + b"".join(b"\xcf" + struct.pack(">Q", 1 + it * modulus) for it in each) for each in numbers)
    return b"\xde\x03\xe8" + b"".join(key + b"\x01" for key in keys)


_BODIES: Sequence[Callable[[Dice], bytes]] = (
    lambda dice: b"",
    lambda dice: dice.randbytes(dice.randrange(1, 60)),
    lambda dice: dice.randbytes(3000),
    _deep_json,
    lambda dice: b"9" * dice.choice((30, 400, 5000)),
    lambda dice: b"1e" + b"9" * dice.choice((2, 400)),
    lambda dice: dice.choice((b"NaN", b"Infinity", b"-Infinity", b"[NaN]", b'{"a":1e999}', b"-0")),
    lambda dice: dice.choice((b'"\\ud800"', b'"\\udc00\\ud800"', b'{"\\ud800":1}', b'"\\u0000"', b'"a\\u0000b"')),
    lambda dice: dice.choice((b'"\xff\xfe"', b"\xff\xfe\x00", b"\xef\xbb\xbf{}", b'"\xed\xa0\x80"', b"\xc0\xaf")),
    lambda dice: b'{"a":1,"a":2,"reason":{},"done":"x","total":[],"message":5,"code":{},"retryable":"yes"}',
    lambda dice: b'{"reason": ' + b"[" * 70 + b"]" * 70 + b"}",
    lambda dice: b'{"done": 1e400, "total": -1e400, "message": "' + b"m" * 2000 + b'"}',
    lambda dice: b'{"done": ' + b"1" * 400 + b', "message": "a\\u0000b"}',
    lambda dice: b'{"title": "a\\u0000b", "detail": null, "code": "a\\u0000", "status": 99999999999999999999}',
    lambda dice: b"\xdd\xff\xff\xff\xff",  # MessagePack: an array of four billion
    lambda dice: b"\xc9\x7f\xff\xff\xff\x01",  # an extension of two gigabytes
    lambda dice: b"\xc7\x08\x05abcdefgh",  # an extension nobody knows
    lambda dice: b"\xd7\xff" + dice.randbytes(8),  # a timestamp, perhaps
    lambda dice: b"\x82\xc0\x01\x90\x02",  # keys that are no texts
    _colliding_keys,
    lambda dice: b"\x82\xc4\x01a\x01\xc4\x01b\x02",  # keys of bytes
    lambda dice: _nested(b"\x91", dice.choice((63, 64, 65, 2000))),
    lambda dice: _nested(b"\x81", dice.choice((64, 2000))),  # CBOR: nested arrays
    lambda dice: b"\x9f" * 500,  # CBOR: arrays without an end
    lambda dice: b"\xd8\x1c\x81\xd8\x1d\x00",  # CBOR: a list that holds itself
    lambda dice: b"\xc2\x59" + struct.pack(">H", 3000) + dice.randbytes(3000),  # CBOR: a very large number
    lambda dice: b"\xc4\x82\x1b" + b"\x7f" * 8 + b"\x01",  # CBOR: 1e9187201950435737471
    lambda dice: b"\xd8\x23\x66(a+)+$",  # CBOR: a pattern
    lambda dice: b"\xc0\x74not a date, not at all",
    lambda dice: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",  # a pickle
    lambda dice: b'\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff' + b"\x00" * 50,
    lambda dice: msgspec.msgpack.encode({"a": [None, 2**64 - 1, -(2**63), b"\x00", 1.5, "x"]}),
    lambda dice: b"[" + b"[]," * 20_000 + b"[]]",
    lambda dice: b'"' + b"\\u0041" * 5000 + b'"',
    _slow_to_read,
    lambda dice: b'{"detail": "' + dice.choice((b"://a:", b"token=", b"://:@ ", b"\\u202e")) * 10_000 + b'"}',
    lambda dice: b'{"code": "' + b"c" * 20_000 + b'", "exception": "' + b"\\u001b[2J" * 500 + b'"}',
    lambda dice: b" " * 5000 + b"1" + b"\t\r\n" * 50,
    lambda dice: b"inf",
    lambda dice: b"-1",
    lambda dice: b"1_0",
)  # fmt: skip


def _oversize(message: Message, dice: Dice, ids: Ids) -> Message:
    return replace(message, body=b'"' + b"x" * (1024 * 1024 - dice.choice((1, 2, 3))) + b'"')


MUTATIONS: Mapping[str, Callable[[Message, Dice, Ids], Message]] = {
    "property": _set_property,
    "content type": _set_content_type,
    "encoding": _set_encoding,
    "header": _set_header,
    "header dropped": _drop_header,
    "many headers": _many_headers,
    "truncated": _truncate,
    "bits flipped": _flip_bits,
    "bytes inserted": _insert_bytes,
    "other body": _replace_body,
    "oversized": _oversize,
}
_WEIGHTS = (8, 3, 1, 10, 3, 0.5, 2, 2, 2, 6, 0.02)
