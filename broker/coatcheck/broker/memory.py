"""The in-memory adapter: the port's promises inside one process, for programs without servers, tests and simulation.

Brokers with the same URL share one `MemoryServer`, as if they were connected to the same machine. It keeps the
semantics that matter: messages stay in the server until acked, a lost consumer gives them back marked as redelivered,
deliveries are counted, a message over the limit goes to the dead queue, prefetch bounds what is out, an unknown queue
is NO_ROUTE. What it cannot keep is durability: a server lives as long as its process.

Three ways to fail on purpose: `cut()` loses the connection for a moment, `go_dark()` until `come_back()`, and a queue
under `MemoryServer.limit` refuses what it has no room for.
"""

from __future__ import annotations

import asyncio
import itertools
from asyncio import Future
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, field

from msgspec.structs import replace

from coatcheck.broker import topology
from coatcheck.broker.headers import KEPT_OF_OVERSIZED, MAY_PASS, QUEUE, REASON, SIZE, arriving
from coatcheck.broker.port import (
    Broker,
    BrokerStats,
    Consumer,
    Delivery,
    HeaderValue,
    Message,
    Outgoing,
    Routing,
    fail,
    new_message_id,
)
from coatcheck.broker.settings import BrokerSettings
from coatcheck.broker.topology import Names
from coatcheck.errors import BrokerUnavailable, InvalidSettings, OversizedMessage, UsageError
from coatcheck.log import get_logger

log = get_logger(__name__)


# --- the server ---


@dataclass(slots=True)
class _Entry:
    """A message in a queue and how often it was handed out."""

    message: Message
    delivery_count: int = 0


@dataclass(slots=True, eq=False)
class _Queue:
    name: str
    delivery_limit: int | None = None
    dead: str | None = None
    is_single_active: bool = False
    max_length: int | None = None
    ready: deque[_Entry] = field(default_factory=deque)
    consumers: list[MemoryConsumer] = field(default_factory=list)
    turn: int = 0

    @property
    def is_full(self) -> bool:
        return self.max_length is not None and len(self.ready) >= self.max_length


class MemoryServer:
    """Queues and fanouts in a process. Not bound to an event loop."""

    def __init__(self) -> None:
        self.queues: dict[str, _Queue] = {}
        self.fanouts: dict[str, set[str]] = {}

    def declare(self, queue: _Queue) -> None:
        self.queues.setdefault(queue.name, queue)

    def route(self, outgoing: Outgoing) -> Routing:
        message = _as_sent(outgoing.message)
        names = self.fanouts.get(outgoing.to, ()) if outgoing.is_broadcast else (outgoing.to,)
        found = [self.queues[name] for name in names if name in self.queues]
        with_room = [queue for queue in found if not queue.is_full]
        for queue in with_room:
            if outgoing.delay is None:
                self._put(queue, message)
            else:
                asyncio.get_running_loop().call_later(outgoing.delay.total_seconds(), self._put, queue, message)
        is_known = bool(found) or (outgoing.is_broadcast and outgoing.to in self.fanouts)
        if len(with_room) < len(found):
            return Routing.REFUSED
        return Routing.ROUTED if is_known else Routing.NO_ROUTE

    def limit(self, queue: str, max_length: int | None) -> None:
        """Let a queue refuse what comes while so many messages are ready in it; None: take everything again."""
        self.queues[queue].max_length = max_length

    def _put(self, queue: _Queue, message: Message) -> None:
        queue.ready.append(_Entry(message))
        self.dispatch(queue)

    def give_back(self, queue: _Queue, entry: _Entry) -> None:
        """Put an entry back in front, or into the dead queue if it was handed out too often."""
        if queue.delivery_limit is not None and entry.delivery_count > queue.delivery_limit:
            dead = self.queues.get(queue.dead or "")
            if dead is not None:
                headers = {**entry.message.headers, REASON: "delivery_limit", QUEUE: queue.name}
                dead.ready.append(_Entry(replace(entry.message, headers=headers)))
                self.dispatch(dead)
            return
        queue.ready.appendleft(entry)

    def dispatch(self, queue: _Queue) -> None:
        """Hand ready messages to consumers with room, in turn."""
        while queue.ready:
            living = [consumer for consumer in queue.consumers if consumer.is_alive]
            candidates = living[:1] if queue.is_single_active else living
            with_room = [consumer for consumer in candidates if consumer.has_room]
            if not with_room:
                return
            queue.turn += 1
            with_room[queue.turn % len(with_room)].push(queue.ready.popleft())


_SERVERS: dict[str, MemoryServer] = {}


