"""Replies to direct reply-to addresses (`amq.rabbitmq.reply-to.…`), kept away from everything else.

Such an address is an encoded Erlang process id. RabbitMQ 3.10 decodes whatever it is given, and an address that was
made up crashes the *connection* that publishes to it (541 INTERNAL_ERROR). A requester picks its own address, so
anyone could cut our publisher off, again with every retry. Hence a connection of their own, opened on first use.

After a crash, addresses that never worked before are suspects for a while: each is tried on a connection of its own, a
few at a time, and one that crashes it has no route. Those that worked before go on as ever. When too many suspects wait
for their turn the rest is refused, and comes again later: they must not hold up what is in order.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

from aiormq.exceptions import ConnectionInternalError

from coatcheck.broker.amqp.connection import AmqpAddress, AmqpLink, AmqpUplink, translating
from coatcheck.broker.amqp.publish_channel import Attempt, Fate, Lane
from coatcheck.broker.amqp.publisher import AmqpPublisher
from coatcheck.broker.port import BrokerStats, Outgoing, Routing
from coatcheck.broker.settings import BrokerSettings
from coatcheck.broker.topology import REPLY_PSEUDO_QUEUE
from coatcheck.errors import BrokerUnavailable
from coatcheck.log import get_logger

log = get_logger(__name__)

SUSPICIOUS_S = 60.0
"""How long after a crash addresses that never worked before are suspects."""
MOST_PROBES = 8
MOST_SUSPECTS = 32
"""Connections that are opened for suspects at a time, and suspects that wait for one."""
MOST_PROVEN = 10_000
MOST_TRIES = 5
"""How often one that worked before is tried beside others that may crash the connection."""


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
        self._uplink = AmqpUplink(address, settings, role="reply", stats=stats)
        self._publisher = AmqpPublisher(self._uplink, settings, stats)
        self._proven: dict[str, None] = {}
        self._suspicious_until_s = 0.0
        self._suspect_count = 0
        self._probes = asyncio.Semaphore(MOST_PROBES)

    async def publish(self, batch: Sequence[Outgoing]) -> list[Routing]:
        """See `Broker.publish`."""
        self._uplink.begin()
        routings = await asyncio.gather(*(self._publish_one(outgoing) for outgoing in batch), return_exceptions=True)
        lost = next((each for each in routings if isinstance(each, BaseException)), None)
        if lost is not None:
            raise lost
        return [each for each in routings if isinstance(each, Routing)]

    async def _publish_one(self, outgoing: Outgoing) -> Routing:
        if not _is_decodable(outgoing.to):
            return Routing.NO_ROUTE
        for _ in range(MOST_TRIES):
            if outgoing.to not in self._proven and asyncio.get_running_loop().time() < self._suspicious_until_s:
                break
            try:
                (routing,) = await self._publisher.publish([outgoing])
            except BrokerUnavailable as exc:
                if not isinstance(exc.__cause__, ConnectionInternalError):
                    raise
                self._suspicious_until_s = asyncio.get_running_loop().time() + SUSPICIOUS_S
            else:
                self._prove(outgoing.to)
                return routing
        if self._suspect_count >= MOST_SUSPECTS:
            return Routing.REFUSED
        self._suspect_count += 1
        try:
            async with self._probes:
                return await self._publish_alone(outgoing)
        finally:
            self._suspect_count -= 1

    def _prove(self, address: str) -> None:
        """Note that an address crashes nothing."""
        self._proven[address] = None
        if len(self._proven) > MOST_PROVEN:
            del self._proven[next(iter(self._proven))]

    async def stop(self) -> None:
        await self._publisher.stop()
        await self._uplink.stop()

    async def _publish_alone(self, outgoing: Outgoing) -> Routing:
        timeout_s = self._settings.publish_timeout.total_seconds()
        async with translating(f"publish to {outgoing.to!r}"), asyncio.timeout(timeout_s):
            link = await AmqpLink.open(self._address, self._settings, role="probe", stats=self._stats)
            try:
                channel = await link.channel(confirms=True, timeout_s=timeout_s)
                fates: list[Fate | None] = [None]
                attempt = Attempt(fates, 1)
                Lane(link, channel, "", timeout_s=timeout_s).send([(0, outgoing)], attempt)
                await attempt.finish()
            finally:
                await link.close()
            fate = fates[0]
            if isinstance(fate, ConnectionInternalError):
                log.warning("reply_address_refused", reply_to=outgoing.to[:64])
                return Routing.NO_ROUTE
            if isinstance(fate, BaseException):
                raise fate
        self._prove(outgoing.to)
        return Routing.ROUTED


def _is_decodable(address: str) -> bool:
    """Tell whether RabbitMQ can decode an address at all. What has another form it does not try to decode."""
    parts = address.removeprefix(REPLY_PSEUDO_QUEUE).lstrip(".").split(".")
    if len(parts) != 2:
        return True
    try:
        return bool(base64.b64decode(parts[0], validate=True))
    except ValueError:
        return False
