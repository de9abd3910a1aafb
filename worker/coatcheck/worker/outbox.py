"""Everything that leaves the worker: published in batches, and what could not be routed dealt with by its kind.

A call to a queue that does not exist becomes an error reply to ourselves, so that it travels the road of any reply. A
send to such a queue goes to the service's dead letters. A final reply stays in its row. A cancel is dropped in
silence.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import structlog

from coatcheck.broker.headers import DETAIL, QUEUE, REASON
from coatcheck.broker.port import Broker, Message, Outgoing, Routing
from coatcheck.broker.topology import Names
from coatcheck.broker.wire import make_error
from coatcheck.errors import BrokerUnavailable, InvalidSettings, StoreUnavailable, TransientError
from coatcheck.points import reach
from coatcheck.store.rows import CallId, Kind, Peer
from coatcheck.store.store import Store
from coatcheck.worker.messages import call_message, cancel_message
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.problems import problem

log = structlog.get_logger(__name__)

MOST_IN_BATCH = 1000
MARK_AFTER_S = 1.0
HINT_PAUSE_S = 0.05


@dataclass(slots=True)
class _Parcel:
    """What one caller wants published, and waits for."""

    messages: list[Outgoing]
    routings: asyncio.Future[list[Routing]]

    def settle(self, fates: list[Routing | Exception]) -> None:
        if self.routings.done():
            return  # whoever waited has left
        failures = [fate for fate in fates if isinstance(fate, Exception)]
        if failures:
            # An outage before all else: what it hit is to be published yet.
            outage = next((each for each in failures if isinstance(each, TransientError)), None)
            self.routings.set_exception(outage or failures[0])
        else:
            self.routings.set_result(cast("list[Routing]", fates))


class Outbox:
    """Publishes for many runs at once: what arrives while a batch is in flight shares the next one."""

    def __init__(self, broker: Broker, *, metrics: Metrics) -> None:
        self._broker = broker
        self._metrics = metrics
        self._waiting: deque[_Parcel] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def publish(self, messages: Iterable[Outgoing]) -> list[Routing]:
        """Hand messages to the broker; returns when all are confirmed. Raises BrokerUnavailable.

        One that the broker will never take raises what is wrong with it; those beside it are published all the same.
        """
        parcel = _Parcel([*messages], asyncio.get_running_loop().create_future())
        if not parcel.messages:
            return []
        self._waiting.append(parcel)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send(), name="outbox")
        return await parcel.routings

    async def publish_home(self, messages: Sequence[Outgoing], service: str) -> None:
        """Publish to queues of a service of ours; one that somebody deleted is made again first.

        Raises BrokerUnavailable, also if it is gone and this process may not make it.
        """
        routings = await self.publish(messages)
        lost = [each for each, routing in zip(messages, routings, strict=True) if routing is Routing.NO_ROUTE]
        if not lost:
            return
        log.warning("own_queue_gone", queues=sorted({each.to for each in lost}))
        try:
            await self._broker.declare_service(service)
        except InvalidSettings as error:
            raise BrokerUnavailable(f"a queue of {service} is gone: {error}") from error
        if Routing.NO_ROUTE in await self.publish(lost):
            raise BrokerUnavailable(f"a queue of {service} is gone as soon as it is made")

    async def drain(self) -> None:
        """Wait until everything handed in so far was published or has failed."""
        if self._sender is not None:
            await asyncio.wait([self._sender])

    async def _send(self) -> None:
        try:
            while self._waiting:
                parcels, batch = self._take()
                # In portions: the broker has so long for each, and a parcel may be ten thousand calls of one task.
                starts = range(0, len(batch), MOST_IN_BATCH)
                fates = iter(await self._publish_parts(batch[at : at + MOST_IN_BATCH] for at in starts))
                for parcel in parcels:
                    parcel.settle([*itertools.islice(fates, len(parcel.messages))])
        finally:
            self._sender = None

    def _take(self) -> tuple[list[_Parcel], list[Outgoing]]:
        """Take the oldest parcels, whole, as many as make a batch."""
        parcels: list[_Parcel] = []
        batch: list[Outgoing] = []
        while self._waiting and len(batch) < MOST_IN_BATCH:
            parcels.append(self._waiting.popleft())
            batch += parcels[-1].messages
        return parcels, batch

    async def _publish_parts(self, parts: Iterable[Sequence[Outgoing]]) -> list[Routing | Exception]:
        """Publish one part after the other. Once the broker is away the rest is not tried: each would wait in vain."""
        fates: list[Routing | Exception] = []
        for part in parts:
            is_away = bool(fates) and isinstance(fates[-1], TransientError)
            fates += [fates[-1]] * len(part) if is_away else await self._publish(part)
        return fates

    async def _publish(self, batch: Sequence[Outgoing]) -> Sequence[Routing | Exception]:
        """Publish a batch; one that fails for a reason of its own is split until the message alone fails."""
        reach("before_publish")
        try:
            routings = await self._broker.publish(batch)
        except TransientError as error:
            return [error] * len(batch)
        except Exception as error:  # noqa: BLE001 - whatever one message did must not reach its neighbours
            if len(batch) == 1:
                return [error]
            middle = len(batch) // 2
            return await self._publish_parts((batch[:middle], batch[middle:]))
        reach("after_publish")
        self._metrics.published.inc(len(batch))
        return routings

    async def send_calls(self, calls: Sequence[Peer], *, reply_to: str | None = None) -> None:
        """Send calls and sends whose rows are committed. What has no route is answered or buried before it returns."""
        calls = [call for call in calls if call.kind is not Kind.TIMER]
        if not calls:
            return
        routings = await self.publish(call_message(call, reply_to=reply_to) for call in calls)
        if Routing.NO_ROUTE in routings:
            lost = [call for call, routing in zip(calls, routings, strict=True) if routing is Routing.NO_ROUTE]
            self._metrics.no_route.inc(len(lost))
            log.warning("calls_had_no_route", peers=sorted({call.peer for call in lost}), call_count=len(lost))
            for service in sorted({call.service for call in lost}):
                answers = [_no_route(call, reply_to) for call in lost if call.service == service]
                await (self.publish_home(answers, service) if reply_to is None else self.publish(answers))

    async def cancel_calls(self, calls: Sequence[Peer], reason: str) -> None:
        """Tell peers that nobody waits any more; who has no control queue never hears it."""
        cancels = [cancel_message(call.call_id, call.peer, reason) for call in calls if call.kind is Kind.CALL]
        if cancels:
            await self.publish(cancels)


def _no_route(call: Peer, reply_to: str | None) -> Outgoing:
    detail = f"there is no queue {call.peer!r}; start that service, or correct the name in the handler"
    if call.kind is Kind.SEND:
        lost = call_message(call)
        headers = {**lost.message.headers, REASON: "no_route", DETAIL: detail, QUEUE: call.peer}
        dead = Message(
            body=lost.message.body, content_type=lost.message.content_type, type=lost.message.type, headers=headers
        )
        return Outgoing(Names(call.service).dead, dead)
    document = problem("no_route", detail=detail)
    return Outgoing(reply_to or Names(call.service).replies, make_error(document, str(call.call_id)))


class Marks:
    """Notes lazily which calls are known to be sent: only those still open after a second cost a write."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sent: dict[CallId, float] = {}

    def add(self, calls: Iterable[Peer]) -> None:
        now = time.monotonic()
        self._sent.update((call.call_id, now) for call in calls if call.kind is not Kind.TIMER)

    def forget(self, call_id: CallId) -> None:
        """Its reply was claimed here: nobody will ask any more whether it was sent."""
        self._sent.pop(call_id, None)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(MARK_AFTER_S)
            await self.flush(older_than_s=MARK_AFTER_S)

    async def flush(self, *, older_than_s: float = 0.0) -> None:
        ripe_before = time.monotonic() - older_than_s
        ripe = [call_id for call_id, sent in self._sent.items() if sent <= ripe_before]
        if not ripe:
            return
        reach("before_mark")
        try:
            await self._store.mark_sent(ripe)
        except StoreUnavailable as error:
            # Unmarked calls are sent again by the sweeper; sending twice is harmless.
            log.warning("marks_not_written", error=str(error), call_count=len(ripe))
            return
        reach("after_mark")
        for call_id in ripe:
            self._sent.pop(call_id, None)


class Hints:
    """Tells the sweeper of due times nearer than its next look; many in a moment become one."""

    def __init__(self, outbox: Outbox, queue: str, *, sweep_interval: timedelta) -> None:
        self._outbox = outbox
        self._queue = queue
        self._horizon = sweep_interval
        self._nearest: timedelta | None = None
        self._sender: asyncio.Task[None] | None = None

    def give(self, delays: Iterable[timedelta | None]) -> None:
        nearest = min((delay for delay in delays if delay is not None and delay < self._horizon), default=None)
        if nearest is None:
            return
        self._nearest = nearest if self._nearest is None else min(self._nearest, nearest)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send(), name="hints")

    async def _send(self) -> None:
        try:
            while self._nearest is not None:  # again, for what was given while the last one was on its way
                await asyncio.sleep(HINT_PAUSE_S)
                nearest, self._nearest = self._nearest, None
                body = str(nearest.total_seconds()).encode()
                await self._outbox.publish([Outgoing(self._queue, Message(body=body))])
        except BrokerUnavailable as error:
            log.debug("hint_not_sent", error=str(error))  # the sweeper looks by itself before long
        finally:
            self._sender = None
