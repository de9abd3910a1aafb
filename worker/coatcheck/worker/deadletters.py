"""Bad input never kills a consumer and never loops: it goes to the dead-letter queue, with the reason on it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from coatcheck.broker.port import Delivery, Outgoing, Routing
from coatcheck.broker.wire import dead_letter, make_error
from coatcheck.errors import BrokerUnavailable, MalformedMessage
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.rows import Address
from coatcheck.worker.events import MessageBuried
from coatcheck.worker.runtime import Runtime

log = get_logger(__name__)

PAUSE_S = 0.5
"""How long a message is held that cannot be buried now, before it goes back to its queue."""
LONGEST_PAUSE_S = 60.0


async def bury(
    runtime: Runtime,
    delivery: Delivery,
    error: MalformedMessage,
    *,
    tell: tuple[Mapping[str, Any], tuple[Address, ...]] | None = None,
) -> None:
    """Put a message in the dead-letter queue and ack it, in that order; tell its sender if it said where to.

    If we die in between, the message comes back and is buried twice: the reason says the same.
    """
    letter = dead_letter(delivery, runtime.app.service, error.code, error.detail)
    document, addresses = tell if tell is not None else ({}, ())
    reach("before_bury")
    try:
        if not await _publish(runtime, letter):
            log.warning("dead_letter_refused", queue=letter.to, delivery_count=delivery.delivery_count)
            await asyncio.sleep(min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(delivery.delivery_count, 10)))
            delivery.requeue()
            return
        if addresses:
            await runtime.outbox.tell(
                Outgoing(to.reply_to, make_error(document, to.correlation_id)) for to in addresses
            )
    except BrokerUnavailable as outage:
        log.warning("dead_letter_not_sent", error=str(outage))
        await asyncio.sleep(PAUSE_S)
        delivery.requeue()
        return
    size = len(delivery.message.body)
    runtime.events.tell(MessageBuried(None, delivery.queue, error.code, error.detail, size))
    delivery.ack()


async def _publish(runtime: Runtime, letter: Outgoing) -> bool:
    """Put a letter into the dead-letter queue. One that is full is waited for, unacked: to go back and forth would only
    count deliveries. False: so many wait for it already that they would hold up what is in order.
    """
    for number in itertools.count():
        (routing,) = await runtime.outbox.publish_home([letter], runtime.app.service)
        if routing is not Routing.REFUSED:
            return True
        if not await runtime.outbox.pause(number):
            return False
    raise AssertionError("it tries for ever")
