"""Words to every replica of a service at once: a task was cancelled, or a reply of a live run was claimed elsewhere.

Losing one costs only time: the epoch fences a cancelled run, and a run looks for news by itself at its next commit.
"""

from __future__ import annotations

from uuid import UUID

from coatcheck.broker.headers import KIND, TASK
from coatcheck.broker.port import Delivery, Message
from coatcheck.broker.topology import Names
from coatcheck.broker.wire import make_cancel, parse_control
from coatcheck.errors import MalformedMessage
from coatcheck.log import get_logger
from coatcheck.store.rows import TaskId
from coatcheck.worker.engine.run_port import Superseded
from coatcheck.worker.runtime import Runtime
from coatcheck.worker.task_run import TaskRun

log = get_logger(__name__)

_POKE = "poke"


def poke_message(names: Names, task_id: TaskId) -> tuple[str, Message]:
    """Tell whoever runs this task that something it may wait for has ended."""
    return names.broadcast, Message(headers={KIND: _POKE, TASK: str(task_id)})


def cancelled_message(
    names: Names, task_id: TaskId, correlation_id: str | None, reason: str | None
) -> tuple[str, Message]:
    """Tell whoever runs this task that it is over."""
    return names.broadcast, make_cancel(task=str(task_id), correlation_id=correlation_id, reason=reason)


class Broadcasts:
    """The consumer of this replica's own queue."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def handle(self, delivery: Delivery) -> None:
        message = delivery.message
        try:
            if message.headers.get(KIND) == _POKE:
                await self._poke(self._runtime.lives.find(TaskId(UUID(str(message.headers.get(TASK))))))
            else:
                self._cancel(message)
        except (MalformedMessage, ValueError) as error:
            log.warning("broadcast_refused", detail=str(error))
        delivery.ack()

    async def _poke(self, live: TaskRun | None) -> None:
        if live is None or live.run is None:
            return
        try:
            await live.refresh()
        except Superseded:
            if not live.is_written:
                live.run.abandon()

    def _cancel(self, message: Message) -> None:
        order = parse_control(message, self._runtime.limits)
        live = None
        if order.task:
            task_id = TaskId(UUID(order.task))
            self._runtime.lives.note_cancelled(task_id)
            live = self._runtime.lives.find(task_id)
        if live is None and order.correlation_id:
            live = self._runtime.lives.find_by_correlation(order.correlation_id)
        if live is not None and live.run is not None:
            live.run.cancel(order.reason or "")
