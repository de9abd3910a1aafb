"""The wire contract, version 1: what messages mean, as values and pure functions.

    parse_…(message) reads what a peer sent and raises `MalformedMessage` for what breaks the contract, nothing else;
    make_…(…)        writes what we send;
    dead_letter(…)   wraps what could not be read, with the reason, and revive(…) undoes that.

Peers need none of this: a result is any body with the call's correlation_id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

from coatcheck.broker.bodies import DEFAULT_LIMITS, PROBLEM, Body, BodyFormat, Limits, parse_body
from coatcheck.broker.headers import (
    AUTHORIZATION,
    BROKEN,
    DEAD_AT,
    DEAD_HEADERS,
    DEADLINE,
    DETAIL,
    EPOCH,
    IDENTITY,
    KEEP,
    KEY,
    KIND,
    QUEUE,
    REASON,
    SIZE,
    TASK,
    Head,
)
from coatcheck.broker.port import Delivery, HeaderValue, Message, Outgoing
from coatcheck.broker.topology import Names
from coatcheck.errors import MalformedMessage, OversizedMessage

_MAX_DETAIL = 500
_NO_BODY = Body(BodyFormat.BYTES, b"")


# --- requests ---


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A requester asks a service for work."""

    handler: str | None
    """None: the service's default handler."""
    body: Body
    identity: str | None
    """Two requests with the same identity are one. None: they cannot be told apart, so each is a new task."""
    correlation_id: str | None
    reply_to: str | None
    key: str | None = None
    task: str | None = None
    """The task of the caller, if the caller is one of ours."""
    deadline: datetime | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    keep: bool = False
    """The requester will fetch the result: store it even if the task never waits."""

    @property
    def digest(self) -> bytes:
        """Tells its body from another one; made when it is asked for."""
        return self.body.digest


def parse_request(message: Message, limits: Limits = DEFAULT_LIMITS) -> Request:
    """Read a request. Raises `MalformedMessage` or `OversizedMessage`."""
    head = Head(message, limits)
    kind = head.find_text(KIND)
    if kind not in {None, "request"}:
        raise MalformedMessage("unknown_kind", f"{KIND} {kind!r} on a requests queue")
    body = parse_body(message.body, message.content_type, content_encoding=message.content_encoding, limits=limits)
    handler, identity = head.find_property("type"), _find_identity(head, body)
    correlation_id, reply_to = head.find_property("correlation_id"), head.find_property("reply_to")
    return Request(
        handler=handler,
        body=body,
        identity=identity,
        correlation_id=correlation_id,
        reply_to=reply_to,
        **(_read_request_headers(head) if message.headers else {}),  # most strangers send none
    )


def _read_request_headers(head: Head) -> dict[str, Any]:
    return {
        "key": head.find_text(KEY),
        "task": head.find_text(TASK),
        "deadline": head.find_instant(DEADLINE),
        "traceparent": head.find_traceparent(),
        "tracestate": head.find_tracestate(),
        "keep": head.find_flag(KEEP),
    }


def make_request(
    body: Body,
    correlation_id: str | None,
    *,
    reply_to: str | None = None,
    handler: str | None = None,
    identity: str | None = None,
    key: str | None = None,
    task: str | None = None,
    deadline: datetime | None = None,
    traceparent: str | None = None,
    tracestate: str | None = None,
    keep: bool = False,
    token: str | None = None,
) -> Message:
    """Write a request. `message_id` is left to the adapter, which makes it unique per publish."""
    headers: dict[str, HeaderValue] = {}
    if identity is not None:
        headers[IDENTITY] = identity
    if key is not None:
        headers[KEY] = key
    if task is not None:
        headers[TASK] = task
    if deadline is not None:
        headers[DEADLINE] = _written(deadline)
    if traceparent is not None:
        headers["traceparent"] = traceparent
    if tracestate is not None:
        headers["tracestate"] = tracestate
    if keep:
        headers[KEEP] = True
    if token:
        headers[AUTHORIZATION] = f"Bearer {token}"
    return Message(
        body=body.raw,
        correlation_id=correlation_id,
        reply_to=reply_to,
        content_type=body.mime_type,
        type=handler,
        headers=headers,
    )


def _written(instant: datetime) -> str:
    """The text of `isoformat` in UTC. msgspec has it in a fifth of the time, but takes no subclasses."""
    utc = instant if instant.tzinfo is UTC else instant.astimezone(UTC)
    if type(utc) is not datetime:
        return utc.isoformat()
    text: str = msgspec.to_builtins(utc)
    return text.replace("Z", "+00:00")


