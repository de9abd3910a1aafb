"""Between our messages and AMQP's: properties both ways, and the whitelist of headers.

Headers are whitelisted in both directions. `CC` and `BCC` make RabbitMQ copy a message to other queues, `x-…` headers
steer the broker, and whatever else a peer sends is none of our business: it would only be stored and passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from coatcheck.broker.headers import QUEUE, REASON, may_arrive, may_pass
from coatcheck.broker.port import HeaderValue, Message

PERSISTENT = 2

_NO_HEADERS: Mapping[str, HeaderValue] = {}


def make_properties(message: Message, message_id: str) -> Basic.Properties:
    """Write a message's properties. Persistent always: a driver's default is transient, and a restart would drop it."""
    return Basic.Properties(
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        headers={name: _wired(value) for name, value in message.headers.items() if may_pass(name)},
        delivery_mode=PERSISTENT,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        message_id=message_id,
        message_type=message.type,
    )


def read_message(delivered: DeliveredMessage, *, is_dead: bool = False) -> Message:
    """Read a message. From a dead queue, the broker's own reason for a dead letter is read like ours."""
    properties = delivered.header.properties
    sent: Mapping[str, Any] = properties.headers or _NO_HEADERS
    headers = (
        {name: value for name, value in sent.items() if may_arrive(name, is_dead=is_dead)} if sent else _NO_HEADERS
    )
    if is_dead and (death := _find_death(sent)) is not None:
        headers = {**headers, REASON: str(death.get("reason")), QUEUE: str(death.get("queue"))}
    return Message(
        body=delivered.body,
        correlation_id=properties.correlation_id,
        reply_to=properties.reply_to,
        content_type=properties.content_type,
        type=properties.message_type,
        message_id=properties.message_id,
        headers=headers,
        content_encoding=properties.content_encoding,
    )


def _find_death(sent: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Find what the broker wrote when it dead-lettered a message; what we buried ourselves has nothing of the kind.

    The broker puts the latest death in front, whatever the sender had written there. The `x-first-death-…` headers it
    leaves as they came.
    """
    deaths = sent.get("x-death")
    return deaths[0] if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict) else None


def count_deliveries(delivered: DeliveredMessage) -> int:
    """Count how often this message was delivered, this time included.

    Quorum queues count in `x-delivery-count`, beginning with the second delivery. On a first delivery such a header
    can only be the sender's own, so it is not believed.
    """
    if not delivered.redelivered:
        return 1
    headers = delivered.header.properties.headers or _NO_HEADERS
    count = headers.get("x-delivery-count")
    return max(2, count + 1) if isinstance(count, int) and not isinstance(count, bool) else 2


def _wired(value: HeaderValue) -> Any:
    # pamqp knows bytearray only, and writes floats with 32 bits.
    if isinstance(value, bytes):
        return bytearray(value)
    if isinstance(value, float):
        return repr(value)
    return value
