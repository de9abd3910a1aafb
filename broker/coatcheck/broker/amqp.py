"""The RabbitMQ adapter: two supervised connections, a publisher, consumers, and the topology they need.

Publishing and consuming use separate connections: under a memory or disk alarm RabbitMQ stops reading from
connections that publish, and an ack sent on one would not be read either. Whatever can fail on its own has a channel
of its own: each consumer, each declare, each look at a queue. A failed or cancelled AMQP call closes its channel, and
nothing else may hang on that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import structlog
from aiormq.channel import Channel
from aiormq.exceptions import ChannelAccessRefused, ChannelNotFoundEntity, ChannelPreconditionFailed

from coatcheck.broker import topology
from coatcheck.broker.amqp_address import AmqpAddress
from coatcheck.broker.amqp_consumer import AmqpConsumer
from coatcheck.broker.amqp_link import DRIVER_ERRORS, Uplink, genuine, translating
from coatcheck.broker.amqp_publisher import Publisher
from coatcheck.broker.amqp_replies import DirectReplies, is_direct_reply
from coatcheck.broker.amqp_session import Session
from coatcheck.broker.port import Broker, BrokerStats, Consumer, Delivery, Outgoing, Routing
from coatcheck.broker.settings import BrokerSettings
from coatcheck.broker.tasks import reap, spawn
from coatcheck.broker.topology import Arguments, Names
from coatcheck.errors import BrokerUnavailable, InvalidSettings, UsageError

T = TypeVar("T")
log = structlog.get_logger(__name__)

Declaration = Callable[[Channel], Awaitable[None]]

ACKS_AT_ONCE = 24
"""How many acks of browsed messages are under way at a time; a quorum queue takes 32 before it puts them off."""


class AmqpBroker(Broker):
    """RabbitMQ 3.10 or newer, over AMQP 0-9-1."""

    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self.stats = BrokerStats()
        self._settings = settings
        self._rpc_s = settings.rpc_timeout.total_seconds()
        address = AmqpAddress.parse(url)
        self._publishing = Uplink(address, settings, role="publish", stats=self.stats)
        self._consuming = Uplink(address, settings, role="consume", stats=self.stats)
        self._publisher = Publisher(self._publishing, settings, self.stats)
        self._direct_replies = DirectReplies(address, settings, self.stats)
        self._consumers: list[AmqpConsumer] = []
        self._single_active: set[str] = set()
        # How to make again what we declared, by queue. A queue may be deleted under us, or a broker come back empty.
        self._declarations: dict[str, Declaration] = {}
        self._own_queues: list[str] = []
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
        await asyncio.gather(*(consumer.stop() for consumer in consumers))
        await self._delete_own_queues()
        await self._publisher.stop()
        await self._direct_replies.stop()
        await asyncio.gather(self._publishing.stop(), self._consuming.stop())

    # --- topology ---

    async def declare_service(self, service: str) -> None:
        names = Names(service)

        async def declare(channel: Channel) -> None:
            await channel.exchange_declare(topology.DEAD_EXCHANGE, exchange_type="direct", durable=True)
            await channel.exchange_declare(names.broadcast, exchange_type="fanout", durable=True)
            await _declare_queue(channel, names.dead, topology.dead_arguments())
            await channel.queue_bind(names.dead, topology.DEAD_EXCHANGE, names.dead)
            for queue in (names.requests, names.replies, names.control):
                await _declare_queue(channel, queue, topology.service_arguments(names.dead))

        async def check(channel: Channel) -> None:
            await channel.exchange_declare(names.broadcast, passive=True)
            await _check_queues(channel, *names.queues)

        await self._declare(declare if self._settings.declares else check, *names.queues)

    async def declare_sweeper(self, queue: str = topology.SWEEPER_QUEUE) -> None:
        async def declare(channel: Channel) -> None:
            await _declare_queue(channel, queue, topology.sweeper_arguments())

        async def check(channel: Channel) -> None:
            await _check_queues(channel, queue)

        await self._declare(declare if self._settings.declares else check, queue)
        self._single_active.add(queue)

    async def declare_replica(self, service: str) -> str:
        names = Names(service)
        queue = names.new_replica()

        async def declare(channel: Channel) -> None:
            if self._settings.declares:
                await channel.exchange_declare(names.broadcast, exchange_type="fanout", durable=True)
            await _declare_queue(channel, queue, topology.replica_arguments())
            await channel.queue_bind(queue, names.broadcast)

        await self._declare(declare, queue)
        self._own_queues.append(queue)
        return queue

    async def declare_private(self) -> str:
        queue = topology.new_private()

        async def declare(channel: Channel) -> None:
            await _declare_queue(channel, queue, topology.private_arguments())

        await self._declare(declare, queue)
        self._own_queues.append(queue)
        return queue

    async def _declare(self, declare: Declaration, *queues: str) -> None:
        try:
            await self._on_channel(declare, f"declare {', '.join(queues)}")
        except BrokerUnavailable as exc:
            if isinstance(exc.__cause__, ChannelPreconditionFailed | ChannelAccessRefused):
                raise InvalidSettings(f"the broker refuses to declare {', '.join(queues)}: {exc.__cause__}") from exc
            if isinstance(exc.__cause__, ChannelNotFoundEntity):
                raise InvalidSettings(
                    f"not all of {', '.join(queues)} are there, and this process was told not to make them: "
                    f"{exc.__cause__}; run `coatcheck declare` as a user who may"
                ) from exc
            raise
        for queue in queues:
            self._declarations[queue] = declare
        # Made again, perhaps: then its consumers may be deaf.
        for consumer in self._consumers:
            if consumer.queue in queues:
                consumer.refresh()

    async def _ensure_queue(self, queue: str) -> bool:
        """Make a queue of ours again. False: it never was one of ours."""
        declare = self._declarations.get(queue)
        if declare is None:
            return False
        made = [name for name, other in self._declarations.items() if other is declare]
        await self._declare(declare, *made)
        log.warning("queue_declared_again", queue=queue)
        return True

    async def _delete_own_queues(self) -> None:
        queues, self._own_queues = self._own_queues, []
        if self._consuming.link is None:
            return
        for queue in queues:
            with suppress(BrokerUnavailable):  # they expire by themselves
                await self.delete_queue(queue)

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
            ensure_queue=self._ensure_queue,
            settings=self._settings,
            stats=self.stats,
        )
        await consumer.start()
        self._consumers = [it for it in self._consumers if not it.is_stopped]
        self._consumers.append(consumer)
        return consumer

    async def publish(self, batch: Sequence[Outgoing]) -> list[Routing]:
        if any(outgoing.delay is not None for outgoing in batch):
            raise UsageError("RabbitMQ has no delayed messages; to wait, use ctx.sleep in a task")
        direct = [outgoing for outgoing in batch if is_direct_reply(outgoing)]
        if not direct:
            return await self._publisher.publish(batch)
        if self._watchdog is None:
            raise BrokerUnavailable("publish: not started")
        others = [outgoing for outgoing in batch if not is_direct_reply(outgoing)]
        # Both are awaited, whatever happens to either: each message gets its chance before the batch fails.
        outcomes = await asyncio.gather(
            self._publisher.publish(others), self._direct_replies.publish(direct), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        to_others, to_direct = (iter(outcome) for outcome in outcomes if not isinstance(outcome, BaseException))
        return [next(to_direct if is_direct_reply(outgoing) else to_others) for outgoing in batch]

    @asynccontextmanager
    async def browse(self, queue: str, limit: int) -> AsyncIterator[list[Delivery]]:
        async with translating(f"browse {queue!r}"):
            link = await self._consuming.get(self._rpc_s)
            channel = await link.channel(timeout_s=self._rpc_s)
            session = Session(link, channel, queue, self.stats)
        try:
            deliveries: list[Delivery] = []
            async with translating(f"browse {queue!r}"), _explaining_names(f"browse {queue!r}"):
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

    async def _flush_browsed(self, session: Session) -> None:
        """Write the acks of a browse so that none goes with the channel.

        To a quorum queue every `get` is a consumer of its own, so every ack is a command of its own, even in one frame.
        RabbitMQ has 32 of them under way and keeps the rest in the channel, which forgets them when it is closed. So
        few are written at a time, and a `get` waits its turn behind them; what it gets is put back with the channel.
        """
        while session.flush_some(ACKS_AT_ONCE):
            await session.get(self._rpc_s)

    # --- looking at queues ---

    async def depth(self, queue: str) -> int | None:
        async def look(channel: Channel) -> int | None:
            try:
                answer = await channel.queue_declare(queue, passive=True)
            except ChannelNotFoundEntity:
                return None
            return answer.message_count

        return await self._on_channel(look, f"depth of {queue!r}")

    async def consumer_count(self, queue: str) -> int | None:
        async def look(channel: Channel) -> int | None:
            try:
                answer = await channel.queue_declare(queue, passive=True)
            except ChannelNotFoundEntity:
                return None
            return answer.consumer_count

        return await self._on_channel(look, f"consumers of {queue!r}")

    async def purge(self, queue: str) -> None:
        async def purge(channel: Channel) -> None:
            with suppress(ChannelNotFoundEntity):
                await channel.queue_purge(queue)

        await self._on_channel(purge, f"purge {queue!r}")

    async def delete_queue(self, queue: str) -> None:
        async def delete(channel: Channel) -> None:
            await channel.queue_delete(queue)

        self._declarations.pop(queue, None)
        await self._on_channel(delete, f"delete {queue!r}")

    async def delete_service(self, service: str) -> None:
        async def delete(channel: Channel) -> None:
            await channel.exchange_delete(names.broadcast)

        names = Names(service)
        await super().delete_service(service)
        await self._on_channel(delete, f"delete {names.broadcast!r}")

    async def _on_channel(self, work: Callable[[Channel], Awaitable[T]], what: str) -> T:
        """Do something on a channel made for it alone, under one time limit. Raises `BrokerUnavailable`."""
        async with translating(what), _explaining_names(what):
            link = await self._consuming.get(self._rpc_s)
            async with asyncio.timeout(self._rpc_s):
                channel = await link.channel(timeout_s=self._rpc_s)
                try:
                    return await genuine(work(channel))
                finally:
                    await link.close_channel(channel, timeout_s=self._rpc_s)

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

        Silent for longer with nothing waiting is most likely nothing to do; but see `amqp_consumer` for who else is.
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


@asynccontextmanager
async def _explaining_names(what: str) -> AsyncIterator[None]:
    """Say in our own words that the driver refuses a queue name, before anything is sent."""
    try:
        yield
    except ValueError as exc:
        raise UsageError(f"{what}: AMQP cannot name such a queue ({exc})") from exc


async def _check_queues(channel: Channel, *queues: str) -> None:
    """Raise ChannelNotFoundEntity unless all are there. It needs no permission, and their arguments are not seen."""
    for queue in queues:
        await channel.queue_declare(queue, passive=True)


async def _declare_queue(channel: Channel, queue: str, arguments: Arguments) -> None:
    await channel.queue_declare(queue, durable=True, arguments=dict(arguments))