def find_server(url: str) -> MemoryServer:
    """The server of this URL, made at the first call. It lives as long as the process, or until it is removed."""
    return _SERVERS.setdefault(url, MemoryServer())


def add_server(url: str, server: MemoryServer) -> None:
    """Let brokers of this URL connect to a server of your own."""
    _SERVERS[url] = server


def remove_server(url: str) -> None:
    """Forget the server of this URL. Brokers that are connected to it keep it. Repeating it is harmless."""
    _SERVERS.pop(url, None)


# --- deliveries and consumers ---


class _Session:
    """What one connection holds of one queue until it is lost."""

    __slots__ = ("is_lost", "unacked")

    def __init__(self) -> None:
        self.is_lost = False
        self.unacked: dict[int, _Entry] = {}


class MemoryDelivery(Delivery):
    """A delivery of one session."""

    __slots__ = ("_holder", "_is_settled", "_session", "_tag")

    def __init__(self, entry: _Entry, holder: _Holder, session: _Session, *, tag: int) -> None:
        super().__init__(
            holder.read(entry.message),
            holder.queue,
            is_redelivered=entry.delivery_count > 1,
            delivery_count=entry.delivery_count,
        )
        self._holder = holder
        self._session = session
        self._tag = tag
        self._is_settled = False

    def ack(self) -> None:
        self._settle(is_ack=True)

    def requeue(self) -> None:
        self._settle(is_ack=False)

    def _settle(self, *, is_ack: bool) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._holder.settle(self._session, self._tag, is_ack=is_ack)

    @property
    def is_settled(self) -> bool:
        return self._is_settled

    @property
    def is_lost(self) -> bool:
        return self._session.is_lost


class _Holder:
    """What takes entries of a queue and owes the server an answer for each: a consumer, or a look."""

    def __init__(self, broker: MemoryBroker, queue: str) -> None:
        self.queue = queue
        self._broker = broker
        self._headers = arriving(is_dead=queue.endswith(".dead"))
        self._tags = itertools.count(1)
        self.session = _Session()

    def read(self, message: Message) -> Message:
        """A message as it arrives from this queue, without the headers that may not, and without an oversized body."""
        if not message.headers.keys() <= self._headers:
            message = replace(message, headers=_only(message.headers, self._headers))
        size = len(message.body)
        if size > (limit := self._broker.max_body):
            body = message.body[: min(limit, KEPT_OF_OVERSIZED)]
            message = replace(message, body=body, headers={**message.headers, SIZE: size})
        return message

    def take(self, entry: _Entry) -> MemoryDelivery:
        tag = next(self._tags)
        entry.delivery_count += 1
        self.session.unacked[tag] = entry
        stats = self._broker.stats
        stats.delivered_count += 1
        stats.redelivered_count += entry.delivery_count > 1
        return MemoryDelivery(entry, self, self.session, tag=tag)

    def settle(self, session: _Session, tag: int, *, is_ack: bool) -> None:
        if session.is_lost:
            return
        entry = session.unacked.pop(tag)
        queue = self._broker.server.queues.get(self.queue)
        if is_ack:
            self._broker.stats.acked_count += 1
        else:
            self._broker.stats.requeued_count += 1
        if queue is None:
            return
        if not is_ack:
            self._broker.server.give_back(queue, entry)
        self._broker.server.dispatch(queue)

    def lose(self) -> None:
        """Everything unacked is the server's again."""
        session, self.session = self.session, _Session()
        session.is_lost = True
        queue = self._broker.server.queues.get(self.queue)
        if queue is not None:
            for entry in reversed(session.unacked.values()):
                self._broker.server.give_back(queue, entry)
            self._broker.server.dispatch(queue)