def find_token(message: Message, limits: Limits = DEFAULT_LIMITS) -> str | None:
    """Read the bearer token a request came with. Raises `MalformedMessage` for one that is none."""
    return Head(message, limits).find_token()


def _find_identity(head: Head, body: Body) -> str | None:
    identity = head.find_text(IDENTITY) or head.find_property("message_id")
    if identity:
        return identity
    reply_to, correlation_id = head.find_property("reply_to"), head.find_property("correlation_id")
    if not reply_to or not correlation_id:
        return None
    # Length-prefixed, so that no two pairs of addresses run together into one.
    parts = (reply_to.encode(), correlation_id.encode(), body.digest)
    return hashlib.sha256(b"".join(len(it).to_bytes(4, "big") + it for it in parts)).hexdigest()


# --- replies ---


class ReplyKind(StrEnum):
    """What arrives on a replies queue."""

    RESULT = "result"
    ERROR = "error"
    PROGRESS = "progress"
    TIMEOUT = "timeout"
    RESUME = "resume"


_RESULT = ReplyKind.RESULT  # asking an Enum for a member takes longer than comparing with it
_RESULT_TEXT, _ERROR_TEXT = ReplyKind.RESULT.value, ReplyKind.ERROR.value


class Progress(msgspec.Struct, frozen=True, gc=False):
    """How far a peer has got; every part may be missing."""

    done: float | None = None
    total: float | None = None
    message: str | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An answer to a call, or word from the sweeper about one."""

    kind: ReplyKind
    correlation_id: str | None
    """The call. None for `resume` only, which names a task."""
    body: Body
    problem: dict[str, Any] | None = None
    """For `error`: an RFC 9457 document, made from what the peer sent."""
    progress: Progress | None = None
    task: str | None = None
    epoch: int | None = None


def parse_reply(message: Message, limits: Limits = DEFAULT_LIMITS) -> Reply:
    """Read a reply.

    Raises `MalformedMessage` or `OversizedMessage`; an unreadable *error* is still an error of its call.
    """
    head = Head(message, limits)
    kind = _find_reply_kind(head)
    correlation_id = head.find_property("correlation_id")
    if correlation_id is None and kind is not ReplyKind.RESUME:
        raise MalformedMessage("no_correlation_id", f"a {kind} must carry its call's correlation_id")
    if kind is _RESULT:  # by far the most
        body = parse_body(message.body, message.content_type, content_encoding=message.content_encoding, limits=limits)
        return Reply(kind=kind, correlation_id=correlation_id, body=body)
    if kind is ReplyKind.PROGRESS:
        body = parse_body(message.body, message.content_type, content_encoding=message.content_encoding, limits=limits)
        return Reply(kind=kind, correlation_id=correlation_id, body=body, progress=_read_progress(body))
    if kind is ReplyKind.ERROR:
        body, problem = _read_problem(message, limits)
        return Reply(kind=kind, correlation_id=correlation_id, body=body, problem=problem)
    if kind is ReplyKind.TIMEOUT:
        return Reply(kind=kind, correlation_id=correlation_id, body=_NO_BODY)
    return Reply(kind=kind, correlation_id=None, body=_NO_BODY, task=head.get_text(TASK), epoch=head.get_int(EPOCH))


def make_result(
    body: Body, correlation_id: str | None, *, identity: str | None = None, traceparent: str | None = None
) -> Message:
    """Write a final reply. `identity` is the same however often it is sent, so its reader can tell repeats."""
    return Message(
        body=body.raw,
        correlation_id=correlation_id,
        content_type=body.mime_type,
        headers=_final_headers(_RESULT_TEXT, identity, traceparent),
    )


def make_error(
    problem: Mapping[str, Any],
    correlation_id: str | None,
    *,
    identity: str | None = None,
    traceparent: str | None = None,
) -> Message:
    """Write a final reply that is an error; `problem` is an RFC 9457 document."""
    return Message(
        body=Body.of(dict(problem)).raw,
        correlation_id=correlation_id,
        content_type=PROBLEM,
        headers=_final_headers(_ERROR_TEXT, identity, traceparent),
    )


def _final_headers(kind: str, identity: str | None, traceparent: str | None) -> dict[str, HeaderValue]:
    headers: dict[str, HeaderValue] = {KIND: kind}
    if identity is not None:
        headers[IDENTITY] = identity
    if traceparent is not None:
        headers["traceparent"] = traceparent
    return headers


def make_progress(progress: Progress, correlation_id: str) -> Message:
    """Write a progress message: it resets the call's idle deadline, never its hard one."""
    body = Body.of({"done": progress.done, "total": progress.total, "message": progress.message})
    return Message(
        body=body.raw,
        correlation_id=correlation_id,
        content_type=body.mime_type,
        headers={KIND: ReplyKind.PROGRESS.value},
    )


