"""A wait without Postgres: the task stays in RAM, its original unacked, its replies on this replica's own queue.

Nothing survives the process but the original, which is redelivered and runs from the start.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coatcheck.broker.bodies import Limits
from coatcheck.broker.port import Delivery
from coatcheck.broker.wire import ReplyKind, parse_reply
from coatcheck.errors import BrokerUnavailable, MalformedMessage
from coatcheck.log import get_logger
from coatcheck.store.blobs import encode
from coatcheck.store.rows import CallId, CallState, Changes, Committed, NewCall, Peer, Recorded
from coatcheck.worker.messages import to_blob
from coatcheck.worker.outbox import pause_s
from coatcheck.worker.problems import problem

if TYPE_CHECKING:
    from coatcheck.worker.task_run import TaskRun

log = get_logger(__name__)


class RamCalls:
    """The open calls of this replica's in-RAM waits, by id; what arrives on its private queue goes to their runs."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[str, Callable[[CallState | None, bytes], None]] = {}

    def add(self, call_id: CallId, on_reply: Callable[[CallState | None, bytes], None]) -> None:
        self._waiting[str(call_id)] = on_reply

    def remove(self, call_id: CallId) -> None:
        self._waiting.pop(str(call_id), None)

    def on_delivery(self, delivery: Delivery) -> None:
        """Take a reply for a wait in RAM. One that is not waited for any more is late, and dropped."""
        try:
            reply = parse_reply(delivery.message, self._limits)
            on_reply = self._waiting.get(reply.correlation_id or "")
            if on_reply is not None:
                on_reply(*_ending(reply.kind, to_blob(reply.body), reply.problem))
        except MalformedMessage as error:
            log.warning("ram_reply_refused", code=error.code, detail=error.detail)
        delivery.ack()


def _ending(kind: ReplyKind, value: bytes, document: Mapping[str, Any] | None) -> tuple[CallState | None, bytes]:
    match kind:
        case ReplyKind.RESULT:
            return CallState.OK, value
        case ReplyKind.ERROR:
            return CallState.FAILED, encode(document)
        case _:
            return None, b""


class RamWaits:
    """The waits of one run in RAM. It never parks: `commit` opens calls, replies go to the live run."""

    def __init__(self, live: TaskRun) -> None:
        self._live = live
        self._runtime = live.runtime
        self._seq = 0
        self._open: dict[CallId, NewCall] = {}
        self._alarms: dict[CallId, list[asyncio.TimerHandle]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def commit(self, changes: Changes) -> Committed:
        """Give entries their place in the order, open calls, and stay."""
        news = [
            Recorded(
                entry.key,
                entry.kind,
                entry.name,
                entry.digest,
                self._next_seq(),
                CallState.OK if entry.is_ok else CallState.FAILED,
                entry.value,
            )
            for entry in changes.entries
        ]
        for call_id in changes.closes:
            await self._give_up(call_id, "its task gave the call up")
        for call in changes.opens:
            if call.kind.is_awaited:
                self._watch(call)
        await self._publish(changes.opens)
        return Committed(is_parked=False, news=tuple(news))

    async def close(self) -> None:
        """The run has ended: its leftovers are not waited for."""
        for task in self._sending:
            task.cancel()
        for call_id in list(self._open):
            await self._give_up(call_id, "its task ended")

    async def _publish(self, opens: tuple[NewCall, ...]) -> None:
        refused = await self._send(self._live.peers_of(opens))
        # Nothing waits for a send, so the task must not end before it left. Calls are waited for, and have their times.
        later = [call for call in refused if call.kind.has_listener]
        if later:
            task = asyncio.create_task(self._send_until_taken(later), name="refused-calls")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        await self._send_until_taken([call for call in refused if not call.kind.has_listener])

    async def _send(self, calls: Sequence[Peer]) -> list[Peer]:
        while True:
            try:
                return await self._runtime.outbox.send_calls(calls, reply_to=self._runtime.private_queue)
            except BrokerUnavailable as error:
                log.warning("calls_not_sent", error=str(error), call_count=len(calls))
                await asyncio.sleep(1.0)

    async def _send_until_taken(self, refused: Sequence[Peer]) -> None:
        """Send what a queue refused until it takes it, or the call is over."""
        for number in itertools.count():
            refused = [call for call in refused if not call.kind.has_listener or call.call_id in self._open]
            if not refused:
                return
            await asyncio.sleep(pause_s(number))
            refused = await self._send(refused)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _watch(self, call: NewCall) -> None:
        self._open[call.call_id] = call
        self._live.open_calls.add(call.call_id)
        self._runtime.ram_calls.add(call.call_id, lambda state, value: self._on_reply(call, state, value))
        self._arm(call, is_first=True)

    def _arm(self, call: NewCall, *, is_first: bool) -> None:
        """Set the deadlines; a progress sets only the idle one anew."""
        loop = asyncio.get_running_loop()
        alarms = self._alarms.setdefault(call.call_id, [])
        if is_first and call.hard is not None:
            alarms.append(loop.call_later(call.hard.total_seconds(), self._on_due, call))
        if call.idle is not None:
            if not is_first:
                alarms.pop().cancel()
            alarms.append(loop.call_later(call.idle.total_seconds(), self._on_due, call))

    def _on_reply(self, call: NewCall, state: CallState | None, value: bytes) -> None:
        if state is None:
            self._arm(call, is_first=False)
        else:
            self._end(call, state, value)

    def _on_due(self, call: NewCall) -> None:
        if call.kind.rings:
            self._end(call, CallState.OK, encode(None))
            return
        detail = f"{call.peer} did not answer in time"
        self._end(call, CallState.TIMED_OUT, encode(problem("timed_out", detail=detail)))
        asyncio.get_running_loop().create_task(self._cancel_peer(call, "timed out"))

    def _end(self, call: NewCall, state: CallState, value: bytes) -> None:
        if self._forget(call.call_id) is None or self._live.run is None:
            return
        ended = Recorded(call.key, call.kind, call.name, call.digest, self._next_seq(), state, value, call.call_id)
        self._live.run.deliver([ended])

    async def _give_up(self, call_id: CallId, reason: str) -> None:
        call = self._forget(call_id)
        if call is not None and call.kind.has_listener:
            await self._cancel_peer(call, reason)

    async def _cancel_peer(self, call: NewCall, reason: str) -> None:
        try:
            await self._runtime.outbox.cancel_calls(self._live.peers_of([call]), reason)
        except BrokerUnavailable as error:
            log.debug("cancel_not_sent", error=str(error))

    def _forget(self, call_id: CallId) -> NewCall | None:
        for alarm in self._alarms.pop(call_id, []):
            alarm.cancel()
        self._runtime.ram_calls.remove(call_id)
        self._live.open_calls.discard(call_id)
        return self._open.pop(call_id, None)
