"""The dedicated consumer that moves what no message does: timeouts, ended leases, retry times, what was never sent.

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
from coatcheck.broker.port import Broker, Delivery, Outgoing, Routing
from coatcheck.broker.topology import Names
from coatcheck.broker.wire import make_resume, make_timeout
from coatcheck.errors import BrokerUnavailable, CoatcheckError, TransientError
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.front import OpenStore, Store
from coatcheck.store.rows import Address, Task, TaskId, TaskState
from coatcheck.store.views import LookedAt, Retention
from coatcheck.worker.events import Event, Events, MessagesResent
from coatcheck.worker.health import HealthServer
from coatcheck.worker.messages import final_messages
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.outbox import Outbox
from coatcheck.worker.running import Running
from coatcheck.worker.sealing import Sealer
from coatcheck.worker.servers import settle, warn_of_exposures
from coatcheck.worker.settings import Settings
from coatcheck.worker.worker import check_schema

log = get_logger(__name__)

T = TypeVar("T")

BATCH_SIZE = 1000
LOOK_AGAIN = timedelta(seconds=30)
"""How long a row stays out of the way after something was emitted for it."""
HOUSEKEEPING_S = 30.0
SLICE_PAUSE_S = 1.0
"""Between two slices of parked tasks that are looked at for any without a waker: a million make a thousand slices."""
QUIET_BEFORE_REPAIR = timedelta(seconds=60)
SHORTEST_PAUSE_S = 0.01
LONGEST_RESENDING_S = 1.0
"""How long a round waits for what it sends again; after that it goes on behind the next rounds."""
MOST_TOLD = 10_000
COUNT_SHARE = 0.05
"""How much of the time may go into counting tasks, which reads the whole table: a second of it every 20 s, no more."""


class Sweeper(Running):
    """One sweeper process. `run` returns after `stop`; `async with` does both. `open_store` makes another store than
    the settings name.
    """

    def __init__(
        self, settings: Settings | None = None, *, name: str | None = None, open_store: OpenStore | None = None
    ) -> None:
        super().__init__()
        self.settings = settings or Settings.load()
        self.name = name or f"sweeper-{socket.gethostname()}-{os.getpid()}"
        self.metrics = Metrics()
        self._events = Events(self.metrics)
        self._open_store = open_store
        self._stopping = asyncio.Event()
        self._hinted = asyncio.Event()
        self._look_at_s = math.inf
        self._cursor = UUID(int=0)
        self._housekeeping_at_s = -math.inf
        self._resending: set[asyncio.Task[None]] = set()
        self._told: dict[TaskId, set[Address]] = {}
        """Of tasks with several addresses, of which some refuse: those that were told."""
        self._retention = retention_of(self.settings)
        self._retired_count = 0
        self._count_at_s = -math.inf
        self._counting: asyncio.Task[None] | None = None
        self._sealing: asyncio.Task[None] | None = None
        self.is_ready = False

    def stop(self) -> None:
        self._stopping.set()
        self._hinted.set()

    def hurry(self) -> None:
        """Look now, whenever the next look was planned."""
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
                # One connection to look, one to count, and one to seal.
                store = (self._open_store or Store)(self.settings.store, pool_size=3, replica=self.name)
                stack.push_async_callback(store.close)
                sealer = Sealer.from_settings(self.settings, store, self.metrics)
                warn_of_exposures(self.settings)
                broker = connect(
                    self.settings.broker, max_body=self.settings.largest_message, declares=self.settings.declare
                )
                await stack.enter_async_context(broker)
                await self._sweep_until_stopped(broker, store, sealer)

    async def _sweep_until_stopped(self, broker: Broker, store: Store, sealer: Sealer | None = None) -> None:
        await broker.declare_sweeper(self.settings.sweeper_queue)
        await broker.consume(self.settings.sweeper_queue, self._on_hint, prefetch=100)
        check_schema(await self._insist(store), store.place)
        outbox = Outbox(broker, events=self._events)
        self.is_ready = True
        self._started.set()
        log.info("sweeper_started", pid=os.getpid(), settings=self.settings.describe_changed())
        if sealer is not None:
            self._sealing = asyncio.create_task(sealer.run(), name="sealing")
        try:
            await self._sweep_on(broker, store, outbox)
        finally:
            if self._sealing is not None:
                self._sealing.cancel()
                await asyncio.wait([self._sealing])
            if self._counting is not None:
                await self._counting
        log.info("sweeper_stopped")

    async def _sweep_on(self, broker: Broker, store: Store, outbox: Outbox) -> None:
        while not self._stopping.is_set():
            # From here on hints count: what they tell of may be committed just after we looked.
            self._look_at_s = math.inf
            try:
                if not broker.is_connected:  # a look puts rows off, and its messages would not leave
                    raise BrokerUnavailable("the broker is away")
                is_full = await self._sweep(store, outbox)
                pause_s = 0.0 if is_full else await self._pause_s(store)
                self.is_ready = True
            except TransientError as error:
                log.warning("sweep_interrupted", error=str(error))
                self.is_ready, pause_s = False, 1.0
            except Exception:
                log.exception("sweep_surprised")  # one row caused it, and the others need a sweeper
                self.is_ready, pause_s = False, 1.0
            await self._sleep(pause_s)
        if self._resending:
            await asyncio.wait(self._resending, timeout=LONGEST_RESENDING_S)
            for resending in self._resending:
                resending.cancel()

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
        if looked.unreadable:
            log.error("rows_unreadable", row_count=len(looked.unreadable), first=str(looked.unreadable[0]))
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
        refused_count = 0
        if timeouts or resumes:
            # One that its queue refuses comes up again, as its row says.
            routings = await outbox.publish([*timeouts, *resumes], is_named=True)
            reach("sweep_emitted")
            refused_count = routings[: len(timeouts)].count(Routing.REFUSED)
        swept = Swept(
            None,
            timeouts=len(timeouts),
            refused_timeouts=refused_count,
            resumes=len(resumes),
            unsent_calls=len(looked.unsent),
            unsent_finals=len(looked.unsent_finals),
            overdue_s=round(looked.oldest.total_seconds(), 3),
        )
        self._events.tell(swept)
        if looked.unsent or looked.unsent_finals:
            await self._resend(looked, store, outbox)

    async def _resend(self, looked: LookedAt, store: Store, outbox: Outbox) -> None:
        """Send what is unsent. A queue that does not answer is not waited for: what is due meanwhile goes first."""
        resending = asyncio.create_task(self._send_again(looked, store, outbox), name="resending")
        self._resending.add(resending)
        resending.add_done_callback(self._resending.discard)
        done, _ = await asyncio.wait([resending], timeout=LONGEST_RESENDING_S)
        if done:
            resending.result()
        else:
            resending.add_done_callback(_say_what_failed)

    async def _send_again(self, looked: LookedAt, store: Store, outbox: Outbox) -> None:
        if looked.unsent:
            refused = {call.call_id for call in await _each(looked.unsent, outbox.send_calls)}
            reach("sweep_resent")
            sent = [call.call_id for call in looked.unsent if call.call_id not in refused]
            await store.mark_sent(sent)
            self._tell_resent(len(sent))
        if looked.unsent_finals:
            finals = [task for task in looked.unsent_finals if task.addresses]
            left = {task.task_id for task in await _each(finals, partial(self._send_finals, outbox))}
            reach("sweep_resent")
            told = [task for task in looked.unsent_finals if task.task_id not in left]
            await store.mark_final_sent({task.task_id: task.answered for task in told})
            self._tell_resent(len(finals) - len(left))
        for queue in outbox.take_open():
            # What waits for it has pauses of minutes by now; a queue that is full in turns would meet few of them.
            if await store.hasten_unsent(queue):
                self.hurry()

    def _tell_resent(self, count: int) -> None:
        if count:
            self._events.tell(MessagesResent(None, count))

    async def _send_finals(self, outbox: Outbox, tasks: Sequence[Task]) -> list[Task]:
        """Send final replies. Gives back the tasks of which one was refused, and remembers who was told meanwhile: else
        each try would tell the others once more.
        """
        untold = [
            (task, tuple(each for each in task.addresses if each not in self._told.get(task.task_id, ())))
            for task in tasks
        ]
        messages = [final_messages(task, *addresses) if addresses else [] for task, addresses in untold]
        routings = iter(await outbox.publish(message for each in messages for message in each))
        left = []
        for task, addresses in untold:
            told = {each for each in addresses if next(routings) is not Routing.REFUSED}
            if len(told) == len(addresses):
                self._told.pop(task.task_id, None)
                continue
            left.append(task)
            if len(task.addresses) > 1:
                self._told.setdefault(task.task_id, set()).update(told)
                if len(self._told) > MOST_TOLD:
                    self._told.pop(next(iter(self._told)))
        return left

    async def _keep_house(self, store: Store) -> bool:
        """Remove what retention is done with, or look at the next slice of parked tasks for any without a waker. One
        batch of either, for what is due meanwhile waits. True: retention has more to remove.
        """
        if await self._retire(store):
            return True
        if self._counting is None and time.monotonic() >= self._count_at_s:
            self._counting = asyncio.create_task(self._count(store), name="count-tasks")
        repaired, last = await store.repair(after=self._cursor, limit=BATCH_SIZE, quiet=QUIET_BEFORE_REPAIR)
        reach("sweep_repaired")
        self._cursor = last or UUID(int=0)
        if repaired:
            self._events.tell(OrphansRepaired(None, repaired))
        pause_s = HOUSEKEEPING_S if last is None else min(SLICE_PAUSE_S, HOUSEKEEPING_S)
        self._housekeeping_at_s = time.monotonic() + pause_s
        return False

    async def _retire(self, store: Store) -> bool:
        """Remove a batch of what was kept for long enough. True: there may be more."""
        count = await store.retire(limit=BATCH_SIZE, keep=self._retention)
        self._retired_count += count
        if self._retired_count:
            is_last = count < BATCH_SIZE
            self._events.tell(TasksRetired(None, count, self._retired_count if is_last else None))
            if is_last:
                self._retired_count = 0
        forgotten = 0
        if count < BATCH_SIZE:
            forgotten = await store.forget_histories(limit=BATCH_SIZE, keep=self.settings.keep_history)
        return BATCH_SIZE in (count, forgotten)

    async def _count(self, store: Store) -> None:
        """Count all tasks by state, beside the sweeping: what is due does not wait for it. The more there are, the
        longer it takes and the more rarely it is done.
        """
        begun_s = time.monotonic()
        try:
            counts = await store.count_tasks()
            for state in TaskState:
                self.metrics.tasks.labels(state.value).set(counts.get(state, 0))
            self.metrics.tasks_counted_at.set_to_current_time()
        except TransientError as error:
            log.warning("tasks_not_counted", error=str(error))
        except Exception:
            log.exception("sweep_surprised")
        finally:
            now_s = time.monotonic()
            self._count_at_s = now_s + max(HOUSEKEEPING_S, (now_s - begun_s) / COUNT_SHARE)
            self._counting = None

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
            in_s = 0.0  # it cannot be read: look now
        self._look_at_s = min(self._look_at_s, asyncio.get_running_loop().time() + in_s + SHORTEST_PAUSE_S)
        self._hinted.set()
        delivery.ack()


def retention_of(settings: Settings) -> Retention:
    return Retention(settings.dedup_window, settings.keep_failures)


async def _each(items: Sequence[T], send: Callable[[Sequence[T]], Awaitable[list[T]]]) -> list[T]:
    """Send together; if one of them can never be sent, send one by one and say which. A call then times out.

    Gives back those that were refused for now.
    """
    try:
        return await send(items) if items else []
    except TransientError:
        raise
    except CoatcheckError as error:
        if len(items) == 1:
            log.error("row_cannot_be_sent", error=str(error), row=str(getattr(items[0], "task_id", "")))
            return []
        return [refused for item in items for refused in await _each([item], send)]


def _say_what_failed(resending: asyncio.Task[None]) -> None:
    if not resending.cancelled() and (error := resending.exception()) is not None:
        log.warning("resending_interrupted", error=str(error))  # the rows come up again


def _say_why(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    log.warning("store_awaited", error=str(error), attempt=state.attempt_number)


# --- what a sweeper tells ---


class Swept(Event, frozen=True):
    """A sweeper found something due and sent it. Timeouts that a queue refused come up again."""

    timeouts: int
    refused_timeouts: int
    resumes: int
    unsent_calls: int
    unsent_finals: int
    overdue_s: float

    def record(self, metrics: Metrics) -> None:
        metrics.timeouts_emitted.inc(self.timeouts - self.refused_timeouts)
        facts = {name: fact for name, fact in self.facts.items() if name not in ("task_id", "refused_timeouts")}
        log.info("swept", **facts)


class OrphansRepaired(Event, frozen=True):
    """Parked tasks had nothing to wake them, and were repaired."""

    task_count: int

    def record(self, metrics: Metrics) -> None:
        metrics.orphans.inc(self.task_count)
        log.error("orphans_repaired", task_count=self.task_count)


class TasksRetired(Event, frozen=True):
    """A batch of tasks was removed. The last batch of several has the `total`, which is logged."""

    task_count: int
    total: int | None

    def record(self, metrics: Metrics) -> None:
        metrics.retired.inc(self.task_count)
        if self.total is not None:
            log.info("tasks_retired", task_count=self.total)
