"""Consuming: one channel per consumer, rebuilt whenever it is lost.

    opening ──channel, qos──► idle ◄──cancel / consume──► consuming
       ▲                        └────────────┬────────────────┘
       └── on_lost() ◄── lost: channel closed, link lost, consumer cancelled by the broker, deaf

One task (`_run`) moves a consumer through these states; `pause`, `resume` and `stop` only say what is wanted and
wait. So a caller that is cancelled never cancels an AMQP call half way, which would close the channel and lose what
was handed over.

RabbitMQ leaves one consumer deaf without a word. When a quorum queue is deleted and made again at once, the broker
puts the old consumer on the new queue, and then drops what it delivers to it: as many messages as the old queue had
delivered. They are not ready in the queue either, so they cannot be seen. Only a new channel helps; so a broker that
makes a queue again, and a watchdog now and then, has idle consumers move to one (`refresh`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiormq.exceptions import ChannelNotFoundEntity
from tenacity import AsyncRetrying, retry_if_result, wait_random_exponential

from coatcheck.broker.amqp.connection import (
    DRIVER_ERRORS,
    AmqpLink,
    AmqpUplink,
    describe,
    genuine,
    is_channel_error,
)
from coatcheck.broker.amqp.session import AmqpSession, OnDelivery
from coatcheck.broker.background import reap, spawn, wait_first
from coatcheck.broker.port import BrokerStats, Consumer
from coatcheck.broker.settings import BrokerSettings
from coatcheck.errors import BrokerUnavailable, CoatcheckError, UsageError
from coatcheck.log import get_logger

log = get_logger(__name__)


class AmqpConsumer(Consumer):
    """A consumer on an uplink. `ensure_queue` makes the queue again if it is one of ours and has gone."""

    def __init__(
        self,
        uplink: AmqpUplink,
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
        self.session: AmqpSession | None = None
        self._uplink = uplink
        self._on_delivery = on_delivery
        self._on_lost = on_lost
        self._ensure_queue = ensure_queue
        self._settings = settings
        self._stats = stats
        self._rpc_s = settings.rpc_timeout.total_seconds()
        self._is_wanted = True
        self._is_stopping = False
        self._is_refreshing = False
        self._is_subscribing = False
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
    def last_delivery_at_s(self) -> float:
        """When it heard something, or began to listen."""
        return self.session.last_delivery_at_s if self.session is not None else 0.0

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
            await self.abandon()
            raise
        if self.is_consuming:
            return
        failure = self._failure
        await self.abandon()
        if isinstance(failure, ChannelNotFoundEntity):
            raise UsageError(f"there is no queue {self.queue!r}: declare it first") from failure
        if isinstance(failure, ValueError):
            raise UsageError(f"consume {self.queue!r}: AMQP cannot name such a queue ({failure})") from failure
        raise BrokerUnavailable(f"consume {self.queue!r}: {describe(failure or TimeoutError())}") from failure

    async def pause(self) -> None:
        self._is_wanted = False
        self._wish.set()
        await self._until(lambda: not self.is_consuming and not self._is_subscribing)

    async def resume(self) -> None:
        self._is_wanted = True
        self._wish.set()
        await self._until(lambda: self.is_consuming or not self._is_wanted or self._is_stopping)

    async def stop(self) -> None:
        self._is_stopping = True
        self._wish.set()
        if self._task is not None and self._uplink.link is not None:
            # Bounded: cancel, acks and close are one answer each. After that the link is stuck, and the broker takes
            # all back. (A broker that stops has less patience with all of its consumers together.)
            await asyncio.wait([self._task], timeout=3 * self._rpc_s)
        await self.abandon()

    def rebuild(self, reason: str) -> None:
        """Drop the channel and make another; what was unacked on it comes again."""
        if self.session is not None:
            self.session.lose(reason)

    def refresh(self) -> None:
        """Move to another channel as soon as nothing is held on this one. No delivery is lost by it."""
        self._is_refreshing = True
        self._wish.set()

    async def abandon(self) -> None:
        """End at once. What is unacked goes back when the channel is closed, or with the link."""
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
                session: AmqpSession | None = await opening(self._open)
                if session is not None:
                    await self._live(session)
        finally:
            self._tag = None
            self._state_changed.set()
            if self.session is not None:  # cut short: what the broker sent us is not to stay with us
                self._discard(self.session)

    async def _open(self) -> AmqpSession | None:
        """Open a channel and, if wanted, consume. None: not this time."""
        link = await self._uplink.get()
        session: AmqpSession | None = None
        self._is_refreshing = False
        try:
            channel = await link.channel(timeout_s=self._rpc_s)
            session = AmqpSession(
                link,
                channel,
                self.queue,
                self._stats,
                max_body=self._settings.max_body,
                on_delivery=self._on_delivery,
                on_idle=self._on_idle,
            )
            self.session = session
            session.channel.on_consumer_cancel_callbacks.add(lambda _: self.rebuild("cancelled by the broker"))
            await genuine(session.channel.basic_qos(prefetch_count=self.prefetch, timeout=self._rpc_s))
            if self._is_wanted:
                await self._consume(session)
        except (*DRIVER_ERRORS, ValueError) as exc:  # ValueError: a name the driver refuses
            await self._on_open_failed(link, exc)
            if session is not None:
                has_unacked = session.unacked_count
                session.lose(describe(exc))
                self._discard(session)
                if has_unacked:
                    self._tell_lost(session)
            return None
        return session

    async def _on_open_failed(self, link: AmqpLink, exc: BaseException) -> None:
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
        except CoatcheckError as exc:  # away, or we may not, or another program made it otherwise; it may be put right
            log.warning("queue_not_declared", queue=self.queue, error=str(exc))
            return False

    async def _live(self, session: AmqpSession) -> None:
        """Serve one session until it is lost, or we stop, or move on to another; then leave it."""
        while not session.lost.is_set() and not self._is_stopping:
            self._wish.clear()
            if await self._move_out(session):
                return
            await self._follow_wish(session)
            self._state_changed.set()
            await wait_first(self._wish, session.lost)
        await self._part(session)

    async def _move_out(self, session: AmqpSession) -> bool:
        """Leave a session for the next one, if that was asked for and nothing is held on it, nor came at last."""
        if not self._is_refreshing or session.unacked_count:
            return False
        await self._cancel(session)
        if session.lost.is_set() or session.unacked_count > 0:
            return False
        await self._close(session, "refreshed")
        return True

    def _on_idle(self) -> None:
        if self._is_refreshing:
            self._wish.set()

    async def _follow_wish(self, session: AmqpSession) -> None:
        if not self._is_wanted and self._tag is not None:
            await self._cancel(session)
        elif self._is_wanted and self._tag is None:
            try:
                await self._consume(session)
            except DRIVER_ERRORS as exc:
                session.lose(describe(exc))

    async def _cancel(self, session: AmqpSession) -> None:
        """End deliveries; what was handed over stays ours."""
        try:
            if self._tag is not None:
                await genuine(session.channel.basic_cancel(self._tag, timeout=self._rpc_s))
        except DRIVER_ERRORS as exc:
            session.lose(describe(exc))
        self._tag = None
        self._state_changed.set()

    async def _part(self, session: AmqpSession) -> None:
        """Leave a session.

        Stopping: deliveries end first, then acks are written, then the channel gives the rest back.
        """
        if session.lost.is_set():
            self._tag = None
            self._state_changed.set()
            self._tell_lost(session)
        else:
            await self._cancel(session)
        # Also when it is only deaf, or cancelled by the broker: then the channel is open, and closing it is what
        # releases its unacked deliveries.
        await self._close(session, "stopped")

    async def _close(self, session: AmqpSession, why: str) -> None:
        session.flush()
        session.lose(why)
        await session.link.close_channel(session.channel, timeout_s=self._rpc_s)

    def _discard(self, session: AmqpSession) -> None:
        session.lose("abandoned")
        if not session.channel.is_closed:
            session.link.begin_closing(session.channel, timeout_s=self._rpc_s)

    def _tell_lost(self, session: AmqpSession) -> None:
        self._stats.consumer_lost_count += 1
        log.warning("consumer_lost", queue=self.queue, reason=session.reason, unacked_count=session.unacked_count)
        if self._on_lost is not None:
            try:
                self._on_lost()
            except Exception:
                log.exception("on_lost_failed", queue=self.queue)

    async def _consume(self, session: AmqpSession) -> None:
        session.last_delivery_at_s = asyncio.get_running_loop().time()
        self._is_subscribing = True
        session.allow(self.prefetch)
        try:
            consuming = session.channel.basic_consume(self.queue, _never, timeout=self._rpc_s)
            self._tag = (await genuine(consuming)).consumer_tag
        finally:
            self._is_subscribing = False
            self._state_changed.set()
        self._failure = None


async def _never(_: object) -> None:
    """What the driver would call; but messages do not go its way."""
