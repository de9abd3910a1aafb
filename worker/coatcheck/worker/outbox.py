"""Everything that leaves the worker, each message with a fate of its own. What did not arrive is dealt with by kind:

| | there is no such queue | its queue refuses: full, or away |
|---|---|---|
| call | becomes an error reply to ourselves, so that it travels the road of any reply | stays unsent in its row |
| send | goes to the service's dead letters | stays unsent in its row |
| final reply | stays in its row | stays unsent in its row; without one it gets one |
| answer without a row | is dropped | is tried a few times, then dropped |
| cancel, progress, hint, broadcast | is dropped | is dropped |

What stays unsent in a row is the sweeper's to send. So is a call or send whose body was damaged in its row: it leaves
once the row is restored.

A queue that refuses what it is sent is left alone for a while, then tried with one message at a time:

    taking ──refused──► refusing, for a pause ──over──► one message is tried ──taken──► taking
                           ▲                                     │
                           └──────── refused: a longer pause ────┘

A full queue is a property of that queue. While it refuses, what goes there is refused here, at once: it costs no
message on the wire, and holds nothing else up. Known to this process alone, and forgotten with it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coatcheck.broker.headers import DETAIL, QUEUE, REASON
from coatcheck.broker.port import Broker, Message, Outgoing, Routing, settled
from coatcheck.broker.topology import Names
from coatcheck.broker.wire import make_error
from coatcheck.errors import BrokerUnavailable, CoatcheckError, InvalidSettings
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.blobs import CorruptBlob
from coatcheck.store.rows import Peer
from coatcheck.worker.events import (
    AnswerDropped,
    CallBodyDamaged,
    CallsHadNoRoute,
    DestinationRefused,
    DestinationTookAgain,
    Events,
)
from coatcheck.worker.messages import call_message, cancel_message
from coatcheck.worker.problems import problem

log = get_logger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
MOST_TRIES = 6
"""How often an answer that no row remembers is tried, with pauses that double: a quarter of a minute in all."""
SHORTEST_REFUSAL_S = 0.2
LONGEST_REFUSAL_S = 30.0
FORGOTTEN_AFTER_S = 600.0
"""A queue that nothing was sent to for so long is not known to refuse any more."""
MOST_KNOWN = 10_000
MOST_LABELS = 100
REPLIES = "replies"
"""The label of all reply queues together: each requester may bring one along."""


class Outbox:
    """Publishes for many runs at once. The broker lets them share what a batch costs.

    `patience`: how many messages may be waited for at a time that a queue refuses and no row remembers. Each keeps a
    delivery unacked, so it is a part of what a consumer may hold.
    """

    def __init__(self, broker: Broker, *, events: Events, patience: int = 16) -> None:
        self._broker = broker
        self._events = events
        self._patience = patience
        self._destinations = Destinations(events)
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
        self._events.metrics.published.inc(len(fates) - fates.count(Routing.REFUSED) - fates.count(None))
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
        self._events.tell(AnswerDropped(None, [each.to[:64] for each in left]))

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
        leaving, damaged = self._messages_of(calls, reply_to)
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

    def _messages_of(
        self, calls: Sequence[Peer], reply_to: str | None
    ) -> tuple[list[tuple[Peer, Outgoing]], list[Peer]]:
        """Calls as they leave, and those whose bodies were damaged in their rows. Of a timer nothing is sent."""
        leaving: list[tuple[Peer, Outgoing]] = []
        damaged: list[Peer] = []
        for call in calls:
            if not call.kind.is_published:
                continue
            try:
                leaving.append((call, call_message(call, reply_to=reply_to)))
            except CorruptBlob as error:
                damaged.append(call)
                self._events.tell(CallBodyDamaged(call.task_id, call.key, call.peer, str(error)))
        return leaving, damaged

    async def _answer_lost(self, lost: Sequence[Peer], reply_to: str | None) -> list[Peer]:
        """Answer calls that had no route. Gives back those whose answer was refused: they are to be sent again."""
        tasks = {call.task_id for call in lost}
        peers = sorted({call.peer for call in lost})
        self._events.tell(CallsHadNoRoute(tasks.pop() if len(tasks) == 1 else None, peers, len(lost)))
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


# --- queues that refuse ---


@dataclass(slots=True)
class _Refusing:
    label: str
    since_s: float
    refused_s: float
    pause_s: float
    next_s: float
    is_tried: bool = False


class Destinations:
    """The queues that refuse at the moment. False as a truth value: none does."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._refusing: OrderedDict[str, _Refusing] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._took_again: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._refusing)

    def is_refusing(self, to: str) -> bool:
        return to in self._refusing

    def may_try(self, to: str) -> bool:
        """Whether a queue that refuses may be sent one message now. The caller says when that has ended."""
        entry = self._refusing[to]
        if entry.is_tried or time.monotonic() < entry.next_s:
            return False
        entry.is_tried = True
        return True

    def end_try(self, to: str) -> None:
        """The one message has a fate, or the broker was away."""
        if to in self._refusing:
            self._refusing[to].is_tried = False

    def note(self, to: str, routing: Routing, label: str) -> None:
        """What became of a message that was sent there."""
        entry = self._refusing.get(to)
        if routing is Routing.REFUSED:
            self.count_refused(label)
            self._refuse(to, entry, label)
        elif entry is not None:
            self._forget(to)
            if len(self._took_again) < MOST_KNOWN:
                self._took_again.add(to)
            refused_s = round(time.monotonic() - entry.since_s, 1)
            self._events.tell(DestinationTookAgain(None, to[:64], refused_s))

    def take_open(self) -> set[str]:
        """The queues that have begun to take messages again since this was last asked."""
        opened, self._took_again = self._took_again, set()
        return {to for to in opened if to not in self._refusing}  # it may be full again by now

    def count_refused(self, label: str, count: int = 1) -> None:
        self._events.metrics.refused.labels(self._known(label)).inc(count)

    def forget_old(self) -> None:
        """Forget queues that nothing is sent to any more."""
        long_ago_s = time.monotonic() - FORGOTTEN_AFTER_S
        while self._refusing and next(iter(self._refusing.values())).refused_s < long_ago_s:
            self._forget(next(iter(self._refusing)))

    def _refuse(self, to: str, entry: _Refusing | None, label: str) -> None:
        now_s = time.monotonic()
        if entry is None:
            entry = self._refusing[to] = _Refusing(self._known(label), now_s, now_s, SHORTEST_REFUSAL_S, now_s)
            self._count(entry.label, 1)
            self._events.tell(DestinationRefused(None, to[:64]))
        elif entry.is_tried:
            entry.pause_s = min(entry.pause_s * 2, LONGEST_REFUSAL_S)
        else:
            return  # it was under way when the first one was refused
        entry.is_tried, entry.refused_s = False, now_s
        entry.next_s = now_s + entry.pause_s * random.uniform(0.5, 1.0)
        self._refusing.move_to_end(to)
        if len(self._refusing) > MOST_KNOWN:
            self._forget(next(iter(self._refusing)))

    def _forget(self, to: str) -> None:
        self._count(self._refusing.pop(to).label, -1)

    def _count(self, label: str, by: int) -> None:
        self._counts[label] += by
        self._events.metrics.refusing.labels(label).set(self._counts[label])

    def _known(self, label: str) -> str:
        """Labels are peers, and those are few; where names are made up at run time they stay few."""
        if label not in self._counts and len(self._counts) >= MOST_LABELS:
            return "others"
        self._counts[label] += 0
        return label