def make_timeout(call_id: str) -> Message:
    """Write the sweeper's word that a call is overdue. Whether it applies is decided at the claim."""
    return Message(correlation_id=call_id, headers={KIND: ReplyKind.TIMEOUT.value})


def make_resume(task_id: str, epoch: int) -> Message:
    """Write the sweeper's word that a task should be picked up, if it is still at `epoch`."""
    return Message(headers={KIND: ReplyKind.RESUME.value, TASK: task_id, EPOCH: epoch})


def make_problem(
    code: str, detail: str, *, title: str | None = None, retryable: bool = True, **more: Any
) -> dict[str, Any]:
    """Build an RFC 9457 document with our two additions, `code` and `retryable`."""
    return {
        "type": "about:blank",
        "title": title or code.replace("_", " ").capitalize(),
        "detail": detail,
        "code": code,
        "retryable": retryable,
        **more,
    }


_REPLY_KINDS = {kind.value: kind for kind in ReplyKind}


def _find_reply_kind(head: Head) -> ReplyKind:
    said = head.find_text(KIND)
    if said is None:
        content_type = head.message.content_type
        is_problem = content_type and content_type.partition(";")[0].strip().lower() == PROBLEM
        return ReplyKind.ERROR if is_problem else _RESULT
    kind = _REPLY_KINDS.get(said)
    if kind is None:
        raise MalformedMessage("unknown_kind", f"{KIND} {said!r} on a replies queue")
    return kind


def _read_problem(message: Message, limits: Limits) -> tuple[Body, dict[str, Any]]:
    """Make a problem of what a peer sent: its document, any other JSON, text, or bytes that say nothing.

    Only size and depth are refused. Dropping an error because it is badly written would turn it into a timeout.
    """
    try:
        body = parse_body(message.body, message.content_type, content_encoding=message.content_encoding, limits=limits)
    except OversizedMessage:
        raise
    except MalformedMessage as exc:
        if exc.code == "too_deep":
            raise
        return Body(BodyFormat.BYTES, message.body), make_problem("peer_error", f"an error that cannot be read ({exc})")
    value = body.decode()
    if isinstance(value, bytes):
        return body, make_problem("peer_error", f"{len(value)} bytes")
    try:
        # MessagePack and CBOR carry more than JSON does; a problem is stored and sent on as JSON.
        plain = msgspec.json.encode(value, enc_hook=repr)
    except (TypeError, ValueError, RecursionError, OverflowError) as exc:
        return body, make_problem("peer_error", f"an error that is no JSON ({type(exc).__name__})")
    if isinstance(value, dict):
        return body, _completed_problem(msgspec.json.decode(plain))
    return body, make_problem("peer_error", value if isinstance(value, str) else plain.decode())


def _completed_problem(value: dict[str, Any]) -> dict[str, Any]:
    problem = {"type": "about:blank", "title": "The peer answered with an error", "code": "peer_error"} | value
    for name in ("type", "title", "detail", "code"):
        if name in problem and not isinstance(problem[name], str):
            problem[name] = str(problem[name])
    if "retryable" in problem and not isinstance(problem["retryable"], bool):
        del problem["retryable"]
    return problem