class MemoryConsumer(_Holder, Consumer):
    """A consumer. Deliveries arrive in a turn of the event loop of their own, as from a network."""

    def __init__(
        self,
        broker: MemoryBroker,
        queue: str,
        on_delivery: Callable[[Delivery], None],
        *,
        prefetch: int,
        on_lost: Callable[[], None] | None,
    ) -> None:
        super().__init__(broker, queue)
        self.prefetch = prefetch
        self._on_delivery = on_delivery
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._is_wanted = True
        self._is_stopped = False

    @property
    def is_alive(self) -> bool:
        """Whether its event loop can still take deliveries: a client that was never closed stays behind without one."""
        return not self._loop.is_closed()

    @property
    def has_room(self) -> bool:
        return len(self.session.unacked) < self.prefetch

    def push(self, entry: _Entry) -> None:
        delivery = self.take(entry)
        # In the consumer's own context: a network carries nothing of the publisher.
        self._loop.call_soon_threadsafe(self._hand_over, delivery, context=self._context)

    def _hand_over(self, delivery: MemoryDelivery) -> None:
        if delivery.is_lost:
            return
        try:
            self._on_delivery(delivery)
        except Exception:
            log.exception("on_delivery_failed", queue=self.queue)
            delivery.requeue()

    def attach(self) -> None:
        """Subscribe, if wanted and connected; the queue is made again if it has gone."""
        if not self._is_wanted or self._is_stopped or not self._broker.is_connected:
            return
        queue = self._broker.ensure_queue(self.queue)
        if queue is not None and self not in queue.consumers:
            queue.consumers.append(self)
            self._broker.server.dispatch(queue)

    def attach_soon(self) -> None:
        self._loop.call_soon_threadsafe(self.attach)

    def detach(self) -> None:
        queue = self._broker.server.queues.get(self.queue)
        if queue is not None and self in queue.consumers:
            queue.consumers.remove(self)
            self._broker.server.dispatch(queue)

    def drop(self) -> None:
        """Lose the channel."""
        self.detach()
        self.lose()
        self._broker.stats.consumer_lost_count += 1
        if self._on_lost is not None and not self._is_stopped:
            self._on_lost()

    async def pause(self) -> None:
        self._is_wanted = False
        self.detach()
        await asyncio.sleep(0)

    async def resume(self) -> None:
        self._is_wanted = True
        self.attach()

    async def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self.detach()
            self.lose()


# --- the broker ---


