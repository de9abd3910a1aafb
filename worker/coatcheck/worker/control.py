"""Arrival of orders: cancel a task that waits, runs anywhere, or has not come yet. First commit wins.

The order of things: commit (cancelled, epoch + 1, calls closed) ──► cancels to peers, final reply, broadcast ──► ack.
A crash in between brings the order back: the row is cancelled already, and what it does not know to be sent is sent
again.
"""

from __future__ import annotations

from uuid import UUID

from structlog.contextvars import bind_contextvars, bound_contextvars

from coatcheck.broker.port import Delivery, Outgoing
from coatcheck.broker.wire import Control, parse_control
from coatcheck.errors import BrokerUnavailable, MalformedMessage
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.blobs import encode
from coatcheck.store.rows import CancelAsk, Ruling, TaskId, TaskState, Verdict
from coatcheck.worker.broadcast import cancelled_message
from coatcheck.worker.deadletters import bury
from coatcheck.worker.messages import task_id_of
from coatcheck.worker.problems import cancelled_problem
from coatcheck.worker.resending import send_final
from coatcheck.worker.runtime import Runtime

log = get_logger(__name__)


class Orders:
    """The consumer of a service's control queue."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def handle(self, delivery: Delivery) -> None:
        reach("order_received")
        try:
            order = parse_control(delivery.message, self._runtime.limits)
            task_id = self._target(order)
        except MalformedMessage as error:
            await bury(self._runtime, delivery, error)
            return
        with bound_contextvars(task_id=str(task_id)):
            try:
                await self._cancel(order, task_id)
            except BrokerUnavailable as error:
                log.warning("order_interrupted", error=str(error))
                delivery.requeue()
                return
            delivery.ack()

    def _target(self, order: Control) -> TaskId:
        """The task an order means: by id, by its request's identity, or by the correlation id its requester knows."""
        if order.task is None:
            return task_id_of(self._runtime.app.service, order.identity or order.correlation_id)
        try:
            return TaskId(UUID(order.task))
        except ValueError:
            raise MalformedMessage("bad_header", f"cc-task {order.task[:64]!r} is not a task id") from None

    async def _cancel(self, order: Control, task_id: TaskId) -> None:
        runtime, correlation_id = self._runtime, order.correlation_id
        runtime.lives.note_cancelled(task_id)
        if runtime.uses_store:
            by_correlation = order.correlation_id if order.task is None else None
            ask = CancelAsk(
                runtime.app.service,
                task_id,
                lambda found: encode(cancelled_problem(found, order.reason)),
                runtime.settings.dedup_window,
                by_correlation,
            )
            ruling = await runtime.gate.insist(lambda _: runtime.store.cancel(ask))
            if ruling.task is not None:
                bind_contextvars(task_id=str(ruling.task.task_id))
            reach("after_cancel")
            await self._tell(ruling, order)
            reach("after_cancel_told")
            if ruling.task is not None:
                task_id, correlation_id = ruling.task.task_id, None  # others may use the same correlation id
        name, message = cancelled_message(runtime.app.names, task_id, correlation_id, order.reason)
        await runtime.outbox.publish([Outgoing(name, message, is_broadcast=True)])

    async def _tell(self, ruling: Ruling, order: Control) -> None:
        """Cancels to the peers, then one final reply, then the mark that it was sent."""
        self._runtime.metrics.cancels.labels(ruling.verdict.value).inc()
        log.info("cancel_ruled", verdict=ruling.verdict.value, reason=order.reason)
        if ruling.verdict is Verdict.RECORDED:
            self._runtime.metrics.finished.labels("cancelled").inc()
        await self._runtime.outbox.cancel_calls(ruling.cancels, order.reason or "its task was cancelled")
        task = ruling.task
        if task is None or task.state is not TaskState.CANCELLED or not ruling.unsent.is_final_unsent:
            return  # it ended by itself before the order came, and whoever ended it answers
        await send_final(self._runtime, task)
