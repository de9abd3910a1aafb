"""Consuming: one channel per consumer, rebuilt whenever it is lost.

    opening ──channel, qos──► idle ◄──cancel / consume──► consuming
       ▲                        └────────────┬────────────────┘
       └── on_lost() ◄── lost: channel closed, link lost, consumer cancelled by the broker, deaf

One task (`_run`) moves a consumer through these states; `pause`, `resume` and `stop` only say what is wanted and
wait. So a caller that is cancelled never cancels an AMQP call half way, which would close the channel and lose what
was handed over.

A session is one channel's life. Deliveries belong to it: once it is lost, the broker has them again, and settling
them is a no-op. Tags are settled once, because a second ack of one tag (406) closes the channel and redelivers
everything on it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import structlog
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from aiormq.exceptions import ChannelNotFoundEntity
from tenacity import AsyncRetrying, retry_if_result, wait_random_exponential

from coatcheck.broker.amqp_codec import count_deliveries, read_message
from coatcheck.broker.amqp_link import (
    DRIVER_ERRORS,
    Link,
    Uplink,
    describe,
    genuine,
    is_channel_error,
    reap,
    spawn,
    wait_first,
)
from coatcheck.broker.port import BrokerStats, Consumer, Delivery
from coatcheck.broker.settings import BrokerSettings
from coatcheck.errors import BrokerUnavailable, UsageError
from coatcheck.points import reach

log = structlog.get_logger(__name__)

OnDelivery = Callable[[Delivery], None]


class AmqpDelivery(Delivery):
    """A delivery of one session."""

    __slots__ = ("_is_settled", "_session", "_tag")

    def __init__(self, delivered: DeliveredMessage, session: Session, *, queue: str) -> None:
        super().__init__(
            read_message(delivered, is_dead=queue.endswith(".dead")),
            queue,
            is_redelivered=bool(delivered.redelivered),
            delivery_count=count_deliveries(delivered),
        )
        assert delivered.delivery_tag is not None
        self._tag: int = delivered.delivery_tag
        self._session = session
        self._is_settled = False
        session.add(self._tag)

    def ack(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._session.settle(self._tag, is_ack=True)

    def requeue(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._session.settle(self._tag, is_ack=False)

    @property
    def is_settled(self) -> bool:
        return self._is_settled

    @property
    def is_lost(self) -> bool:
        return self._session.lost.is_set()


class Session:
    """One channel's life: which tags are out, which are settled but not written yet."""

    def __init__(self, link: Link, channel: Channel, stats: BrokerStats) -> None:
        self.link = link
        self.channel = channel
        self.lost = asyncio.Event()
        self.reason = ""
        self._stats = stats
        self._unacked: dict[int, None] = {}  # in order of delivery: tags only grow
        self._acks: set[int] = set()
        self._requeues: list[int] = []
        self._is_dirty = asyncio.Event()
        self._is_finishing = False
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

    def _lose_with_link(self) -> None:
        self.lose(self.link.reason)

    def add(self, tag: int) -> None:
        self._unacked[tag] = None

    def settle(self, tag: int, *, is_ack: bool) -> None:
        if self.lost.is_set():
            return
        if is_ack:
            self._acks.add(tag)
        else:
            self._requeues.append(tag)
        self._is_dirty.set()

    async def flush_forever(self) -> None:
        """Write what was settled, once per turn of the event loop, until `finish`."""
        while not self._is_finishing:
            await self._is_dirty.wait()
            await self.flush()

    def finish(self) -> None:
        """Let `flush_forever` write what there is and return."""
        self._is_finishing = True
        self._is_dirty.set()

    async def flush(self) -> None:
        """Write every ack and requeue given so far. A lost channel is not an error: the broker redelivers."""
        self._is_dirty.clear()
        requeues, self._requeues = self._requeues, []
        with suppress(*DRIVER_ERRORS):
            for tag in requeues:
                del self._unacked[tag]
                self._stats.requeued_count += 1
                await self.channel.basic_nack(tag, requeue=True, wait=False)
            await self._flush_acks()

    async def _flush_acks(self) -> None:
        """Write one `multiple` ack for the oldest deliveries as far as all are settled, and single acks for the rest.

        A tag leaves the books before its ack is written, never after: a `multiple` only ever covers tags that are on
        the books, so none is acked twice. A requeue that came in meanwhile is on the books too, and ends the run.
        """
        acks, self._acks = self._acks, set()
        self._stats.acked_count += len(acks)
        run = list(itertools.takewhile(acks.__contains__, self._unacked))
        if len(run) > 1:
            for tag in run:
                del self._unacked[tag]
            acks.difference_update(run)
            self._stats.ack_frame_count += 1
            await self.channel.basic_ack(run[-1], multiple=True, wait=False)
        for tag in acks:
            del self._unacked[tag]
            self._stats.ack_frame_count += 1
            await self.channel.basic_ack(tag, wait=False)
        reach("acks_written")

    async def flush_some(self, most: int) -> bool:
        """Write up to so many acks, one by one, the oldest first. False: there were none left."""
        some = sorted(self._acks)[:most]
        self._acks.difference_update(some)
        for tag in some:
            del self._unacked[tag]
            self._stats.acked_count += 1
            self._stats.ack_frame_count += 1
            await self.channel.basic_ack(tag, wait=False)
        return bool(some)


