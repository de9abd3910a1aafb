"""The RabbitMQ adapter: two supervised connections, a publisher, consumers, and the topology they need.

Publishing and consuming use separate connections: under a memory or disk alarm RabbitMQ stops reading from
connections that publish, and an ack sent on one would not be read either. Whatever can fail on its own has a channel
of its own: each consumer, each declare, each look at a queue. A failed or cancelled AMQP call closes its channel, and
nothing else may hang on that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from aiormq.channel import Channel
from aiormq.exceptions import (
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)

from coatcheck.broker import topology
from coatcheck.broker.amqp import existing_queues as existing
from coatcheck.broker.amqp.address import AmqpAddress
from coatcheck.broker.amqp.connection import DRIVER_ERRORS, Uplink, genuine, translating
from coatcheck.broker.amqp.consume_channel import Session
from coatcheck.broker.amqp.consumer import AmqpConsumer
from coatcheck.broker.amqp.direct_replies import DirectReplies, is_direct_reply
from coatcheck.broker.amqp.existing_queues import Refusal, Value
from coatcheck.broker.amqp.publisher import Publisher
from coatcheck.broker.background import reap, spawn
from coatcheck.broker.port import Broker, BrokerStats, Consumer, Delivery, Outgoing, Routing
from coatcheck.broker.settings import BrokerSettings
from coatcheck.broker.topology import Arguments, Names
from coatcheck.errors import BrokerUnavailable, InvalidSettings, UsageError
from coatcheck.log import get_logger

T = TypeVar("T")
log = get_logger(__name__)

ACKS_AT_ONCE = 24
"""How many acks of browsed messages are under way at a time; a quorum queue takes 32 before it puts them off."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is declared together. `is_own`: by this process for itself, also if it may not make queues of services."""

    queues: Mapping[str, Arguments]
    exchanges: Mapping[str, str] = field(default_factory=dict)
    bindings: tuple[tuple[str, str, str], ...] = ()
    is_own: bool = False


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
        self._declarations: dict[str, _Plan] = {}
        self.odd_queues: dict[str, str] = {}
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
        try:
            async with asyncio.timeout(self._rpc_s):
                await asyncio.gather(*(consumer.stop() for consumer in consumers))
                await self._delete_own_queues()
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
        await self._declare(
            _Plan(
                queues={names.dead: topology.dead_arguments(), **ours},
                exchanges={topology.DEAD_EXCHANGE: "direct", names.broadcast: "fanout"},
                bindings=((names.dead, topology.DEAD_EXCHANGE, names.dead),),
            )
        )

    async def declare_sweeper(self, queue: str = topology.SWEEPER_QUEUE) -> None:
        await self._declare(_Plan(queues={queue: topology.sweeper_arguments()}))
        self._single_active.add(queue)

    async def declare_replica(self, service: str) -> str:
        names = Names(service)
        queue = names.new_replica()
        return await self._declare_own(
            _Plan(
                queues={queue: topology.replica_arguments()},
                exchanges={names.broadcast: "fanout"} if self._settings.declares else {},
                bindings=((queue, names.broadcast, ""),),
                is_own=True,
            )
        )

    async def declare_private(self) -> str:
        return await self._declare_own(
            _Plan(queues={topology.new_private(): topology.private_arguments()}, is_own=True)
        )

    async def _declare_own(self, plan: _Plan) -> str:
        await self._declare(plan)
        (queue,) = plan.queues
        self._own_queues.append(queue)
        return queue

    async def _declare(self, plan: _Plan) -> None:
        what = f"declare {', '.join(plan.queues)}"
        while True:
            try:
                await self._on_channel(lambda channel: self._follow(plan, channel), what)
                break
            except BrokerUnavailable as exc:
                if await self._make_do(plan, exc.__cause__):
                    continue
                if (refusal := _explain_refusal(plan, exc.__cause__)) is None:
                    raise
                raise refusal from exc
        for queue in plan.queues:
            self._declarations[queue] = plan
        # Made again, perhaps: then its consumers may be deaf.
        for consumer in self._consumers:
            if consumer.queue in plan.queues:
                consumer.refresh()

    async def _follow(self, plan: _Plan, channel: Channel) -> None:
        """Make what is planned, or see whether it is there: what we may not make, and what others made otherwise."""
        makes = self._settings.declares or plan.is_own
        for exchange, kind in plan.exchanges.items():
            if makes:
                await channel.exchange_declare(exchange, exchange_type=kind, durable=True)
            elif kind == "fanout":  # the other one is the broker's business, when it has a letter
                await channel.exchange_declare(exchange, passive=True)
        for queue, arguments in plan.queues.items():
            if makes and queue not in self.odd_queues:
                await channel.queue_declare(queue, durable=True, arguments=dict(arguments))
            else:  # needs no permission, and arguments are not compared
                await channel.queue_declare(queue, passive=True)
        for queue, exchange, key in plan.bindings if makes else ():
            await channel.queue_bind(queue, exchange, key)

    # --- queues that others made ---

    async def _make_do(self, plan: _Plan, cause: BaseException | None) -> bool:
        """See whether a plan that was refused can be followed after all, with a queue as it is. Raises InvalidSettings.

        Each time one queue more is known to be odd, or none is any more, so this comes to an end.
        """
        if isinstance(cause, ChannelNotFoundEntity):  # an odd one has gone, and is made by us now
            odd = [queue for queue in plan.queues if self.odd_queues.pop(queue, None) is not None]
            return bool(odd)
        refusal = existing.read_refusal(str(cause)) if isinstance(cause, ChannelPreconditionFailed) else None
        if refusal is None or refusal.queue not in plan.queues or refusal.queue in self.odd_queues:
            return False
        queue, wanted = refusal.queue, plan.queues[refusal.queue]
        differences = await self._find_differences(refusal, wanted)
        self.odd_queues[queue] = text = existing.compare(wanted, differences)
        log.warning("queue_used_as_it_is", queue=queue, differences=text)
        return True

    async def _find_differences(self, refusal: Refusal, wanted: Arguments) -> dict[str, Value]:
        """What a queue has that was declared otherwise, as far as RabbitMQ tells."""
        queue, tried = refusal.queue, dict(wanted)
        found: dict[str, Value] = {}
        for _ in range(existing.MOST_DIFFERENCES):
            if why := existing.find_unfitness(refusal):
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

    async def _try_arguments(self, queue: str, arguments: Arguments) -> Refusal | None:
        """Ask whether a queue has these arguments. None: it has, or nothing more can be learnt."""
        try:
            await self._on_channel(
                lambda channel: channel.queue_declare(queue, durable=True, arguments=dict(arguments)),
                f"declare {queue}",
            )
        except BrokerUnavailable as exc:
            return existing.read_refusal(str(exc.__cause__))
        return None

    async def _ensure_queue(self, queue: str) -> bool:
        """Make a queue of ours again. False: it never was one of ours."""
        plan = self._declarations.get(queue)
        if plan is None:
            return False
        await self._declare(plan)
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
            session = Session(link, channel, queue, self.stats, max_body=self._settings.max_body)
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


def _explain_refusal(plan: _Plan, cause: BaseException | None) -> InvalidSettings | None:
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
