"""Deliveries under way, from their arrival to their ack.

A consumer's `receive` takes a delivery in and gives back the work that sees it through, which gets a task of its own.
Where nothing is to be done but to wait for the rows, as with most replies, it gives back none, and has a future
watched instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from coatcheck.broker.port import Delivery
from coatcheck.errors import MalformedMessage
from coatcheck.log import get_logger
from coatcheck.worker.deadletters import bury
from coatcheck.worker.engine.tracking import ensure_factory, make_untracked
from coatcheck.worker.runtime import Runtime

log = get_logger(__name__)

T = TypeVar("T")

Work = Coroutine[Any, Any, None]
Receive = Callable[[Delivery], Work | None]

LONGEST_SURPRISE_PAUSE_S = 5.0
MOST_SURPRISES = 5
"""A delivery that fails in an unforeseen way is tried this often, then buried."""


class UnderWay:
    """What a replica has in its hands."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        ensure_factory(self._loop)  # so that tasks of deliveries, too, are made by a factory that was set before ours
        self._running: set[asyncio.Future[Any]] = set()
        self._is_over = False

    def __len__(self) -> int:
        return len(self._running)

    def take(self, receive: Receive, delivery: Delivery) -> None:
        """Begin to see a delivery through."""
        try:
            work = receive(delivery)
        except Exception as error:  # noqa: BLE001 - a surprise, to be dealt with like one that comes later
            self._start_surprised(delivery, error)
            return
        if work is not None:
            self.start(delivery, work)

    def start(self, delivery: Delivery, work: Work) -> None:
        """Give the work a task of its own. What it raises must not end the replica."""
        self._start(work, on_done=partial(self._on_done, delivery))

    def _start_surprised(self, delivery: Delivery, error: BaseException) -> None:
        """Deal with a surprise. One about a surprise ends here: it is told, and the delivery goes back with the
        connection.
        """
        self._start(self._surprised(delivery, error), on_done=self._on_dealt_with)

    def _start(self, work: Work, *, on_done: Callable[[asyncio.Future[None]], None]) -> None:
        if self._is_over:
            work.close()  # unacked, the delivery goes back with the connection
            return
        context = copy_context()
        task = make_untracked(self._loop, work, context=context)
        self._running.add(task)
        # In the task's own context, so that a surprise is told with the ids that were bound there.
        task.add_done_callback(on_done, context=context)

    def _on_done(self, delivery: Delivery, task: asyncio.Future[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._start_surprised(delivery, error)

    def _on_dealt_with(self, task: asyncio.Future[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("delivery_not_requeued", exc_info=error)

    def watch(self, delivery: Delivery, future: asyncio.Future[T], then: Callable[[asyncio.Future[T]], None]) -> None:
        """Count as under way until the future is done and `then` was called with it. Cut short, it is not called."""

        def on_done(done: asyncio.Future[T]) -> None:
            self._running.discard(done)
            if done.cancelled():
                return
            try:
                then(done)
            except Exception as error:  # noqa: BLE001 - in a callback it would only be logged, and the delivery kept
                self._start_surprised(delivery, error)

        self._running.add(future)
        future.add_done_callback(on_done)

    async def wait(self, timeout_s: float) -> None:
        """Wait for all of them, for so long and no longer."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._running and (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(self._running, timeout=left_s)

    def cancel(self) -> None:
        """Cut them short: unacked, each delivery goes back to its queue with the connection."""
        for each in self._running:
            each.cancel()

    async def keep(self) -> None:
        """Stand for all of them in the replica's task group: when that is cut short so are they, and it waits for them.

        A task each in the group would cost a callback and a set entry for every delivery.
        """
        try:
            await self._loop.create_future()
        finally:
            self._is_over = True
            self.cancel()
            while self._running:
                await asyncio.wait(self._running)

    async def _surprised(self, delivery: Delivery, error: BaseException) -> None:
        """A surprise in one delivery must not end the replica, nor loop for ever."""
        log.error("delivery_surprised", queue=delivery.queue, delivery_count=delivery.delivery_count, exc_info=error)
        if delivery.delivery_count >= MOST_SURPRISES:
            reason = MalformedMessage("internal_error", f"{type(error).__name__} while handling it; see the log")
            await self._try_to_bury(delivery, reason)
            return
        await asyncio.sleep(0.5 * delivery.delivery_count)
        delivery.requeue()

    async def _try_to_bury(self, delivery: Delivery, reason: MalformedMessage) -> None:
        """What a dead letter raises must not end the replica: the queue's own limit ends the loop then."""
        try:
            await bury(self._runtime, delivery, reason)
        except Exception:
            log.exception("delivery_not_buried", queue=delivery.queue, delivery_count=delivery.delivery_count)
            await asyncio.sleep(LONGEST_SURPRISE_PAUSE_S)
            delivery.requeue()
