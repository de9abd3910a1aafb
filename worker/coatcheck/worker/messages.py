"""Between the wire and the rows: bodies become blobs as they came, rows become messages again. Functions
that change nothing.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from coatcheck.broker.bodies import Body, BodyFormat
from coatcheck.broker.port import Delivery, Outgoing
from coatcheck.broker.topology import Names, takes_replies
from coatcheck.broker.wire import Request, make_cancel, make_error, make_request, make_result
from coatcheck.log import get_logger
from coatcheck.store.blobs import Codec, CorruptBlob, decode, pack, unpack
from coatcheck.store.rows import Address, Birth, Caller, CallId, HistoryLevel, NewCall, Peer, Task, TaskId, TaskState
from coatcheck.worker.engine.keys import REVISION, base_of
from coatcheck.worker.ids import child_traceparent, derived_id, new_id
from coatcheck.worker.problems import problem

log = get_logger(__name__)

_NAMESPACE = UUID("636f6174-6368-5563-8b21-7461736b6964")
_CODECS = {
    BodyFormat.JSON: Codec.JSON,
    BodyFormat.MSGPACK: Codec.MSGPACK,
    BodyFormat.CBOR: Codec.CBOR,
    BodyFormat.TEXT: Codec.TEXT,
    BodyFormat.BYTES: Codec.BYTES,
}
_FORMATS = {codec: form for form, codec in _CODECS.items()}
_NEVER = 9000
_names_of = functools.lru_cache(maxsize=256)(Names)


def task_id_of(service: str, identity: str | None) -> TaskId:
    """The same request always becomes the same task; one without an identity is new each time."""
    return TaskId(new_id() if identity is None else derived_id(_NAMESPACE, f"{service}\0{identity}"))


def to_blob(body: Body) -> bytes:
    """Keep a body's bytes as they came."""
    return pack(_CODECS[body.content_type], body.raw)


def to_body(blob: bytes) -> Body:
    codec, raw = unpack(blob)
    return Body(_FORMATS[codec], raw)


def birth_of(
    request: Request,
    *,
    service: str,
    task_id: TaskId,
    handler: str | None,
    version: str,
    caller: Caller | None = None,
    history: HistoryLevel = HistoryLevel.OFF,
) -> Birth:
    """The row this request would become."""
    address = Address(request.reply_to, request.correlation_id) if request.reply_to else None
    return Birth(
        task_id=task_id,
        service=service,
        handler=handler,
        version=version,
        request=to_blob(request.body),
        digest=digest_with(request.digest, caller),
        identity=request.identity,
        address=address,
        correlation_id=request.correlation_id,
        traceparent=request.traceparent,
        tracestate=request.tracestate,
        caller=caller,
        deadline_at=deadline_of(request),
        history=history,
    )


def digest_with(digest: bytes, caller: Caller | None) -> bytes:
    """Tell the same body of two callers apart: what one asked for is not answered to the other.

    By subject alone, for claims such as a token's expiry differ from one request to the next.
    """
    if caller is None:
        return digest
    return hashlib.sha256(digest + b"\0caller\0" + caller.subject.encode("utf-8", "surrogatepass")).digest()


def deadline_of(request: Request) -> datetime | None:
    """Until when its requester waits. One that no clock will reach is none: Postgres keeps years Python cannot read."""
    return None if request.deadline is None or request.deadline.year >= _NEVER else request.deadline


def call_message(call: Peer, *, reply_to: str | None = None) -> Outgoing:
    """A call or send as a request to its peer. Sending it twice is harmless: its identity stays the same."""
    identity, task = str(call.call_id), str(call.task_id)
    is_answered = call.kind.has_listener
    message = make_request(
        to_body(call.body),
        identity if is_answered else None,
        reply_to=(reply_to or _names_of(call.service).replies) if is_answered else None,
        handler=call.handler,
        identity=identity,
        key=_key_of(call),
        task=task,
        deadline=call.hard_due_at,
        traceparent=child_traceparent(call.traceparent, call_id=call.call_id, task_id=call.task_id),
        tracestate=call.headers.get("tracestate"),
    )
    return Outgoing(call.peer, message)


def _key_of(call: Peer) -> str:
    """For the peer's own idempotency. A task that was taken back by order asks anew, and is not to get old answers."""
    revision = call.headers.get(REVISION)
    return f"{call.task_id}:{base_of(call.key)}" + (f":{revision}" if revision else "")


def peer_of_new(call: NewCall, now: datetime, *, task_id: TaskId, service: str, traceparent: str | None) -> Peer:
    """A call that was just committed, in the shape the wire needs."""
    return Peer(
        call_id=call.call_id,
        task_id=task_id,
        service=service,
        kind=call.kind,
        key=call.key,
        peer=call.peer,
        handler=call.handler,
        body=call.body,
        headers=call.headers,
        # By our own clock; the row's due time is Postgres's.
        hard_due_at=now + call.hard if call.hard is not None else None,
        traceparent=traceparent,
    )


def cancel_message(call_id: CallId, peer: str, reason: str) -> Outgoing:
    """Tell a peer that this call is not waited for any more. A peer without a control queue never hears it."""
    # A task of ours was started under cc-id = call id, so naming it lets a tombstone meet it.
    return Outgoing(f"{peer}.control", make_cancel(correlation_id=str(call_id), identity=str(call_id), reason=reason))


def final_messages(task: Task, *addresses: Address) -> list[Outgoing]:
    """The stored answer of a finished task, for these addresses or for all it has."""
    assert task.value is not None, "a finished row holds its answer"
    to = addresses or task.addresses
    return answers(task.task_id, task.state, task.value, to, traceparent=task.traceparent, revision=task.revision)


def answers(
    task_id: TaskId,
    state: TaskState,
    value: bytes,
    addresses: tuple[Address, ...],
    *,
    traceparent: str | None,
    revision: int = 0,
) -> list[Outgoing]:
    """A final reply under a stable id, one for each address. A stored answer that cannot be read is a problem, too.

    A task that was taken back by order may have answered before; its next answer has another id.
    """
    identity = f"{task_id}:{revision}" if revision else str(task_id)
    try:
        if state is not TaskState.DONE:
            return errors(task_id, decode(value), addresses, traceparent=traceparent, identity=identity)
        body = to_body(value)
    except CorruptBlob as error:
        detail = f"the task is {state}, but its stored answer (coatcheck.task, value) cannot be read: {error}"
        log.error("stored_answer_damaged", task_id=str(task_id), reason=detail)
        document = problem("damaged_value", detail=detail, task_id=str(task_id))
        return errors(task_id, document, addresses, traceparent=traceparent, identity=identity)
    return [
        Outgoing(to.reply_to, make_result(body, to.correlation_id, identity=identity, traceparent=traceparent))
        for to in addresses
    ]


def errors(
    task_id: TaskId,
    document: Mapping[str, Any],
    addresses: tuple[Address, ...],
    *,
    traceparent: str | None,
    identity: str | None = None,
) -> list[Outgoing]:
    named = identity or str(task_id)
    return [
        Outgoing(to.reply_to, make_error(document, to.correlation_id, identity=named, traceparent=traceparent))
        for to in addresses
    ]


def address_of(delivery: Delivery) -> tuple[Address, ...]:
    """Where a request wants its answer, as far as its raw properties tell and we publish there."""
    message = delivery.message
    is_usable = message.reply_to and takes_replies(message.reply_to)
    return (Address(message.reply_to, message.correlation_id),) if message.reply_to and is_usable else ()
