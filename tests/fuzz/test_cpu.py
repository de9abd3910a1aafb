"""Whatever reads bytes from outside takes time in proportion to them, or refuses them: the loop waits meanwhile.

A row here is a reader, redactor or printer; a column is a way to write bytes that some reader, somewhere, took minutes
for. Time is that of the thread, so a busy machine changes little, and the margins leave room for the rest.
"""

import io
import struct
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import cbor2
import msgspec
import pytest
from click.testing import CliRunner

from coatcheck.broker import wire
from coatcheck.broker.amqp import codec as amqp_codec
from coatcheck.broker.bodies import find_format, parse_body
from coatcheck.broker.port import BrokerStats, Message
from coatcheck.broker.postgres.codec import decode_message
from coatcheck.broker.topology import takes_replies
from coatcheck.cli import output
from coatcheck.cli.dead import _print_letter, read_letter
from coatcheck.cli.dev_screen import Screen, read_line
from coatcheck.cli.output import Terminal, read_blob, read_message, read_problem
from coatcheck.errors import CallFailed, CoatcheckError
from coatcheck.store import blobs
from coatcheck.store.memory.tables import as_json
from coatcheck.worker import ids
from coatcheck.worker.binding import Binding
from coatcheck.worker.logs import _protect, _renderer
from coatcheck.worker.messages import to_body
from coatcheck.worker.problems import problem_of, traceback_of
from coatcheck.worker.redaction import clean, clean_json, redacted, redacted_ends, redacted_start
from coatcheck.worker.settings import LogFormat

SIZE = 8_000
GROWTH = 4
MOST_TIMES_AS_LONG = 9
"""Four times the bytes take four times as long, sixteen times if the time grows by the square."""
MOST_PER_BYTE_S = 9e-6
"""A reader with a constant so large that a body of 1 MiB stops the loop for seconds is as bad."""
TOO_SHORT_TO_TELL_S = 0.015

LONGEST_COMPLAINT = 3_000

# --- ways to write ---


