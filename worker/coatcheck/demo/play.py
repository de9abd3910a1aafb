"""The performance: set the stage, ask, kill one replica in the middle, wait for the rest.

Who does what is seen from the logs alone; whether all went well is read from the asker's books alone.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from coatcheck.broker import Broker, connect
from coatcheck.demo.asker import Asker
from coatcheck.demo.caretaker import Caretaker
from coatcheck.demo.crew import Crew, DemoFailed
from coatcheck.demo.display import Display
from coatcheck.demo.ledger import Ledger
from coatcheck.demo.memory import find_rss
from coatcheck.demo.plan import SOURCES, Plan, Source
from coatcheck.demo.scene import Scene, State
from coatcheck.demo.servers import CONNECT_TIMEOUT_S, Servers, announce, no_broker, servers_of
from coatcheck.demo.story import Chronicle
from coatcheck.demo.watch import Watch
from coatcheck.errors import BrokerUnavailable
from coatcheck.store import migrate
from coatcheck.worker.settings import QUEUES_IN_STORE, Settings

T = TypeVar("T")

TICK_S = 0.1
RSS_EVERY_S = 0.5
START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 90.0
STRAGGLERS_S = 1.0
"""After the last answer: time for one too many to show up."""


async def perform(
    plan: Plan, settings: Settings, *, display: Display, caretaker: Caretaker, logs: Path, ledger: Ledger
) -> Scene:
    """Play it once and return the last scene. SIGTERM ends it like Ctrl-C. Raises DemoFailed, CoatcheckError."""
    this_task = asyncio.current_task()
    assert this_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)
    performance = Performance(plan, display, caretaker=caretaker, logs=logs, ledger=ledger)
    async with AsyncExitStack() as stage:
        await performance.set_stage(stage, settings)
        await performance.play()
    return performance.scene


class Performance:
    """One run of the demo."""

    def __init__(self, plan: Plan, display: Display, *, caretaker: Caretaker, logs: Path, ledger: Ledger) -> None:
        self.prefix = f"demo-{secrets.token_hex(4)}"
        self.scene = Scene(plan, Chronicle(f"{self.prefix}-"), began_at_s=time.time())
        for replica in plan.replicas:
            self.scene.add_replica(replica)
        self._plan = plan
        self._display = display
        self._caretaker = caretaker
        self._logs = logs
        self._ledger = ledger
        self._watch = Watch(logs)
        self._crew: Crew | None = None
        self._asker: Asker | None = None
        self._rss_at_s = 0.0

    @property
    def service(self) -> str:
        return f"{self.prefix}-survey"

    # --- the stage ---

    async def set_stage(self, stage: AsyncExitStack, settings: Settings) -> None:
        """Servers, then everybody who takes part; they all leave with the stage."""
        self._say(announce(settings, self.prefix))
        entering = servers_of(settings, self._caretaker, database=f"coatcheck_{self.prefix.replace('-', '_')}")
        servers = await self._begin("Postgres", stage.enter_async_context(entering))
        self.scene.servers = servers.words
        broker = await self._begin("queues", stage.enter_async_context(_connected(servers.broker)))
        if settings.broker != QUEUES_IN_STORE:
            self._announce_queues(servers.broker)
        crew = await stage.enter_async_context(Crew(self._logs, self._environment(servers)))
        self._crew = crew
        await self._start_everyone(crew, servers.store)
        self._asker = await Asker.start(broker, self._ledger, service=self.service)

    def _announce_queues(self, url: str) -> None:
        services = [self.service, *(self._queue(source) for source in SOURCES)]
        self._caretaker.will_delete_queues(url, services=services, queues=[self._sweeper_queue])

    def _environment(self, servers: Servers) -> dict[str, str]:
        return {
            "COATCHECK_BROKER": servers.broker,
            "COATCHECK_STORE": servers.store,
            "COATCHECK_LEASE": "5s",
            "COATCHECK_GRACE": "2s",
            # A queue of our own: another database's sweeper on this broker must not take our hints.
            "COATCHECK_SWEEPER_QUEUE": self._sweeper_queue,
            "COATCHECK_LOG_FORMAT": "json",
            "COATCHECK_LOG_LEVEL": "debug",  # who claimed which reply
            "DEMO_PREFIX": self.prefix,
        }

    @property
    def _sweeper_queue(self) -> str:
        return f"{self.prefix}-sweepers"

    def _queue(self, source: Source) -> str:
        return f"{self.prefix}-{source.name}"

    async def _start_everyone(self, crew: Crew, store: str) -> None:
        """Peers first, for they need no tables; then the schema, the sweeper and the replicas."""
        plan = self._plan
        self._say(f"starting {plan.replica_count} replicas, a sweeper and {len(SOURCES)} peers")
        self.scene.begin("peers", *(source.name for source in SOURCES))
        for source in SOURCES:
            await self._start_peer(crew, source)
        await self._begin("tables", migrate(store))
        self.scene.begin("sweeper")
        await self._start(crew, "sweeper", "coatcheck.cli", "sweeper", "--name", "sweeper")
        self.scene.begin("replicas", *plan.replicas)
        for replica in plan.replicas:
            await self._start_replica(crew, replica)
        everyone = {name for names in self.scene.starts.values() for name in names}
        if not await self._look_until(lambda: everyone <= self.scene.ready.keys(), limit_s=START_LIMIT_S):
            late = ", ".join(sorted(everyone - self.scene.ready.keys()))
            raise DemoFailed(f"not everybody was ready after {START_LIMIT_S:.0f} seconds: {late}")

    async def _begin(self, word: str, work: Coroutine[Any, Any, T]) -> T:
        """Do something that is shown as being started until it is done."""
        self.scene.begin(word)
        done = await self._while_looking(work)
        self.scene.ready[word] = time.time()
        return done

    async def _start_peer(self, crew: Crew, source: Source) -> None:
        options = ["--queue", self._queue(source), "--delay", str(source.delay_s), "--seed", str(self._plan.seed)]
        if source.progress_every_s:
            options += ["--progress-every", str(source.progress_every_s)]
        if source.is_silent:
            options.append("--silent")
        await self._start(crew, source.name, "coatcheck.demo.peer", source.name, *options)

    async def _start_replica(self, crew: Crew, name: str) -> None:
        arguments = ("coatcheck.cli", "worker", "coatcheck.demo.survey:app", "--name", name)
        await self._start(crew, name, *arguments, DEMO_REPLICA=name)

    async def _start(self, crew: Crew, name: str, *arguments: str, **environment: str) -> None:
        self._caretaker.will_end_process(await crew.start(name, *arguments, **environment))

    # --- the play ---

    async def play(self) -> None:
        """Ask, kill one replica when an eighth is answered, start another, wait for the rest."""
        plan, ledger = self._plan, self._ledger
        self._say(f"asking for {plan.task_count} surveys (seed {plan.seed})")
        asking = asyncio.ensure_future(self._ask_all())
        try:
            await self._look_until(self._is_time_to_kill, limit_s=ANSWER_LIMIT_S, failing=asking)
            await self._replace_victim()
            is_over = await self._look_until(self._is_over, limit_s=ANSWER_LIMIT_S, failing=asking)
        finally:
            await _cancelled(asking)
        self._say(f"{ledger.answered} of {plan.task_count} are answered" + ("" if is_over else "; gave up waiting"))
        await self._look_until(lambda: False, limit_s=STRAGGLERS_S)

    async def _ask_all(self) -> None:
        assert self._asker is not None
        began_s = time.monotonic()
        for number, question in enumerate(self._plan.questions()):
            await asyncio.sleep(began_s + number / self._plan.ask_per_s - time.monotonic())
            await self._asker.ask(question)

    def _is_time_to_kill(self) -> bool:
        """An eighth is answered, and the victim has begun something that is not finished."""
        answered, total = self._ledger.answered, self._plan.task_count
        has_survivor = self.scene.chronicle.find_survivor(self._plan.victim) is not None
        return answered >= total // 8 and (has_survivor or answered >= total // 2)

    async def _replace_victim(self) -> None:
        assert self._crew is not None
        victim, chronicle = self._plan.victim, self.scene.chronicle
        await self._crew.kill(victim)
        killed_at_s = time.time()
        self._ledger.note_killed(victim)
        self.scene.replicas[victim].change(State.KILLED, killed_at_s)
        self._look()  # its last words
        survivor = chronicle.find_survivor(victim)
        if survivor is not None:
            chronicle.begin(survivor, victim=victim, killed_at_s=killed_at_s)
        self._say(f"{victim} was killed with -9; {self._plan.successor} starts")
        self.scene.add_replica(self._plan.successor, is_late=True)
        await self._start_replica(self._crew, self._plan.successor)

    def _is_over(self) -> bool:
        """All are answered, and whoever was to join has joined."""
        return self._ledger.answered >= self._plan.task_count and self._plan.successor in self.scene.ready

    # --- looking ---

    def _say(self, text: str) -> None:
        self.scene.now_s = time.time()
        self._display.say(self.scene, text)

    def _look(self) -> None:
        """Take in what happened and show it. Raises DemoFailed if a process is gone that should be there."""
        scene = self.scene
        events = self._watch.look()
        for event in events:
            scene.note(event)
        scene.asked, scene.answered, scene.now_s = self._ledger.asked, self._ledger.answered, time.time()
        if self._crew is not None:
            self._crew.check()
            self._weigh(self._crew.pids)
        self._display.show(scene)
        if any(event.name == "worker_started" and event.who == self._plan.successor for event in events):
            self._say(f"{self._plan.successor} joined")

    def _weigh(self, pids: dict[str, int]) -> None:
        if time.monotonic() - self._rss_at_s < RSS_EVERY_S:
            return
        self._rss_at_s = time.monotonic()
        pids = {name: pid for name, pid in pids.items() if name in self.scene.replicas}
        found = find_rss(pids.values())
        for name, replica in self.scene.replicas.items():
            replica.rss = found.get(pids.get(name, 0))

    async def _look_until(
        self, is_so: Callable[[], bool], *, limit_s: float, failing: asyncio.Future[None] | None = None
    ) -> bool:
        """Look again and again. False: it did not come true in time. Raises what `failing` raised meanwhile."""
        deadline_s = time.monotonic() + limit_s
        self._look()
        while not is_so():
            if failing is not None and failing.done():
                failing.result()
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(TICK_S)
            self._look()
        return True

    async def _while_looking(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something that takes a while, and look meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._look()
                await asyncio.wait([task], timeout=TICK_S)
            return task.result()
        finally:
            await _cancelled(task)


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end; what it raised was seen, or is not wanted any more."""
    task.cancel()
    await asyncio.wait([task])


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Broker]:
    """The asker's connection. Raises DemoFailed with the fix if nobody answers there."""
    broker = connect(url, connect_budget=CONNECT_TIMEOUT_S, name="demo asker")
    try:
        await broker.start()
    except BrokerUnavailable as error:
        await broker.stop()
        raise no_broker(url, error) from None
    try:
        yield broker
    finally:
        await broker.stop()
