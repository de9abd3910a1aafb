"""Queues on RabbitMQ: what this process declares, and the queues that another program made with other arguments.

RabbitMQ refuses to declare such a queue (406) and names one argument at a time: what it received and what the queue
has. So we ask again with what the queue has, until it agrees or says nothing new. That makes and changes nothing, each
time on a channel of its own. A queue that keeps messages is then used as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import aio_pika
from aiormq.exceptions import (
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)

from coatcheck.broker.amqp.connection import AmqpUplink
from coatcheck.broker.topology import Arguments
from coatcheck.errors import BrokerUnavailable, InvalidSettings
from coatcheck.log import get_logger

log = get_logger(__name__)

Value: TypeAlias = str | int | bool | None
_MOST_DIFFERENCES = 16

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


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is made together. `is_own`: by this process for itself, also if it may not make queues of services."""

    queues: Mapping[str, Arguments]
    exchanges: Mapping[str, str] = field(default_factory=dict)
    bindings: tuple[tuple[str, str, str], ...] = ()
    is_own: bool = False


class AmqpQueues:
    """What this process declared, so that it can be made again.

    A queue may be deleted under us, or a broker come back empty. `on_made` hears which queues were declared, perhaps
    again: then their consumers may be deaf.
    """

    def __init__(self, uplink: AmqpUplink, *, declares: bool, on_made: Callable[[Collection[str]], None]) -> None:
        self.odd: dict[str, str] = {}
        """Queues that are used as they are: how they differ from what was wanted."""
        self._uplink = uplink
        self._declares = declares
        self._on_made = on_made
        self._plans: dict[str, Declaration] = {}
        self._own: list[str] = []

    async def declare(self, plan: Declaration) -> None:
        """Make what is planned. Raises InvalidSettings for what the broker refuses, else BrokerUnavailable."""
        what = f"declare {', '.join(plan.queues)}"
        while True:
            try:
                await self._uplink.on_channel(lambda channel: self._follow(plan, channel), what)
                break
            except BrokerUnavailable as exc:
                if await self._make_do(plan, exc.__cause__):
                    continue
                if (refusal := _explain_refusal(plan, exc.__cause__)) is None:
                    raise
                raise refusal from exc
        self._plans |= dict.fromkeys(plan.queues, plan)
        if plan.is_own:
            self._own += [queue for queue in plan.queues if queue not in self._own]
        self._on_made(plan.queues)

    async def ensure(self, queue: str) -> bool:
        """Make a queue of ours again. False: it never was one of ours."""
        plan = self._plans.get(queue)
        if plan is None:
            return False
        await self.declare(plan)
        log.warning("queue_declared_again", queue=queue)
        return True

    async def delete(self, queue: str) -> None:
        self._plans.pop(queue, None)
        await self._uplink.on_channel(lambda channel: channel.queue_delete(queue), f"delete {queue!r}")

    async def delete_own(self) -> None:
        """Delete the queues that this process made for itself."""
        queues, self._own = self._own, []
        if self._uplink.link is not None:
            for queue in queues:
                with suppress(BrokerUnavailable):  # they expire by themselves
                    await self.delete(queue)

    async def _follow(self, plan: Declaration, channel: aio_pika.Channel) -> None:
        """Make what is planned, or see whether it is there: what we may not make, and what others made otherwise."""
        makes = self._declares or plan.is_own
        for exchange, kind in plan.exchanges.items():
            if makes:
                await channel.declare_exchange(exchange, kind, durable=True)
            elif kind == "fanout":  # the other one is the broker's business, when it has a letter
                await channel.declare_exchange(exchange, passive=True)
        made: dict[str, aio_pika.abc.AbstractQueue] = {}
        for queue, arguments in plan.queues.items():
            if makes and queue not in self.odd:
                made[queue] = await channel.declare_queue(queue, durable=True, arguments=dict(arguments))
            else:  # needs no permission, and arguments are not compared
                made[queue] = await channel.declare_queue(queue, passive=True)
        for queue, exchange, key in plan.bindings if makes else ():
            await made[queue].bind(exchange, key)

    # --- queues that others made ---

    async def _make_do(self, plan: Declaration, cause: BaseException | None) -> bool:
        """See whether a plan that was refused can be followed after all, with a queue as it is. Raises InvalidSettings.

        Each time one queue more is known to be odd, or none is any more, so this comes to an end.
        """
        if isinstance(cause, ChannelNotFoundEntity):  # an odd one has gone, and is made by us now
            odd = [queue for queue in plan.queues if self.odd.pop(queue, None) is not None]
            return bool(odd)
        refusal = _read_refusal(str(cause)) if isinstance(cause, ChannelPreconditionFailed) else None
        if refusal is None or refusal.queue not in plan.queues or refusal.queue in self.odd:
            return False
        queue, wanted = refusal.queue, plan.queues[refusal.queue]
        differences = await self._find_differences(refusal, wanted)
        self.odd[queue] = text = _compare(wanted, differences)
        log.warning("queue_used_as_it_is", queue=queue, differences=text)
        return True

    async def _find_differences(self, refusal: _Difference, wanted: Arguments) -> dict[str, Value]:
        """What a queue has that was declared otherwise, as far as RabbitMQ tells."""
        queue, tried = refusal.queue, dict(wanted)
        found: dict[str, Value] = {}
        for _ in range(_MOST_DIFFERENCES):
            if why := _find_unfitness(refusal):
                raise InvalidSettings(
                    f"the queue {queue!r} is there and cannot be used: {why}; delete it on the broker when it is "
                    "empty, or use another name"
                )
            found[refusal.argument] = refusal.current
            if refusal.current is None:
                tried.pop(refusal.argument, None)
            else:
                tried[refusal.argument] = refusal.current
            again = await self._try_arguments(queue, tried) if refusal.is_told else None
            if again is None or again.argument in found:
                break
            refusal = again
        return found

    async def _try_arguments(self, queue: str, arguments: Arguments) -> _Difference | None:
        """Ask whether a queue has these arguments. None: it has, or nothing more can be learnt."""
        try:
            await self._uplink.on_channel(
                lambda channel: channel.declare_queue(queue, durable=True, arguments=dict(arguments)),
                f"declare {queue}",
            )
        except BrokerUnavailable as exc:
            return _read_refusal(str(exc.__cause__))
        return None


