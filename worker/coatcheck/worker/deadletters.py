"""Bad input never kills a consumer and never loops: it goes to the dead-letter queue, with the reason on it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import structlog

from coatcheck.broker.port import Delivery, Outgoing
from coatcheck.broker.wire import dead_letter, make_error
from coatcheck.errors import BrokerUnavailable, MalformedMessage
from coatcheck.points import reach
from coatcheck.store.rows import Address
from coatcheck.worker.runtime import Runtime

log = structlog.get_logger(__name__)

PAUSE_S = 0.5
"""How long a message is held that cannot be buried now, before it goes back to its queue."""


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
        await runtime.outbox.publish_home([letter], runtime.app.service)
        if addresses:
            await runtime.outbox.publish(
                Outgoing(to.reply_to, make_error(document, to.correlation_id)) for to in addresses
            )
    except BrokerUnavailable as outage:
        log.warning("dead_letter_not_sent", error=str(outage))
        await asyncio.sleep(PAUSE_S)
        delivery.requeue()
        return
    reach("after_bury")
    runtime.metrics.dead_letters.labels(error.code).inc()
    log.error(
        "message_buried", queue=delivery.queue, code=error.code, detail=error.detail, size=len(delivery.message.body)
    )
    delivery.ack()
