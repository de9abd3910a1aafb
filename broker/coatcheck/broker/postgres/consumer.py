"""What one connection has in hand: its deliveries, the consumers they are for, and what was said of them.

A session is a row, an advisory lock on the connection that made it, and the messages whose `holder` it is. It ends in
one of three ways, and in each the server has its messages again:

    closed   by `stop`, after its acks were written
    lost     its connection went away; the lock is free, so the next process that looks gives its messages back
    reaped   it was silent for longer than its lease, frozen or blocked, and another process took it for dead

Deliveries belong to a holding, what one consumer or one look has of a session. Once either is over, settling does
nothing.

A consumer's `pause`, `resume` and `stop` only say what is wanted and wait, so a caller that is cancelled leaves nothing
half done. The receiver's loop acts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import asyncpg

from coatcheck.broker.headers import KEPT_OF_OVERSIZED
from coatcheck.broker.port import BrokerStats, Consumer, Delivery
from coatcheck.broker.postgres.codec import decode_message
from coatcheck.broker.postgres.connection import PostgresLink
from coatcheck.broker.postgres.sql import SQL
from coatcheck.broker.settings import BrokerSettings
from coatcheck.errors import BrokerUnavailable, CoatcheckError
from coatcheck.log import get_logger
from coatcheck.points import reach

T = TypeVar("T")
log = get_logger(__name__)

_SMALLEST_BITE = 4
_LARGEST_BITE = 128


def limit_bodies(settings: BrokerSettings) -> tuple[int, int]:
    """The largest body that is fetched whole, and how much of a larger one is fetched."""
    return settings.max_body, min(settings.max_body, KEPT_OF_OVERSIZED)


class PostgresSession:
    """One connection's life as a holder of messages."""

    def __init__(self, session_id: int, link: PostgresLink, stats: BrokerStats, *, rpc_s: float) -> None:
        self.id = session_id
        self.link = link
        self.lost = asyncio.Event()
        self.reason = ""
        self.woken = asyncio.Event()
        """Something to do: acks to write, a notification, a wish."""
        self._stats = stats
        self._rpc_s = rpc_s
        self._acks: list[tuple[Holding, int]] = []
        self._requeues: list[tuple[Holding, int]] = []
        link.call_when_lost(lambda: self.lose(link.reason))

    async def fetch(self, statement: str, *values: Any) -> Sequence[Mapping[str, Any]]:
        """Run one statement. Raises a driver error."""
        return await self.link.fetch(statement, *values, timeout_s=self._rpc_s)

    async def run(self, work: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        """Do something that takes more than one statement. Raises a driver error."""
        return await self.link.run(work, timeout_s=self._rpc_s)

    def lose(self, reason: str) -> None:
        """The server has everything unacked again; from here on settling does nothing."""
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
            self.woken.set()

    def settle(self, hold: Holding, message: int, *, is_ack: bool) -> None:
        (self._acks if is_ack else self._requeues).append((hold, message))
        self.woken.set()

    async def flush(self) -> None:
        """Write every ack and requeue given so far. Raises a driver error, and then the server redelivers."""
        acks, self._acks = self._acks, []
        requeues, self._requeues = self._requeues, []
        if acks:
            await self.fetch(SQL["ack"], self.id, sorted(message for _, message in acks))
            self._stats.acked_count += len(acks)
            self._stats.ack_frame_count += 1
        if requeues:
            await self.give_back([message for _, message in requeues])
            self._stats.requeued_count += len(requeues)
        for hold, message in (*acks, *requeues):
            hold.unacked.discard(message)
        if acks or requeues:
            reach("acks_written")

    async def give_back(self, messages: Sequence[int]) -> None:
        await self.fetch(SQL["give_back"], [self.id], messages)


class Holding:
    """What one consumer, or one look at a queue, has of a session."""

    __slots__ = ("_is_over", "queue", "session", "unacked")

    def __init__(self, session: PostgresSession, queue: str) -> None:
        self.session = session
        self.queue = queue
        self.unacked: set[int] = set()
        self._is_over = False

    @property
    def is_lost(self) -> bool:
        return self._is_over or self.session.lost.is_set()

    def lose(self) -> None:
        """What is unacked is, or will be, another consumer's."""
        self._is_over = True

    def take(self, row: Mapping[str, Any], stats: BrokerStats) -> PostgresDelivery:
        self.unacked.add(row["id"])
        delivery = PostgresDelivery(row, self, stats)
        stats.delivered_count += 1
        stats.redelivered_count += delivery.is_redelivered
        return delivery

    async def release(self) -> None:
        """Write the acks, give the rest back. Raises a driver error, and then all of it comes back anyway."""
        self.lose()
        await self.session.flush()
        if self.unacked:
            await self.session.give_back(sorted(self.unacked))


class PostgresDelivery(Delivery):
    """A delivery of one hold."""

    __slots__ = ("_hold", "_id", "_is_settled")

    def __init__(self, row: Mapping[str, Any], hold: Holding, stats: BrokerStats) -> None:
        super().__init__(
            decode_message(row, stats, is_dead=hold.queue.endswith(".dead")),
            hold.queue,
            is_redelivered=row["delivery_count"] > 1,
            delivery_count=row["delivery_count"],
        )
        self._id: int = row["id"]
        self._hold = hold
        self._is_settled = False

    def ack(self) -> None:
        self._settle(is_ack=True)

    def requeue(self) -> None:
        self._settle(is_ack=False)

    def _settle(self, *, is_ack: bool) -> None:
        if not self._is_settled:
            self._is_settled = True
            if not self._hold.is_lost:
                self._hold.session.settle(self._hold, self._id, is_ack=is_ack)

    @property
    def is_settled(self) -> bool:
        return self._is_settled

    @property
    def is_lost(self) -> bool:
        return self._hold.is_lost


class PostgresConsumer(Consumer):
    """A consumer. `attached_as` is its row in the line of its queue, while it stands there."""

    def __init__(
        self,
        queue: str,
        on_delivery: Callable[[Delivery], None],
        *,
        prefetch: int,
        on_lost: Callable[[], None] | None,
        wake: Callable[[], None],
        patience_s: float,
        stats: BrokerStats,
    ) -> None:
        self.queue = queue
        self.prefetch = prefetch
        self.rank = _rank(queue)
        self.is_wanted = True
        self.is_stopping = False
        self.is_stopped = False
        self.attached_as: int | None = None
        self.channel = ""
        self.hold: Holding | None = None
        self.failure: CoatcheckError | None = None
        """Why it could not be attached; it is tried again at `retry_at_s`."""
        self.retry_at_s = 0.0
        self.is_hungry = False
        """There may be something for it."""
        self.due_at_s: float | None = None
        """When a delayed message of its queue is due, by the clock of the event loop."""
        self._bite = _SMALLEST_BITE
        self._on_delivery = on_delivery
        self._on_lost = on_lost
        self._wake = wake
        self._patience_s = patience_s
        self._stats = stats
        self._changed = asyncio.Event()

    # --- what callers say ---

    async def start(self) -> None:
        """Wait until it stands in line. Raises `UsageError` if there is no such queue, else `BrokerUnavailable`."""
        await self._until(lambda: self.attached_as is not None or self.failure is not None)
        if self.failure is not None:
            raise self.failure
        if self.is_stopped:
            raise BrokerUnavailable(f"consumer of {self.queue!r}: the broker was stopped")

    async def pause(self) -> None:
        self.is_wanted = False
        await self._until(lambda: self.attached_as is None)

    async def resume(self) -> None:
        self.is_wanted = True
        await self._until(lambda: self.attached_as is not None or not self.is_wanted)

    async def stop(self) -> None:
        self.is_stopping = True
        await self._until(lambda: self.is_stopped)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a state is reached. While the server is away that may never be; then say so, but keep the wish."""
        self._wake()
        try:
            async with asyncio.timeout(self._patience_s):
                while not is_so() and not self.is_stopped:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as exc:
            raise BrokerUnavailable(f"consumer of {self.queue!r}: the broker does not answer") from exc

    # --- what the receiver says ---

    def tell_changed(self) -> None:
        self._changed.set()

    @property
    def appetite(self) -> int:
        """How many it would take now.

        A bite doubles for as long as the queue fills it: a burst is shared with the other processes, which are awake
        by then, and a backlog is worked off in large bites.
        """
        if not self.is_hungry or self.attached_as is None or self.hold is None:
            return 0
        return min(self._bite, self.prefetch - len(self.hold.unacked))

    def feed(self, rows: list[Mapping[str, Any]], *, asked: int) -> None:
        """Hand over what was fetched for it. Fewer than asked: the queue is empty until a notification comes."""
        assert self.hold is not None
        is_filled = len(rows) == asked
        self.is_hungry |= is_filled
        self._bite = min(2 * self._bite, _LARGEST_BITE) if is_filled else _SMALLEST_BITE
        for row in rows:
            self._deliver(self.hold.take(row, self._stats))

    def _deliver(self, delivery: Delivery) -> None:
        try:
            self._on_delivery(delivery)
        except Exception:
            # A bug in the receiver of the message. Handing it back costs a delivery each time, so the queue's limit
            # ends the loop in the dead-letter queue, where a person looks.
            log.exception("on_delivery_failed", queue=self.queue)
            delivery.requeue()

    def lose(self, reason: str) -> None:
        """Everything it had in hand comes again, to it or to others."""
        hold, self.hold = self.hold, None
        self.attached_as = None
        if hold is None:
            return
        hold.lose()
        self._stats.consumer_lost_count += 1
        log.warning("consumer_lost", queue=self.queue, reason=reason, unacked_count=len(hold.unacked))
        if self._on_lost is not None and not self.is_stopping:
            try:
                self._on_lost()
            except Exception:
                log.exception("on_lost_failed", queue=self.queue)


def _rank(queue: str) -> int:
    """Which messages are handed over first: orders, then answers, so that what has begun goes on, then new requests."""
    if queue.endswith(".control"):
        return 0
    return 1 if queue.endswith(".replies") or ".private." in queue or ".replica." in queue else 2