def _read_progress(body: Body) -> Progress:
    value = body.decode()
    if not isinstance(value, dict):
        return Progress(message=value[:_MAX_DETAIL] if isinstance(value, str) else None)
    done, total, message = value.get("done"), value.get("total"), value.get("message")
    return Progress(
        done=_number(done), total=_number(total), message=message[:_MAX_DETAIL] if isinstance(message, str) else None
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


# --- control ---


class ControlKind(StrEnum):
    """What arrives on a control queue."""

    CANCEL = "cancel"


class Control(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An order about a task, named by its id, by the identity of its request, or by its requester's correlation_id."""

    kind: ControlKind
    correlation_id: str | None = None
    task: str | None = None
    identity: str | None = None
    reason: str | None = None


def parse_control(message: Message, limits: Limits = DEFAULT_LIMITS) -> Control:
    """Read a control message. Raises `MalformedMessage` or `OversizedMessage`."""
    head = Head(message, limits)
    kind = head.find_text(KIND)
    if kind != ControlKind.CANCEL:
        raise MalformedMessage("unknown_kind", f"{KIND} {kind!r} on a control queue")
    control = Control(
        kind=ControlKind.CANCEL,
        correlation_id=head.find_property("correlation_id"),
        task=head.find_text(TASK),
        identity=head.find_text(IDENTITY),
        reason=_read_reason(message, limits),
    )
    if control.correlation_id is None and control.task is None and control.identity is None:
        raise MalformedMessage("no_correlation_id", f"a cancel needs correlation_id, {TASK} or {IDENTITY}")
    return control


def make_cancel(
    *,
    correlation_id: str | None = None,
    task: str | None = None,
    identity: str | None = None,
    reason: str | None = None,
) -> Message:
    """Write a cancel, for a peer (by correlation_id) or for one of our own services."""
    body = Body.of({"reason": reason})
    return Message(
        body=body.raw,
        correlation_id=correlation_id,
        content_type=body.mime_type,
        headers=_present({KIND: ControlKind.CANCEL.value, TASK: task, IDENTITY: identity}),
    )


def _read_reason(message: Message, limits: Limits) -> str | None:
    body = parse_body(message.body, message.content_type, content_encoding=message.content_encoding, limits=limits)
    value = body.decode()
    reason = value.get("reason") if isinstance(value, dict) else value
    return reason[:_MAX_DETAIL] if isinstance(reason, str) and reason else None


# --- dead letters ---


def dead_letter(delivery: Delivery, service: str, code: str, detail: str) -> Outgoing:
    """Wrap a delivery for the service's dead queue: properties and body as they came, the reason in headers.

    Of a body over the adapter's limit, its beginning came, and `cc-size` says how long it was.
    A token does not come along. A header over its limit neither, or the letter might not fit into a frame any more: it
    is replaced by word of it that keeps the message unreadable, should it be redriven.
    """
    message = delivery.message
    headers = {
        **_letter_headers(message.headers),
        REASON: code,
        DETAIL: detail[:_MAX_DETAIL],
        QUEUE: delivery.queue,
        DEAD_AT: datetime.now(UTC).isoformat(),
    }
    return Outgoing(to=Names(service).dead, message=msgspec.structs.replace(message, headers=headers))


def revive(message: Message) -> Outgoing:
    """Undo `dead_letter`: the message as it was, to the queue it was on.

    Raises `MalformedMessage` if that is not recorded, or if the letter has only the beginning of the body.
    """
    size = message.headers.get(SIZE)
    if size is not None:
        detail = (
            f"its body had {str(size)[:20]} bytes, and {len(message.body)} were kept; ask its sender to send it again"
        )
        raise OversizedMessage("oversized", detail)
    queue = message.headers.get(QUEUE)
    if not isinstance(queue, str) or not queue:
        raise MalformedMessage("bad_header", f"no {QUEUE}: nothing says which queue it was on")
    headers = {
        name: value for name, value in message.headers.items() if name not in DEAD_HEADERS and name != AUTHORIZATION
    }
    return Outgoing(to=queue, message=msgspec.structs.replace(message, headers=headers))


def _letter_headers(headers: Mapping[str, HeaderValue]) -> dict[str, HeaderValue]:
    """What a letter can carry of the headers: what is too long, or has an inside that AMQP may not take back, stays."""
    given = {name: value for name, value in headers.items() if name != AUTHORIZATION}
    kept = {name: value for name, value in given.items() if _fits_a_letter(value)}
    missed = sorted(name for name in given.keys() - kept.keys() if name.startswith("cc-"))  # a trace is not missed
    return kept | {BROKEN: f"left out: {', '.join(missed)}"} if missed else kept


def _fits_a_letter(value: HeaderValue) -> bool:
    return not isinstance(value, list | dict) and len(str(value)) <= DEFAULT_LIMITS.max_header


def _present(headers: Mapping[str, HeaderValue]) -> dict[str, HeaderValue]:
    return {name: value for name, value in headers.items() if value is not None}
