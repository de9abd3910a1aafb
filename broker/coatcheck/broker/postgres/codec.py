"""Between our messages and rows.

Properties and headers are one blob of MessagePack: text columns refuse NUL, jsonb refuses more than that, and a
message that breaks the wire contract must arrive all the same, to be buried with a reason. What the adapter itself says
about a dead letter has columns of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from coatcheck.broker.headers import BROKEN, QUEUE, REASON, SIZE, may_arrive, may_pass
from coatcheck.broker.port import BrokerStats, HeaderValue, Message
from coatcheck.decoding import check_msgpack
from coatcheck.errors import MalformedMessage
from coatcheck.log import get_logger

log = get_logger(__name__)

_Head: TypeAlias = tuple[
    str | None, str | None, str | None, str | None, str | None, str | None, dict[str, Any]
]  # correlation_id, reply_to, content_type, type, message_id, content_encoding, headers

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)
_MAX_NAME_BYTES = 255


def encode_head(message: Message) -> bytes:
    """Write a message's properties and those of its headers that may pass. Raises MalformedMessage if it cannot."""
    headers = {name: value for name, value in message.headers.items() if may_pass(name)}
    try:
        return _encoder.encode(
            (
                message.correlation_id,
                message.reply_to,
                message.content_type,
                message.type,
                message.message_id or uuid.uuid4().hex,
                message.content_encoding,
                headers,
            )
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise MalformedMessage("unencodable", f"it cannot be written as MessagePack: {exc}") from exc


def decode_message(row: Mapping[str, Any], stats: BrokerStats, *, is_dead: bool) -> Message:
    """Read a message. One whose head cannot be read says so in a header, and takes the road of malformed messages."""
    body: bytes = row["body"]
    is_cut = row["size"] != len(body)
    try:
        head: bytes = row["head"]
        check_msgpack(head)
        correlation_id, reply_to, content_type, type_, message_id, content_encoding, sent = _decoder.decode(head)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        stats.undecodable_count += 1
        log.warning("message_properties_undecodable", error=type(exc).__name__, body_size=len(body))
        return Message(body, headers={BROKEN: type(exc).__name__} | ({SIZE: row["size"]} if is_cut else {}))
    headers: dict[str, HeaderValue] = {name: value for name, value in sent.items() if may_arrive(name, is_dead=is_dead)}
    if is_dead and row["reason"] is not None:
        headers |= {REASON: row["reason"], QUEUE: row["origin"]}
    if is_cut:
        headers[SIZE] = row["size"]
    return Message(
        body=body,
        correlation_id=correlation_id,
        reply_to=reply_to,
        content_type=content_type,
        type=type_,
        message_id=message_id,
        headers=headers,
        content_encoding=content_encoding,
    )


def is_nameable(name: str) -> bool:
    """Tell whether a queue can have this name at all. If not, there is no such queue."""
    try:
        return 0 < len(name.encode()) <= _MAX_NAME_BYTES and "\0" not in name
    except UnicodeEncodeError:
        return False
