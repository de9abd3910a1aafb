"""Publishing: a batch goes out on one confirm channel, pipelined, and every message learns its own fate.

Each message ends in one of four ways: confirmed (ROUTED), returned and confirmed (NO_ROUTE), refused (nack), or
unknown because the connection went away or the time was over. Unknown ones are sent again while time is left, on the
next connection: a duplicate is harmless by design, a loss is not.

The driver matches a returned message to its publish by message_id. Two in flight on one channel with the same id
would get each other's fate, so the second waits until the first is settled.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog
from aiormq.channel import Channel
from aiormq.exceptions import ChannelNotFoundEntity, ConnectionInternalError, DeliveryError, PublishError

from coatcheck.broker.amqp_codec import make_properties
from coatcheck.broker.amqp_link import (
    DRIVER_ERRORS,
    Link,
    Uplink,
    describe,
    genuine,
    is_channel_error,
    reap,
    wait_first,
)
from coatcheck.broker.headers import REASON
from coatcheck.broker.port import BrokerStats, Outgoing, Routing
from coatcheck.broker.settings import BrokerSettings
from coatcheck.broker.topology import REPLY_PSEUDO_QUEUE
from coatcheck.errors import BrokerUnavailable, MalformedMessage, OversizedMessage
from coatcheck.points import reach

log = structlog.get_logger(__name__)

_PROCESS = uuid.uuid4().hex
_COUNT = itertools.count(1)
_MAX_NAME_BYTES = 255
_RETRY_PAUSE_S = 0.05


@dataclass(slots=True)
class _Lane:
    """A confirm channel and what is in flight on it."""

    link: Link
    channel: Channel
    sending: set[asyncio.Task[Routing]] = field(default_factory=set)
    latest: dict[str, asyncio.Task[Routing]] = field(default_factory=dict)
    """The last send of each message_id that is in flight."""

    def cancel_all(self) -> None:
        for task in self.sending:
            task.cancel()


class Publisher:
    """Publishes over one uplink. Safe for concurrent callers; they share the channel, not the waiting."""

    def __init__(self, uplink: Uplink, settings: BrokerSettings, stats: BrokerStats) -> None:
        self._uplink = uplink
        self._settings = settings
        self._stats = stats
        # By exchange. Each broadcast has a channel of its own: publishing to an exchange that does not exist closes the
        # channel, and with it everything in flight there.
        self._lanes: dict[str, asyncio.Task[_Lane]] = {}

    @staticmethod
    def new_id() -> str:
        """A message_id nobody else has: unique to this process, and counted within it."""
        return f"{_PROCESS}-{next(_COUNT)}"

    async def publish(self, batch: Sequence[Outgoing]) -> list[Routing]:
        """See `Broker.publish`."""
        for outgoing in batch:
            self._check(outgoing)
        deadline = asyncio.get_running_loop().time() + self._settings.publish_timeout.total_seconds()
        routings: list[Routing | None] = [None if _is_nameable(it.to) else Routing.NO_ROUTE for it in batch]
        while missing := [index for index, routing in enumerate(routings) if routing is None]:
            await self._attempt(batch, missing, routings, deadline)
        done = [routing for routing in routings if routing is not None]
        self._stats.published_count += len(done)
        self._stats.no_route_count += done.count(Routing.NO_ROUTE)
        return done

    async def stop(self) -> None:
        """Give up what is still in flight."""
        lanes, self._lanes = self._lanes, {}
        for opening in lanes.values():
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                for sending in tuple(opening.result().sending):
                    await reap(sending)
            await reap(opening)

    async def _attempt(
        self, batch: Sequence[Outgoing], missing: list[int], routings: list[Routing | None], deadline: float
    ) -> None:
        """Send what is missing once and note what became known. Raises when there is no point in another attempt."""
        link = await self._get_link(deadline)
        try:
            exchanges = {_exchange(batch[index]) for index in missing}
            lanes = {exchange: await self._get_lane(link, exchange, deadline=deadline) for exchange in exchanges}
        except DRIVER_ERRORS as exc:
            await self._pause_or_fail(exc, deadline)
            return
        sending = [self._send(lanes[_exchange(batch[index])], batch[index]) for index in missing]
        left_s = deadline - asyncio.get_running_loop().time()
        await asyncio.wait(sending, timeout=max(0.0, left_s))
        failures: list[BaseException] = []
        for index, task in zip(missing, sending, strict=True):
            if not task.done():
                self._give_up(link, len(missing))
            elif task.cancelled():
                failures.append(link.error or ConnectionError(f"the connection was lost: {link.reason}"))
            elif (failure := task.exception()) is not None:
                failures.append(failure)
            else:
                routings[index] = task.result()
        if failures:
            await self._pause_or_fail(failures[0], deadline)

    async def _get_link(self, deadline: float) -> Link:
        loop = asyncio.get_running_loop()
        try:
            link = await self._uplink.get(deadline - loop.time())
        except BrokerUnavailable:
            self._stats.publish_failure_count += 1
            raise
        # While the broker is blocked it reads nothing; writing on would only fill our own buffers.
        await wait_first(link.unblocked, timeout_s=max(0.0, deadline - loop.time()))
        if not link.unblocked.is_set():
            raise self._unavailable("the broker is blocked by a memory or disk alarm")
        return link

    async def _pause_or_fail(self, exc: BaseException, deadline: float) -> None:
        if isinstance(exc, TypeError | ValueError) and not isinstance(exc, OSError):
            raise MalformedMessage("unencodable", f"AMQP cannot carry it: {exc}") from exc
        is_over = asyncio.get_running_loop().time() + _RETRY_PAUSE_S >= deadline
        # A channel closed for cause, a nack, a server that crashed over a message: the next attempt would end alike.
        if is_over or is_channel_error(exc) or isinstance(exc, DeliveryError | ConnectionInternalError):
            raise self._unavailable(describe(exc)) from exc
        if not isinstance(exc, DRIVER_ERRORS) and type(exc) is not Exception:
            raise exc
        await asyncio.sleep(_RETRY_PAUSE_S)

    def _give_up(self, link: Link, count: int) -> None:
        # Blocked: the broker will read what it has from us when it can; the sends stay in flight, so that a late return
        # finds its own message. Otherwise the connection is stuck, and dropping it is the quickest way to a good one.
        if link.unblocked.is_set():
            link.abort("publishes were not confirmed in time")
        raise self._unavailable(f"not all of {count} messages were confirmed in time")

    def _unavailable(self, why: str) -> BrokerUnavailable:
        self._stats.publish_failure_count += 1
        return BrokerUnavailable(f"publish: {why}; any message of the batch may or may not have arrived")

    def _check(self, outgoing: Outgoing) -> None:
        size = len(outgoing.message.body)
        if size > self._settings.max_body and REASON not in outgoing.message.headers:
            raise OversizedMessage(
                "oversized", f"body of {size} bytes to {outgoing.to!r}; max_body is {self._settings.max_body}"
            )

    # --- one message ---

    def _send(self, lane: _Lane, outgoing: Outgoing) -> asyncio.Task[Routing]:
        message_id = outgoing.message.message_id or self.new_id()
        # The task outlives a caller that is cancelled or out of time: the message is on the wire, and the driver needs
        # somebody to hear its fate.
        task = asyncio.create_task(self._transfer(lane, outgoing, message_id, before=lane.latest.get(message_id)))
        lane.latest[message_id] = task
        lane.sending.add(task)
        task.add_done_callback(lambda done: _forget(lane, message_id, done))
        return task

    async def _transfer(
        self, lane: _Lane, outgoing: Outgoing, message_id: str, *, before: asyncio.Task[Routing] | None
    ) -> Routing:
        if before is not None:
            await asyncio.wait([before])
        return await self._transfer_on(lane.channel, outgoing, message_id)

    async def _transfer_on(self, channel: Channel, outgoing: Outgoing, message_id: str) -> Routing:
        is_broadcast = outgoing.is_broadcast
        # With `mandatory`, a direct reply-to is both delivered and returned: it looks lost though it arrived.
        is_mandatory = not is_broadcast and not outgoing.to.startswith(REPLY_PSEUDO_QUEUE)
        try:
            await genuine(
                channel.basic_publish(
                    outgoing.message.body,
                    exchange=_exchange(outgoing),
                    routing_key="" if is_broadcast else outgoing.to,
                    properties=make_properties(outgoing.message, message_id),
                    mandatory=is_mandatory,
                    wait=False,
                )
            )
        except PublishError:
            return Routing.NO_ROUTE
        except ChannelNotFoundEntity:
            if is_broadcast:
                return Routing.NO_ROUTE
            raise
        reach("message_confirmed")
        return Routing.ROUTED

    # --- lanes ---

    async def _get_lane(self, link: Link, exchange: str, *, deadline: float) -> _Lane:
        opening = self._lanes.get(exchange)
        if opening is None or not _is_usable(opening, link):
            # In a task of its own: a cancelled open would close the channel under the others who wait for it.
            opening = asyncio.create_task(self._open_lane(link))
            self._lanes[exchange] = opening
        if not opening.done():
            await asyncio.wait([opening], timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        if not opening.done():
            self._give_up(link, 1)
        if opening.cancelled():
            raise ConnectionError("the publisher was stopped")
        return opening.result()

    async def _open_lane(self, link: Link) -> _Lane:
        lane = _Lane(link, await link.channel(confirms=True, timeout_s=self._settings.rpc_timeout.total_seconds()))
        # A send may hang in the driver's write queue, which nobody reads any more once the link is lost.
        link.call_when_lost(lane.cancel_all)
        return lane


def _forget(lane: _Lane, message_id: str, task: asyncio.Task[Routing]) -> None:
    lane.sending.discard(task)
    if lane.latest.get(message_id) is task:
        del lane.latest[message_id]
    if not task.cancelled():
        task.exception()  # its caller may be gone; asyncio would complain that nobody looked


def _is_usable(opening: asyncio.Task[_Lane], link: Link) -> bool:
    if not opening.done():
        return not link.lost.is_set()
    if opening.cancelled() or opening.exception() is not None:
        return False
    lane = opening.result()
    return lane.link is link and not lane.channel.is_closed


def _exchange(outgoing: Outgoing) -> str:
    """The exchange a message goes through: its broadcast, or the default one, which routes by queue name."""
    return outgoing.to if outgoing.is_broadcast else ""


def _is_nameable(name: str) -> bool:
    """Tell whether a queue can have this name at all. If not, there is no such queue."""
    try:
        return len(name.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False
