"""Publishing: messages go out on confirm channels, many in one buffer, and each has a fate of its own.

    publish ──► held, until there is a lane ──► waiting ──window open, socket has room──► written
       written ──ack──► ROUTED, or NO_ROUTE if it was returned before
          ├──nack──► REFUSED
          ├──overtaken, and still not confirmed──► REFUSED
          └──channel or link lost──► in doubt: held again while time is left, then BrokerUnavailable

What is in doubt is sent again on the next connection: a duplicate is harmless by design, a loss is not.

A lane is one channel, to one exchange, until it is lost. The broker numbers what it gets on a channel from one, and
confirms by number. What it returns it sends back whole, before the confirm, and the only way to know it again is by
what it carries: its message_id and its routing key. Of two with the same of both, the second waits until the first is
settled, or they would get each other's fate.

A queue without its node or its quorum confirms nothing, while the channel is well. Numbers tell the two apart: a
message is overtaken when a later one is confirmed. Where no other message would overtake it, a probe does: a message to
no queue, which RabbitMQ confirms at once. Overtaken messages leave the window, so that they hold nothing up; if they
stay unconfirmed, their queue has refused them. Without any confirm for the whole publish timeout the link is stuck.
"""

from __future__ import annotations

import asyncio
import itertools
from asyncio import Future, TimerHandle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from aiormq.channel import Channel
from aiormq.exceptions import ChannelNotFoundEntity, ConnectionInternalError

from coatcheck.broker.amqp import codec
from coatcheck.broker.amqp.connection import (
    DRIVER_ERRORS,
    AmqpLink,
    AmqpUplink,
    describe,
    is_channel_error,
)
from coatcheck.broker.amqp.socket import ChannelReceiver
from coatcheck.broker.background import reap, spawn, wait_first
from coatcheck.broker.port import BrokerStats, Message, Outgoing, Routing, fail, new_message_id
from coatcheck.broker.settings import BrokerSettings
from coatcheck.broker.topology import REPLY_PSEUDO_QUEUE
from coatcheck.errors import BrokerUnavailable, MalformedMessage
from coatcheck.log import get_logger
from coatcheck.points import reach

log = get_logger(__name__)

WINDOW_COUNT = 2000
WINDOW_BYTES = 8 << 20
"""So much is written and not confirmed at a time; the rest waits here, not in the buffers of a broker that is slow."""
WRITE_BYTES = 1 << 20
"""So much goes to the socket at a time, before a look whether it takes more."""
LOOKS = 20
"""How often in a publish timeout a lane looks for messages that wait too long for their confirms."""
NOWHERE = "coatcheck.nowhere"
"""The routing key of a probe: no queue has this name."""
_MAX_NAME_BYTES = 255
_RETRY_PAUSE_S = 0.05


class Sending(msgspec.Struct, eq=False):
    """One message on its way. After `deadline_s` it is not sent again."""

    outgoing: Outgoing
    routing: Future[Routing]
    deadline_s: float
    key: tuple[str, str] = ("", "")
    size: int = 0
    written_s: float = 0.0
    is_returned: bool = False