def _explain_refusal(plan: Declaration, cause: BaseException | None) -> InvalidSettings | None:
    """What the broker has against a plan. None: it is only away."""
    queues = ", ".join(plan.queues)
    if isinstance(cause, ChannelPreconditionFailed | ChannelAccessRefused | ChannelLockedResource):
        return InvalidSettings(f"the broker refuses to declare {queues}: {cause}")
    if isinstance(cause, ChannelNotFoundEntity):
        return InvalidSettings(
            f"not all of {queues} are there, and this process was told not to make them: {cause}; "
            "run `coatcheck declare` as a user who may"
        )
    return None


class _Difference(NamedTuple):
    """One argument in which a queue is not what was declared. `is_told`: the text said what the queue has."""

    queue: str
    argument: str
    current: Value
    is_told: bool


def _read_refusal(text: str) -> _Difference | None:
    """Read what RabbitMQ says of a queue with other arguments. It says 255 bytes at most, so the end may be missing."""
    found = _REFUSAL.search(text)
    if found is None:
        return None
    current = _CURRENT.search(text)
    value = None if current is None or current[1] is None else _value(current[1], current[2])
    return _Difference(found[2], found[1], value, current is not None)


def _value(text: str, kind: str | None) -> Value:
    if kind == "bool" or kind is None:
        return {"true": True, "false": False}.get(text, text)
    return int(text) if kind != "longstr" and _NUMBERS.fullmatch(text) else text


def _find_unfitness(refusal: _Difference) -> str | None:
    """Say why a queue cannot keep our messages at all, if it cannot."""
    if refusal.argument in _UNFIT:
        return f"{refusal.argument} is {_written(refusal.current)} there; it has to be {_written(not refusal.current)}"
    if refusal.argument == "x-queue-type" and refusal.current == "stream":
        return "it is a stream, of which nothing can be taken off"
    return None


def _compare(wanted: Arguments, current: Mapping[str, Value]) -> str:
    """Both declarations side by side, where they differ, and what is lost by it."""
    sides = [f"{name}: wanted {_written(wanted.get(name))}, is {_written(it)}" for name, it in current.items()]
    losses = dict.fromkeys(_LOSSES[name] for name in current if name in _LOSSES)
    return "; ".join((*sides, *(f"so {loss}" for loss in losses)))


def _written(value: Value) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else repr(value)
