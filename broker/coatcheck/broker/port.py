"""The broker port: everything the rest of Coatcheck knows about a message broker.

An adapter keeps these promises, and `tests/broker/test_conformance.py` holds every adapter to them:

- what is published is persistent, and its fate is told only after the broker took it over;
- what is delivered stays the broker's until it is acked; a lost consumer gives it back, marked as redelivered;
- a lost connection is one `BrokerUnavailable` for a publisher and one `on_lost` for a consumer, and heals by itself.
"""

from __future__ import annotations

import itertools
import uuid
from abc import ABC, abstractmethod
from asyncio import Future, get_running_loop
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeAlias

import msgspec

from coatcheck.broker.headers import REASON
from coatcheck.broker.topology import SWEEPER_QUEUE, Names
from coatcheck.errors import OversizedMessage, TransientError

HeaderValue: TypeAlias = str | int | float | bool | bytes | datetime | list[Any] | dict[str, Any] | None

_NO_HEADERS: Mapping[str, HeaderValue] = MappingProxyType({})


_PROCESS = uuid.uuid4().hex
_COUNT = itertools.count(1)


def new_message_id() -> str:
    """A message_id of its own: unique to this process, and counted within it."""
    return f"{_PROCESS}-{next(_COUNT)}"


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message, whichever way it travels. Only the headers of the wire contract pass an adapter.

    `message_id` None means: the adapter picks a fresh one. One that is given is kept, also when it is used twice.
    """

    body: bytes = b""
    correlation_id: str | None = None
    reply_to: str | None = None
    content_type: str | None = None
    type: str | None = None
    message_id: str | None = None
    headers: Mapping[str, HeaderValue] = _NO_HEADERS
    content_encoding: str | None = None

    def __repr__(self) -> str:
        """Neither body nor headers: a message in a log or traceback must not bring its payload or a token along."""
        return f"Message({len(self.body)} bytes, correlation_id={self.correlation_id!r}, type={self.type!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("size", len(self.body)), ("correlation_id", self.correlation_id), ("type", self.type)]


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A message and where it goes: a queue, or with `is_broadcast` every replica queue of a service.

    With a `delay` it is delivered that much later, where the broker can: RabbitMQ cannot, and raises `UsageError`.
    """

    to: str
    message: Message
    is_broadcast: bool = False
    delay: timedelta | None = None


class Routing(StrEnum):
    """What became of one published message."""

    ROUTED = "routed"
    NO_ROUTE = "no_route"
    REFUSED = "refused"
    """Its queue did not take it: it is full, or away. It may have arrived all the same; others are not concerned."""


class Delivery(ABC):
    """A message as it arrived. It stays the broker's until `ack`.

    `ack` and `requeue` are synchronous, may be repeated, and never raise: the first of them counts. The adapter
    writes them soon and in batches. After a lost channel they do nothing: the broker has the message again and
    redelivers it.
    """

    __slots__ = ("delivery_count", "is_redelivered", "message", "queue")

    message: Message
    queue: str
    is_redelivered: bool
    delivery_count: int
    """1 = first. Counted by the broker where its queue counts, else 1 or 2."""

    def __init__(self, message: Message, queue: str, *, is_redelivered: bool, delivery_count: int) -> None:
        self.message = message
        self.queue = queue
        self.is_redelivered = is_redelivered
        self.delivery_count = delivery_count

    @abstractmethod
    def ack(self) -> None:
        """Take the message off its queue."""

    @abstractmethod
    def requeue(self) -> None:
        """Hand the message back for redelivery, to any consumer."""

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """Acked or requeued by us. The broker may still redeliver it, if the connection is lost right now."""

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """The channel it came on is gone, so settling it has no effect any more."""


class Consumer(ABC):
    """A subscription to one queue that survives lost connections until it is stopped."""

    queue: str
    prefetch: int

    @abstractmethod
    async def pause(self) -> None:
        """Stop new deliveries. What was handed over stays valid and unacked. Repeating it is safe."""

    @abstractmethod
    async def resume(self) -> None:
        """Ask for deliveries again. Repeating it is safe."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop deliveries, write the acks given so far, hand the rest back to the queue. Repeating it is safe."""


@dataclass(slots=True)
class BrokerStats:
    """What an adapter counted since it was made. Plain numbers, for metrics and tests."""

    connect_count: int = 0
    reconnect_count: int = 0
    connect_failure_count: int = 0
    lost_count: int = 0
    blocked_count: int = 0
    published_count: int = 0
    no_route_count: int = 0
    refused_count: int = 0
    publish_failure_count: int = 0
    delivered_count: int = 0
    redelivered_count: int = 0
    acked_count: int = 0
    ack_frame_count: int = 0
    requeued_count: int = 0
    undecodable_count: int = 0
    consumer_lost_count: int = 0
    watchdog_rebuild_count: int = 0

    def count_routing(self, routing: Routing) -> None:
        """Count what became of a message."""
        if routing is Routing.REFUSED:
            self.refused_count += 1
        else:
            self.published_count += 1
            self.no_route_count += routing is Routing.NO_ROUTE


