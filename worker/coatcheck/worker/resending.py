"""Sent is a fact in the row: a message that meets a task whose rows do not say so sends again, before its own ack.

What a queue refuses is left to the sweeper: the row says that it is unsent, and when to try again.
"""

from __future__ import annotations

from collections.abc import Sequence

from coatcheck.broker.port import Outgoing, Routing
from coatcheck.points import reach
from coatcheck.store.rows import Address, Ruling, Task, TaskId
from coatcheck.worker.messages import final_messages
from coatcheck.worker.outbox import RESEND_AFTER
from coatcheck.worker.runtime import Runtime


async def send_unsent(runtime: Runtime, ruling: Ruling) -> None:
    """Send the calls and the final reply that a redelivered message found unsent. Raises BrokerUnavailable."""
    if ruling.unsent.calls:
        reach("before_resend")
        runtime.metrics.resent.inc(len(ruling.unsent.calls))
        refused = await runtime.outbox.send_calls(ruling.unsent.calls)
        reach("after_resend")
        runtime.marks.add(ruling.unsent.calls, refused=refused)
    task = ruling.task
    if ruling.unsent.is_final_unsent and task is not None and task.addresses:
        reach("before_resend")
        runtime.metrics.resent.inc()
        await send_final(runtime, task)


async def send_final(runtime: Runtime, task: Task) -> None:
    """Send a stored final reply, and note that it is sent, or that the sweeper is to send it."""
    messages = final_messages(task) if task.addresses else []
    refused = await _publish(runtime, messages)
    reach("after_resend")
    if refused:
        await leave_final(runtime, task.task_id, refused)
    else:
        await runtime.gate.insist(lambda _: runtime.store.mark_final_sent({task.task_id: task.addresses}))


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