class MemoryBroker(Broker):
    """A connection to a `MemoryServer`."""

    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self.stats = BrokerStats()
        self.server = find_server(url)
        self.max_body = settings.max_body
        self._settings = settings
        self._is_up = asyncio.Event()
        self._is_started = False
        self._is_dark = False
        self._consumers: list[MemoryConsumer] = []
        self._own_queues: list[str] = []
        self._publishing: set[asyncio.Task[None]] = set()
        self._made: dict[str, Callable[[], None]] = {}

    @property
    def is_connected(self) -> bool:
        return self._is_up.is_set()

    async def start(self) -> None:
        self._is_started = True
        if not self._is_dark:
            self._is_up.set()
            self.stats.connect_count += 1
        await self._until_up("cannot connect", self._settings.connect_budget.total_seconds())

    async def stop(self) -> None:
        consumers, self._consumers = self._consumers, []
        for consumer in consumers:
            await consumer.stop()
        queues, self._own_queues = self._own_queues, []
        for queue in queues:
            self._drop_queue(queue)
        self._is_started = False
        self._is_up.clear()

    # --- failing on purpose ---

    def cut(self) -> None:
        """Lose the connection and have it back a moment later."""
        self.go_dark()
        asyncio.get_running_loop().call_soon(self.come_back)

    def go_dark(self) -> None:
        """Lose the connection until `come_back`."""
        self._is_dark = True
        self._is_up.clear()
        self.stats.lost_count += 1
        for consumer in self._consumers:
            consumer.drop()

    def come_back(self) -> None:
        """Have the connection back; consumers go on."""
        self._is_dark = False
        if self._is_started:
            self._is_up.set()
            self.stats.reconnect_count += 1
            for consumer in self._consumers:
                consumer.attach()

    # --- topology ---

    async def declare_service(self, service: str) -> None:
        await self._until_up("declare")
        names = Names(service)

        def make() -> None:
            self.server.fanouts.setdefault(names.broadcast, set())
            self.server.declare(_Queue(names.dead))
            for name in (names.requests, names.replies, names.control):
                self.server.declare(_Queue(name, delivery_limit=topology.SERVICE_DELIVERY_LIMIT, dead=names.dead))

        if not self._settings.declares:
            self._check_queues(*names.queues)
            return
        make()
        self._made |= dict.fromkeys(names.queues, make)

    async def declare_sweeper(self, queue: str = topology.SWEEPER_QUEUE) -> None:
        await self._until_up("declare")
        if not self._settings.declares:
            self._check_queues(queue)
            return
        self.server.declare(_Queue(queue, is_single_active=True))

    async def declare_replica(self, service: str) -> str:
        await self._until_up("declare")
        names = Names(service)
        queue = names.new_replica()

        def make() -> None:
            self.server.declare(_Queue(queue))
            self.server.fanouts.setdefault(names.broadcast, set()).add(queue)

        make()
        self._made[queue] = make
        self._own_queues.append(queue)
        return queue

    async def declare_private(self) -> str:
        await self._until_up("declare")
        queue = topology.new_private()
        self.server.declare(_Queue(queue))
        self._made[queue] = lambda: self.server.declare(_Queue(queue))
        self._own_queues.append(queue)
        return queue

    def _check_queues(self, *queues: str) -> None:
        missing = [queue for queue in queues if queue not in self.server.queues]
        if missing:
            raise InvalidSettings(
                f"{', '.join(missing)} not there, and this process was told not to make them; "
                "run `coatcheck declare` as a user who may"
            )

    def ensure_queue(self, queue: str) -> _Queue | None:
        """Give a queue, made again if it was ours and has gone."""
        if queue not in self.server.queues and queue in self._made:
            self._made[queue]()
        return self.server.queues.get(queue)

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
        await self._until_up(f"consume {queue!r}")
        if queue not in self.server.queues:
            raise UsageError(f"there is no queue {queue!r}: declare it first")
        consumer = MemoryConsumer(self, queue, on_delivery, prefetch=prefetch, on_lost=on_lost)
        self._consumers.append(consumer)
        consumer.attach()
        return consumer

    def publish_soon(self, batch: Sequence[Outgoing]) -> list[Future[Routing]]:
        loop = asyncio.get_running_loop()
        leaving: list[tuple[Outgoing, Future[Routing]]] = []
        for outgoing in batch:
            routing: Future[Routing] = loop.create_future()
            leaving.append((outgoing, routing))
            try:
                self.check(outgoing)
            except OversizedMessage as error:
                fail(routing, error)
        if self.is_connected:
            loop.call_soon(self._route, leaving)
        else:
            task = loop.create_task(self._route_when_up(leaving))
            self._publishing.add(task)
            task.add_done_callback(self._publishing.discard)
        return [routing for _, routing in leaving]

    async def _route_when_up(self, leaving: Sequence[tuple[Outgoing, Future[Routing]]]) -> None:
        try:
            await self._until_up("publish")
        except BrokerUnavailable as error:
            self.stats.publish_failure_count += 1
            for _, routing in leaving:
                fail(routing, error)
        else:
            self._route(leaving)

    def _route(self, leaving: Sequence[tuple[Outgoing, Future[Routing]]]) -> None:
        for outgoing, future in leaving:
            if not future.done():
                routing = self.server.route(outgoing)
                self.stats.count_routing(routing)
                future.set_result(routing)

    @asynccontextmanager
    async def browse(self, queue: str, limit: int) -> AsyncIterator[list[Delivery]]:
        await self._until_up(f"browse {queue!r}")
        found = self.server.queues.get(queue)
        if found is None:
            raise BrokerUnavailable(f"browse {queue!r}: there is no such queue")
        holder = _Holder(self, queue)
        deliveries: list[Delivery] = [holder.take(found.ready.popleft()) for _ in range(min(limit, len(found.ready)))]
        try:
            yield deliveries
        finally:
            holder.lose()

    async def depth(self, queue: str) -> int | None:
        await self._until_up(f"depth of {queue!r}")
        found = self.server.queues.get(queue)
        return None if found is None else len(found.ready)

    async def consumer_count(self, queue: str) -> int | None:
        await self._until_up(f"consumers of {queue!r}")
        found = self.server.queues.get(queue)
        return None if found is None else len(found.consumers)

    async def purge(self, queue: str) -> None:
        await self._until_up(f"purge {queue!r}")
        found = self.server.queues.get(queue)
        if found is not None:
            found.ready.clear()

    async def delete_queue(self, queue: str) -> None:
        await self._until_up(f"delete {queue!r}")
        self._drop_queue(queue)

    def _drop_queue(self, queue: str) -> None:
        found = self.server.queues.pop(queue, None)
        for bound in self.server.fanouts.values():
            bound.discard(queue)
        for consumer in tuple(found.consumers) if found else ():
            consumer.drop()
            consumer.attach_soon()

    async def _until_up(self, what: str, timeout_s: float | None = None) -> None:
        if self._is_up.is_set():
            return
        if not self._is_started:
            raise BrokerUnavailable(f"{what}: not started")
        try:
            async with asyncio.timeout(timeout_s or self._settings.publish_timeout.total_seconds()):
                await self._is_up.wait()
        except TimeoutError as exc:
            raise BrokerUnavailable(f"{what}: not connected") from exc


def _as_sent(message: Message) -> Message:
    message_id = message.message_id or new_message_id()
    return replace(message, message_id=message_id, headers=_only(message.headers, MAY_PASS))


def _only(headers: Mapping[str, HeaderValue], names: Set[str]) -> dict[str, HeaderValue]:
    return {name: value for name, value in headers.items() if name in names}