class AmqpPublisher:
    """Publishes over one uplink. Safe for concurrent callers; they share the channels, not the waiting."""

    def __init__(self, uplink: AmqpUplink, settings: BrokerSettings, stats: BrokerStats) -> None:
        self._uplink = uplink
        self._stats = stats
        self._timeout_s = settings.publish_timeout.total_seconds()
        self._rpc_s = settings.rpc_timeout.total_seconds()
        # All by exchange. Each broadcast has a channel of its own: publishing to an exchange that does not exist closes
        # the channel, and with it everything in flight there.
        self._lanes: dict[str, Lane] = {}
        self._held: dict[str, deque[Sending]] = {}
        self._feeders: dict[str, asyncio.Task[None]] = {}

    def publish(self, outgoing: Outgoing) -> Future[Routing]:
        """See `Broker.publish_soon`."""
        loop = asyncio.get_running_loop()
        sending = Sending(outgoing, loop.create_future(), loop.time() + self._timeout_s)
        exchange = outgoing.to if outgoing.is_broadcast else ""
        lane = self._lanes.get(exchange)
        if not _is_nameable(outgoing.to):
            self._stats.count_routing(Routing.NO_ROUTE)
            sending.routing.set_result(Routing.NO_ROUTE)
        elif lane is not None and not lane.is_lost and lane.link.unblocked.is_set():
            lane.send(sending)
        else:
            self._hold(exchange, [sending])
        return sending.routing

    async def stop(self) -> None:
        """Give up what waits for a lane; what is in flight goes with the link."""
        feeders, self._feeders = self._feeders, {}
        for feeder in feeders.values():
            await reap(feeder)
        held, self._held = self._held, {}
        for sending in itertools.chain.from_iterable(held.values()):
            self._fail(sending, ConnectionError("the publisher was stopped"))

    # --- until there is a lane ---

    def _hold(self, exchange: str, sendings: Iterable[Sending], *, pause_s: float = 0.0) -> None:
        if not self._uplink.is_started:
            for sending in sendings:
                self._fail(sending, BrokerUnavailable(self._uplink.explain("not started")))
            return
        self._held.setdefault(exchange, deque()).extend(sendings)
        if exchange not in self._feeders:
            # A task of its own: a caller that is cancelled would close the channel under the others that wait for it.
            self._feeders[exchange] = spawn(self._feed(exchange, pause_s), f"broker-publisher-{self._uplink.role}")

    async def _feed(self, exchange: str, pause_s: float) -> None:
        """Get a lane for what is held. Messages whose time is over fail with the reason."""
        held = self._held[exchange]
        try:
            await asyncio.sleep(pause_s)
            while held:
                try:
                    lane = await self._get_lane(exchange, min(sending.deadline_s for sending in held))
                except (BrokerUnavailable, *DRIVER_ERRORS) as exc:
                    again = self._fail_late(held, exc)
                    held.clear()
                    held.extend(again)
                else:
                    while held and not lane.is_lost:
                        sending = held.popleft()
                        if not sending.routing.done():  # a message whose caller has left does not go
                            lane.send(sending)
                await asyncio.sleep(_RETRY_PAUSE_S if held else 0.0)
        finally:
            self._feeders.pop(exchange, None)

    async def _get_lane(self, exchange: str, deadline_s: float) -> Lane:
        loop = asyncio.get_running_loop()
        link = await self._uplink.get(max(0.0, deadline_s - loop.time()))
        # While the broker is blocked it reads nothing; writing on would only fill our own buffers.
        await wait_first(link.unblocked, timeout_s=max(0.0, deadline_s - loop.time()))
        if not link.unblocked.is_set():
            raise ConnectionError("the broker is blocked by a memory or disk alarm")
        lane = self._lanes.get(exchange)
        if lane is None or lane.is_lost or lane.link is not link:
            try:
                async with asyncio.timeout_at(deadline_s):
                    channel = await link.channel(confirms=True, timeout_s=self._rpc_s)
            except TimeoutError as exc:
                link.abort("a channel was not opened in time")
                raise ConnectionError("the broker did not open a channel in time") from exc
            lane = Lane(link, channel, exchange, timeout_s=self._timeout_s, stats=self._stats, on_doubt=self._on_doubt)
            self._lanes[exchange] = lane
        return lane

    # --- what is in doubt ---

    def _on_doubt(self, exchange: str, sendings: Iterable[Sending], error: BaseException) -> None:
        """A lane does not know what became of these: they are sent again while time is left."""
        if again := self._fail_late(sendings, error):
            self._hold(exchange, again, pause_s=_RETRY_PAUSE_S)

    def _fail_late(self, sendings: Iterable[Sending], error: BaseException) -> list[Sending]:
        """Fail the messages that have no time left, and give the others. One whose caller has left is neither."""
        # A channel closed for cause, a server that crashed over a message: the next attempt would end alike.
        is_final = is_channel_error(error) or isinstance(error, ConnectionInternalError)
        soon_s = asyncio.get_running_loop().time() + _RETRY_PAUSE_S
        again: list[Sending] = []
        for sending in sendings:
            if is_final or not self._uplink.is_started or sending.deadline_s <= soon_s:
                self._fail(sending, error)
            elif not sending.routing.done():
                again.append(sending)
        return again

    def _fail(self, sending: Sending, error: BaseException) -> None:
        self._stats.publish_failure_count += 1
        if isinstance(error, BrokerUnavailable):
            why = str(error)
        else:
            why = f"publish: {describe(error)}; any message of the batch may or may not have arrived"
        fail(sending.routing, BrokerUnavailable(why), cause=error)


