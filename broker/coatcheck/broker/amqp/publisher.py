"""Publishing: a batch goes out as one buffer on a confirm channel, and every message learns its own fate.

Each message ends in one of four ways: confirmed (ROUTED), returned and confirmed (NO_ROUTE), not taken by its queue
(REFUSED), or unknown because the connection went away. Unknown ones are sent again while time is left, on the next
connection: a duplicate is harmless by design, a loss is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from aiormq.exceptions import ConnectionInternalError

from coatcheck.broker.amqp.connection import DRIVER_ERRORS, AmqpLink, AmqpUplink, describe, is_channel_error
from coatcheck.broker.amqp.publish_channel import Attempt, Fate, Lane
from coatcheck.broker.background import reap, wait_first
from coatcheck.broker.headers import REASON
from coatcheck.broker.port import BrokerStats, Outgoing, Routing, count_routings
from coatcheck.broker.settings import BrokerSettings
from coatcheck.errors import BrokerUnavailable, MalformedMessage, OversizedMessage
from coatcheck.log import get_logger

log = get_logger(__name__)

_MAX_NAME_BYTES = 255
_RETRY_PAUSE_S = 0.05


class AmqpPublisher:
    """Publishes over one uplink. Safe for concurrent callers; they share the channel, not the waiting."""

    def __init__(self, uplink: AmqpUplink, settings: BrokerSettings, stats: BrokerStats) -> None:
        self._uplink = uplink
        self._settings = settings
        self._stats = stats
        # By exchange. Each broadcast has a channel of its own: publishing to an exchange that does not exist closes the
        # channel, and with it everything in flight there.
        self._lanes: dict[str, asyncio.Task[Lane]] = {}

    async def publish(self, batch: Sequence[Outgoing]) -> list[Routing]:
        """See `Broker.publish`."""
        limit = self._settings.max_body
        for outgoing in batch:
            size = len(outgoing.message.body)
            if size > limit and REASON not in outgoing.message.headers:
                raise OversizedMessage("oversized", f"body of {size} bytes to {outgoing.to!r}; max_body is {limit}")
        deadline = asyncio.get_running_loop().time() + self._settings.publish_timeout.total_seconds()
        fates: list[Fate | None] = [None if _is_nameable(it.to) else Routing.NO_ROUTE for it in batch]
        while missing := [index for index, fate in enumerate(fates) if not isinstance(fate, Routing)]:
            await self._attempt(batch, missing, fates, deadline)
        routings = cast("list[Routing]", fates)
        count_routings(self._stats, routings)
        return routings

    async def stop(self) -> None:
        """Give up what is still being opened; what is in flight goes with the link."""
        lanes, self._lanes = self._lanes, {}
        for opening in lanes.values():
            await reap(opening)

    async def _attempt(
        self, batch: Sequence[Outgoing], missing: list[int], fates: list[Fate | None], deadline: float
    ) -> None:
        """Send what is missing once and note what became known. Raises when there is no point in another attempt."""
        link = await self._get_link(deadline)
        by_exchange: dict[str, list[tuple[int, Outgoing]]] = {}
        for index in missing:
            by_exchange.setdefault(_exchange(batch[index]), []).append((index, batch[index]))
        try:
            lanes = [await self._get_lane(link, exchange, deadline=deadline) for exchange in by_exchange]
        except DRIVER_ERRORS as exc:
            await self._pause_or_fail(exc, deadline)
            return
        attempt = Attempt(fates, len(missing))
        for lane, part in zip(lanes, by_exchange.values(), strict=True):
            lane.send(part, attempt)
        await attempt.finish()
        failure = next((fate for index in missing if isinstance(fate := fates[index], BaseException)), None)
        if failure is not None:
            await self._pause_or_fail(failure, deadline)

    async def _get_link(self, deadline: float) -> AmqpLink:
        loop = asyncio.get_running_loop()
        try:
            link = await self._uplink.get(deadline - loop.time())
        except BrokerUnavailable:
            self._stats.publish_failure_count += 1
            raise
        # While the broker is blocked it reads nothing; writing on would only fill our own buffers.
        if not link.unblocked.is_set():
            await wait_first(link.unblocked, timeout_s=max(0.0, deadline - loop.time()))
            if not link.unblocked.is_set():
                raise self._unavailable("the broker is blocked by a memory or disk alarm")
        return link

    async def _pause_or_fail(self, exc: BaseException, deadline: float) -> None:
        if isinstance(exc, ValueError) and not isinstance(exc, OSError):
            raise MalformedMessage("unencodable", f"AMQP cannot carry it: {exc}") from exc
        is_over = asyncio.get_running_loop().time() + _RETRY_PAUSE_S >= deadline
        # A channel closed for cause, a server that crashed over a message: the next attempt would end alike.
        if is_over or is_channel_error(exc) or isinstance(exc, ConnectionInternalError):
            raise self._unavailable(describe(exc)) from exc
        if not isinstance(exc, DRIVER_ERRORS) and type(exc) is not Exception:
            raise exc
        await asyncio.sleep(_RETRY_PAUSE_S)

    def _unavailable(self, why: str) -> BrokerUnavailable:
        self._stats.publish_failure_count += 1
        return BrokerUnavailable(f"publish: {why}; any message of the batch may or may not have arrived")

    # --- lanes ---

    async def _get_lane(self, link: AmqpLink, exchange: str, *, deadline: float) -> Lane:
        opening = self._lanes.get(exchange)
        if opening is None or not _is_usable(opening, link):
            # In a task of its own: a cancelled open would close the channel under the others who wait for it.
            opening = asyncio.create_task(self._open_lane(link, exchange))
            self._lanes[exchange] = opening
        if not opening.done():
            await asyncio.wait([opening], timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        if not opening.done():
            link.abort("a channel was not opened in time")
            raise self._unavailable("the broker did not open a channel in time")
        if opening.cancelled():
            raise ConnectionError("the publisher was stopped")
        return opening.result()

    async def _open_lane(self, link: AmqpLink, exchange: str) -> Lane:
        channel = await link.channel(confirms=True, timeout_s=self._settings.rpc_timeout.total_seconds())
        return Lane(link, channel, exchange, timeout_s=self._settings.publish_timeout.total_seconds())


def _is_usable(opening: asyncio.Task[Lane], link: AmqpLink) -> bool:
    if not opening.done():
        return not link.lost.is_set()
    if opening.cancelled() or opening.exception() is not None:
        return False
    lane = opening.result()
    return lane.link is link and not lane.is_lost


def _exchange(outgoing: Outgoing) -> str:
    """The exchange a message goes through: its broadcast, or the default one, which routes by queue name."""
    return outgoing.to if outgoing.is_broadcast else ""


@lru_cache(maxsize=1024)
def _is_nameable(name: str) -> bool:
    """Tell whether a queue can have this name at all. If not, there is no such queue."""
    try:
        return len(name.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False
