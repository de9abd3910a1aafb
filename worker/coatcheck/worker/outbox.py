"""Everything that leaves the worker, each message with a fate of its own. What did not arrive is dealt with by kind:

| | there is no such queue | its queue refuses: full, or away |
|---|---|---|
| call | becomes an error reply to ourselves, so that it travels the road of any reply | stays unsent in its row |
| send | goes to the service's dead letters | stays unsent in its row |
| final reply | stays in its row | stays unsent in its row; without one it gets one |
| answer without a row | is dropped | is tried a few times, then dropped |
| cancel, progress, hint, broadcast | is dropped | is dropped |

What stays unsent in a row is the sweeper's to send. So is a call or send whose body was damaged in its row: it leaves
once the row is restored. A queue that refuses is left alone for a while (`destinations.py`), so that it holds up
nothing but its own messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta

from coatcheck.broker.headers import DETAIL, QUEUE, REASON
from coatcheck.broker.port import Broker, Message, Outgoing, Routing, settled
from coatcheck.broker.topology import Names
from coatcheck.broker.wire import make_error
from coatcheck.errors import BrokerUnavailable, CoatcheckError, InvalidSettings, StoreUnavailable
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.blobs import CorruptBlob
from coatcheck.store.front import Store
from coatcheck.store.rows import CallId, Peer
from coatcheck.worker.destinations import REPLIES, Destinations
from coatcheck.worker.messages import call_message, cancel_message
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.problems import problem

log = get_logger(__name__)

MARK_AFTER_S = 1.0
RESEND_AFTER = timedelta(seconds=2)
"""When the sweeper first tries what was refused here; the row's pauses grow from there."""
HINT_PAUSE_S = 0.05
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
MOST_TRIES = 6
"""How often an answer that no row remembers is tried, with pauses that double: a quarter of a minute in all."""


