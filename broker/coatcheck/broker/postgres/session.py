"""What one connection has in hand: which messages are out, and which are settled but not written yet.

A session is a row, an advisory lock on the connection that made it, and the messages whose `holder` it is. It ends in
one of three ways, and in each the server has its messages again:

    closed   by `stop`, after its acks were written
    lost     its connection went away; the lock is free, so whoever looks next gives its messages back
    reaped   it was silent for longer than its lease, frozen or blocked, and somebody took it for dead

Deliveries belong to a hold, what one consumer or one look has of a session. Once either is over, settling does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import asyncpg

from coatcheck.broker.headers import KEPT_OF_OVERSIZED
from coatcheck.broker.port import BrokerStats, Delivery
from coatcheck.broker.postgres.codec import decode_message
from coatcheck.broker.postgres.link import Link
from coatcheck.broker.postgres.statements import ACK, GIVE_BACK
from coatcheck.broker.settings import BrokerSettings
from coatcheck.points import reach

T = TypeVar("T")


def limit_bodies(settings: BrokerSettings) -> tuple[int, int]:
    """The largest body that is fetched whole, and how much of a larger one is fetched."""
    return settings.max_body, min(settings.max_body, KEPT_OF_OVERSIZED)


class Session:
    """One connection's life as a holder of messages."""

    def __init__(self, session_id: int, link: Link, stats: BrokerStats, *, rpc_s: float) -> None:
        self.id = session_id
        self.link = link
        self.lost = asyncio.Event()
        self.reason = ""
        self.woken = asyncio.Event()
        """Something to do: acks to write, a notification, a wish."""
        self._stats = stats
        self._rpc_s = rpc_s
        self._acks: list[tuple[Hold, int]] = []
        self._requeues: list[tuple[Hold, int]] = []
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

    def settle(self, hold: Hold, message: int, *, is_ack: bool) -> None:
        (self._acks if is_ack else self._requeues).append((hold, message))
        self.woken.set()

    async def flush(self) -> None:
        """Write every ack and requeue given so far. Raises a driver error, and then the server redelivers."""
        acks, self._acks = self._acks, []
        requeues, self._requeues = self._requeues, []
        if acks:
            await self.fetch(ACK, self.id, sorted(message for _, message in acks))
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
        await self.fetch(GIVE_BACK, [self.id], messages)


class Hold:
    """What one consumer, or one look at a queue, has of a session."""

    __slots__ = ("_is_over", "queue", "session", "unacked")

    def __init__(self, session: Session, queue: str) -> None:
        self.session = session
        self.queue = queue
        self.unacked: set[int] = set()
        self._is_over = False

    @property
    def is_lost(self) -> bool:
        return self._is_over or self.session.lost.is_set()

    def lose(self) -> None:
        """What is unacked is, or will be, somebody else's."""
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

    def __init__(self, row: Mapping[str, Any], hold: Hold, stats: BrokerStats) -> None:
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
