"""The simulated broker: the in-memory adapter with a network in between that is slow, cuts and repeats.

What a process sends is under way for a while: an ack given may not be written when the process dies, half a batch may
have left, a confirm may be lost though the message arrived. The broker's side of a lost connection happens at once, the
process notices when it runs again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tests.simulation.world import Died, Process, World

from coatcheck.broker.memory import (
    MemoryBroker,
    MemoryConsumer,
    MemoryDelivery,
    MemoryServer,
    _as_sent,
    _Entry,
    _Holder,
)
from coatcheck.broker.port import Consumer, Delivery, Message, Outgoing, Routing, fail
from coatcheck.broker.settings import BrokerSettings
from coatcheck.errors import BrokerUnavailable

HEARTBEAT_S = 15.0


class Watcher(Protocol):
    def on_route(self, outgoing: Outgoing) -> None: ...

    def on_ack(self, queue: str, message: Message, process: Process) -> None: ...


class Server(MemoryServer):
    """The broker, which sometimes delivers a message twice."""

    def __init__(self, world: World, watcher: Watcher, *, repeats: float = 0.0) -> None:
        super().__init__()
        self.world = world
        self.watcher = watcher
        self.repeats = repeats

    def route(self, outgoing: Outgoing) -> Routing:
        queue = self.queues.get(outgoing.to)
        if queue is not None and queue.is_full:
            return Routing.REFUSED
        self.watcher.on_route(outgoing)
        routing = super().route(outgoing)
        if self.repeats and self.world.rng.random() < self.repeats:
            super().route(outgoing)
        return routing


class SimDelivery(MemoryDelivery):
    """A delivery whose ack takes a moment, and is lost with the connection."""

    __slots__ = ()

    def _settle(self, *, is_ack: bool) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        holder = self._holder
        assert isinstance(holder, SimConsumer)
        holder.settle_later(self._session, self._tag, is_ack=is_ack)

    @property
    def is_lost(self) -> bool:
        """As far as this process has noticed."""
        holder = self._holder
        assert isinstance(holder, SimConsumer)
        return self._session in holder.noticed


class SimConsumer(MemoryConsumer):
    def __init__(self, broker: SimBroker, queue: str, on_delivery: Callable[[Delivery], None], **options: Any) -> None:
        super().__init__(broker, queue, on_delivery, **options)
        self.process = broker.process
        self.noticed: set[Any] = set()
        self._settling: list[Callable[[], None]] = []
        self._under_way = 0
        self._arrived = asyncio.Event()

    def take(self, entry: _Entry) -> SimDelivery:
        delivery = _Holder.take(self, entry)
        return SimDelivery(entry, self, self.session, tag=delivery._tag)

    def push(self, entry: _Entry) -> None:
        delivery = self.take(entry)
        world = self.process.world
        self._under_way += 1
        world.later(world.delay(), lambda: self.process.soon(self._hand_over, delivery))

    async def pause(self) -> None:
        """Returns when the last delivery that was under way is here, as the broker's answer to a cancel does."""
        await super().pause()
        while self._under_way:
            self._arrived.clear()
            await self._arrived.wait()

    def _hand_over(self, delivery: MemoryDelivery) -> None:
        self._under_way -= 1
        self._arrived.set()
        again = " again" if delivery.is_redelivered else ""
        self.process.world.note(self.process.name, f"gets{again} {describe(delivery.message)} from {self.queue}")
        super()._hand_over(delivery)

    def settle_later(self, session: Any, tag: int, *, is_ack: bool) -> None:
        world = self.process.world
        entry = session.unacked.get(tag)

        def settle() -> None:
            if settle in self._settling:
                self._settling.remove(settle)
                if not session.is_lost:
                    world.note(self.process.name, f"{'acked' if is_ack else 'requeued'} {describe(entry.message)}")
                    if is_ack:
                        self._broker.server.watcher.on_ack(self.queue, entry.message, self.process)  # type: ignore[attr-defined]
                    self.settle(session, tag, is_ack=is_ack)

        self._settling.append(settle)
        world.later(world.delay(), settle)

    def flush(self) -> None:
        for settle in list(self._settling):
            settle()

    def lose_quietly(self) -> None:
        """The broker gives up on the connection: all unacked is ready again."""
        self._settling.clear()
        session = self.session
        self.detach()
        self.lose()
        self.process.soon(self._notice, session)

    def _notice(self, session: Any) -> None:
        self.noticed.add(session)
        self._broker.stats.consumer_lost_count += 1
        if self._on_lost is not None and not self._is_stopped:
            self._on_lost()

    def drop(self) -> None:
        self.lose_quietly()


