"""The RabbitMQ adapter: two supervised connections, a publisher, consumers, and the topology they need.

Publishing and consuming use separate connections: under a memory or disk alarm RabbitMQ stops reading from
connections that publish, and an ack sent on one would not be read either. All that can fail on its own has a channel
of its own: each consumer, each declare, each look at a queue. A failed or cancelled AMQP call closes its channel, and
nothing else may hang on that.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress

import aio_pika
from aiormq.exceptions import ChannelNotFoundEntity
from pamqp.commands import Queue

from coatcheck.broker import topology
from coatcheck.broker.amqp.connection import DRIVER_ERRORS, AmqpAddress, AmqpUplink, translating
from coatcheck.broker.amqp.consumer import AmqpConsumer
from coatcheck.broker.amqp.direct_replies import DirectReplies, is_direct_reply
from coatcheck.broker.amqp.publisher import AmqpPublisher
from coatcheck.broker.amqp.queues import AmqpQueues, Declaration
from coatcheck.broker.amqp.session import AmqpSession
from coatcheck.broker.background import reap, spawn
from coatcheck.broker.port import Broker, BrokerStats, Consumer, Delivery, Outgoing, Routing, failed
from coatcheck.broker.settings import BrokerSettings
from coatcheck.broker.topology import Names
from coatcheck.errors import BrokerUnavailable, CoatcheckError, InvalidSettings, UsageError
from coatcheck.log import get_logger

log = get_logger(__name__)

ACKS_AT_ONCE = 24
"""How many acks of browsed messages are under way at a time; a quorum queue takes 32 before it puts them off."""


class AmqpBroker(Broker):
    """RabbitMQ 3.10 or newer, over AMQP 0-9-1."""

    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self.stats = BrokerStats()
        self.max_body = settings.max_body
        self._settings = settings
        self._rpc_s = settings.rpc_timeout.total_seconds()
        address = AmqpAddress.parse(url)
        self._publishing = AmqpUplink(address, settings, role="publish", stats=self.stats)
        self._consuming = AmqpUplink(address, settings, role="consume", stats=self.stats)
        self._publisher = AmqpPublisher(self._publishing, settings, self.stats)
        self._direct_replies = DirectReplies(address, settings, self.stats)
        self._consumers: list[AmqpConsumer] = []
        self._single_active: set[str] = set()
        self._queues = AmqpQueues(self._consuming, declares=settings.declares, on_made=self._on_made)
        self.odd_queues = self._queues.odd
        self._watchdog: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._publishing.link is not None and self._consuming.link is not None

    async def start(self) -> None:
        starting = [asyncio.ensure_future(uplink.start()) for uplink in (self._publishing, self._consuming)]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                await reap(task)
            await self.stop()
            raise
        if self._watchdog is None:
            self._watchdog = spawn(self._watch(), "broker-watchdog")

    async def stop(self) -> None:
        watchdog, self._watchdog = self._watchdog, None
        await reap(watchdog)
        consumers, self._consumers = self._consumers, []
        try:
            async with asyncio.timeout(self._rpc_s):
                await asyncio.gather(*(consumer.stop() for consumer in consumers))
                await self._queues.delete_own()
        except TimeoutError:  # the broker has everything unacked again, and own queues expire
            if (link := self._consuming.link) is not None:
                link.abort("no answer while stopping")
            await asyncio.gather(*(consumer.abandon() for consumer in consumers))
        await self._publisher.stop()
        await asyncio.gather(self._direct_replies.stop(), self._publishing.stop(), self._consuming.stop())

    # --- topology ---

    async def declare_service(self, service: str) -> None:
        names = Names(service)
        ours = dict.fromkeys((names.requests, names.replies, names.control), topology.service_arguments(names.dead))
        await self._queues.declare(
            Declaration(
                queues={names.dead: topology.dead_arguments(), **ours},
                exchanges={topology.DEAD_EXCHANGE: "direct", names.broadcast: "fanout"},
                bindings=((names.dead, topology.DEAD_EXCHANGE, names.dead),),
            )
        )

    async def declare_sweeper(self, queue: str = topology.SWEEPER_QUEUE) -> None:
        await self._queues.declare(Declaration(queues={queue: topology.sweeper_arguments()}))
        self._single_active.add(queue)

    async def declare_replica(self, service: str) -> str:
        names = Names(service)
        queue = names.new_replica()
        return await self._declare_own(
            Declaration(
                queues={queue: topology.replica_arguments()},
                exchanges={names.broadcast: "fanout"} if self._settings.declares else {},
                bindings=((queue, names.broadcast, ""),),
                is_own=True,
            )
        )

    async def declare_private(self) -> str:
        return await self._declare_own(
            Declaration(queues={topology.new_private(): topology.private_arguments()}, is_own=True)
        )

    async def _declare_own(self, plan: Declaration) -> str:
        await self._queues.declare(plan)
        (queue,) = plan.queues
        return queue

    def _on_made(self, queues: Collection[str]) -> None:
        for consumer in self._consumers:
            if consumer.queue in queues:
                consumer.refresh()

    # --- messages ---

    async def consume(
        self,
        queue: str,
        on_delivery: Callable[[Delivery], None],
        *,
        prefetch: int,
        on_lost: Callable[[], None] | None = None,
    ) -> Consumer:
        if not 1 <= prefetch <= 65_535:
            raise InvalidSettings(f"prefetch is {prefetch}; it must be between 1 and 65535")
        consumer = AmqpConsumer(
            self._consuming,
            queue,
            on_delivery,
            prefetch=prefetch,
            on_lost=on_lost,
            ensure_queue=self._queues.ensure,
            settings=self._settings,
            stats=self.stats,
        )
        await consumer.start()
        self._consumers = [it for it in self._consumers if not it.is_stopped]
        self._consumers.append(consumer)
        return consumer

    def publish_soon(self, batch: Sequence[Outgoing]) -> list[Future[Routing]]:
        return [self._publish(outgoing) for outgoing in batch]

    def _publish(self, outgoing: Outgoing) -> Future[Routing]:
        try:
            self.check(outgoing)
        except CoatcheckError as error:
            return failed(error)
        if not is_direct_reply(outgoing):
            return self._publisher.publish(outgoing)
        if self._watchdog is None:
            return failed(BrokerUnavailable("publish: not started"))
        return self._direct_replies.publish(outgoing)

    def check(self, outgoing: Outgoing) -> None:
        super().check(outgoing)
        if outgoing.delay is not None:
            raise UsageError("RabbitMQ has no delayed messages; to wait, use ctx.sleep in a task")

    @asynccontextmanager
    async def browse(self, queue: str, limit: int) -> AsyncIterator[list[Delivery]]:
        async with translating(f"browse {queue!r}"):
            link = await self._consuming.get(self._rpc_s)
            channel = await link.channel(timeout_s=self._rpc_s)
            session = AmqpSession(link, channel, queue, self.stats, max_body=self.max_body)
        try:
            deliveries: list[Delivery] = []
            async with translating(f"browse {queue!r}"):
                while len(deliveries) < limit and (delivery := await session.get(self._rpc_s)) is not None:
                    deliveries.append(delivery)
            yield deliveries
        finally:
            # Closing the channel puts back what was not acked.
            try:
                with suppress(*DRIVER_ERRORS):
                    await self._flush_browsed(session)
            finally:
                session.lose("browsed")
                await link.close_channel(channel, timeout_s=self._rpc_s)

    async def _flush_browsed(self, session: AmqpSession) -> None:
        """Write the acks of a browse so that none goes with the channel.

        To a quorum queue every `get` is a consumer of its own, so every ack is a command of its own, even in one frame.
        RabbitMQ has 32 of them under way and keeps the rest in the channel, which forgets them when it is closed. So
        few are written at a time, and a `get` waits its turn behind them; what it gets is put back with the channel.
        """
        while session.flush_some(ACKS_AT_ONCE):
            await session.get(self._rpc_s)

    # --- looking at queues ---

    async def depth(self, queue: str) -> int | None:
        found = await self._look(queue, f"depth of {queue!r}")
        return None if found is None else found.message_count

    async def consumer_count(self, queue: str) -> int | None:
        found = await self._look(queue, f"consumers of {queue!r}")
        return None if found is None else found.consumer_count

    async def _look(self, queue: str, what: str) -> Queue.DeclareOk | None:
        async def look(channel: aio_pika.Channel) -> Queue.DeclareOk | None:
            try:
                return (await channel.declare_queue(queue, passive=True)).declaration_result
            except ChannelNotFoundEntity:
                return None

        return await self._consuming.on_channel(look, what)

    async def purge(self, queue: str) -> None:
        async def purge(channel: aio_pika.Channel) -> None:
            with suppress(ChannelNotFoundEntity):
                await (await channel.declare_queue(queue, passive=True)).purge()

        await self._consuming.on_channel(purge, f"purge {queue!r}")

    async def delete_queue(self, queue: str) -> None:
        await self._queues.delete(queue)

    async def delete_service(self, service: str) -> None:
        broadcast = Names(service).broadcast
        await super().delete_service(service)
        await self._consuming.on_channel(lambda channel: channel.exchange_delete(broadcast), f"delete {broadcast!r}")

    # --- watchdog ---

    async def _watch(self) -> None:
        """Rebuild consumers that hear nothing though there is something to hear; drop a link that does not answer."""
        interval_s = self._settings.watchdog_interval.total_seconds()
        suspects: dict[AmqpConsumer, float] = {}
        while True:
            await asyncio.sleep(interval_s / 2)
            suspects = await self._inspect(suspects, interval_s)

    async def _inspect(self, suspects: dict[AmqpConsumer, float], interval_s: float) -> dict[AmqpConsumer, float]:
        """Look at every silent consumer. Silent with work waiting twice in a row, half an interval apart, is deaf.

        Silent for longer with nothing waiting most likely has nothing to do; but see `consumer.py` for the one that is
        deaf all the same.
        """
        now = asyncio.get_running_loop().time()
        found: dict[AmqpConsumer, float] = {}
        for consumer in self._consumers:
            heard_at = consumer.last_delivery_at_s
            # All but one consumer of a sweepers' queue are silent by design.
            if not consumer.has_room or now - heard_at < interval_s / 2 or consumer.queue in self._single_active:
                continue
            if not await self._is_waiting(consumer):
                if now - heard_at > 2 * interval_s:
                    consumer.refresh()
                continue
            if suspects.get(consumer) == heard_at == consumer.last_delivery_at_s:
                self.stats.watchdog_rebuild_count += 1
                log.warning("consumer_deaf", queue=consumer.queue, silent_s=round(now - heard_at, 1))
                consumer.rebuild("deaf: silent though its queue is not empty")
            else:
                found[consumer] = heard_at
        return found

    async def _is_waiting(self, consumer: AmqpConsumer) -> bool:
        link = self._consuming.link
        try:
            return bool(await self.depth(consumer.queue))
        except BrokerUnavailable as exc:
            if link is not None and isinstance(exc.__cause__, TimeoutError):
                link.abort("a passive declare got no answer")
            return False