class AmqpConsumer(Consumer):
    """A consumer on an uplink. `ensure_queue` makes the queue again if it is one of ours and has gone."""

    def __init__(
        self,
        uplink: Uplink,
        queue: str,
        on_delivery: OnDelivery,
        *,
        prefetch: int,
        on_lost: Callable[[], None] | None,
        ensure_queue: Callable[[str], Awaitable[bool]],
        settings: BrokerSettings,
        stats: BrokerStats,
    ) -> None:
        self.queue = queue
        self.prefetch = prefetch
        self.session: Session | None = None
        self.last_delivery_at_s = 0.0
        self._uplink = uplink
        self._on_delivery = on_delivery
        self._on_lost = on_lost
        self._ensure_queue = ensure_queue
        self._settings = settings
        self._stats = stats
        self._rpc_s = settings.rpc_timeout.total_seconds()
        self._is_wanted = True
        self._is_stopping = False
        self._wish = asyncio.Event()
        self._state_changed = asyncio.Event()
        self._tag: str | None = None
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    # --- what callers say ---

    @property
    def is_consuming(self) -> bool:
        return self._tag is not None and self.session is not None and not self.session.lost.is_set()

    @property
    def is_stopped(self) -> bool:
        return self._task is not None and self._task.done()

    @property
    def has_room(self) -> bool:
        """The broker may and should send more."""
        return self.is_consuming and self.session is not None and self.session.unacked_count < self.prefetch

    async def start(self) -> None:
        """Begin. Raises `UsageError` if there is no such queue, `BrokerUnavailable` if the broker does not answer."""
        self._task = spawn(self._run(), f"broker-consumer-{self.queue}")
        try:
            await self._until(lambda: self.is_consuming or self._failure is not None)
        except BaseException:
            await self._abandon()
            raise
        if self.is_consuming:
            return
        failure = self._failure
        await self._abandon()
        if isinstance(failure, ChannelNotFoundEntity):
            raise UsageError(f"there is no queue {self.queue!r}: declare it first") from failure
        if isinstance(failure, ValueError):
            raise UsageError(f"consume {self.queue!r}: AMQP cannot name such a queue ({failure})") from failure
        raise BrokerUnavailable(f"consume {self.queue!r}: {describe(failure or TimeoutError())}") from failure

    async def pause(self) -> None:
        self._is_wanted = False
        self._wish.set()
        await self._until(lambda: not self.is_consuming)

    async def resume(self) -> None:
        self._is_wanted = True
        self._wish.set()
        await self._until(lambda: self.is_consuming or not self._is_wanted or self._is_stopping)

    async def stop(self) -> None:
        self._is_stopping = True
        self._wish.set()
        if self._task is not None and self.session is not None and not self.session.lost.is_set():
            # Bounded: cancel, acks and close are one answer each. After that the link is stuck, and the broker takes
            # all back.
            await asyncio.wait([self._task], timeout=3 * self._rpc_s)
        await self._abandon()

    def rebuild(self, reason: str) -> None:
        """Drop the channel and make another; what was unacked on it comes again."""
        if self.session is not None:
            self.session.lose(reason)

    async def _abandon(self) -> None:
        self._is_stopping = True
        await reap(self._task)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a state is reached. While the broker is away that may never be; then say so, but keep the wish."""
        assert self._task is not None
        try:
            async with asyncio.timeout(self._settings.publish_timeout.total_seconds() + self._rpc_s):
                while not is_so() and not self._task.done():
                    self._state_changed.clear()
                    await self._state_changed.wait()
        except TimeoutError as exc:
            raise BrokerUnavailable(f"consumer of {self.queue!r}: the broker does not answer") from exc

    # --- the one task that acts ---

    async def _run(self) -> None:
        low, high = self._settings.backoff_min.total_seconds(), self._settings.backoff_max.total_seconds()
        opening = AsyncRetrying(
            retry=retry_if_result(lambda session: session is None and not self._is_stopping),
            wait=wait_random_exponential(multiplier=low, max=high, min=low),
        )
        try:
            while not self._is_stopping:
                session: Session | None = await opening(self._open)
                if session is not None:
                    await self._live(session)
        finally:
            self._tag = None
            self._state_changed.set()

    async def _open(self) -> Session | None:
        """Open a channel and, if wanted, consume. None: not this time."""
        link = await self._uplink.get()
        session: Session | None = None
        try:
            session = self.session = Session(link, await link.channel(timeout_s=self._rpc_s), self._stats)
            session.channel.on_consumer_cancel_callbacks.add(lambda _: self.rebuild("cancelled by the broker"))
            await genuine(session.channel.basic_qos(prefetch_count=self.prefetch, timeout=self._rpc_s))
            if self._is_wanted:
                await self._consume(session)
        except (*DRIVER_ERRORS, ValueError) as exc:  # ValueError: a name the driver refuses
            await self._on_open_failed(link, exc)
            if session is not None and session.unacked_count:
                session.lose(describe(exc))
                self._tell_lost(session)
            return None
        return session

    async def _on_open_failed(self, link: Link, exc: BaseException) -> None:
        self._tag = None
        if isinstance(exc, TimeoutError):
            link.abort(f"no answer while consuming {self.queue!r}")
        if isinstance(exc, ChannelNotFoundEntity) and await self._try_ensure_queue():
            return
        log.warning("consumer_not_opened", queue=self.queue, error=repr(exc))
        if is_channel_error(exc) or isinstance(exc, ValueError):
            self._failure = exc
            self._state_changed.set()

    async def _try_ensure_queue(self) -> bool:
        try:
            return await self._ensure_queue(self.queue)
        except BrokerUnavailable:
            return False

    async def _live(self, session: Session) -> None:
        """Serve one session until it is lost or we stop, then leave it."""
        flusher = spawn(session.flush_forever(), f"broker-acks-{self.queue}")
        try:
            while not session.lost.is_set() and not self._is_stopping:
                self._wish.clear()
                await self._follow_wish(session)
                self._state_changed.set()
                await wait_first(self._wish, session.lost)
            await self._part(session, flusher)
        finally:
            await reap(flusher)

    async def _follow_wish(self, session: Session) -> None:
        try:
            if self._is_wanted and self._tag is None:
                await self._consume(session)
            elif not self._is_wanted and self._tag is not None:
                await genuine(session.channel.basic_cancel(self._tag, timeout=self._rpc_s))
                self._tag = None
        except DRIVER_ERRORS as exc:
            session.lose(describe(exc))

    async def _part(self, session: Session, flusher: asyncio.Task[None]) -> None:
        """Leave a session.

        Stopping: deliveries end first, then acks are written, then the channel gives the rest back.
        """
        is_lost = session.lost.is_set()
        if is_lost:
            self._tag = None
            self._state_changed.set()
            self._tell_lost(session)
        else:
            self._is_wanted = False
            await self._follow_wish(session)
            session.finish()
            await asyncio.wait([flusher], timeout=self._rpc_s)
            session.lose("stopped")
        # Also when it is only deaf, or cancelled by the broker: then the channel is open, and closing it is what
        # releases its unacked deliveries.
        with suppress(*DRIVER_ERRORS):
            await genuine(session.channel.close(timeout=self._rpc_s))

    def _tell_lost(self, session: Session) -> None:
        self._stats.consumer_lost_count += 1
        log.warning("consumer_lost", queue=self.queue, reason=session.reason, unacked_count=session.unacked_count)
        if self._on_lost is not None:
            try:
                self._on_lost()
            except Exception:
                log.exception("on_lost_failed", queue=self.queue)

    # --- deliveries ---

    async def _consume(self, session: Session) -> None:
        async def on_message(delivered: DeliveredMessage) -> None:
            self._deliver(delivered, session)

        self.last_delivery_at_s = asyncio.get_running_loop().time()
        consuming = session.channel.basic_consume(self.queue, on_message, timeout=self._rpc_s)
        self._tag = (await genuine(consuming)).consumer_tag
        self._failure = None

    def _deliver(self, delivered: DeliveredMessage, session: Session) -> None:
        if session.lost.is_set():
            return
        delivery = AmqpDelivery(delivered, session, queue=self.queue)
        self.last_delivery_at_s = asyncio.get_running_loop().time()
        self._stats.delivered_count += 1
        self._stats.redelivered_count += delivery.is_redelivered
        try:
            self._on_delivery(delivery)
        except Exception:
            # A bug in the receiver. Handing it back costs a delivery each time, so the queue's limit ends the loop in
            # the dead-letter queue, where somebody looks.
            log.exception("on_delivery_failed", queue=self.queue)
            delivery.requeue()


def _why(closing: asyncio.Future[Any]) -> str:
    if closing.cancelled():
        return "closed"
    error = closing.exception()
    return describe(error) if error else "closed"
