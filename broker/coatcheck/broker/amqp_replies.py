"""Replies to direct reply-to addresses (`amq.rabbitmq.reply-to.…`), kept away from everything else.

Such an address is an encoded Erlang process id. RabbitMQ 3.10 decodes whatever it is given, and an address that was
made up crashes the *connection* that publishes to it (541 INTERNAL_ERROR). A requester picks its own address, so
anyone could cut our publisher off, again with every retry. Hence a connection of their own, opened on first use; and
after a crash, one more connection per message, to find out whose address it was. That one has no route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from aiormq.exceptions import ConnectionInternalError

from coatcheck.broker.amqp_address import AmqpAddress
from coatcheck.broker.amqp_lane import Attempt, Fate, Lane
from coatcheck.broker.amqp_link import Link, Uplink, translating
from coatcheck.broker.amqp_publisher import Publisher
from coatcheck.broker.port import BrokerStats, Outgoing, Routing
from coatcheck.broker.settings import BrokerSettings
from coatcheck.broker.topology import REPLY_PSEUDO_QUEUE
from coatcheck.errors import BrokerUnavailable

log = structlog.get_logger(__name__)


def is_direct_reply(outgoing: Outgoing) -> bool:
    """Tell whether a message goes to a direct reply-to address."""
    return outgoing.to.startswith(REPLY_PSEUDO_QUEUE) and not outgoing.is_broadcast


class DirectReplies:
    """Publishes to direct reply-to addresses.

    ROUTED means handed over; whether anybody listens, RabbitMQ does not say.
    """

    def __init__(self, address: AmqpAddress, settings: BrokerSettings, stats: BrokerStats) -> None:
        self._address = address
        self._settings = settings
        self._stats = stats
        self._uplink = Uplink(address, settings, role="reply", stats=stats)
        self._publisher = Publisher(self._uplink, settings, stats)

    async def publish(self, batch: Sequence[Outgoing]) -> list[Routing]:
        """See `Broker.publish`."""
        self._uplink.begin()
        try:
            return await self._publisher.publish(batch)
        except BrokerUnavailable as exc:
            if not isinstance(exc.__cause__, ConnectionInternalError):
                raise
        return [await self._publish_alone(outgoing) for outgoing in batch]

    async def stop(self) -> None:
        await self._publisher.stop()
        await self._uplink.stop()

    async def _publish_alone(self, outgoing: Outgoing) -> Routing:
        timeout_s = self._settings.publish_timeout.total_seconds()
        async with translating(f"publish to {outgoing.to!r}"), asyncio.timeout(timeout_s):
            link = await Link.open(self._address, self._settings, role="probe", stats=self._stats)
            try:
                channel = await link.channel(confirms=True, timeout_s=timeout_s)
                fates: list[Fate | None] = [None]
                attempt = Attempt(fates, 1)
                Lane(link, channel, "").send([(0, outgoing)], attempt)
                await attempt.finish(asyncio.get_running_loop().time() + timeout_s)
            finally:
                await link.close()
            fate = fates[0]
            if isinstance(fate, ConnectionInternalError):
                log.warning("reply_address_refused", reply_to=outgoing.to[:64])
                return Routing.NO_ROUTE
            if isinstance(fate, BaseException):
                raise fate
        return Routing.ROUTED
