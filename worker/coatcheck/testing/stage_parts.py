"""What stands behind a stage: its parts, put together, on the event loop of the test."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from coatcheck.broker.headers import KEY
from coatcheck.broker.memory import MemoryBroker, MemoryServer, add_server, remove_server
from coatcheck.broker.port import Message, Outgoing, Routing
from coatcheck.errors import CoatcheckError, UsageError
from coatcheck.store.front import Store
from coatcheck.store.memory import MemoryStore, Tables
from coatcheck.testing.peers import NotFaked, Peer
from coatcheck.testing.stage_clock import StageClock
from coatcheck.testing.virtual_time import StagePart, Time, unwrap, wrap
from coatcheck.worker.app import App
from coatcheck.worker.client import Client
from coatcheck.worker.settings import Checkpointing, Settings
from coatcheck.worker.sweeper import Sweeper
from coatcheck.worker.worker import Worker

__all__ = ["Replica", "StageScene"]

T = TypeVar("T")

_NOT_PEERS = ("coatcheck.", "amq.")
_QUEUES_OF_SERVICES = (".replies", ".control", ".dead")


class StageScene:
    """Broker and store in memory, a sweeper, a client, replicas and peers, and the time they live in."""

    def __init__(self, now: datetime) -> None:
        self.time = Time(now)
        self.tables = Tables(self.time.now)
        self.peers: dict[str, Peer] = {}
        self.replicas: list[Replica] = []
        self.clock = StageClock(self.time, self.tables, replicas=self.replicas)
        self.server = _Server(self)
        self.open_store: Callable[..., Store] = self.open_memory
        self._url = f"memory://{uuid.uuid4()}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task_factory: Any = None
        self._part = StagePart(self.time)
        self._client: Client | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._keeper: asyncio.Task[None] | None = None
        self._complaints: list[Exception] = []
        self._numbers = itertools.count(1)
        self._is_closed = False

    @property
    def has_begun(self) -> bool:
        return self._loop is not None

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    # --- beginning and end ---

    async def begin(self) -> None:
        """Take the running loop, and start what every stage has: a sweeper and a client. Repeating it is free."""
        loop = _running_loop()
        if self._is_closed:
            raise UsageError("this stage is closed; make another one")
        if self._loop is loop:
            return
        if self._loop is not None:
            raise UsageError("this stage belongs to another event loop; make one for each test")
        add_server(self._url, self.server)
        self._loop = loop
        self._task_factory = loop.get_task_factory()
        self.time.start_at(loop.time())
        wrap(loop)
        self._keeper = loop.create_task(self._keep(), name="coatcheck-stage")
        settings = self._settings(None, {})
        self._client = Client(settings, open_store=self.open_store)
        self.clock.sweeper = sweeper = Sweeper(settings, name="sweeper", open_store=self.open_store)
        sweeping = self.spawn(sweeper.run(), part=StagePart(self.time, is_lazy=True))
        while not sweeper.is_ready:
            if sweeping.done():
                sweeping.result()
            await asyncio.sleep(0)

    async def _keep(self) -> None:
        """Close the stage when its loop ends before the test has done so: `asyncio.run` cancels what is left."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self._end()

    async def close(self) -> None:
        """Stop everything and give the event loop back. Repeating it is harmless."""
        is_there = self._loop is not None and not self._loop.is_closed()
        if is_there and self._keeper is not None and not self._keeper.done():
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            if not self._keeper.cancelled():
                self._keeper.result()
        self._is_closed = True

    def close_from_outside(self) -> None:
        """Close the stage where no event loop runs: after the test, if its loop is still there."""
        if self._loop is not None and not self._loop.is_closed() and not self._loop.is_running():
            self._loop.run_until_complete(self.close())
        self._is_closed = True

    async def _end(self) -> None:
        self._is_closed = True
        assert self._loop is not None
        try:
            living = [replica for replica in self.replicas if not replica.is_gone]
            for replica in living:
                replica.worker.stop()
            await self._finish(*(replica.running for replica in living))
            if self.clock.sweeper is not None:
                self.clock.sweeper.stop()
            self.spawn(self.client.close())
            dead = {replica.running for replica in self.replicas if replica.part.is_dead}
            await self._finish(*(task for task in self._tasks if task not in dead))
            await self.clock.run_out()
        finally:
            remove_server(self._url)
            unwrap(self._loop)
            self._loop.set_task_factory(self._task_factory)

    async def _finish(self, *tasks: asyncio.Task[Any]) -> None:
        if not await self.clock.finish(*tasks):
            for task in tasks:
                task.cancel()
            await self.clock.finish(*tasks)

    # --- replicas ---

    async def start(self, app: App, settings: dict[str, Any]) -> Replica:
        """Start a replica, and return when it consumes."""
        if app.service in self.peers:
            raise UsageError(f"{app.service!r} is a fake peer of this stage already: run the app, or fake it")
        await self.begin()
        name = f"{app.service}-{next(self._numbers)}"
        worker = Worker(app, self._settings(app, settings), name=name, open_store=self.open_store)
        part = StagePart(self.time)
        replica = Replica(worker, part=part, running=self.spawn(worker.run(), part=part), finish=self.clock.finish)
        self.replicas.append(replica)
        await replica.start()
        return replica

    def _settings(self, app: App | None, given: dict[str, Any]) -> Settings:
        ours: dict[str, Any] = {
            "broker": self._url,
            "store": "postgresql://localhost/stage",
            "checkpointing": Checkpointing.REQUIRED,
            # Hints are for due times nearer than this; on a stage the sweeper is told when to look.
            "sweep_interval": timedelta(milliseconds=10),
            "environ": {},
        }
        loaded = Settings.load(**ours) if app is None else app.load_settings(**(given | ours))
        return replace(loaded, health_port=None)

    def open_memory(self, _url: str, *, pool_size: int = 0, **options: Any) -> Store:
        """A replica's own store, over the tables they all share."""
        return MemoryStore(self.tables, **options)

    # --- what the others need ---

    def spawn(self, work: Coroutine[Any, Any, T], *, part: StagePart | None = None) -> asyncio.Task[T]:
        """Do something as a part of the stage, in its time."""
        assert self._loop is not None
        task = self._loop.create_task(work, context=(part or self._part).context())
        self._tasks = [each for each in self._tasks if not each.done()]
        self._tasks.append(task)
        task.add_done_callback(_retrieve)
        return task

    def later(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        if self._loop is None or self._is_closed:
            return
        context = self._part.context()
        if delay_s:
            self._loop.call_later(delay_s, self._act, act, *args, context=context)
        else:
            self._loop.call_soon(self._act, act, *args, context=context)

    def _act(self, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except CoatcheckError as error:
            self.complain(error)

    def route(self, outgoing: Outgoing) -> None:
        self.server.route(outgoing)

    def complain(self, error: Exception) -> None:
        """Keep an error for the next thing the test waits for."""
        self._complaints.append(error)

    def check(self) -> None:
        """Raise what the test must hear of before it goes on."""
        if self._complaints:
            raise self._complaints.pop(0)
        for peer in self.peers.values():
            if peer.waiting:
                raise NotFaked(_not_faked(peer))


class Replica:
    """One replica of an app on a stage."""

    def __init__(
        self,
        worker: Worker,
        *,
        part: StagePart,
        running: asyncio.Task[None],
        finish: Callable[[asyncio.Task[None]], Awaitable[bool]],
    ) -> None:
        self.worker = worker
        self.part = part
        self.running = running
        self._finish = finish

    def __repr__(self) -> str:
        return f"Replica({self.worker.name!r})"

    @property
    def app(self) -> App:
        return self.worker.app

    @property
    def is_gone(self) -> bool:
        """Whether it was stopped or killed, or has ended by itself."""
        return self.part.is_dead or self.running.done()

    async def start(self) -> None:
        """Return when it consumes. Raises what kept it from starting."""
        while not self.worker.is_ready:
            if self.running.done():
                self.running.result()
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Stop as on a deploy: runs are finished or put down, and what is parked waits for another replica."""
        if not self.is_gone:
            self.worker.stop()
            await self._finish(self.running)

    def kill(self) -> None:
        """Die, as by `kill -9`: nothing of it runs any more, and the broker has its unacked messages back."""
        broker = self.worker._broker  # noqa: SLF001 - no method of the worker is a death
        assert isinstance(broker, MemoryBroker)
        self.part.is_dead = True
        broker.go_dark()


class _Server(MemoryServer):
    """The broker in memory, on which every queue that is no app's belongs to a fake peer."""

    def __init__(self, scene: StageScene) -> None:
        super().__init__()
        self.is_sorting = False
        """Whether calls made together reach the peers in the order of their keys, however often they are sent."""
        self._scene = scene
        self._arrived: list[tuple[Callable[[Message], None], Message]] = []

    def route(self, outgoing: Outgoing) -> Routing:
        if outgoing.is_broadcast or outgoing.to in self.queues:
            return super().route(outgoing)
        name, is_control = outgoing.to.removesuffix(".control"), outgoing.to.endswith(".control")
        peer = self._scene.peers.get(name)
        if peer is None and not is_control and _may_be_peer(name):
            peer = self._scene.peers[name] = Peer(name, self._scene)
        if peer is None or peer.is_missing:
            return Routing.NO_ROUTE
        if not self._arrived:
            self._scene.later(0.0, self._hand_out)
        self._arrived.append((peer.on_control if is_control else peer.on_message, outgoing.message))
        return Routing.ROUTED

    def _hand_out(self) -> None:
        arrived, self._arrived = self._arrived, []
        if self.is_sorting:
            arrived.sort(key=lambda each: str(each[1].headers.get(KEY)))
        for take, message in arrived:
            take(message)


def _may_be_peer(queue: str) -> bool:
    return not queue.startswith(_NOT_PEERS) and not queue.endswith(_QUEUES_OF_SERVICES)


def _not_faked(peer: Peer) -> str:
    bodies = ", ".join(repr(asked.body) for asked in peer.waiting[:3])
    more = f" and {len(peer.waiting) - 3} more" if len(peer.waiting) > 3 else ""
    return (
        f"{peer} was asked {bodies}{more}, and nothing says what it answers. Say so before the call is made: "
        f"{peer}.replies(...), .fails(...), .never() or .missing(); or run the app {peer.name!r} on the same stage"
    )


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError("a stage needs a running asyncio event loop; handlers run on asyncio, not on trio") from None


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # the code that cares asks the task itself
