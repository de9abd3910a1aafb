"""Reading what a stranger sent raises our own errors and nothing else, whatever the bytes, properties and headers."""

import tracemalloc
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import cbor2
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.fuzz.messages import PROPERTIES

from coatcheck.broker import wire
from coatcheck.broker.bodies import Body, Limits, find_format, parse_body
from coatcheck.broker.headers import DEAD_HEADERS, IDENTITY, KIND, SIZE, TASK
from coatcheck.broker.port import Delivery, Message
from coatcheck.errors import MalformedMessage, OversizedMessage
from coatcheck.store.blobs import encode
from coatcheck.worker.messages import birth_of, task_id_of, to_blob, to_body

PARSERS = (wire.parse_request, wire.parse_reply, wire.parse_control)
NARROW = Limits(max_body=2000, max_depth=5, max_header=50)
KNOWN_TYPES = ("application/json", "application/problem+json", "application/msgpack", "application/cbor", "text/plain")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
bodies = st.one_of(
    st.binary(max_size=200),
    texts.map(str.encode),
    plain.map(msgspec.json.encode),
    plain.map(msgspec.msgpack.encode),
    plain.map(cbor2.dumps),
    st.builds(lambda body, at: body[: at % (len(body) + 1)], plain.map(msgspec.json.encode), st.integers(0)),
    st.builds(bytes.__mul__, st.sampled_from([b"[", b'{"a":', b"\x91", b"\x81"]), st.integers(0, 3000)),
)
content_types = st.none() | st.sampled_from(KNOWN_TYPES) | texts
header_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | texts
    | st.binary(max_size=20)
    | st.binary(max_size=20).map(bytearray)
    | st.decimals(allow_nan=False, allow_infinity=False).map(Decimal)
    | st.datetimes(timezones=st.just(UTC))
    | st.text(min_size=1000, max_size=1100, alphabet="x")
    | st.sampled_from([*wire.ReplyKind, *wire.ControlKind, "request", "1", "true", "2026-01-01T00:00:00Z"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
header_names = st.sampled_from(
    ["cc-kind", "cc-id", "cc-key", "cc-task", "cc-deadline", "cc-keep", "cc-epoch", "cc-version", "cc-broken",
     "traceparent", "tracestate", "authorization", *DEAD_HEADERS]
)  # fmt: skip
properties = st.none() | texts
messages = st.builds(
    Message,
    body=bodies,
    content_type=content_types,
    content_encoding=st.none() | st.none() | texts | st.sampled_from(["gzip", "utf-8"]),
    correlation_id=properties,
    reply_to=properties,
    type=properties,
    message_id=properties,
    headers=st.dictionaries(header_names, header_values, max_size=5),
)
many = settings(max_examples=150, deadline=None)


class Arrived(Delivery):
    """A message on a queue, for what only looks at it."""

    def __init__(self, message: Message) -> None:
        super().__init__(message, "research", is_redelivered=False, delivery_count=1)

    def ack(self) -> None: ...

    def requeue(self) -> None: ...

    @property
    def is_settled(self) -> bool:
        return False

    @property
    def is_lost(self) -> bool:
        return False


def read(parser: Any, message: Message, limits: Limits) -> tuple[Any, MalformedMessage | None]:
    """What was read, or why it was refused. Whatever else is raised comes out."""
    try:
        return parser(message, limits), None
    except MalformedMessage as error:
        return None, error


@many
@given(message=messages, parser=st.sampled_from(PARSERS), limits=st.sampled_from([Limits(), NARROW]))
@example(Message(body=b"[" * 200_000), wire.parse_reply, Limits())
@example(Message(headers={KIND: "resume", TASK: "t", "cc-epoch": -1}), wire.parse_reply, Limits())
@example(Message(headers={"cc-deadline": datetime.max.replace(tzinfo=UTC)}), wire.parse_request, Limits())
def test_reading_a_message_raises_our_own_errors_only(message: Message, parser: Any, limits: Limits) -> None:
    parsed, refusal = read(parser, message, limits)

    if refusal is not None:
        assert refusal.code
        assert refusal.detail
        return
    assert len(message.body) <= limits.max_body
    for text in (parsed.correlation_id, getattr(parsed, "task", None), getattr(parsed, "identity", None)):
        assert text is None or (text and "\0" not in text)


@many
@given(message=messages)
def test_what_was_read_can_be_stored(message: Message) -> None:
    try:
        request = wire.parse_request(message)
    except MalformedMessage:
        return

    task_id = task_id_of("research", request.identity)
    birth = birth_of(request, service="research", task_id=task_id, handler=request.handler, version="1")
    assert to_body(birth.request) == request.body
    assert to_body(birth.request).raw == message.body


@many
@given(
    message=messages.map(
        lambda it: Message(body=it.body, content_type=it.content_type, correlation_id="c", headers={KIND: "error"})
    )
)
def test_whatever_a_peer_says_of_its_error_becomes_a_problem_that_can_be_stored(message: Message) -> None:
    reply, refusal = read(wire.parse_reply, message, Limits())

    if refusal is not None:
        assert refusal.code in {"oversized", "too_deep"}  # an error is not dropped because it is badly written
        return
    assert reply.problem is not None
    assert isinstance(reply.problem["code"], str)
    assert isinstance(reply.problem["title"], str)
    assert encode(reply.problem)


@many
@given(body=bodies, content_type=content_types)
@example(b"\xd8\x1c\x81\xd8\x1d\x00", "application/cbor")
@example(b'"\\ud800"', "application/json")
@example(b"9" * 5000, "application/json")
def test_a_body_that_was_read_reads_the_same_again(body: bytes, content_type: str | None) -> None:
    try:
        parsed = parse_body(body, content_type)
    except MalformedMessage:
        return

    first, again = parsed.decode(), parsed.decode()
    assert repr(first) == repr(again)
    assert to_body(to_blob(parsed)) == parsed == Body(parsed.content_type, body)
    if content_type:
        assert find_format(content_type) is parsed.content_type


@many
@given(message=messages)
def test_a_dead_letter_is_readable_and_goes_back_where_it_was(message: Message) -> None:
    letter = wire.dead_letter(Arrived(message), "research", "undecodable", "because")
    if letter.message.headers.get(SIZE) is not None:  # only the beginning of its body came: half a message goes nowhere
        with pytest.raises(OversizedMessage, match="ask its sender"):
            wire.revive(letter.message)
        return
    back = wire.revive(letter.message)

    assert letter.to == "research.dead"
    assert letter.message.headers["cc-reason"] == "undecodable"
    assert back.to == "research"
    assert [getattr(back.message, name) for name in PROPERTIES] == [getattr(message, name) for name in PROPERTIES]
    assert back.message.body == message.body


@pytest.mark.parametrize("parser", PARSERS)
def test_reading_gives_something_for_a_plain_message(parser: Any) -> None:
    """The properties above would hold for a reader that refuses everything."""
    kind = {KIND: "cancel"} if parser is wire.parse_control else {}

    parsed = parser(Message(body=b'{"reason": "r"}', correlation_id="c", headers={IDENTITY: "i", **kind}))

    assert parsed.correlation_id == "c"


@pytest.mark.parametrize(
    ("content_type", "raw"),
    [
        ("application/msgpack", b"\xdd\x00\x01\x00\x00" + b"\x81\xa0\x80" * 65_536),
        ("application/cbor", b"\x9f" + b"\xa1\x60\x80" * 65_536 + b"\xff"),
        ("application/json", b"[" + b"[[]]," * 40_000 + b"1]"),
        (None, b"[" + b"[[]]," * 40_000 + b"1]"),
        ("text/plain", ("a" * 200_000 + "\U0001f600").encode()),
    ],
)
def test_body_that_waits_takes_no_more_than_its_bytes(content_type: str | None, raw: bytes) -> None:
    """A process holds hundreds of them; as values, 1 MiB of MessagePack takes 89."""
    tracemalloc.start()
    try:
        body = parse_body(raw, content_type)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert held < len(raw)
    assert len(body.decode()) > 1000