async def settled(futures: Sequence[Future[Routing]]) -> list[Routing]:
    """Wait until each message has its fate. Raises what one failed with: an outage before all else."""
    # The last first: fates come mostly in order, so one wait is mostly enough.
    for future in reversed(futures):
        if not future.done():
            with suppress(Exception):
                await future
    failures = [error for future in futures if (error := future.exception()) is not None]
    if failures:
        raise next((error for error in failures if isinstance(error, TransientError)), failures[0])
    return [future.result() for future in futures]


def fail(future: Future[Routing], error: BaseException, *, cause: BaseException | None = None) -> None:
    """Let a message fail, unless its fate is known. A caller that has left need not look at it."""
    if not future.done():
        error.__cause__ = cause
        future.set_exception(error)
        future.exception()  # or asyncio would complain that the error was not read


def failed(error: BaseException) -> Future[Routing]:
    """The fate of a message that was never sent."""
    future: Future[Routing] = get_running_loop().create_future()
    fail(future, error)
    return future


class Broker(ABC):
    """A connection to a message broker that heals itself while it is started."""

    stats: BrokerStats
    max_body: int
    """The largest body that is published."""
    odd_queues: Mapping[str, str] = MappingProxyType({})
    """Queues that were declared and that another program had made otherwise: how they differ, and what is lost by it.
    They are used as they are.
    """

    @property
    @abstractmethod
    def is_connected(self) -> bool:
        """Publishing and consuming are both up at this moment."""

    @abstractmethod
    async def start(self) -> None:
        """Connect. Raises `BrokerUnavailable` when that takes longer than `connect_budget`."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop the consumers, write their acks, disconnect. Repeating it is safe."""

    @abstractmethod
    async def declare_service(self, service: str) -> None:
        """Make the four queues of a service, its dead-letter route and its broadcast. Safe for ten replicas at once.

        A queue that is there is used as it is, if it can keep messages; see `odd_queues`. With the setting `declares`
        off it makes nothing. Raises InvalidSettings if it may not, if they are missing, or if one cannot be used.
        """

    @abstractmethod
    async def declare_sweeper(self, queue: str = SWEEPER_QUEUE) -> None:
        """Make the sweepers' queue, of which one consumer at a time is active."""

    @abstractmethod
    async def declare_replica(self, service: str) -> str:
        """Make this process's own queue for a service's broadcasts and give its name. It goes with the process."""

    @abstractmethod
    async def declare_private(self) -> str:
        """Make a reply queue for this process alone and give its name. It goes with the process."""

    @abstractmethod
    async def consume(
        self,
        queue: str,
        on_delivery: Callable[[Delivery], None],
        *,
        prefetch: int,
        on_lost: Callable[[], None] | None = None,
    ) -> Consumer:
        """Deliver from `queue`, at most `prefetch` unacked at a time.

        `on_delivery` is called once per delivery, in order, and must not block. `on_lost` is called whenever the
        channel was lost, before the first delivery of the next one: every delivery not acked by then comes again.
        Raises `UsageError` if there is no such queue, `BrokerUnavailable` if the broker does not answer.
        """

    @abstractmethod
    def publish_soon(self, batch: Sequence[Outgoing]) -> list[Future[Routing]]:
        """Take messages to hand over, persistent, mandatory and confirmed. Each future says what became of its message.

        A queue that does not take a message is that message's fate (REFUSED), and holds up neither its neighbours nor
        other callers. A future fails with `BrokerUnavailable` when the connection is lost, blocked or silent for
        `publish_timeout`; then its message may or may not have arrived. It fails with what `check` raises, or with
        `MalformedMessage`, for a message that the broker never takes. Cancelling a future does not call a message back.
        What many callers publish at once shares what a batch costs.
        """

    async def publish(self, batch: Sequence[Outgoing]) -> list[Routing]:
        """Hand a batch over and say what became of each: `publish_soon`, and the wait for all of it.

        Raises `OversizedMessage` before anything is sent. Raises `BrokerUnavailable` if any future fails with it; then
        any of the batch may or may not have arrived. Cancelling the caller does not call anything back.
        """
        for outgoing in batch:
            self.check(outgoing)
        return await settled(self.publish_soon(batch))

    def check(self, outgoing: Outgoing) -> None:
        """Raise `OversizedMessage` for a body over `max_body`. Dead letters are exempt."""
        size = len(outgoing.message.body)
        if size > self.max_body and REASON not in outgoing.message.headers:
            raise OversizedMessage("oversized", f"body of {size} bytes to {outgoing.to!r}; max_body is {self.max_body}")

    @abstractmethod
    async def depth(self, queue: str) -> int | None:
        """The number of messages ready in `queue`, or None if there is no such queue."""

    @abstractmethod
    async def consumer_count(self, queue: str) -> int | None:
        """The number of consumers `queue` has, of any process, or None if there is no such queue."""

    @abstractmethod
    def browse(self, queue: str, limit: int) -> AbstractAsyncContextManager[list[Delivery]]:
        """Take up to `limit` messages to look at; on exit those not acked are put back."""

    @abstractmethod
    async def purge(self, queue: str) -> None:
        """Drop every ready message of `queue`. For tools and tests."""

    @abstractmethod
    async def delete_queue(self, queue: str) -> None:
        """Delete `queue` with what is in it. For tools and tests; repeating it is safe."""

    async def delete_service(self, service: str) -> None:
        """Delete what `declare_service` made, with what is in it. For tools and tests; repeating it is safe."""
        for queue in Names(service).queues:
            await self.delete_queue(queue)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