class Outbox:
    """Publishes for many runs at once. The broker lets them share what a batch costs.

    `patience`: how many messages may be waited for at a time that a queue refuses and no row remembers. Each keeps a
    delivery unacked, so it is a part of what a consumer may hold.
    """

    def __init__(self, broker: Broker, *, metrics: Metrics, patience: int = 16) -> None:
        self._broker = broker
        self._metrics = metrics
        self._patience = patience
        self._destinations = Destinations(metrics)
        self._publishing_count = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def publish(self, messages: Iterable[Outgoing], *, is_named: bool = False) -> list[Routing]:
        """Hand messages to the broker; returns when the fate of each is known. Raises BrokerUnavailable.

        One that the broker will never take raises what is wrong with it; those beside it are published all the same.
        `is_named`: a queue that refuses is counted under its own name, for those whose names are few.
        """
        batch = [*messages]
        if not batch:
            return []
        if not self._destinations:
            return await self._publish(batch, is_named=is_named)
        return await self._publish_around(batch, is_named=is_named)

    def take_open(self) -> set[str]:
        """The queues that refused, and have begun to take messages again since this was last asked."""
        return self._destinations.take_open()

    async def _publish_around(self, batch: Sequence[Outgoing], *, is_named: bool) -> list[Routing]:
        """Publish while some queues refuse: to those whose pause is over one message, and the rest if it was taken."""
        destinations = self._destinations
        destinations.forget_old()
        now: list[int] = []
        after: dict[str, list[int]] = {}
        for index, outgoing in enumerate(batch):
            if outgoing.is_broadcast or not destinations.is_refusing(outgoing.to):
                now.append(index)
            elif outgoing.to in after:
                after[outgoing.to].append(index)
            elif destinations.may_try(outgoing.to):
                now.append(index)
                after[outgoing.to] = []
            else:
                destinations.count_refused(_label(outgoing, is_named=is_named))
        routings: dict[int, Routing] = {}
        try:
            routings |= await self._publish_some(batch, now, is_named=is_named)
        finally:
            for to in after:
                destinations.end_try(to)
        more = [index for to, held in after.items() if not destinations.is_refusing(to) for index in held]
        routings |= await self._publish_some(batch, more, is_named=is_named)
        return [routings.get(index, Routing.REFUSED) for index in range(len(batch))]

    async def _publish_some(
        self, batch: Sequence[Outgoing], indexes: Sequence[int], *, is_named: bool
    ) -> dict[int, Routing]:
        if not indexes:
            return {}
        routings = await self._publish([batch[index] for index in indexes], is_named=is_named)
        return dict(zip(indexes, routings, strict=True))

    async def _publish(self, batch: Sequence[Outgoing], *, is_named: bool) -> list[Routing]:
        """Publish, and note which queues refuse and which take again."""
        reach("before_publish")
        futures = self._broker.publish_soon(batch)
        self._publishing_count += 1
        self._is_idle.clear()
        try:
            routings = await settled(futures)
        except CoatcheckError:
            self._note(batch, [None if future.exception() else future.result() for future in futures], is_named)
            raise
        finally:
            self._publishing_count -= 1
            if not self._publishing_count:
                self._is_idle.set()
        reach("after_publish")
        self._note(batch, routings, is_named)
        return routings

    def _note(self, batch: Sequence[Outgoing], fates: Sequence[Routing | None], is_named: bool) -> None:
        """Count what became of messages; None: it is not known."""
        self._metrics.published.inc(len(fates) - fates.count(Routing.REFUSED) - fates.count(None))
        if self._destinations or Routing.REFUSED in fates:
            for outgoing, fate in zip(batch, fates, strict=True):
                if fate is not None and not outgoing.is_broadcast:
                    self._destinations.note(outgoing.to, fate, _label(outgoing, is_named=is_named))

    async def publish_home(self, messages: Sequence[Outgoing], service: str) -> list[Routing]:
        """Publish to queues of a service of ours; one that was deleted is made again first. No fate is NO_ROUTE.

        Raises BrokerUnavailable, also if it is gone and this process may not make it.
        """
        routings = await self.publish(messages, is_named=True)
        if Routing.NO_ROUTE not in routings:
            return routings
        lost = [index for index, routing in enumerate(routings) if routing is Routing.NO_ROUTE]
        log.warning("own_queue_gone", queues=sorted({messages[index].to for index in lost}))
        try:
            await self._broker.declare_service(service)
        except InvalidSettings as error:
            raise BrokerUnavailable(f"a queue of {service} is gone: {error}") from error
        again = await self.publish([messages[index] for index in lost], is_named=True)
        if Routing.NO_ROUTE in again:
            raise BrokerUnavailable(f"a queue of {service} is gone as soon as it is made")
        for index, routing in zip(lost, again, strict=True):
            routings[index] = routing
        return routings

    async def drain(self) -> None:
        """Wait until everything handed in so far was published or has failed."""
        await self._is_idle.wait()

    # --- what no row remembers ---

    async def tell(self, messages: Iterable[Outgoing]) -> None:
        """Publish answers that no row remembers. Where a queue refuses one it is tried a few times, then dropped.

        Raises BrokerUnavailable.
        """
        left = [*messages]
        for number in range(MOST_TRIES):
            routings = await self.publish(left)
            left = [each for each, routing in zip(left, routings, strict=True) if routing is Routing.REFUSED]
            if not left:
                return
            if number == MOST_TRIES - 1 or not await self.pause(number):
                break
        self._metrics.answers_dropped.inc(len(left))
        log.warning("answer_dropped", reply_to=[each.to[:64] for each in left], why="the reply queue refuses it")

    async def pause(self, number: int) -> bool:
        """Wait before the next try at something that is kept in RAM only, the longer the more there were. False, at
        once: so many wait already that what they hold up must not wait for another.
        """
        if self._patience <= 0:
            return False
        self._patience -= 1
        try:
            await asyncio.sleep(pause_s(number))
        finally:
            self._patience += 1
        return True

    # --- calls ---

    async def send_calls(self, calls: Sequence[Peer], *, reply_to: str | None = None) -> list[Peer]:
        """Send calls and sends whose rows are committed. What has no route is answered or buried before it returns.

        Gives back those that are not sent, as a queue refused them or their bodies are damaged.
        """
        leaving, damaged = _messages_of(calls, reply_to)
        if not leaving:
            return damaged
        calls = [call for call, _ in leaving]
        routings = await self.publish((message for _, message in leaving), is_named=True)
        if Routing.NO_ROUTE not in routings and Routing.REFUSED not in routings:
            return damaged
        refused = [call for call, routing in zip(calls, routings, strict=True) if routing is Routing.REFUSED]
        lost = [call for call, routing in zip(calls, routings, strict=True) if routing is Routing.NO_ROUTE]
        if refused:
            log.debug("calls_refused", peers=sorted({call.peer for call in refused}), call_count=len(refused))
        return damaged + refused + (await self._answer_lost(lost, reply_to) if lost else [])

    async def _answer_lost(self, lost: Sequence[Peer], reply_to: str | None) -> list[Peer]:
        """Answer calls that had no route. Gives back those whose answer was refused: they are to be sent again."""
        self._metrics.no_route.inc(len(lost))
        log.warning("calls_had_no_route", peers=sorted({call.peer for call in lost}), call_count=len(lost))
        refused: list[Peer] = []
        for service in sorted({call.service for call in lost}):
            calls = [call for call in lost if call.service == service]
            answers = [_no_route(call, reply_to) for call in calls]
            told = await (self.publish_home(answers, service) if reply_to is None else self.publish(answers))
            refused += [call for call, routing in zip(calls, told, strict=True) if routing is Routing.REFUSED]
        return refused

    async def cancel_calls(self, calls: Sequence[Peer], reason: str) -> None:
        """Tell peers that their answers are not awaited any more; a peer without a control queue never hears it."""
        cancels = [cancel_message(call.call_id, call.peer, reason) for call in calls if call.kind.has_listener]
        if cancels:
            await self.publish(cancels, is_named=True)