@lru_cache(maxsize=1024)
def _is_nameable(name: str) -> bool:
    """Tell whether a queue can have this name at all. If not, there is no such queue."""
    try:
        return len(name.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False


# --- one channel ---


class Lane(ChannelReceiver):
    """Publishes on one channel, to one exchange. `timeout_s`: without any confirm for so long, the link is stuck.

    `on_doubt` hears which messages have an unknown fate when the lane ends or gives up, and why.
    """

    takes = frozenset({codec.RETURN, codec.ACK, codec.NACK})

    def __init__(
        self,
        link: AmqpLink,
        channel: Channel,
        exchange: str,
        *,
        timeout_s: float,
        stats: BrokerStats,
        on_doubt: Callable[[str, Sequence[Sending], BaseException], None],
    ) -> None:
        self.link = link
        self.is_lost = False
        self._number = channel.number
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._stats = stats
        self._on_doubt = on_doubt
        self._waiting: deque[Sending] = deque()
        self._unconfirmed: dict[int, Sending] = {}  # in order of writing: numbers only grow
        self._unconfirmed_bytes = 0
        self._overtaken: dict[int, Sending] = {}  # written before those, and out of the window
        self._tag = 0
        self._top = 0
        """The highest number that was confirmed."""
        self._probe = 0
        self._loop = asyncio.get_running_loop()
        self._progress_at_s = 0.0
        self._looking: TimerHandle | None = None
        self._is_pumping = False
        self._in_flight: dict[tuple[str, str], Sending] = {}
        self._behind: dict[tuple[str, str], deque[Sending]] = {}
        link.attach(channel, self)
        link.wire.on_writable.append(self._pump)
        link.call_when_lost(self._on_link_lost)
        channel.closing.add_done_callback(self._on_channel_closed)

    def send(self, sending: Sending) -> None:
        """Write a message as soon as there is room."""
        if self.is_lost:
            self._on_doubt(self._exchange, [sending], self._explain(None))
            return
        sending.is_returned = False  # on a link before this one, which was lost, its queue may not have been there yet
        if not self._in_flight:
            self._progress_at_s = self._loop.time()
        outgoing = sending.outgoing
        sending.key = key = (outgoing.message.message_id or new_message_id(), outgoing.to)
        if key in self._in_flight:
            self._behind.setdefault(key, deque()).append(sending)
        else:
            self._in_flight[key] = sending
            self._waiting.append(sending)
        if not self._is_pumping:
            # In a moment: what others send in the same turn of the loop shares the write.
            self._is_pumping = True
            self._loop.call_soon(self._pump)

    def _frames(self, outgoing: Outgoing, message_id: str) -> bytes:
        # With `mandatory`, a direct reply-to is both delivered and returned: it looks lost though it arrived.
        is_mandatory = not outgoing.is_broadcast and not outgoing.to.startswith(REPLY_PSEUDO_QUEUE)
        return self._encode(outgoing.message, message_id, self._exchange, outgoing.to, is_mandatory=is_mandatory)

    def _encode(self, message: Message, message_id: str, exchange: str, to: str, *, is_mandatory: bool) -> bytes:
        return codec.publish_frames(
            self._number,
            message,
            message_id,
            exchange=exchange,
            routing_key="" if exchange else to,
            mandatory=is_mandatory,
            frame_max=self.link.frame_max,
        )

    def _pump(self) -> None:
        """Write what the window and the socket have room for. Encoded only now: of a large batch no more is held twice
        than the window takes.
        """
        self._is_pumping = False
        while self._waiting and not self.is_lost and not self.link.wire.is_clogged and (frames := self._take()):
            self.link.write(frames)
        self._keep_looking()

    def _take(self) -> bytes:
        """Take the next messages that the window has room for, as one buffer."""
        waiting, unconfirmed, now_s = self._waiting, self._unconfirmed, self._loop.time()
        room = min(WRITE_BYTES, WINDOW_BYTES - self._unconfirmed_bytes)
        parts: list[bytes] = []
        while waiting and room > 0 and len(unconfirmed) < WINDOW_COUNT:
            sending = waiting.popleft()
            try:
                frames = self._frames(sending.outgoing, sending.key[0])
            except ValueError as exc:
                self._leave(sending)
                fail(sending.routing, MalformedMessage("unencodable", f"AMQP cannot carry it: {exc}"), cause=exc)
                continue
            self._tag += 1
            unconfirmed[self._tag] = sending
            sending.size, sending.written_s = len(frames), now_s
            self._unconfirmed_bytes += sending.size
            room -= sending.size
            parts.append(frames)
        return b"".join(parts)

    # --- what the broker says ---

    def on_method(self, method: int, args: bytes) -> None:
        self._progress_at_s = self._loop.time()
        tag, is_multiple = codec.read_confirm(args)
        self._top = max(self._top, tag)
        is_taken = method == codec.ACK
        for each in self._tags_up_to(tag) if is_multiple else (tag,):
            sending = self._unconfirmed.pop(each, None)
            if sending is not None:
                self._unconfirmed_bytes -= sending.size
            else:
                sending = self._overtaken.pop(each, None)
            if sending is not None:
                self._settle(sending, _routing(sending, is_taken=is_taken))
        self._pump()

    def _tags_up_to(self, tag: int) -> list[int]:
        overtaken = itertools.takewhile(tag.__ge__, self._overtaken)
        return [*overtaken, *itertools.takewhile(tag.__ge__, self._unconfirmed)]

    def on_message(self, method: int, args: bytes, header: bytes, body: bytes) -> None:
        routing_key, message_id = codec.read_returned(args, header)
        sending = self._in_flight.get((message_id or "", routing_key))
        if sending is not None:
            sending.is_returned = True

    def on_close(self) -> None:
        self.is_lost = True  # what is published from here on goes on another; what is in flight hears why

    def _settle(self, sending: Sending, routing: Routing) -> None:
        self._leave(sending)
        self._stats.count_routing(routing)
        if routing is Routing.ROUTED:
            reach("message_confirmed")
        if not sending.routing.done():
            sending.routing.set_result(routing)

    def _leave(self, sending: Sending) -> None:
        """Make room for the next message with the same id and routing key."""
        if following := self._behind.get(sending.key):
            successor = self._in_flight[sending.key] = following.popleft()
            self._waiting.append(successor)
            if not following:
                del self._behind[sending.key]
        else:
            del self._in_flight[sending.key]

    # --- what the broker does not say ---

    def _keep_looking(self) -> None:
        if self._looking is None and self._in_flight and not self.is_lost:
            self._looking = self._loop.call_later(self._timeout_s / LOOKS, self._look)

    def _look(self) -> None:
        """Take what was overtaken out of the window, and give up what has waited for half the timeout since."""
        self._looking = None
        now_s = self._loop.time()
        if now_s - self._progress_at_s >= self._timeout_s:
            self._give_up()
            return
        self._move_overtaken(now_s - self._timeout_s / LOOKS)
        long_ago_s = now_s - self._timeout_s / 2
        for tag in [tag for tag, sending in self._overtaken.items() if sending.written_s <= long_ago_s]:
            self._settle(self._overtaken.pop(tag), Routing.REFUSED)
        self._pump()

    def _move_overtaken(self, before_s: float) -> None:
        old = [
            tag for tag, _ in itertools.takewhile(lambda each: each[1].written_s <= before_s, self._unconfirmed.items())
        ]
        for tag in old:
            if tag < self._top:
                sending = self._overtaken[tag] = self._unconfirmed.pop(tag)
                self._unconfirmed_bytes -= sending.size
        if old and old[-1] > max(self._probe, self._top) and self.link.unblocked.is_set():
            self._tag += 1
            self._probe = self._tag
            self.link.write(self._encode(Message(), new_message_id(), "", NOWHERE, is_mandatory=False))

    def _give_up(self) -> None:
        """Nothing at all was confirmed. Blocked by an alarm, the broker will read what it has when it can; otherwise
        the connection is stuck, and dropping it is the quickest way to a good one.
        """
        if self.link.unblocked.is_set():
            self.link.abort("publishes were not confirmed in time")
        else:
            self._doubt(ConnectionError("the broker is blocked by a memory or disk alarm"))

    # --- the end ---

    def _on_link_lost(self) -> None:
        self._end(None)

    def _on_channel_closed(self, closing: Future[Any]) -> None:
        self.link.forget(self._on_link_lost)
        self._end(None if closing.cancelled() else closing.exception())

    def _end(self, error: BaseException | None) -> None:
        """The fate of the rest is unknown. But a broadcast whose exchange is not there reached no queue."""
        self.is_lost = True
        if self._pump in self.link.wire.on_writable:
            self.link.wire.on_writable.remove(self._pump)
        if self._looking is not None:
            self._looking.cancel()
        if self._exchange and isinstance(error, ChannelNotFoundEntity):
            for sending in (*self._in_flight.values(), *itertools.chain.from_iterable(self._behind.values())):
                self._settle(sending, Routing.NO_ROUTE)
        self._doubt(self._explain(error))

    def _explain(self, error: BaseException | None) -> BaseException:
        if isinstance(error, Exception) and type(error) is not Exception:
            return error
        return self.link.error or ConnectionError(f"the connection was lost: {self.link.reason or 'channel closed'}")

    def _doubt(self, error: BaseException) -> None:
        behind = itertools.chain.from_iterable(self._behind.values())
        sendings = [*self._in_flight.values(), *behind]
        for held in (self._waiting, self._unconfirmed, self._overtaken, self._in_flight, self._behind):
            held.clear()
        self._unconfirmed_bytes = 0
        if sendings:
            self._on_doubt(self._exchange, sendings, error)


def _routing(sending: Sending, *, is_taken: bool) -> Routing:
    if not is_taken:
        return Routing.REFUSED
    return Routing.NO_ROUTE if sending.is_returned else Routing.ROUTED
