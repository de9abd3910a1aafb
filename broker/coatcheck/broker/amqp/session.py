"""The life of one consuming channel: the deliveries that came on it, and what was said of them.

Deliveries belong to their session: once it is lost, the broker has them again, and settling them is a no-op. Tags are
settled once, because a second ack of one tag (406) closes the channel and redelivers everything on it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pamqp.frame
from aiormq.channel import Channel
from pamqp.commands import Basic

from coatcheck.broker.amqp import codec
from coatcheck.broker.amqp.connection import AmqpLink, describe
from coatcheck.broker.amqp.socket import ChannelReceiver
from coatcheck.broker.port import BrokerStats, Delivery
from coatcheck.log import get_logger
from coatcheck.points import reach

log = get_logger(__name__)

OnDelivery = Callable[[Delivery], None]


class AmqpDelivery(Delivery):
    """A delivery of one session."""

    __slots__ = ("_is_settled", "_session", "_tag")

    def __init__(self, arrived: codec.Arrived, session: AmqpSession) -> None:
        super().__init__(
            arrived.message,
            session.queue,
            is_redelivered=arrived.is_redelivered,
            delivery_count=arrived.delivery_count,
        )
        self._tag = arrived.tag
        self._session = session
        self._is_settled = False

    def ack(self) -> None:
        self._settle(is_ack=True)

    def requeue(self) -> None:
        self._settle(is_ack=False)

    def _settle(self, *, is_ack: bool) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._session.settle(self._tag, is_ack=is_ack)

    @property
    def is_settled(self) -> bool:
        return self._is_settled

    @property
    def is_lost(self) -> bool:
        return self._session.lost.is_set()


class AmqpSession(ChannelReceiver):
    """Which tags of a channel are out, and which are settled but not written yet.

    What is settled within one turn of the event loop is written together at its end.
    """

    takes = frozenset({codec.DELIVER, codec.GET_OK, codec.GET_EMPTY})

    def __init__(
        self,
        link: AmqpLink,
        channel: Channel,
        queue: str,
        stats: BrokerStats,
        *,
        max_body: int,
        on_delivery: OnDelivery | None = None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.link = link
        self.channel = channel
        self.queue = queue
        self.max_body = max_body
        self.lost = asyncio.Event()
        self.reason = ""
        self.last_delivery_at_s = 0.0
        self._stats = stats
        self._on_delivery = on_delivery
        self._on_idle = on_idle
        self._is_dead_queue = queue.endswith(".dead")
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._unacked: dict[int, None] = {}  # in order of delivery: tags only grow
        self._last_tag = 0
        self._most_unacked = 0
        self._acks: set[int] = set()
        self._requeues: list[int] = []
        self._is_flush_due = False
        self._getting: asyncio.Future[AmqpDelivery | None] | None = None
        link.attach(channel, self)
        link.call_when_lost(self._lose_with_link)
        channel.closing.add_done_callback(lambda closing: self.lose(_why(closing)))

    @property
    def unacked_count(self) -> int:
        return len(self._unacked)

    def lose(self, reason: str) -> None:
        """The broker has everything unacked again; from here on settling does nothing."""
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
            self.link.forget(self._lose_with_link)
            self._answer(ConnectionError(f"the channel was lost: {reason}"))

    def _lose_with_link(self) -> None:
        self.lose(self.link.reason)

    # --- what arrives ---

    def on_message(self, method: int, args: bytes, header: bytes, body: bytes) -> None:
        if self.lost.is_set():
            return
        is_get = method == codec.GET_OK
        arrived = codec.read_arrived(args, header, body, is_get=is_get, is_dead=self._is_dead_queue)
        if arrived.broken is not None:
            self._stats.undecodable_count += 1
            log.warning("message_properties_undecodable", error=arrived.broken, body_size=len(body))
        self._note(arrived.tag, is_get=is_get)
        delivery = AmqpDelivery(arrived, self)
        if is_get:
            self._answer(delivery)
        else:
            self._deliver(delivery)

    def allow(self, prefetch: int) -> None:
        """Expect deliveries, so many unacked at a time. Those that are out by now are another consumer's.

        Twice as many are borne, for who counts how is the broker's business; a broker that does not count is not.
        """
        self._most_unacked = len(self._unacked) + 2 * prefetch

    def _note(self, tag: int, *, is_get: bool) -> None:
        if tag <= self._last_tag:
            raise codec.ProtocolViolated(f"delivery tag {tag} after {self._last_tag}")
        if self._getting is None if is_get else len(self._unacked) >= self._most_unacked:
            raise codec.ProtocolViolated(f"more messages from {self.queue!r} than were asked for")
        self._last_tag = tag
        self._unacked[tag] = None

    def on_method(self, method: int, args: bytes) -> None:
        self._answer(None)  # the one there is: the queue is empty

    def on_close(self) -> None:
        self._is_closed = True

    def _deliver(self, delivery: AmqpDelivery) -> None:
        self.last_delivery_at_s = self._loop.time()
        self._stats.delivered_count += 1
        self._stats.redelivered_count += delivery.is_redelivered
        assert self._on_delivery is not None
        try:
            self._on_delivery(delivery)
        except Exception:
            # A bug in the receiver. Handing it back costs a delivery each time, so the queue's limit ends the loop in
            # the dead-letter queue, where a person looks.
            log.exception("on_delivery_failed", queue=self.queue)
            delivery.requeue()

    # --- one by one ---

    async def get(self, timeout_s: float) -> AmqpDelivery | None:
        """Take one message off the queue; None if there is none.

        Raises ConnectionError, TimeoutError, or ValueError for a name that no queue can have.
        """
        frame = pamqp.frame.marshal(Basic.Get(queue=self.queue), self.channel.number)
        if self.lost.is_set():
            raise ConnectionError(f"the channel was lost: {self.reason}")
        self._getting = self._loop.create_future()
        self._write([frame])
        async with asyncio.timeout(timeout_s):
            return await self._getting

    def _answer(self, answer: AmqpDelivery | ConnectionError | None) -> None:
        getting, self._getting = self._getting, None
        if getting is None or getting.done():
            return
        if isinstance(answer, ConnectionError):
            getting.set_exception(answer)
        else:
            getting.set_result(answer)

    # --- what is said of it ---

    def settle(self, tag: int, *, is_ack: bool) -> None:
        if self.lost.is_set():
            return
        if is_ack:
            self._acks.add(tag)
        else:
            self._requeues.append(tag)
        if not self._is_flush_due and self._on_delivery is not None:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write every ack and requeue given so far. On a lost channel they vanish: the broker redelivers."""
        self._is_flush_due = False
        if self.lost.is_set():
            return
        requeues, self._requeues = self._requeues, []
        for tag in requeues:
            del self._unacked[tag]
        self._stats.requeued_count += len(requeues)
        frames = [codec.requeue_frame(self.channel.number, tag) for tag in requeues]
        frames += self._ack_frames()
        self._write(frames)
        reach("acks_written")
        if not self._unacked:
            self._on_idle()

    def _ack_frames(self) -> list[bytes]:
        """One `multiple` ack for the oldest deliveries as far as all are settled, and single acks for the rest.

        A `multiple` only ever covers tags that are on the books, so none is acked twice.
        """
        acks, self._acks = self._acks, set()
        self._stats.acked_count += len(acks)
        frames: list[bytes] = []
        run = list(itertools.takewhile(acks.__contains__, self._unacked))
        if len(run) > 1:
            for tag in run:
                del self._unacked[tag]
            acks.difference_update(run)
            frames.append(codec.ack_frame(self.channel.number, run[-1], multiple=True))
        for tag in acks:
            del self._unacked[tag]
            frames.append(codec.ack_frame(self.channel.number, tag))
        self._stats.ack_frame_count += len(frames)
        return frames

    def flush_some(self, most: int) -> bool:
        """Write up to so many acks, one by one, the oldest first. False: there were none left."""
        some = sorted(self._acks)[:most]
        self._acks.difference_update(some)
        for tag in some:
            del self._unacked[tag]
        self._stats.acked_count += len(some)
        self._stats.ack_frame_count += len(some)
        self._write([codec.ack_frame(self.channel.number, tag) for tag in some])
        return bool(some)

    def _write(self, frames: list[bytes]) -> None:
        if frames and not self._is_closed and not self.lost.is_set():
            self.link.write(b"".join(frames))


def _why(closing: asyncio.Future[Any]) -> str:
    if closing.cancelled():
        return "closed"
    error = closing.exception()
    return describe(error) if error else "closed"
