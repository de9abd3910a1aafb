"""A confirm channel: what waits to be written, what is written and not confirmed, and the fate of each.

    send ──► waiting ──window open, socket has room──► written ──ack──► ROUTED, or NO_ROUTE if it was returned before
                                                          ├──nack──► refused
                                                          └──channel or link lost──► unknown

The broker numbers what it gets on a channel from one, and confirms by number. What it returns it sends back whole,
before the confirm, and the only way to know it again is by what it carries: its message_id and its routing key. Of two
with the same of both, the second waits until the first is settled, or they would get each other's fate.
"""

from __future__ import annotations

import itertools
from asyncio import Future, get_running_loop
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from aiormq.channel import Channel
from aiormq.exceptions import ChannelNotFoundEntity, DeliveryError
from pamqp.commands import Basic

from coatcheck.broker import amqp_codec as codec
from coatcheck.broker.amqp_link import Link
from coatcheck.broker.amqp_wire import Receiver
from coatcheck.broker.port import Outgoing, Routing, new_message_id
from coatcheck.broker.topology import REPLY_PSEUDO_QUEUE
from coatcheck.points import reach

WINDOW_COUNT = 2000
WINDOW_BYTES = 8 << 20
"""So much is written and not confirmed at a time; the rest waits here, not in the buffers of a broker that is slow."""

Fate = Routing | BaseException


class Attempt:
    """One try at publishing what is left of a batch. What becomes of each message is noted at its index."""

    __slots__ = ("_done", "_fates", "_left")

    def __init__(self, fates: list[Fate | None], left: int) -> None:
        self._fates = fates
        self._left = left
        self._done: Future[None] = get_running_loop().create_future()

    def settle(self, index: int, fate: Fate) -> None:
        self._fates[index] = fate
        self._left -= 1
        if not self._left:
            self._end()

    async def finish(self, deadline: float) -> bool:
        """Wait for the last fate. False: the time was over first; what is on the wire stays there all the same."""
        timer = get_running_loop().call_at(deadline, self._end)
        try:
            await self._done
        finally:
            timer.cancel()
        return not self._left

    def _end(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


class _Sending(msgspec.Struct, eq=False):
    """One message on its way."""

    attempt: Attempt
    index: int
    key: tuple[str, str]
    frames: bytes
    is_returned: bool = False


class Lane(Receiver):
    """Publishes on one channel, to one exchange."""

    def __init__(self, link: Link, channel: Channel, exchange: str) -> None:
        self.link = link
        self.is_lost = False
        self._number = channel.number
        self._exchange = exchange
        self._waiting: deque[_Sending] = deque()
        self._unconfirmed: dict[int, _Sending] = {}  # in order of writing: numbers only grow
        self._unconfirmed_bytes = 0
        self._tag = 0
        self._loop = get_running_loop()
        self._progress_at_s = 0.0
        self._in_flight: dict[tuple[str, str], _Sending] = {}
        self._behind: dict[tuple[str, str], deque[_Sending]] = {}
        link.attach(channel, self)
        link.wire.on_writable.append(self._pump)
        link.call_when_lost(self._on_link_lost)
        channel.closing.add_done_callback(self._on_channel_closed)

    def is_stuck(self, after_s: float) -> bool:
        """Tell whether something waits for its confirm, and none has come for so long."""
        return bool(self._unconfirmed) and self._loop.time() - self._progress_at_s > after_s

    def send(self, batch: Sequence[tuple[int, Outgoing]], attempt: Attempt) -> None:
        """Write messages as soon as there is room. Each is given with its index in the whole batch."""
        for index, outgoing in batch:
            message_id = outgoing.message.message_id or new_message_id()
            try:
                frames = self._frames(outgoing, message_id)
            except ValueError as exc:
                attempt.settle(index, exc)
                continue
            sending = _Sending(attempt, index, (message_id, outgoing.to), frames)
            if self.is_lost:
                attempt.settle(index, self._reason(None))
            elif sending.key in self._in_flight:
                self._behind.setdefault(sending.key, deque()).append(sending)
            else:
                self._in_flight[sending.key] = sending
                self._waiting.append(sending)
        self._pump()

    def _frames(self, outgoing: Outgoing, message_id: str) -> bytes:
        # With `mandatory`, a direct reply-to is both delivered and returned: it looks lost though it arrived.
        is_mandatory = not outgoing.is_broadcast and not outgoing.to.startswith(REPLY_PSEUDO_QUEUE)
        return codec.publish_frames(
            self._number,
            outgoing.message,
            message_id,
            exchange=self._exchange,
            routing_key="" if outgoing.is_broadcast else outgoing.to,
            mandatory=is_mandatory,
            frame_max=self.link.frame_max,
        )

    def _pump(self) -> None:
        """Write what the window and the socket have room for, as one buffer."""
        waiting, unconfirmed = self._waiting, self._unconfirmed
        if not waiting or self.is_lost or self.link.wire.is_clogged:
            return
        parts: list[bytes] = []
        if not unconfirmed:
            self._progress_at_s = self._loop.time()
        while waiting and len(unconfirmed) < WINDOW_COUNT and self._unconfirmed_bytes < WINDOW_BYTES:
            sending = waiting.popleft()
            self._tag += 1
            unconfirmed[self._tag] = sending
            self._unconfirmed_bytes += len(sending.frames)
            parts.append(sending.frames)
        if parts:
            self.link.write(b"".join(parts))

    # --- what the broker says ---

    def on_method(self, method: int, args: bytes) -> None:
        self._progress_at_s = self._loop.time()
        tag, is_multiple = codec.read_confirm(args)
        tags = list(itertools.takewhile(tag.__ge__, self._unconfirmed)) if is_multiple else (tag,)
        for each in tags:
            sending = self._unconfirmed.pop(each, None)
            if sending is None:
                continue
            self._unconfirmed_bytes -= len(sending.frames)
            self._settle(sending, is_taken=method == codec.ACK)
        self._pump()

    def on_message(self, method: int, args: bytes, header: bytes, body: bytes) -> None:
        routing_key, message_id = codec.read_returned(args, header)
        sending = self._in_flight.get((message_id or "", routing_key))
        if sending is not None:
            sending.is_returned = True

    def on_close(self) -> None:
        self.is_lost = True  # whoever wants to publish from here on opens another; what is in flight hears why

    def _settle(self, sending: _Sending, *, is_taken: bool) -> None:
        if following := self._behind.get(sending.key):
            successor = self._in_flight[sending.key] = following.popleft()
            self._waiting.append(successor)
            if not following:
                del self._behind[sending.key]
        else:
            del self._in_flight[sending.key]
        if not is_taken:
            fate: Fate = DeliveryError(None, Basic.Nack())
        elif sending.is_returned:
            fate = Routing.NO_ROUTE
        else:
            reach("message_confirmed")
            fate = Routing.ROUTED
        sending.attempt.settle(sending.index, fate)

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
        fate: Fate = Routing.NO_ROUTE if self._exchange and isinstance(error, ChannelNotFoundEntity) else error
        behind = [sending for following in self._behind.values() for sending in following]
        in_flight = list(self._in_flight.values())
        self._waiting.clear()
        self._unconfirmed.clear()
        self._in_flight.clear()
        self._behind.clear()
        for sending in (*in_flight, *behind):
            sending.attempt.settle(sending.index, fate)
