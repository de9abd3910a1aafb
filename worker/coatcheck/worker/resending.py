"""Sent is a fact in the row: how it gets there, and what is done where the row does not say so.

`Marks` notes which calls are known to be sent. A message that meets a task whose rows do not say so sends again, before
its own ack. What a queue refuses is left to the sweeper: the row says that it is unsent, and when to try again, and a
hint tells the sweeper.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from coatcheck.broker.port import Message, Outgoing, Routing
from coatcheck.errors import BrokerUnavailable, StoreUnavailable
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.front import Store
from coatcheck.store.rows import Address, CallId, Peer, Ruling, Task, TaskId
from coatcheck.worker.events import MessagesResent
from coatcheck.worker.messages import final_messages
from coatcheck.worker.outbox import Outbox

if TYPE_CHECKING:  # it holds marks and hints
    from coatcheck.worker.runtime import Runtime

log = get_logger(__name__)

MARK_AFTER_S = 1.0
RESEND_AFTER = timedelta(seconds=2)
"""When the sweeper first tries what was refused here; the row's pauses grow from there."""
HINT_PAUSE_S = 0.05


async def send_unsent(runtime: Runtime, ruling: Ruling) -> None:
    """Send the calls and the final reply that a redelivered message found unsent. Raises BrokerUnavailable."""
    if ruling.unsent.calls:
        reach("before_resend")
        refused = await runtime.outbox.send_calls(ruling.unsent.calls)
        reach("after_resend")
        runtime.marks.add(ruling.unsent.calls, refused=refused)
        sent_count = len(ruling.unsent.calls) - len(refused)
        if sent_count:
            runtime.events.tell(MessagesResent(ruling.unsent.calls[0].task_id, sent_count))
    task = ruling.task
    if ruling.unsent.is_final_unsent and task is not None and task.addresses:
        reach("before_resend")
        if await send_final(runtime, task):
            runtime.events.tell(MessagesResent(task.task_id, 1))


async def send_final(runtime: Runtime, task: Task) -> bool:
    """Send a stored final reply, and note that it is sent, or that the sweeper is to send it. Tells whether it is."""
    messages = final_messages(task) if task.addresses else []
    refused = await _publish(runtime, messages)
    reach("after_resend")
    if refused:
        await leave_final(runtime, task.task_id, refused)
    else:
        await runtime.gate.insist(lambda _: runtime.store.mark_final_sent({task.task_id: task.answered}))
    return not refused


async def answer_one(runtime: Runtime, task: Task, address: Address) -> None:
    """Send a stored final reply to one address, known to the row or not."""
    await leave_final(runtime, task.task_id, await _publish(runtime, final_messages(task, address)))


async def leave_final(runtime: Runtime, task_id: TaskId, refused: Sequence[Outgoing]) -> None:
    """Leave final replies that a queue refused to the sweeper. After that the trigger may be acked.

    The row learns their addresses: it may be that of another copy of the request, which ended the task first.
    """
    for message in refused:
        address = Address(message.to, message.message.correlation_id)
        reach("before_leave")
        is_left = await _leave(runtime, task_id, address)
        reach("after_leave")
        if is_left:
            runtime.hints.give([RESEND_AFTER])
        else:
            await runtime.outbox.tell([message])


async def _leave(runtime: Runtime, task_id: TaskId, address: Address) -> bool:
    return await runtime.gate.insist(lambda _: runtime.store.resend_to(task_id, address, after=RESEND_AFTER))


async def _publish(runtime: Runtime, messages: Sequence[Outgoing]) -> list[Outgoing]:
    """Publish, and give back what was refused."""
    routings = await runtime.outbox.publish(messages)
    return [each for each, routing in zip(messages, routings, strict=True) if routing is Routing.REFUSED]


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
