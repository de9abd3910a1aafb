"""The dedicated consumer that moves what nobody else would: timeouts, ended leases, retry times, what was never sent.

    look ──► overdue call: `timeout` to the service's replies queue
         ──► overdue lease or retry time: `resume`
         ──► call or final reply not known to be sent: send it, mark it
    then sleep until the next due time, or until a hint says that an earlier one was made

It decides nothing: whether a timeout or resume applies is decided at the claim, under the row's lock. So several may
run, one may die anywhere, and a message too many does no harm.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import TypeVar
from uuid import UUID

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from coatcheck.broker import connect
from coatcheck.broker.port import Broker, Delivery, Outgoing
from coatcheck.broker.topology import Names
from coatcheck.broker.wire import make_resume, make_timeout
from coatcheck.errors import BrokerUnavailable, CoatcheckError, TransientError
from coatcheck.points import reach
from coatcheck.store.rows import Task, TaskState
from coatcheck.store.store import OpenStore, Store
from coatcheck.store.sweeps import LookedAt
from coatcheck.worker.exposure import warn_of_exposures
from coatcheck.worker.health import HealthServer
from coatcheck.worker.messages import final_messages
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.outbox import Outbox
from coatcheck.worker.servers import settle
from coatcheck.worker.settings import Settings
from coatcheck.worker.worker import check_schema

log = structlog.get_logger(__name__)

T = TypeVar("T")

BATCH_SIZE = 1000
LOOK_AGAIN = timedelta(seconds=30)
"""How long a row stays out of the way after something was emitted for it."""
HOUSEKEEPING_S = 30.0
SLICE_PAUSE_S = 1.0
"""Between two slices of parked tasks that are looked at for any without a waker: a million make a thousand slices."""
QUIET_BEFORE_REPAIR = timedelta(seconds=60)
SHORTEST_PAUSE_S = 0.01


class Sweeper:
    """One sweeper process. `run` returns after `stop`. `open_store` makes another store than the settings name."""

    def __init__(
        self, settings: Settings | None = None, *, name: str | None = None, open_store: OpenStore | None = None
    ) -> None:
        self.settings = settings or Settings.load()
        self.name = name or f"sweeper-{socket.gethostname()}-{os.getpid()}"
        self.metrics = Metrics()
        self._open_store = open_store
        self._stopping = asyncio.Event()
        self._hinted = asyncio.Event()
        self._look_at_s = math.inf
        self._cursor = UUID(int=0)
        self._housekeeping_at_s = -math.inf
        self.is_ready = False

    def stop(self) -> None:
        self._stopping.set()
        self._hinted.set()

    def hurry(self) -> None:
        """Look now, whenever the next look was planned: for whoever holds the clock of the store in hand."""
        self._look_at_s = -math.inf
        self._hinted.set()

    async def run(self) -> None:
        """Sweep until told to stop; outages of either server are waited out."""
        with structlog.contextvars.bound_contextvars(replica=self.name):
            async with AsyncExitStack() as stack:
                self.settings = await settle(self.settings, makes=True)
                checks = {"started": True}
                health = HealthServer.from_settings(
                    self.settings, live=lambda: checks, ready=lambda: {"started": self.is_ready}, metrics=self.metrics
                )
                if health is not None:
                    await stack.enter_async_context(health)
                store = (self._open_store or Store)(self.settings.store, pool_size=2)
                stack.push_async_callback(store.close)
                warn_of_exposures(self.settings)
                broker = connect(
                    self.settings.broker, max_body=self.settings.largest_message, declares=self.settings.declare
                )
                await stack.enter_async_context(broker)
                await self._sweep_until_stopped(broker, store)

    async def _sweep_until_stopped(self, broker: Broker, store: Store) -> None:
        await broker.declare_sweeper(self.settings.sweeper_queue)
        await broker.consume(self.settings.sweeper_queue, self._on_hint, prefetch=100)
        check_schema(await self._insist(store), store.place)
        outbox = Outbox(broker, metrics=self.metrics)
        self.is_ready = True
        log.info("sweeper_started", settings=self.settings.describe())
        while not self._stopping.is_set():
            # From here on hints count: what they tell of may be committed just after we looked.
            self._look_at_s = math.inf
            try:
                if not broker.is_connected:  # a look puts rows off, and nobody would hear of them
                    raise BrokerUnavailable("the broker is away")
                is_full = await self._sweep(store, outbox)
                pause_s = 0.0 if is_full else await self._pause_s(store)
                self.is_ready = True
            except TransientError as error:
                log.warning("sweep_interrupted", error=str(error))
                self.is_ready, pause_s = False, 1.0
            except Exception:
                log.exception("sweep_surprised")  # whatever one row did, the others need a sweeper
                self.is_ready, pause_s = False, 1.0
            await self._sleep(pause_s)
        log.info("sweeper_stopped")

    async def _insist(self, store: Store) -> str | None:
        """Wait for Postgres at the start."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(TransientError),
            wait=wait_random_exponential(multiplier=0.2, max=5),
            before_sleep=_say_why,
        ):
            with attempt:
                return await store.ping()
        raise AssertionError("it tries for ever")

    async def _sweep(self, store: Store, outbox: Outbox) -> bool:
        """One round. True: there may be more, go on at once."""
        looked = await store.look(limit=BATCH_SIZE, again=LOOK_AGAIN)
        self.metrics.overdue_age.set(looked.oldest.total_seconds())
        reach("sweep_looked")
        if looked:
            await self._emit(looked, store, outbox)
        has_more = time.monotonic() >= self._housekeeping_at_s and await self._keep_house(store)
        taken = max(len(looked.due) + len(looked.unsent), len(looked.overdue) + len(looked.unsent_finals))
        return has_more or taken >= BATCH_SIZE

    async def _emit(self, looked: LookedAt, store: Store, outbox: Outbox) -> None:
        timeouts = [Outgoing(Names(call.service).replies, make_timeout(str(call.call_id))) for call in looked.due]
        resumes = [
            Outgoing(Names(task.service).replies, make_resume(str(task.task_id), task.epoch)) for task in looked.overdue
        ]
        if timeouts or resumes:
            await outbox.publish([*timeouts, *resumes])
            reach("sweep_emitted")
            self.metrics.timeouts_emitted.inc(len(timeouts))
        if looked.unsent:
            await _each(looked.unsent, outbox.send_calls)
            reach("sweep_resent")
            await store.mark_sent([call.call_id for call in looked.unsent])
        finals = [task for task in looked.unsent_finals if task.addresses]
        await _each(finals, partial(_send_finals, outbox))
        if looked.unsent_finals:
            reach("sweep_resent")
            await store.mark_final_sent([task.task_id for task in looked.unsent_finals])
        self.metrics.resent.inc(len(looked.unsent) + len(finals))
        log.info(
            "swept",
            timeouts=len(timeouts),
            resumes=len(resumes),
            calls_resent=len(looked.unsent),
            finals_resent=len(finals),
            overdue_s=round(looked.oldest.total_seconds(), 3),
        )

    async def _keep_house(self, store: Store) -> bool:
        """Remove what retention is done with, or look at the next slice of parked tasks for any without a waker. One
        batch of either, for what is due meanwhile waits. True: retention has more to remove.
        """
        if await store.retire(limit=BATCH_SIZE) == BATCH_SIZE:
            return True
        repaired, last = await store.repair(after=self._cursor, limit=BATCH_SIZE, quiet=QUIET_BEFORE_REPAIR)
        reach("sweep_repaired")
        self._cursor = last or UUID(int=0)
        if repaired:
            self.metrics.orphans.inc(repaired)
            log.error("orphans_repaired", task_count=repaired)
        pause_s = HOUSEKEEPING_S if last is None else min(SLICE_PAUSE_S, HOUSEKEEPING_S)
        self._housekeeping_at_s = time.monotonic() + pause_s
        if last is None:
            counts = await store.count_tasks()
            for state in TaskState:
                self.metrics.tasks.labels(state.value).set(counts.get(state, 0))
        return False

    async def _pause_s(self, store: Store) -> float:
        """Until the next due time, but never longer than the interval: a hint may have been lost."""
        next_look = await store.next_look()
        longest_s = self.settings.sweep_interval.total_seconds()
        if next_look is None:
            return longest_s
        return min(max(next_look.total_seconds(), SHORTEST_PAUSE_S), longest_s)

    async def _sleep(self, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._look_at_s = min(self._look_at_s, loop.time() + pause_s)
        while (left_s := self._look_at_s - loop.time()) > 0 and not self._stopping.is_set():
            self._hinted.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._hinted.wait()
            except TimeoutError:
                return

    def _on_hint(self, delivery: Delivery) -> None:
        """Something is due earlier than we meant to look."""
        try:
            in_s = max(0.0, float(delivery.message.body))
        except ValueError:
            in_s = 0.0  # whatever it was meant to say: look now
        self._look_at_s = min(self._look_at_s, asyncio.get_running_loop().time() + in_s + SHORTEST_PAUSE_S)
        self._hinted.set()
        delivery.ack()


async def _send_finals(outbox: Outbox, tasks: Sequence[Task]) -> None:
    await outbox.publish([message for task in tasks for message in final_messages(task)])


async def _each(items: Sequence[T], send: Callable[[Sequence[T]], Awaitable[None]]) -> None:
    """Send together; if one of them can never be sent, send one by one and say which. A call then times out."""
    try:
        if items:
            await send(items)
    except TransientError:
        raise
    except CoatcheckError as error:
        if len(items) == 1:
            log.error("row_cannot_be_sent", error=str(error), row=str(getattr(items[0], "task_id", "")))
            return
        for item in items:
            await _each([item], send)


def _say_why(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    log.warning("store_awaited", error=str(error), attempt=state.attempt_number)
