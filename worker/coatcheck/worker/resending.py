"""Sent is a fact in the row: whoever meets a task whose rows do not say so sends again, before its own ack."""

from __future__ import annotations

from coatcheck.points import reach
from coatcheck.store.rows import Ruling
from coatcheck.worker.messages import final_messages
from coatcheck.worker.runtime import Runtime


async def send_unsent(runtime: Runtime, ruling: Ruling) -> None:
    """Send the calls and the final reply that a redelivered message found unsent. Raises BrokerUnavailable."""
    if ruling.unsent.calls:
        reach("before_resend")
        runtime.metrics.resent.inc(len(ruling.unsent.calls))
        await runtime.outbox.send_calls(ruling.unsent.calls)
        reach("after_resend")
        runtime.marks.add(ruling.unsent.calls)
    task = ruling.task
    if ruling.unsent.is_final_unsent and task is not None and task.addresses:
        reach("before_resend")
        runtime.metrics.resent.inc()
        await runtime.outbox.publish(final_messages(task))
        reach("after_resend")
        await runtime.gate.insist(lambda _: runtime.store.mark_final_sent([task.task_id]))
