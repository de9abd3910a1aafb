"""A queue that is there already, declared by another program with other arguments: what differs, and what that means.

RabbitMQ refuses such a declare (406) and names one argument at a time: what it received and what the queue has. So we
ask again with what the queue has, until it agrees or says nothing new. That makes and changes nothing, each time on a
channel of its own. A queue that keeps messages is then used as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from coatcheck.broker.topology import Arguments

Value: TypeAlias = str | int | bool | None
MOST_DIFFERENCES = 16

_REFUSAL = re.compile(r"inequivalent arg '([^']{1,255})' for queue '([^']{1,255})'")
_CURRENT = re.compile(r"but current is (?:none|(?:the value )?'([^']*)'(?: of type '([a-z]+)')?)$")

_LOSSES = {
    "x-queue-type": "its messages are on one node only, and wait while that node is away",
    "x-dead-letter-exchange": "a message that RabbitMQ gives up on is dropped, not kept as a dead letter",
    "x-dead-letter-routing-key": "a message that RabbitMQ gives up on goes elsewhere than to our dead letters",
    "x-dead-letter-strategy": "a message may be lost on its way to the dead letters",
    "x-delivery-limit": "a message that ends its consumer comes back more or less often than we allow",
    "x-overflow": "a full queue may drop its oldest messages",
    "x-single-active-consumer": "its messages are spread over its consumers otherwise than we rely on",
    "x-message-ttl": "messages that wait for longer are dropped",
    "x-max-length": "a full queue drops or refuses messages",
    "x-max-length-bytes": "a full queue drops or refuses messages",
    "x-expires": "the queue is deleted with its messages when it is not used for so long",
    "x-max-priority": "messages overtake each other",
}
_UNFIT = {"durable", "auto_delete", "exclusive"}
_NUMBERS = re.compile(r"-?[0-9]{1,18}")


class Refusal(NamedTuple):
    """One argument in which a queue is not what was declared. `is_told`: the text said what the queue has."""

    queue: str
    argument: str
    current: Value
    is_told: bool


def read_refusal(text: str) -> Refusal | None:
    """Read what RabbitMQ says of a queue with other arguments. It says 255 bytes at most, so the end may be missing."""
    found = _REFUSAL.search(text)
    if found is None:
        return None
    current = _CURRENT.search(text)
    value = None if current is None or current[1] is None else _value(current[1], current[2])
    return Refusal(found[2], found[1], value, current is not None)


def _value(text: str, kind: str | None) -> Value:
    if kind == "bool" or kind is None:
        return {"true": True, "false": False}.get(text, text)
    return int(text) if kind != "longstr" and _NUMBERS.fullmatch(text) else text


def find_unfitness(refusal: Refusal) -> str | None:
    """Say why a queue cannot keep our messages at all, if it cannot."""
    if refusal.argument in _UNFIT:
        return f"{refusal.argument} is {_written(refusal.current)} there; it has to be {_written(not refusal.current)}"
    if refusal.argument == "x-queue-type" and refusal.current == "stream":
        return "it is a stream, of which nothing can be taken off"
    return None


def compare(wanted: Arguments, current: Mapping[str, Value]) -> str:
    """Both declarations side by side, where they differ, and what is lost by it."""
    sides = [f"{name}: wanted {_written(wanted.get(name))}, is {_written(it)}" for name, it in current.items()]
    losses = dict.fromkeys(_LOSSES[name] for name in current if name in _LOSSES)
    return "; ".join((*sides, *(f"so {loss}" for loss in losses)))


def _written(value: Value) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else repr(value)
