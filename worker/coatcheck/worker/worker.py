"""A replica: the parts put together, consuming until told to stop.

Four consumers (requests, replies, control, broadcasts) see each delivery through to its ack. Stopping drains:
no new deliveries, runs finish or are put down; what is left after the grace time goes back to its queue unacked.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import structlog

from coatcheck.broker import connect
from coatcheck.broker.bodies import Limits
from coatcheck.broker.port import Broker, Consumer, Outgoing
from coatcheck.broker.wire import make_resume
from coatcheck.errors import BrokerUnavailable, CoatcheckError, InvalidSettings, StoreUnavailable
from coatcheck.log import get_logger
from coatcheck.store.front import OpenStore, Store
from coatcheck.store.versions import newest_version
from coatcheck.worker.app import App
from coatcheck.worker.arrivals import Broadcasts, Orders, Receive, Replies, UnderWay
from coatcheck.worker.engine.classify import find_unsupported
from coatcheck.worker.events import ConsumerLost, Events
from coatcheck.worker.executor import Executor
from coatcheck.worker.health import HealthServer
from coatcheck.worker.leases import Leases
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.outbox import Outbox
from coatcheck.worker.ram_waits import RamCalls
from coatcheck.worker.requests import Requests
from coatcheck.worker.resending import Hints, Marks
from coatcheck.worker.running import Running
from coatcheck.worker.runtime import LiveRuns, Runtime, Slots
from coatcheck.worker.servers import settle, warn_of_exposures
from coatcheck.worker.settings import Checkpointing, Settings, redacted
from coatcheck.worker.store_outage import StoreGate

log = get_logger(__name__)

CONTROL_PREFETCH = 20
ORDERS_AT_ONCE = 100
ORDERS_FIRST_S = 5.0
"""How long requests wait at most for the orders that lie in the control queue."""
UNWIND_S = 6.0
"""How long runs that are cut short may take to clean up after themselves."""
LOOK_EVERY_S = 15.0
MOST_MISSES = 2
"""So many looks in a row without a sweeper are no restart of one, nor a start of everything at once."""


class Worker(Running):
    """One replica of an app. `run` returns when `stop` was called and everything is put down; `async with` does both.

    `open_store` makes another store than the one the settings name, such as one in memory.
    """

    def __init__(
        self,
        app: App,
        settings: Settings | None = None,
        *,
        name: str | None = None,
        open_store: OpenStore | None = None,
    ) -> None:
        super().__init__()
        self.app = app
        self.settings = settings or app.load_settings()
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self.metrics = Metrics()
        self.is_ready = False
        self.runtime: Runtime | None = None
        """The parts its consumers share, once it has begun to run."""
        self._open_store = open_store
        self._stopping = asyncio.Event()
        self._consumers: dict[str, Consumer] = {}
        self._orders: Orders | None = None
        self._is_paused = False
        self._under_way: UnderWay | None = None
        self._broker: Broker | None = None
        self._gate: StoreGate | None = None
        self._watch: SweeperWatch | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no delivery is under way from its arrival to its ack."""
        return not self._under_way

    def live_checks(self) -> dict[str, bool]:
        """What `/livez` tells of it."""
        return {"running": True}

    def ready_checks(self) -> dict[str, bool]:
        """What `/readyz` tells of it."""
        is_store_up = self._gate is not None and self._gate.is_open
        return {
            "started": self.is_ready,
            "broker": self._broker is not None and self._broker.is_connected,
            "store": is_store_up or self.settings.checkpointing is Checkpointing.OFF,
        }

    def notes(self) -> dict[str, bool]:
        """What `/readyz` tells beside that, and is no reason to take it out of service."""
        return {"sweeper": self._watch is None or not self._watch.is_missing}

    def stop(self) -> None:
        """Begin to drain; may be called from a signal handler, and repeated."""
        self._stopping.set()

    async def run(self) -> None:
        """Consume until told to stop. Raises BrokerUnavailable or InvalidSettings if it cannot start."""
        with structlog.contextvars.bound_contextvars(service=self.app.service, replica=self.name):
            async with AsyncExitStack() as stack:
                await self._run(stack)

    async def _run(self, stack: AsyncExitStack) -> None:
        self.settings = await settle(self.settings, makes=True)
        health = HealthServer.from_settings(
            self.settings, live=self.live_checks, ready=self.ready_checks, notes=self.notes, metrics=self.metrics
        )
        if health is not None:
            await stack.enter_async_context(health)
        warn_of_exposures(self.settings)
        self._broker = connect(
            self.settings.broker, max_body=self.settings.largest_message, declares=self.settings.declare
        )
        await stack.enter_async_context(self._broker)
        await self._broker.declare_service(self.app.service)
        await self._broker.declare_sweeper(self.settings.sweeper_queue)
        self.runtime = runtime = await self._assemble(stack, self._broker)
        executor = Executor(runtime)
        leases = Leases(runtime)
        await self._check_store(runtime)
        async with asyncio.TaskGroup() as group:
            self._under_way = under_way = UnderWay(runtime)
            background = [group.create_task(work) for work in (under_way.keep(), *self._background(runtime, leases))]
            await self._consume(group, runtime, executor, leases, under_way=under_way)
            self.is_ready = True
            self._started.set()
            for lack in find_unsupported():
                log.warning("asyncio_differs", lack=lack, python=platform.python_version())
            log.info(
                "worker_started",
                pid=os.getpid(),
                handlers=sorted(self.app.handlers),
                settings=self.settings.describe_changed(),
            )
            await self._stopping.wait()
            await self._drain(runtime, leases)
            for task in background:
                task.cancel()
        log.info("worker_stopped")

    async def _assemble(self, stack: AsyncExitStack, broker: Broker) -> Runtime:
        settings = self.settings
        # A task that may go on in RAM must know for certain that it has no row.
        is_falling = settings.checkpointing is Checkpointing.PREFERRED
        store = (self._open_store or Store)(
            settings.store,
            lease=settings.lease,
            observe=self._observe,
            begins=is_falling,
            max_history=settings.max_history,
            replica=self.name,
            keeps_values=settings.history_values,
        )
        stack.push_async_callback(store.close)
        events = Events(self.metrics, self.app.on_event)
        self._gate = StoreGate(partial(_probe, store), on_close=self._pause, on_open=self._resume, events=events)
        stack.push_async_callback(self._gate.stop)
        outbox = Outbox(broker, events=events, patience=settings.request_prefetch // 4)
        is_in_ram = settings.checkpointing is not Checkpointing.REQUIRED
        limits = Limits(max_body=settings.max_body, max_depth=settings.max_depth)
        return Runtime(
            app=self.app,
            settings=settings,
            limits=limits,
            metrics=self.metrics,
            events=events,
            outbox=outbox,
            lives=LiveRuns(),
            slots=Slots(settings.concurrency),
            hints=Hints(outbox, settings.sweeper_queue, sweep_interval=settings.sweep_interval),
            store=store,
            gate=self._gate,
            marks=Marks(store),
            ram_calls=RamCalls(limits),
            private_queue=await broker.declare_private() if is_in_ram else None,
        )

    def _background(self, runtime: Runtime, leases: Leases) -> list[Coroutine[Any, Any, None]]:
        if not runtime.uses_store:
            return []
        assert self._broker is not None
        self._watch = SweeperWatch(self._broker, self.settings.sweeper_queue, metrics=self.metrics)
        return [leases.run(), runtime.marks.run(), self._watch.run()]

    async def _check_store(self, runtime: Runtime) -> None:
        """Refuse to start on a schema that is missing or older; start paused when Postgres is away.

        What is held waits for code that fits it, and this may be that code: its pauses of up to an hour are over.
        """
        if not runtime.uses_store:
            return
        try:
            check_schema(await runtime.store.ping(), runtime.store.place)
            if await runtime.store.hasten_held(self.app.service):
                runtime.hints.give([timedelta()])
        except StoreUnavailable as error:
            runtime.gate.close(error)

    async def _consume(
        self, group: asyncio.TaskGroup, runtime: Runtime, executor: Executor, leases: Leases, *, under_way: UnderWay
    ) -> None:
        names, settings = self.app.names, self.settings
        assert self._broker is not None
        self._orders = Orders(runtime)
        replica_queue = await self._broker.declare_replica(self.app.service)
        consumers: list[tuple[str, str, Receive, int]] = [
            ("broadcasts", replica_queue, Broadcasts(runtime).handle, CONTROL_PREFETCH),
            ("control", names.control, self._orders.handle, CONTROL_PREFETCH),
        ]
        if runtime.uses_store:
            replies = Replies(runtime, executor, under_way)
            consumers.append(("replies", names.replies, replies.receive, settings.reply_prefetch))
        # Last: a cancel that waits beside its request is to be read first.
        consumers.append(("requests", names.requests, Requests(runtime, executor).handle, settings.request_prefetch))
        if runtime.private_queue is not None:
            on_reply = runtime.ram_calls.on_delivery
            await self._broker.consume(runtime.private_queue, on_reply, prefetch=settings.reply_prefetch)
        if runtime.gate.is_open:
            await self._take_waiting_orders()
        for name, queue, receive, prefetch in consumers:
            on_delivery = partial(under_way.take, receive)
            on_lost = partial(self._on_lost, group, runtime, leases, queue)
            self._consumers[name] = await self._broker.consume(queue, on_delivery, prefetch=prefetch, on_lost=on_lost)
        if not runtime.gate.is_open:
            await self._pause()
        await self._follow(runtime.gate)

    async def _take_waiting_orders(self) -> None:
        """See to the cancels that wait in the control queue, before requests are asked for.

        They are fetched, not consumed: a consumer cannot tell an empty queue from messages on their way. Bounded in
        time: requests do not wait for a queue that is filled as fast as it is read, nor for one order that hangs.
        """
        assert self._broker is not None
        assert self._orders is not None
        try:
            async with asyncio.timeout(ORDERS_FIRST_S):
                is_more = True
                while is_more:
                    async with self._broker.browse(self.app.names.control, ORDERS_AT_ONCE) as waiting:
                        # One that fails goes back to the queue, to the consumer that deals with surprises.
                        await asyncio.gather(*map(self._orders.handle, waiting), return_exceptions=True)
                        is_more = bool(waiting) and all(order.is_settled for order in waiting)
        except (TimeoutError, BrokerUnavailable) as error:
            log.warning("orders_not_taken_first", error=str(error) or f"more than {ORDERS_FIRST_S:g} s of them")

    async def _follow(self, gate: StoreGate) -> None:
        """Resume what was paused a moment ago, if the gate was opened before the consumers were there."""
        if gate.is_open:
            await self._resume()

    def _on_lost(self, group: asyncio.TaskGroup, runtime: Runtime, leases: Leases, queue: str) -> None:
        """The broker has taken back what we held: our runs live on under their leases, so that none starts twice."""
        lost = [live for live in runtime.lives if live.trigger is not None and live.trigger.queue == queue]
        with_rows = [live for live in lost if live.has_row]
        if with_rows:
            group.create_task(leases.renew(with_rows, detaches=True))
        runtime.events.tell(ConsumerLost(None, queue, len(lost)))

    async def _pause(self) -> None:
        """Postgres is away: take nothing new that would need it. `preferred` goes on with requests, in RAM."""
        self._is_paused = True
        names = ["replies", "control"]
        if self.settings.checkpointing is Checkpointing.REQUIRED:
            names.append("requests")
        for name in names:
            await self._switch(name, is_on=False)

    async def _resume(self) -> None:
        if not self._stopping.is_set():
            if self._is_paused:
                self._is_paused = False
                await self._take_waiting_orders()
            for name in ("replies", "control", "requests"):
                await self._switch(name, is_on=True)

    async def _switch(self, name: str, *, is_on: bool) -> None:
        consumer = self._consumers.get(name)
        if consumer is None:
            return
        try:
            await (consumer.resume() if is_on else consumer.pause())
        except BrokerUnavailable as error:
            log.warning("consumer_not_switched", consumer=name, is_on=is_on, error=str(error))

    async def _drain(self, runtime: Runtime, leases: Leases) -> None:
        """Stop consuming, let runs finish or park; after the grace time the rest is left to others."""
        self.is_ready = False
        log.info("worker_draining", run_count=len(runtime.lives))
        for name in self._consumers:
            await self._switch(name, is_on=False)
        assert self._under_way is not None
        await self._under_way.wait(self.settings.grace.total_seconds())
        if self._under_way:
            await self._let_go(runtime, leases, self._under_way)
        await runtime.marks.flush() if runtime.uses_store else None
        await runtime.outbox.drain()

    async def _let_go(self, runtime: Runtime, leases: Leases, under_way: UnderWay) -> None:
        runtime.lives.is_closed = True
        lives = list(runtime.lives)
        log.warning("runs_cut_short", run_count=len(lives), hop_count=len(under_way))
        await leases.give_up(lives)
        for live in lives:
            live.let_go()
        orphans = [live for live in lives if live.has_row and (live.trigger is None or live.is_detached)]
        resumes = [Outgoing(self.app.names.replies, make_resume(str(live.task_id), live.epoch)) for live in orphans]
        try:
            if resumes:
                await runtime.outbox.publish(resumes)
        except BrokerUnavailable as error:
            log.warning("resumes_not_sent", error=str(error))  # the sweeper sees their leases end
        await under_way.wait(UNWIND_S)
        under_way.cancel()

    def _observe(self, operation: str, size: int, seconds: float) -> None:
        self.metrics.batch_size.labels(operation).observe(size)
        self.metrics.commit_seconds.labels(operation).observe(seconds)


async def _probe(store: Store) -> None:
    """Raise StoreUnavailable until Postgres answers and its schema is there: a gate opened earlier would flap."""
    try:
        check_schema(await store.ping(), store.place)
    except InvalidSettings as error:
        raise StoreUnavailable(str(error)) from error


def check_schema(found: str | None, place: str) -> None:
    """Raise InvalidSettings unless the schema is this release's; newer ones are fine, they only add."""
    wanted = newest_version()
    if found is None or found < wanted:
        state = (
            "has no coatcheck schema"
            if found is None
            else f"stands at schema version {found}, this code needs {wanted}"
        )
        raise InvalidSettings(f"the database at {redacted(place)} {state}; run `coatcheck migrate`")


class SweeperWatch:
    """Looks now and then whether any sweeper consumes `queue`, and says when that changes.

    Without a sweeper timeouts, sleeps and retries wait, and nothing else would say so. The consumers of the queue are
    the sign of life: the broker takes a dead one off by itself. It is for people only: a worker without a sweeper stays
    ready, for it takes requests and replies all the same.
    """

    def __init__(self, broker: Broker, queue: str, *, metrics: Metrics) -> None:
        self._broker = broker
        self._queue = queue
        self._metrics = metrics
        self._miss_count = 0

    @property
    def is_missing(self) -> bool:
        return self._miss_count >= MOST_MISSES

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Look once. While the broker is away, or does not let us look, what was seen last stands."""
        try:
            count = await self._broker.consumer_count(self._queue)
        except CoatcheckError:
            return
        was_missing = self.is_missing
        self._miss_count = 0 if count else self._miss_count + 1
        if self.is_missing and not was_missing:
            log.warning(
                "sweeper_missing",
                queue=self._queue,
                effect="timeouts, sleeps and retries wait until there is one",
                remedy="run `coatcheck sweeper`; with the broker memory://, a Sweeper in this process",
            )
        elif was_missing and not self.is_missing:
            log.info("sweeper_seen", queue=self._queue)
        self._metrics.sweeper_missing.set(self.is_missing)