class SimBroker(MemoryBroker):
    """One process's connection."""

    def __init__(self, process: Process, server: Server, settings: BrokerSettings) -> None:
        super().__init__("memory://simulation", settings)
        self.server = server
        self.process = process
        self.world = process.world
        self.connection = 0
        process.on_death.append(self._lose)
        process.on_freeze.append(self._on_freeze)
        process.parts["broker"] = self

    # --- faults ---

    def cut_for(self, seconds: float) -> None:
        """Lose the connection and have it back later; the process lives on."""
        if not self.process.is_alive or not self._is_started:
            return
        self.world.note(self.process.name, f"LOSES the broker for {seconds:.2f} s")
        self.connection += 1
        self._is_up.clear()
        self._lose()
        self.world.later(seconds, lambda: self.process.soon(self.come_back))

    def _lose(self) -> None:
        self.connection += 1
        for consumer in self._consumers:
            consumer.lose_quietly()  # type: ignore[attr-defined]

    def _on_freeze(self, seconds: float) -> None:
        if seconds > HEARTBEAT_S:
            self.world.later(HEARTBEAT_S, self._lose)
            self.world.later(seconds, lambda: self.process.soon(self.come_back))

    async def stop(self) -> None:
        for consumer in self._consumers:
            consumer.flush()  # type: ignore[attr-defined]
        await super().stop()

    # --- messages ---

    async def consume(
        self,
        queue: str,
        on_delivery: Callable[[Delivery], None],
        *,
        prefetch: int,
        on_lost: Callable[[], None] | None = None,
    ) -> Consumer:
        await self._until_up(f"consume {queue!r}")
        consumer = SimConsumer(self, queue, on_delivery, prefetch=prefetch, on_lost=on_lost)
        self._consumers.append(consumer)
        consumer.attach()
        return consumer

    def publish_soon(self, batch: Sequence[Outgoing]) -> list[asyncio.Future[Routing]]:
        if not self.process.is_alive:
            raise Died
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Routing]] = [loop.create_future() for _ in batch]
        messages = [Outgoing(it.to, _as_sent(it.message), it.is_broadcast) for it in batch]
        loop.create_task(self._publish(messages, futures))  # noqa: RUF006 - its world keeps what it runs
        return futures

    async def _publish(self, messages: Sequence[Outgoing], futures: Sequence[asyncio.Future[Routing]]) -> None:
        routings: list[Routing | None] = [None] * len(messages)
        error = BrokerUnavailable("publish: the connection was lost; any message may or may not have arrived")
        for attempt in range(3):
            try:
                await self._until_up("publish")
            except BrokerUnavailable as exc:
                error = exc
                break
            await self._send(messages, routings)
            if None not in routings or attempt == 2 or self.world.rng.random() < 0.5:
                break
        self.stats.publish_failure_count += None in routings
        for future, routing in zip(futures, routings, strict=True):
            if routing is None:
                fail(future, error)
            elif not future.done():
                future.set_result(routing)

    async def _send(self, messages: Sequence[Outgoing], routings: list[Routing | None]) -> None:
        """Send what is not confirmed, in order. On a lost connection a part of it arrives, and less is confirmed."""
        world, connection = self.world, self.connection
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        is_lost = False
        at_s = world.delay()

        def arrive(index: int) -> None:
            nonlocal is_lost
            is_broken = self.connection != connection
            is_lost = is_lost or (is_broken and world.rng.random() < 0.5)
            if not is_lost:
                routing = self.server.route(messages[index])
                sent = "sent" if routing is not Routing.REFUSED else "could not send"
                world.note(self.process.name, f"{sent} {describe(messages[index].message)} to {messages[index].to}")
                if not is_broken:
                    routings[index] = routing

        for index, routing in enumerate(routings):
            if routing is None:
                world.later(at_s, lambda index=index: arrive(index))  # type: ignore[misc]
                at_s += world.rng.random() * 0.002
        world.later(at_s + world.delay(), lambda: self.process.soon(_resolve, done))
        await done


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def describe(message: Message) -> str:
    """A message in a word or two, for traces."""
    kind = message.headers.get("cc-kind") or message.type or "message"
    name = message.correlation_id or message.headers.get("cc-task") or message.headers.get("cc-id") or ""
    return f"{kind!s} {str(name)[:8]}"
