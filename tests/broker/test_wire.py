"""The wire contract, without I/O: what each kind of message means, and how each kind of nonsense is refused."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.pretty import pretty_repr

from coatcheck.broker import (
    Body,
    BodyFormat,
    ControlKind,
    Delivery,
    Limits,
    Message,
    Outgoing,
    Progress,
    ReplyKind,
    dead_letter,
    make_cancel,
    make_error,
    make_problem,
    make_progress,
    make_request,
    make_result,
    make_resume,
    make_timeout,
    parse_control,
    parse_reply,
    parse_request,
    revive,
)
from coatcheck.errors import MalformedMessage, OversizedMessage

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60)


class FakeDelivery(Delivery):
    __slots__ = ()

    def ack(self) -> None: ...
    def requeue(self) -> None: ...

    @property
    def is_settled(self) -> bool:
        return False

    @property
    def is_lost(self) -> bool:
        return False


def code_of(parse: Any, message: Message) -> str:
    with pytest.raises(MalformedMessage) as caught:
        parse(message)
    return caught.value.code


# --- requests ---


def test_tutorial_request_without_content_type_is_a_json_number() -> None:
    request = parse_request(Message(body=b"30", correlation_id="c1", reply_to="amq.gen-x"))

    assert request.handler is None
    assert request.body.decode() == 30
    assert (request.correlation_id, request.reply_to) == ("c1", "amq.gen-x")


@given(value=json_values, identity=names, correlation_id=names, handler=st.none() | names, keep=st.booleans())
def test_request_round_trip(value: Any, identity: str, correlation_id: str, handler: str | None, keep: bool) -> None:
    deadline = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=timezone(timedelta(hours=2)))

    message = make_request(
        Body.of(value),
        correlation_id,
        reply_to="me.replies",
        handler=handler,
        identity=identity,
        key="k",
        task="t",
        deadline=deadline,
        traceparent=TRACEPARENT,
        tracestate="a=b",
        keep=keep,
    )
    request = parse_request(message)

    assert request.body.decode() == value
    assert (request.identity, request.correlation_id, request.handler) == (identity, correlation_id, handler)
    assert (request.reply_to, request.key, request.task, request.keep) == ("me.replies", "k", "t", keep)
    assert request.deadline == deadline
    assert request.deadline.tzinfo is UTC
    assert (request.traceparent, request.tracestate) == (TRACEPARENT, "a=b")


class OtherInstant(datetime):
    """As a library for tests would have it."""


@given(instant=st.datetimes(timezones=st.just(UTC)))
def test_deadline_is_written_as_isoformat_does(instant: datetime) -> None:
    for deadline in (instant, instant.replace(microsecond=0), OtherInstant.fromtimestamp(0, UTC)):
        message = make_request(Body.of(1), None, deadline=deadline)

        assert message.headers["cc-deadline"] == deadline.isoformat()


def test_identity_is_cc_id_then_message_id_then_a_hash_then_none() -> None:
    everything: dict[str, Any] = {"correlation_id": "c", "reply_to": "r", "message_id": "m"}

    assert parse_request(Message(body=b"1", headers={"cc-id": "i"}, **everything)).identity == "i"
    assert parse_request(Message(body=b"1", **everything)).identity == "m"
    hashed = parse_request(Message(body=b"1", correlation_id="c", reply_to="r")).identity
    assert hashed is not None
    assert len(hashed) == 64
    assert parse_request(Message(body=b"1", correlation_id="c")).identity is None
    assert parse_request(Message(body=b"1", reply_to="r")).identity is None
    assert parse_request(Message(body=b"1")).identity is None


def test_hashed_identity_tells_addresses_and_bodies_apart() -> None:
    def identity(reply_to: str, correlation_id: str, body: bytes) -> str | None:
        return parse_request(Message(body=body, correlation_id=correlation_id, reply_to=reply_to)).identity

    assert identity("r", "c", b"1") == identity("r", "c", b"1")
    assert (
        len({identity("r", "c", b"1"), identity("r", "c", b"2"), identity("rc", "c", b"1"), identity("r", "cc", b"1")})
        == 4
    )
    assert identity("ab", "c", b"1") != identity("a", "bc", b"1")


def test_digest_depends_on_bytes_and_format_not_on_the_name_of_the_format() -> None:
    plain = parse_request(Message(body=b"1")).digest

    assert parse_request(Message(body=b"1", content_type="application/json; charset=UTF-8")).digest == plain
    assert parse_request(Message(body=b"1", content_type="text/plain")).digest != plain
    assert parse_request(Message(body=b"2")).digest != plain


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Message(headers={"cc-version": 2}), "wrong_version"),
        (Message(headers={"cc-version": "1.0"}), "wrong_version"),
        (Message(headers={"cc-version": True}), "wrong_version"),
        (Message(headers={"cc-version": [1]}), "wrong_version"),
        (Message(headers={"cc-kind": "progress"}), "unknown_kind"),
        (Message(headers={"cc-kind": ["request"]}), "bad_header"),
        (Message(headers={"cc-id": {"a": 1}}), "bad_header"),
        (Message(headers={"cc-id": True}), "bad_header"),
        (Message(headers={"cc-id": b"\xff"}), "bad_header"),
        (Message(headers={"cc-id": "x" * 1025}), "bad_header"),
        (Message(headers={"cc-id": "a\0b"}), "bad_header"),
        (Message(headers={"cc-deadline": "tomorrow"}), "bad_header"),
        (Message(headers={"cc-deadline": "0001-01-01T00:00:00+23:00"}), "bad_header"),
        (Message(headers={"cc-deadline": 12}), "bad_header"),
        (Message(headers={"cc-broken": "UnicodeDecodeError: …"}), "bad_properties"),
        (Message(type="a\0b"), "bad_property"),
        (Message(message_id="a\0b"), "bad_property"),
        (Message(body=b"1", correlation_id="a\0b"), "bad_property"),
        (Message(body=b"1", correlation_id="x" * 256), "bad_property"),
        (Message(body=b"1", type="\N{OWL}" * 64), "bad_property"),
        (Message(body=b"1", message_id="x" * 256), "bad_property"),
        (Message(body=b"1", reply_to="x" * 256), "bad_property"),
        (Message(body=b"1", headers={"cc-size": 2_000_000}), "oversized"),
        (Message(body=b"{", content_type="application/json"), "undecodable"),
        (Message(body=b"", content_type="application/json"), "undecodable"),
        (Message(body=b"[NaN]", content_type="application/json"), "undecodable"),
        (Message(body=b'"\\ud800"', content_type="application/json"), "undecodable"),
        (Message(body=b'"\xed\xa0\x80"', content_type="application/json"), "undecodable"),
        (Message(body=b"9" * 5000, content_type="application/json"), "undecodable"),
        (Message(body=b"1e999", content_type="application/json"), "undecodable"),
        (Message(body=b"\xff", content_type="text/plain"), "undecodable"),
        (Message(body=b"\xe9", content_type="text/plain; charset=iso-8859-1"), "unsupported_charset"),
        (Message(body=b"\xc1", content_type="application/msgpack"), "undecodable"),
        (Message(body=b"\xff", content_type="application/cbor"), "undecodable"),
        (Message(body=b"[" * 65 + b"]" * 65), "too_deep"),
        (Message(body=b"[" * 100_000, content_type="application/json"), "too_deep"),
        (Message(body=b'{"a":' * 65 + b"1" + b"}" * 65, content_type="application/json"), "too_deep"),
        (Message(body=b"\x91" * 65 + b"\x01", content_type="application/x-msgpack"), "too_deep"),
        (Message(body=b"\x91" * 5000 + b"\x01", content_type="application/x-msgpack"), "too_deep"),
        (Message(body=b"\x81" * 65 + b"\x01", content_type="application/cbor"), "too_deep"),
        (Message(body=b"x" * 1_048_577), "oversized"),
        (Message(body=b"1", content_encoding="gzip"), "unsupported_encoding"),
    ],
)
def test_bad_request_is_refused_with_a_code(message: Message, code: str) -> None:
    assert code_of(parse_request, message) == code


def test_oversized_is_its_own_kind_of_malformed() -> None:
    with pytest.raises(OversizedMessage):
        parse_request(Message(body=b"12345"), Limits(max_body=4))


def test_what_peers_really_send_is_accepted() -> None:
    for version in (1, "1"):
        assert parse_request(Message(body=b"1", headers={"cc-version": version})).body.decode() == 1
    assert parse_request(Message(body=b"1", headers={"cc-id": 42})).identity == "42"
    assert parse_request(Message(body=b"1", content_encoding="utf-8")).body.decode() == 1
    assert parse_request(Message(body=b"1", headers={"cc-deadline": "2030-01-01T00:00:00Z"})).deadline == datetime(
        2030, 1, 1, tzinfo=UTC
    )
    assert parse_request(Message(body=b"1", headers={"cc-keep": "true"})).keep
    assert parse_request(Message(body=b"1", type="", message_id="", correlation_id="")).handler is None


def test_broken_trace_context_is_ignored() -> None:
    for traceparent in ("x", 5, "00-zz", TRACEPARENT.upper(), "0" * 200):
        request = parse_request(Message(body=b"1", headers={"traceparent": traceparent, "tracestate": "a=b"}))

        assert (request.traceparent, request.tracestate) == (None, None)


@given(
    body=st.binary(max_size=200),
    content_type=st.none()
    | st.sampled_from(
        ["application/json", "application/msgpack", "application/cbor", "text/plain", "image/png", "a/b+json"]
    )
    | st.text(max_size=20),
    headers=st.dictionaries(
        st.sampled_from(
            ["cc-id", "cc-kind", "cc-version", "cc-deadline", "cc-keep", "cc-task", "cc-epoch", "traceparent"]
        ),
        st.none() | st.integers() | st.text(max_size=20) | st.binary(max_size=8) | st.lists(st.integers(), max_size=2),
        max_size=4,
    ),
    properties=st.dictionaries(
        st.sampled_from(["correlation_id", "reply_to", "message_id", "type", "content_encoding"]), st.text(max_size=10)
    ),
)
def test_whatever_arrives_is_read_or_refused_and_nothing_else(
    body: bytes, content_type: str | None, headers: dict[str, Any], properties: dict[str, str]
) -> None:
    message = Message(body=body, content_type=content_type, headers=headers, **properties)

    for parse in (parse_request, parse_reply, parse_control):
        try:
            read = parse(message)
        except MalformedMessage:
            continue
        assert read.correlation_id in (message.correlation_id or None, None)


# --- replies ---


def test_reply_with_nothing_but_a_correlation_id_is_a_result() -> None:
    reply = parse_reply(Message(body=b"832040", correlation_id="c1"))

    assert (reply.kind, reply.correlation_id, reply.body.decode()) == (ReplyKind.RESULT, "c1", 832040)
    assert reply.problem is None


@given(value=json_values)
def test_result_round_trip(value: Any) -> None:
    reply = parse_reply(make_result(Body.of(value), "c", identity="task-1"))

    assert (reply.kind, reply.body.decode()) == (ReplyKind.RESULT, value)


def test_error_round_trip() -> None:
    problem = make_problem("no_route", "there is no queue 'search'", retryable=False, peer="search")

    reply = parse_reply(make_error(problem, "c"))

    assert reply.kind is ReplyKind.ERROR
    assert reply.problem == problem
    assert reply.problem["title"] == "No route"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            Message(body=b'{"detail":"d"}', content_type="application/problem+json"),
            {"detail": "d", "code": "peer_error"},
        ),
        (Message(body=b'{"code":7,"retryable":"no"}', content_type="application/problem+json"), {"code": "7"}),
        (Message(body=b'{"error":"e"}', headers={"cc-kind": "error"}), {"error": "e", "code": "peer_error"}),
        (Message(body=b"[1,2]", headers={"cc-kind": "error"}), {"detail": "[1,2]"}),
        (Message(body=b"it broke", headers={"cc-kind": "error"}), {"detail": "it broke"}),
        (Message(body=b"", headers={"cc-kind": "error"}), {"detail": ""}),
        (Message(body=b"\xff\xfe", headers={"cc-kind": "error"}), {"detail": "2 bytes"}),
        (Message(body=b"{", content_type="application/problem+json"), {"code": "peer_error"}),
        (Message(body=b"x", content_type="text/plain", headers={"cc-kind": "error"}), {"detail": "x"}),
    ],
)
def test_any_error_becomes_a_problem(message: Message, expected: dict[str, Any]) -> None:
    message = Message(body=message.body, content_type=message.content_type, headers=message.headers, correlation_id="c")

    reply = parse_reply(message)

    assert reply.kind is ReplyKind.ERROR
    assert reply.problem is not None
    assert expected.items() <= reply.problem.items()
    assert isinstance(reply.problem["code"], str)
    assert isinstance(reply.problem.get("retryable", True), bool)


@pytest.mark.parametrize(
    ("body", "progress"),
    [
        (b'{"done":3,"total":10,"message":"m"}', Progress(3.0, 10.0, "m")),
        (b'{"done":"three","total":true}', Progress()),
        (b'{"done":1' + b"0" * 400 + b"}", Progress()),
        (b'"half way"', Progress(message="half way")),
        (b"half way", Progress(message="half way")),
        (b"7", Progress()),
    ],
)
def test_progress_takes_what_it_can_read(body: bytes, progress: Progress) -> None:
    reply = parse_reply(Message(body=body, correlation_id="c", headers={"cc-kind": "progress"}))

    assert (reply.kind, reply.progress) == (ReplyKind.PROGRESS, progress)


def test_progress_timeout_and_resume_round_trip() -> None:
    progress = parse_reply(make_progress(Progress(1, 2, "x"), "c"))
    timeout = parse_reply(make_timeout("c"))
    resume = parse_reply(make_resume("t", 7))

    assert progress.progress == Progress(1.0, 2.0, "x")
    assert (timeout.kind, timeout.correlation_id) == (ReplyKind.TIMEOUT, "c")
    assert (resume.kind, resume.task, resume.epoch) == (ReplyKind.RESUME, "t", 7)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Message(body=b"1"), "no_correlation_id"),
        (Message(body=b"1", correlation_id=""), "no_correlation_id"),
        (Message(headers={"cc-kind": "timeout"}), "no_correlation_id"),
        (Message(correlation_id="c", headers={"cc-kind": "cancel"}), "unknown_kind"),
        (Message(headers={"cc-kind": "resume", "cc-task": "t"}), "bad_header"),
        (Message(headers={"cc-kind": "resume", "cc-epoch": 1}), "bad_header"),
        (Message(headers={"cc-kind": "resume", "cc-task": "t", "cc-epoch": "-1"}), "bad_header"),
        (Message(headers={"cc-kind": "resume", "cc-task": "t", "cc-epoch": "9" * 30}), "bad_header"),
        (Message(body=b"x" * 2_000_000, correlation_id="c", content_type="application/problem+json"), "oversized"),
        (Message(body=b"[" * 99 + b"]" * 99, correlation_id="c", content_type="application/problem+json"), "too_deep"),
        (Message(body=b"{", correlation_id="c", content_type="application/json"), "undecodable"),
    ],
)
def test_bad_reply_is_refused_with_a_code(message: Message, code: str) -> None:
    assert code_of(parse_reply, message) == code


# --- control ---


def test_cancel_round_trip() -> None:
    control = parse_control(make_cancel(correlation_id="c", task="t", identity="i", reason="late"))

    assert control.kind is ControlKind.CANCEL
    assert (control.correlation_id, control.task, control.identity, control.reason) == ("c", "t", "i", "late")


def test_cancel_needs_no_body() -> None:
    assert parse_control(Message(correlation_id="c", headers={"cc-kind": "cancel"})).reason is None


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Message(correlation_id="c"), "unknown_kind"),
        (Message(correlation_id="c", headers={"cc-kind": "explode"}), "unknown_kind"),
        (Message(headers={"cc-kind": "cancel"}), "no_correlation_id"),
    ],
)
def test_bad_control_is_refused_with_a_code(message: Message, code: str) -> None:
    assert code_of(parse_control, message) == code


# --- dead letters ---


def test_dead_letter_keeps_the_message_and_tells_the_reason_and_revive_undoes_it() -> None:
    message = Message(b"{", "c", "r", "application/json", "h", "m", {"cc-id": "i"}, "identity")
    delivery = FakeDelivery(message, "research", is_redelivered=False, delivery_count=1)

    outgoing = dead_letter(delivery, "research", "undecodable", "x" * 9999)

    assert outgoing.to == "research.dead"
    headers = outgoing.message.headers
    assert (headers["cc-reason"], headers["cc-queue"], headers["cc-id"]) == ("undecodable", "research", "i")
    assert len(str(headers["cc-detail"])) == 500
    assert datetime.fromisoformat(str(headers["cc-dead-at"])).tzinfo is not None
    revived = revive(outgoing.message)
    assert (revived.to, revived.message) == ("research", message)


@pytest.mark.parametrize("inside", [[b"\xff\xfe"], [1e300], {"a": 1}])
def test_dead_letter_leaves_out_a_header_that_amqp_may_not_take_back(inside: Any) -> None:
    delivery = FakeDelivery(
        Message(headers={"cc-task": inside, "cc-id": "i"}), "q", is_redelivered=False, delivery_count=1
    )

    headers = dead_letter(delivery, "q", "bad_header", "why").message.headers

    assert "cc-task" not in headers
    assert (headers["cc-id"], headers["cc-broken"]) == ("i", "left out: cc-task")


def test_revive_refuses_a_letter_without_a_queue() -> None:
    assert code_of(revive, Message()) == "bad_header"


# --- bodies ---


@pytest.mark.parametrize("form", [BodyFormat.JSON, BodyFormat.MSGPACK, BodyFormat.CBOR])
@given(value=json_values)
def test_body_round_trip_in_every_format(form: BodyFormat, value: Any) -> None:
    body = Body.of(value, form)

    assert body.decode() == value
    assert parse_request(make_request(body, "c")).body == body


@pytest.mark.parametrize(
    ("raw", "form", "value"),
    [
        (b'{"a":[1]}', BodyFormat.JSON, {"a": [1]}),
        (b'"\\u0000"', BodyFormat.JSON, "\0"),
        (b"hello", BodyFormat.TEXT, "hello"),
        (b"NaN", BodyFormat.TEXT, "NaN"),
        (b"", BodyFormat.TEXT, ""),
        (b"\xff\xd8", BodyFormat.BYTES, b"\xff\xd8"),
        (b"[" * 64 + b"]" * 64, BodyFormat.JSON, None),
        (b'["' + b"[" * 1000 + b'"]', BodyFormat.JSON, ["[" * 1000]),
        (b'["\\"' + b"[" * 1000 + b'"]', BodyFormat.JSON, ['"' + "[" * 1000]),
        (b"see " + b"[" * 99, BodyFormat.TEXT, "see " + "[" * 99),
        (b"[" + b"[]," * 1000 + b"[]]", BodyFormat.JSON, [[]] * 1001),
    ],
)
def test_body_without_content_type_is_json_else_text_else_bytes(raw: bytes, form: BodyFormat, value: Any) -> None:
    body = parse_request(Message(body=raw)).body

    assert (body.content_type, body.raw) == (form, raw)
    if value is not None:
        assert body.decode() == value


@pytest.mark.parametrize("content_type", ["image/png", "application/x-python-serialize", "nonsense"])
def test_unknown_content_type_is_bytes_and_never_interpreted(content_type: str) -> None:
    body = parse_request(Message(body=b"\x80\x04.", content_type=content_type)).body

    assert (body.content_type, body.decode()) == (BodyFormat.BYTES, b"\x80\x04.")


def test_callers_do_not_share_a_decoded_value() -> None:
    body = parse_request(Message(body=b"[1]")).body

    first = body.decode()
    first.append(2)

    assert body.decode() == [1]


def test_typed_decode_fits_or_says_why() -> None:
    class Order(msgspec.Struct):
        item: str
        count: int

    body = parse_request(Message(body=b'{"item":"x","count":2}')).body

    assert body.decode(Order) == Order("x", 2)
    with pytest.raises(MalformedMessage, match="does_not_fit"):
        Body.of({"item": 1}).decode(Order)


@pytest.mark.parametrize("value", ["\ud800", object(), {("a", "b"): 1}])
def test_what_json_cannot_carry_is_said_at_once(value: Any) -> None:
    with pytest.raises(MalformedMessage, match="unencodable"):
        Body.of(value)


def test_cbor_that_shares_or_loops_is_refused() -> None:
    looped = bytes.fromhex("d81c81d81d00")
    laughs = bytes.fromhex("82d81c8a" + "01" * 10 + "98f0" + "d81d00" * 240)

    assert code_of(parse_request, Message(body=looped, content_type="application/cbor")) in {"too_deep", "undecodable"}
    assert code_of(parse_request, Message(body=laughs, content_type="application/cbor")) == "undecodable"


def test_message_shows_neither_body_nor_headers():
    message = Message(b"secret", headers={"authorization": "secret"})

    assert "secret" not in repr(message) + repr(Outgoing("queue", message)) + pretty_repr(message)
