"""Dead letters: looking at them, sending them back, dropping them.

A letter is redriven in this order: published to the queue it was on, confirmed by the broker, then acked off the dead
queue. Killed in between it is in both places, and redriving it again is harmless: it keeps its message_id, so it is
the same request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime

from coatcheck.broker.headers import DEAD_AT, DETAIL, QUEUE, REASON
from coatcheck.broker.port import Broker, Delivery, Message, Outgoing, Routing
from coatcheck.broker.topology import Names
from coatcheck.broker.wire import revive
from coatcheck.errors import MalformedMessage, UsageError

BATCH_SIZE = 500


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead message and why it is dead."""

    letter_id: str
    """Its message_id; a message without one is named by a digest of it."""
    message: Message
    reason: str
    detail: str
    queue: str
    dead_at: datetime | None
    service: str = ""
    """Whose dead letter it is."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a chosen letter. `trouble`: why it is still there; None: it is gone from the dead queue."""

    letter_id: str
    reason: str
    queue: str
    trouble: str | None


Action = Callable[[Broker, Sequence[Letter]], Awaitable[list[str | None]]]
"""Acts on letters and says for each what the trouble is, or None: then it may be acked."""


async def count_letters(broker: Broker, service: str) -> int:
    """How many dead letters a service has. Raises UsageError if it has no queue for them."""
    queue = Names(service).dead
    depth = await broker.depth(queue)
    if depth is None:
        raise UsageError(f"there is no queue {queue!r} on this broker; a worker of {service!r} makes it when it starts")
    return depth


async def look(broker: Broker, service: str, *, limit: int) -> list[Letter]:
    """Read up to `limit` letters, the oldest first, and leave them where they are."""
    async with broker.browse(Names(service).dead, limit) as deliveries:
        letters = [read_letter(delivery.message, service) for delivery in deliveries]
    never = datetime.max.replace(tzinfo=UTC)
    return sorted(letters, key=lambda letter: (letter.dead_at or never, letter.letter_id))


async def settle(broker: Broker, service: str, choose: Callable[[Letter], bool], act: Action) -> list[Outcome]:
    """Act on every letter that is chosen, among those that are there now; the rest stay.

    Batches with letters that stay are held until the end, or the same ones would come up again. What arrives meanwhile
    (a redriven message may die again at once) is left for the next time.
    """
    left_count = await count_letters(broker, service)
    outcomes: list[Outcome] = []
    async with AsyncExitStack() as held:
        while left_count > 0:
            async with AsyncExitStack() as batch:
                browsing = broker.browse(Names(service).dead, min(left_count, BATCH_SIZE))
                deliveries = await batch.enter_async_context(browsing)
                if not deliveries:
                    break
                left_count -= len(deliveries)
                outcomes += await _settle_batch(broker, service, deliveries, choose=choose, act=act)
                if not all(delivery.is_settled for delivery in deliveries):
                    deliveries.clear()  # lets go of their bodies; the broker knows what it gets back
                    held.push_async_callback(batch.pop_all().aclose)
    return outcomes


async def _settle_batch(
    broker: Broker, service: str, deliveries: Sequence[Delivery], *, choose: Callable[[Letter], bool], act: Action
) -> list[Outcome]:
    chosen = [(delivery, letter) for delivery in deliveries if choose(letter := read_letter(delivery.message, service))]
    troubles = await act(broker, [letter for _, letter in chosen]) if chosen else []
    for (delivery, _), trouble in zip(chosen, troubles, strict=True):
        if trouble is None:
            delivery.ack()
    return [
        Outcome(letter.letter_id, letter.reason, letter.queue, trouble)
        for (_, letter), trouble in zip(chosen, troubles, strict=True)
    ]


async def redrive(broker: Broker, letters: Sequence[Letter]) -> list[str | None]:
    """Publish letters to the queues they were on; those that have no way back are told apart.

    Anybody who may publish can forge a letter, and we would publish it with an operator's rights. So a way back leads
    to a queue of the service itself; only what the service sent in vain goes elsewhere, to a peer's queue.
    """
    troubles: list[str | None] = [None] * len(letters)
    ways: dict[int, Outgoing] = {}
    for index, letter in enumerate(letters):
        try:
            way = revive(letter.message)
        except MalformedMessage as error:
            troubles[index] = error.detail
            continue
        if letter.reason == "no_route" or not letter.service or way.to in Names(letter.service).queues:
            ways[index] = way
        else:
            troubles[index] = f"{way.to!r} is no queue of {letter.service}, so it cannot have been there"
    routings = await broker.publish(list(ways.values()))
    for index, routing in zip(ways, routings, strict=True):
        if routing is Routing.NO_ROUTE:
            troubles[index] = f"its queue {ways[index].to!r} is gone"
        elif routing is Routing.REFUSED:
            troubles[index] = f"its queue {ways[index].to!r} does not take it: it is full, or away"
    return troubles


async def drop(broker: Broker, letters: Sequence[Letter]) -> list[str | None]:
    """Let letters go for good."""
    return [None] * len(letters)


def read_letter(message: Message, service: str = "") -> Letter:
    """Read a dead letter; whatever it does not say is empty."""
    return Letter(
        letter_id=message.message_id or f"sha-{_digest(message)}",
        message=message,
        reason=_text(message, REASON),
        detail=_text(message, DETAIL),
        queue=_text(message, QUEUE),
        dead_at=_instant(_text(message, DEAD_AT)),
        service=service,
    )


def _text(message: Message, header: str) -> str:
    value = message.headers.get(header)
    return "" if value is None else str(value)


def _instant(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _digest(message: Message) -> str:
    parts = (message.body, *(str(it).encode() for it in (message.correlation_id, message.reply_to, message.type)))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
