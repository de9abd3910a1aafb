"""A confirm channel: what waits to be written, what is written and not confirmed, and the fate of each.

    send ──► waiting ──window open, socket has room──► written ──ack──► ROUTED, or NO_ROUTE if it was returned before
                                                          ├──nack──► REFUSED
                                                          ├──overtaken, and still not confirmed──► REFUSED
                                                          └──channel or link lost──► unknown

The broker numbers what it gets on a channel from one, and confirms by number. What it returns it sends back whole,
before the confirm, and the only way to know it again is by what it carries: its message_id and its routing key. Of two
with the same of both, the second waits until the first is settled, or they would get each other's fate.

A queue without its node or its quorum confirms nothing, while the channel is well. Numbers tell the two apart: a
message is overtaken when a later one is confirmed. Where no other message would overtake it, a probe does: a message to
no queue, which RabbitMQ confirms at once. Overtaken messages leave the window, so that they hold nothing up; if they
stay unconfirmed, their queue has refused them. Without any confirm for the whole publish timeout the link is stuck.
"""

from __future__ import annotations

import itertools
from asyncio import Future, TimerHandle, get_running_loop
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from aiormq.channel import Channel
from aiormq.exceptions import ChannelNotFoundEntity

from coatcheck.broker.amqp import codec
from coatcheck.broker.amqp.connection import AmqpLink
from coatcheck.broker.amqp.socket import ChannelReceiver
from coatcheck.broker.port import Message, Outgoing, Routing, new_message_id
from coatcheck.broker.topology import REPLY_PSEUDO_QUEUE
from coatcheck.points import reach

WINDOW_COUNT = 2000
WINDOW_BYTES = 8 << 20
"""So much is written and not confirmed at a time; the rest waits here, not in the buffers of a broker that is slow."""

WRITE_BYTES = 1 << 20
"""So much goes to the socket at a time, before a look whether it takes more."""

LOOKS = 20
"""How often in a publish timeout a lane looks for messages that wait too long for their confirms."""
NOWHERE = "coatcheck.nowhere"
"""The routing key of a probe: no queue has this name."""

Fate = Routing | BaseException


class Attempt:
    """One try at publishing what is left of a batch. What becomes of each message is noted at its index."""

    __slots__ = ("_done", "_fates", "_left")

    def __init__(self, fates: list[Fate | None], left: int) -> None:
        self._fates = fates
        self._left = left
        self._done: Future[None] | None = None

    def settle(self, index: int, fate: Fate) -> None:
        self._fates[index] = fate
        self._left -= 1
        if not self._left and self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def finish(self) -> None:
        """Wait for the last fate. A lane settles every message sooner or later, if only with its own end."""
        if self._left:
            self._done = get_running_loop().create_future()
            await self._done


class _Sending(msgspec.Struct, eq=False):
    """One message on its way."""

    attempt: Attempt
    index: int
    key: tuple[str, str]
    outgoing: Outgoing
    size: int = 0
    written_s: float = 0.0
    is_returned: bool = False


class Lane(ChannelReceiver):
    """Publishes on one channel, to one exchange. `timeout_s`: without any confirm for so long, the link is stuck."""

    takes = frozenset({codec.RETURN, codec.ACK, codec.NACK})

    def __init__(self, link: AmqpLink, channel: Channel, exchange: str, *, timeout_s: float) -> None:
        self.link = link
        self.is_lost = False
        self._number = channel.number
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._waiting: deque[_Sending] = deque()
        self._unconfirmed: dict[int, _Sending] = {}  # in order of writing: numbers only grow
        self._unconfirmed_bytes = 0
        self._overtaken: dict[int, _Sending] = {}  # written before those, and out of the window
        self._tag = 0
        self._top = 0
        """The highest number that was confirmed."""
        self._probe = 0
        self._loop = get_running_loop()
        self._progress_at_s = 0.0
        self._looking: TimerHandle | None = None
        self._is_pumping = False
        self._in_flight: dict[tuple[str, str], _Sending] = {}
        self._behind: dict[tuple[str, str], deque[_Sending]] = {}
        link.attach(channel, self)
        link.wire.on_writable.append(self._pump)
        link.call_when_lost(self._on_link_lost)
        channel.closing.add_done_callback(self._on_channel_closed)

    def send(self, batch: Sequence[tuple[int, Outgoing]], attempt: Attempt) -> None:
        """Write messages as soon as there is room. Each is given with its index in the whole batch."""
        if self.is_lost:
            for index, _ in batch:
                attempt.settle(index, self._reason(None))
            return
        if not self._in_flight:
            self._progress_at_s = self._loop.time()
        for index, outgoing in batch:
            message_id = outgoing.message.message_id or new_message_id()
            sending = _Sending(attempt, index, (message_id, outgoing.to), outgoing)
            if sending.key in self._in_flight:
                self._behind.setdefault(sending.key, deque()).append(sending)
            else:
                self._in_flight[sending.key] = sending
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
                self._settle(sending, exc)
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
                self._settle(sending, _fate(sending, is_taken=is_taken))
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
        self.is_lost = True  # whoever wants to publish from here on opens another; what is in flight hears why

    def _settle(self, sending: _Sending, fate: Fate) -> None:
        if following := self._behind.get(sending.key):
            successor = self._in_flight[sending.key] = following.popleft()
            self._waiting.append(successor)
            if not following:
                del self._behind[sending.key]
        else:
            del self._in_flight[sending.key]
        if fate is Routing.ROUTED:
            reach("message_confirmed")
        sending.attempt.settle(sending.index, fate)

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
            self._fail_all(TimeoutError("the broker is blocked by a memory or disk alarm"))

    # --- the end ---

    def _on_link_lost(self) -> None:
        self._fail(self._reason(None))

    def _on_channel_closed(self, closing: Future[Any]) -> None:
        self.link.forget(self._on_link_lost)
        self._fail(self._reason(None if closing.cancelled() else closing.exception()))

    def _reason(self, error: BaseException | None) -> BaseException:
        if isinstance(error, Exception) and type(error) is not Exception:
            return error
        return self.link.error or ConnectionError(f"the connection was lost: {self.link.reason or 'channel closed'}")

    def _fail(self, error: BaseException) -> None:
        """Nobody knows what became of the rest. But a broadcast whose exchange is not there reached nobody."""
        self.is_lost = True
        if self._pump in self.link.wire.on_writable:
            self.link.wire.on_writable.remove(self._pump)
        if self._looking is not None:
            self._looking.cancel()
        self._fail_all(Routing.NO_ROUTE if self._exchange and isinstance(error, ChannelNotFoundEntity) else error)

    def _fail_all(self, fate: Fate) -> None:
        behind = [sending for following in self._behind.values() for sending in following]
        in_flight = list(self._in_flight.values())
        for held in (self._waiting, self._unconfirmed, self._overtaken, self._in_flight, self._behind):
            held.clear()
        self._unconfirmed_bytes = 0
        for sending in (*in_flight, *behind):
            sending.attempt.settle(sending.index, fate)


def _fate(sending: _Sending, *, is_taken: bool) -> Routing:
    if not is_taken:
        return Routing.REFUSED
    return Routing.NO_ROUTE if sending.is_returned else Routing.ROUTED
