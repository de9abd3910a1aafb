"""Replies to direct reply-to addresses (`amq.rabbitmq.reply-to.…`), kept away from everything else.

Such an address is an encoded Erlang process id. RabbitMQ 3.10 decodes what it is given, and an address that was made up
crashes the *connection* that publishes to it (541 INTERNAL_ERROR). A requester picks its own address, so any of them
could cut our publisher off, again with every retry. Hence a connection of their own, opened on first use.

After a crash, addresses that never worked before are suspects for a while: each is tried on a connection of its own, a
few at a time, and one that crashes it has no route. Those that worked before go on as ever. When too many suspects wait
for their turn the rest is refused, and comes again later: they must not hold up what is in order.
"""

from __future__ import annotations

import asyncio
import base64
from asyncio import Future
from collections.abc import Iterable
from functools import partial

from aiormq.exceptions import ConnectionInternalError

from coatcheck.broker.amqp.connection import AmqpAddress, AmqpLink, AmqpUplink, translating
from coatcheck.broker.amqp.publisher import AmqpPublisher, Lane, Sending
from coatcheck.broker.background import reap
from coatcheck.broker.port import BrokerStats, Outgoing, Routing, fail
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
"""How often an address that worked before is tried beside others that may crash the connection."""


def is_direct_reply(outgoing: Outgoing) -> bool:
    """Tell whether a message goes to a direct reply-to address."""
    return outgoing.to.startswith(REPLY_PSEUDO_QUEUE) and not outgoing.is_broadcast


class DirectReplies:
    """Publishes to direct reply-to addresses. ROUTED means handed over; RabbitMQ does not say whether it was heard."""

    def __init__(self, address: AmqpAddress, settings: BrokerSettings, stats: BrokerStats) -> None:
        self._address = address
        self._settings = settings
        self._stats = stats
        self._uplink = AmqpUplink(address, settings, role="reply", stats=stats)
        self._publisher = AmqpPublisher(self._uplink, settings, stats)
        self._publishing: set[asyncio.Task[Routing]] = set()
        self._proven: dict[str, None] = {}
        self._suspicious_until_s = 0.0
        self._suspect_count = 0
        self._probes = asyncio.Semaphore(MOST_PROBES)

    def publish(self, outgoing: Outgoing) -> Future[Routing]:
        """See `Broker.publish_soon`."""
        self._uplink.begin()
        fate: Future[Routing] = asyncio.get_running_loop().create_future()
        publishing = asyncio.create_task(self._publish(outgoing))
        self._publishing.add(publishing)
        publishing.add_done_callback(partial(self._on_done, fate))
        return fate

    def _on_done(self, fate: Future[Routing], publishing: asyncio.Task[Routing]) -> None:
        """Hand the outcome to the caller. If `stop` ended the task, the message has failed: its caller goes on."""
        self._publishing.discard(publishing)
        if publishing.cancelled():
            fail(fate, BrokerUnavailable("publish: the broker was stopped; the message may or may not have arrived"))
        elif (error := publishing.exception()) is not None:
            fail(fate, error, cause=error.__cause__)
        elif not fate.done():
            fate.set_result(publishing.result())

    async def stop(self) -> None:
        await self._publisher.stop()
        await self._uplink.stop()
        for publishing in tuple(self._publishing):  # probes have connections of their own
            await reap(publishing)

    async def _publish(self, outgoing: Outgoing) -> Routing:
        if not _is_decodable(outgoing.to):
            self._stats.count_routing(Routing.NO_ROUTE)
            return Routing.NO_ROUTE
        for _ in range(MOST_TRIES):
            if outgoing.to not in self._proven and asyncio.get_running_loop().time() < self._suspicious_until_s:
                break
            try:
                routing = await self._publisher.publish(outgoing)
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

    async def _publish_alone(self, outgoing: Outgoing) -> Routing:
        loop, timeout_s = asyncio.get_running_loop(), self._settings.publish_timeout.total_seconds()
        sending = Sending(outgoing, loop.create_future(), 0.0)
        async with translating(f"publish to {outgoing.to!r}"), asyncio.timeout(timeout_s):
            link = await AmqpLink.open(self._address, self._settings, role="probe", stats=self._stats)
            try:
                channel = await link.channel(confirms=True, timeout_s=timeout_s)
                Lane(link, channel, "", timeout_s=timeout_s, stats=self._stats, on_doubt=_fail_all).send(sending)
                routing = await sending.routing
            except ConnectionInternalError:
                log.warning("reply_address_refused", reply_to=outgoing.to[:64])
                return Routing.NO_ROUTE
            finally:
                await link.close()
        self._prove(outgoing.to)
        return routing


def _fail_all(_exchange: str, sendings: Iterable[Sending], error: BaseException) -> None:
    for sending in sendings:
        fail(sending.routing, error)


def _is_decodable(address: str) -> bool:
    """Tell whether RabbitMQ can decode an address at all. What has another form it does not try to decode."""
    parts = address.removeprefix(REPLY_PSEUDO_QUEUE).lstrip(".").split(".")
    if len(parts) != 2:
        return True
    try:
        return bool(base64.b64decode(parts[0], validate=True))
    except ValueError:
        return False