def _repeated(unit: bytes, before: bytes = b"", after: bytes = b"") -> Callable[[int], bytes]:
    return lambda size: before + unit * (size // len(unit)) + after


_MODULUS = (1 << 61) - 1
"""Python hashes a number to its rest from the division by this."""


def _same_hash(count: int) -> list[int]:
    return [_MODULUS * number for number in range(1, count + 1)]


def _colliding_msgpack(size: int) -> bytes:
    """Keys that are arrays of five numbers of 64 bits. Eight numbers have one hash, so 32,768 keys have."""
    keys = []
    for number in range(size * 4 // 47):
        digits = ((number >> shift) & 7 for shift in (0, 3, 6, 9, 12))
        keys.append(b"\x95" + b"".join(b"\xcf" + struct.pack(">Q", 1 + digit * _MODULUS) for digit in digits) + b"\x01")
    return b"\xdf" + struct.pack(">I", len(keys)) + b"".join(keys)


WAYS: Mapping[str, Callable[[int], bytes]] = {
    "escaped quotes": _repeated(b'\\"', b"[" * 65 + b'"'),
    "escaped quotes, closed": _repeated(b'\\"', b"[" * 65 + b'"', b'"' + b"]" * 65),
    "backslashes": _repeated(b"\\", b"[" * 65 + b'"'),
    "quotes": _repeated(b'"', b"[" * 65),
    "texts": _repeated(b'"a",', b"[" * 65, b'""' + b"]" * 65),
    "nesting": _repeated(b"["),
    "nesting of objects": _repeated(b'{"a":'),
    "nesting, closed": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "nesting just allowed": _repeated(b"[" * 60 + b"]" * 60 + b",", b"[", b"1]"),
    "pairs": _repeated(b"[],", b"[", b"1]"),
    "values of one byte": _repeated(b"1,", b"[", b"1]"),
    "one long number": _repeated(b"9"),
    "long numbers": _repeated(b"9" * 4000 + b",", b"[", b"1]"),
    "a long fraction": _repeated(b"9", b"0."),
    "a long exponent": _repeated(b"9", b"1e"),
    "extreme numbers": _repeated(b"1e308,", b"[", b"1]"),
    "the smallest numbers": _repeated(b"5E-324,", b"[", b"1]"),
    "exponents of noughts": _repeated(b"0", b"1e", b"308"),
    "a fraction of noughts": _repeated(b"0", b"0.", b"1e-5"),
    "names of numbers": lambda size: msgspec.json.encode(dict.fromkeys(map(str, range(size // 9)), 1)),
    "one long name": _repeated(b"a", b'{"', b'":1}'),
    "the same name": _repeated(b'"a":1,', b"{", b'"a":1}'),
    "blanks": _repeated(b" "),
    "blanks, then a value": _repeated(b" ", b"", b"1"),
    "tabs and newlines": _repeated(b"\t\r\n", b"{", b"}"),
    "newlines": _repeated(b"\n"),
    "one letter": _repeated(b"a"),
    "one long text": _repeated(b"a", b'"', b'"'),
    "escapes of letters": _repeated(b"\\u0041", b'"', b'"'),
    "escaped NULs": _repeated(b"\\u0000", b'{"detail":"', b'"}'),
    "controls": _repeated(b"\x1b[31m\x07"),
    "an error of controls": _repeated(b"\\u001b\\u202e", b'{"detail":"', b'"}'),
    "letters of three bytes": _repeated("\u202e".encode(), b'"', b'"'),
    "NULs": _repeated(b"\0"),
    "bytes that are no text": _repeated(b"\xff"),
    "addresses": _repeated(b"://a:", b'{"detail":"', b'"}'),
    "addresses without users": _repeated(b"://:", b'"', b'"'),
    "addresses with an end": lambda size: b"amqp://" + b"u:p/" * (size // 8) + b"@" * (size // 2),
    "one address": _repeated(b"a", b"amqp://u:"),
    "signs of addresses": _repeated(b"://@"),
    "parameters": _repeated(b"token=", b'{"detail":"', b'"}'),
    "parameters with values": _repeated(b"password=a ", b'{"detail":"', b'"}'),
    "equals signs": _repeated(b"=", b"://"),
    "charsets": _repeated(b"charset ", b"text/plain;"),
    "semicolons": _repeated(b";", b"text/plain"),
    "dots": _repeated(b".control."),
    "dashes": _repeated(b"-", b"00-" + b"a" * 32 + b"-" + b"a" * 16 + b"-01"),
    "MessagePack: colliding keys": _colliding_msgpack,
    "MessagePack: numbers as keys": lambda size: msgspec.msgpack.encode(dict.fromkeys(range(size // 6), 1)),
    "MessagePack: values of one byte": lambda size: b"\xdd" + struct.pack(">I", size) + b"\x01" * size,
    "MessagePack: nesting": _repeated(b"\x91"),
    "MessagePack: nesting of maps": _repeated(b"\x81\xa1a"),
    "MessagePack: empty maps": lambda size: b"\xdd" + struct.pack(">I", size) + b"\x80" * size,
    "MessagePack: arrays in arrays": lambda size: b"\xdd" + struct.pack(">I", size // 2) + b"\x91\x01" * (size // 2),
    "MessagePack: arrays that promise": _repeated(b"\xdd\xff\xff\xff\xff"),
    "MessagePack: texts of keys": lambda size: msgspec.msgpack.encode(
        {f"{number:x}": 1 for number in range(size // 8)}
    ),
    "MessagePack: extensions": _repeated(b"\xd4\x05a", b"\xdd\x00\x00\x10\x00"),
    "CBOR: colliding keys": lambda size: cbor2.dumps(dict.fromkeys(_same_hash(size // 12), 1)),
    "CBOR: colliding members": lambda size: cbor2.dumps(set(_same_hash(size // 11))),
    "CBOR: nesting": _repeated(b"\x81"),
    "CBOR: nesting without an end": _repeated(b"\x9f"),
    "CBOR: pieces of a text": _repeated(b"\x61a", b"\x7f", b"\xff"),
    "CBOR: pieces of bytes": _repeated(b"\x41a", b"\x5f", b"\xff"),
    "CBOR: one long number": lambda size: b"\xc2" + cbor2.dumps(b"\xff" * size),
    "CBOR: a long fraction": lambda size: b"\xd8\x1e\x82" + (b"\xc2" + cbor2.dumps(b"\xff" * (size // 2))) * 2,
    "CBOR: long numbers": _repeated(b"\xc2\x59\x06\xf9" + b"\xff" * 1785, b"\x9f", b"\xff"),
    "CBOR: decimals": _repeated(b"\xc4\x82\x1a\x7f\xff\xff\xff\x01", b"\x9f", b"\xff"),
    "CBOR: large floats": _repeated(b"\xc5\x82\x19\x7f\xff\x01", b"\x9f", b"\xff"),
    "CBOR: tags": _repeated(b"\xd9\xff\x00"),
    "CBOR: dates": _repeated(b"\xc0\x74" + b"2013-03-21T20:04:00Z", b"\x9f", b"\xff"),
    "CBOR: shared values": _repeated(b"\xd8\x1d\x00", b"\xd8\x1c\x9f", b"\xff"),
}


# --- what reads, redacts and prints ---


def _parsed(parser: Callable[[Message], object], content_type: str | None, **headers: Any) -> Callable[[bytes], object]:
    return lambda raw: parser(Message(raw, correlation_id="c", content_type=content_type, headers=headers))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _peer_failure(raw: bytes) -> CallFailed:
    """What a handler sees of a peer's error, and what it says of itself if it lets it through."""
    reply = wire.parse_reply(Message(raw, correlation_id="c", headers={"cc-kind": "error"}))
    problem = reply.problem or {}
    return CallFailed(f"search: {problem.get('detail')}", problem=problem)


def _in_property(raw: bytes) -> Message:
    text = _text(raw)
    return Message(b"{}", correlation_id=text, reply_to=text, type=text, content_type=text, content_encoding=text)


def _in_headers(raw: bytes) -> Message:
    names = ("cc-id", "cc-key", "cc-task", "cc-deadline", "cc-keep", "cc-version", "cc-broken", "traceparent")
    return Message(b"{}", headers=dict.fromkeys((*names, "tracestate", "authorization", "cc-reason"), _text(raw)))


def _each(*readers: Callable[[Message], object], made: Callable[[bytes], Message]) -> Callable[[bytes], object]:
    def read(raw: bytes) -> None:
        for reader in readers:
            _tolerate(partial(reader, made(raw)))

    return read


def _tolerate(read: Callable[[], object]) -> None:
    """A refusal is an answer; its text is ours to show, too."""
    try:
        read()
    except (CoatcheckError, ValueError) as error:
        if len(str(error)) > LONGEST_COMPLAINT:
            pytest.fail(f"a complaint of {len(str(error))} characters quotes what it complains of")


def _logged(log_format: LogFormat) -> Callable[[bytes], object]:
    render = _renderer(log_format, has_colors=True)

    def log(raw: bytes) -> object:
        text = _text(raw)
        event = {"event": text, "error": text, "problem": {"detail": [text]}, "raw": raw, "exc": ValueError(text)}
        return render(None, "info", _protect(None, "info", event))

    return log


async def _take(ctx: object, topic: str, count: int) -> None: ...


async def _take_any(ctx: object, whole: Any) -> None: ...


async def _take_named(ctx: object, **names: int) -> None: ...


def _bound(handler: Any, codec: blobs.Codec) -> Callable[[bytes], object]:
    binding = Binding.of(handler)
    return lambda raw: binding.bind(to_body(blobs.pack(codec, raw)))


def _stored(codec: blobs.Codec) -> Callable[[bytes], object]:
    return lambda raw: read_blob(blobs.pack(codec, raw)).as_text(2000)


def _on_screen(raw: bytes) -> None:
    screen = Screen(Terminal(file=io.StringIO(), force_terminal=True, width=100))
    screen.add("worker")
    screen.show("worker", read_line(raw.translate(None, b"\r\n")))
    screen.show("worker", read_line(msgspec.json.encode({"event": "e", "level": "error", "error": _text(raw)})))


def _letter(limit: int | None, content_type: str | None) -> Callable[[bytes], object]:
    def show(raw: bytes) -> None:
        text = _text(raw[:250])
        message = Message(raw, correlation_id=text, type=text, content_type=content_type, headers={"cc-reason": text})
        with CliRunner().isolation():
            _print_letter(read_letter(message), limit=limit)

    return show


def _printed(raw: bytes) -> None:
    text = _text(raw)
    with CliRunner().isolation():
        output.say(text)
        output.say_facts([("fact", text)])
        output.say_table(("ID", "WHAT"), [["1", text]])
        output.emit_json({"text": text})


def _amqp_header(raw: bytes) -> object:
    """Properties whose table of headers is the bytes; a frame is not longer than 128 KiB."""
    header = struct.pack(">HHQHI", 60, 0, 0, 1 << 13, len(raw)) + raw
    method = struct.pack(">HHB", 60, 60, 1) + b"c" + struct.pack(">QB", 1, 0)
    return amqp_codec.read_arrived(method, header, b"", is_get=False, is_dead=True)


JSON, MSGPACK, CBOR = "application/json", "application/msgpack", "application/cbor"
READERS: Mapping[str, Callable[[bytes], object]] = {
    **{f"a body: {kind}": _parsed(wire.parse_request, kind) for kind in (JSON, MSGPACK, CBOR, "text/plain", None)},
    **{f"an error: {kind}": _parsed(wire.parse_reply, kind, **{"cc-kind": "error"}) for kind in (JSON, MSGPACK, CBOR)},
    "a progress": _parsed(wire.parse_reply, None, **{"cc-kind": "progress"}),
    "a cancel": _parsed(wire.parse_control, None, **{"cc-kind": "cancel"}),
    "properties": _each(wire.parse_request, wire.parse_reply, wire.parse_control, made=_in_property),
    "headers": _each(wire.parse_request, wire.parse_reply, wire.parse_control, wire.find_token, made=_in_headers),
    "a content type": lambda raw: find_format.__wrapped__(_text(raw)),
    "a trace": lambda raw: ids.parse_traceparent.__wrapped__(_text(raw)),
    "a trace that goes on": lambda raw: ids.child_traceparent(_text(raw)),
    "a reply address": lambda raw: takes_replies(_text(raw)),
    "properties of AMQP": _amqp_header,
    "properties in Postgres": lambda raw: decode_message(
        {"head": raw, "body": b"", "size": 0}, BrokerStats(), is_dead=False
    ),
    "arguments: JSON": _bound(_take, blobs.Codec.JSON),
    "arguments: MessagePack": _bound(_take, blobs.Codec.MSGPACK),
    "arguments: CBOR": _bound(_take, blobs.Codec.CBOR),
    "one argument": _bound(_take_any, blobs.Codec.MSGPACK),
    "named arguments": _bound(_take_named, blobs.Codec.JSON),
    "a stored value: JSON": _stored(blobs.Codec.JSON),
    "a stored value: MessagePack": _stored(blobs.Codec.MSGPACK),
    "a stored value: CBOR": _stored(blobs.Codec.CBOR),
    "a stored problem": lambda raw: read_problem(blobs.pack(blobs.Codec.JSON, raw)),
    "a document in memory": lambda raw: as_json({"message": _text(raw).replace("\0", "")}),
    "a problem": lambda raw: problem_of(_peer_failure(raw)),
    "a traceback": lambda raw: traceback_of(_peer_failure(raw)),
    "redacted": lambda raw: redacted(_text(raw)),
    "redacted, its start": lambda raw: redacted_start(_text(raw), 2000),
    "redacted, its ends": lambda raw: redacted_ends(_text(raw), 16_000),
    "clean": lambda raw: clean(_text(raw)),
    "clean JSON": lambda raw: clean_json(msgspec.json.encode(_text(raw))),
    "a line of the log: JSON": _logged(LogFormat.JSON),
    "a line of the log: console": _logged(LogFormat.CONSOLE),
    "a line of dev": _on_screen,
    "a message for people": lambda raw: read_message(Message(raw)).as_text(2000),
    "dead show": _letter(2000, None),
    "dead show --full": _letter(None, None),
    "dead show, MessagePack": _letter(2000, MSGPACK),
    "printed": _printed,
}


def cpu_s(read: Callable[[bytes], object], raw: bytes) -> float:
    """The least that reading took in a few attempts: the others were disturbed."""
    best = float("inf")
    for _ in range(3):
        started_s = time.thread_time()
        _tolerate(lambda: read(raw))
        best = min(best, time.thread_time() - started_s)
        if best < TOO_SHORT_TO_TELL_S:
            break
    return best


def complaint(read: Callable[[bytes], object], write: Callable[[int], bytes]) -> str | None:
    small, large = write(SIZE), write(SIZE * GROWTH)
    large_s = cpu_s(read, large)
    if large_s > MOST_PER_BYTE_S * len(large):
        return f"{large_s / len(large) * 1e6:.1f} µs a byte"
    small_s = cpu_s(read, small) if large_s > TOO_SHORT_TO_TELL_S else large_s
    if large_s > small_s * MOST_TIMES_AS_LONG * len(large) / len(small) / GROWTH:
        return f"{small_s * 1000:.1f} ms for {len(small)} bytes, {large_s * 1000:.1f} ms for {len(large)}"
    return None


@pytest.mark.parametrize("reader", READERS)
def test_reading_takes_time_in_proportion_to_the_bytes(reader: str) -> None:
    found = {way: complaint(READERS[reader], write) for way, write in WAYS.items()}

    assert {way: text for way, text in found.items() if text} == {}


def test_a_body_of_the_largest_size_is_read_in_a_moment() -> None:
    """What froze a replica: 65 brackets, a quote, and escaped quotes up to the limit."""
    raw = WAYS["escaped quotes"](1024 * 1024 - 100)

    assert cpu_s(lambda it: parse_body(it, JSON), raw) < 2


@pytest.mark.parametrize("reader", ["a problem", "a traceback", "redacted", "a line of the log: JSON"])
def test_error_of_the_largest_size_is_told_in_a_moment(reader: str) -> None:
    """What blocked a loop for seconds: a megabyte of addresses, each with a password that does not end."""
    raw = WAYS["addresses"](1024 * 1024 - 100)

    assert cpu_s(READERS[reader], raw) < 1


def test_growth_by_the_square_is_seen() -> None:
    def squared(raw: bytes) -> int:
        return sum(raw.count(b"a", at) for at in range(0, len(raw), 4))

    assert complaint(squared, WAYS["one letter"]) is not None
    assert complaint(len, WAYS["one letter"]) is None