def pause_s(number: int) -> float:
    """How long to wait after so many tries at something that is kept in RAM only."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(number, 10))


def _label(outgoing: Outgoing, *, is_named: bool) -> str:
    return outgoing.to if is_named else REPLIES


def _messages_of(calls: Sequence[Peer], reply_to: str | None) -> tuple[list[tuple[Peer, Outgoing]], list[Peer]]:
    """Calls as they leave, and those whose bodies were damaged in their rows. There is nothing to send of a timer."""
    leaving: list[tuple[Peer, Outgoing]] = []
    damaged: list[Peer] = []
    for call in calls:
        if not call.kind.is_published:
            continue
        try:
            leaving.append((call, call_message(call, reply_to=reply_to)))
        except CorruptBlob as error:
            damaged.append(call)
            log.error("call_body_damaged", task_id=str(call.task_id), key=call.key, peer=call.peer, reason=str(error))
    return leaving, damaged


def _no_route(call: Peer, reply_to: str | None) -> Outgoing:
    detail = f"there is no queue {call.peer!r}; start that service, or correct the name in the handler"
    if not call.kind.is_awaited:
        lost = call_message(call)
        headers = {**lost.message.headers, REASON: "no_route", DETAIL: detail, QUEUE: call.peer}
        dead = Message(
            body=lost.message.body, content_type=lost.message.content_type, type=lost.message.type, headers=headers
        )
        return Outgoing(Names(call.service).dead, dead)
    document = problem("no_route", detail=detail)
    return Outgoing(reply_to or Names(call.service).replies, make_error(document, str(call.call_id)))


class Marks:
    """Notes lazily which calls are known to be sent: only those still open after a second cost a write.

    And which are known not to be: the sweeper sends those soon. If that note is lost, it does so after a minute.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sent: dict[CallId, float] = {}
        self._refused: set[CallId] = set()

    def add(self, calls: Iterable[Peer], *, refused: Collection[Peer] = ()) -> None:
        now = time.monotonic()
        unsent = {call.call_id for call in refused}
        self._refused |= unsent
        self._sent.update(
            (call.call_id, now) for call in calls if call.kind.is_published and call.call_id not in unsent
        )

    def forget(self, call_id: CallId) -> None:
        """Its reply was claimed here: whether it was sent does not matter any more."""
        self._sent.pop(call_id, None)
        self._refused.discard(call_id)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(MARK_AFTER_S)
            await self.flush(older_than_s=MARK_AFTER_S)

    async def flush(self, *, older_than_s: float = 0.0) -> None:
        ripe_before = time.monotonic() - older_than_s
        ripe = [call_id for call_id, sent in self._sent.items() if sent <= ripe_before]
        refused, self._refused = self._refused, set()
        if not ripe and not refused:
            return
        reach("before_mark")
        try:
            if ripe:
                await self._store.mark_sent(ripe)
            if refused:
                await self._store.resend_calls(sorted(refused), after=RESEND_AFTER)
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
