"""One trial from beginning to end: set up, ask and break, let it settle, stop, check, report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
from tests.broker.proxy import Proxy
from tests.chaos.books import Book, Tail
from tests.chaos.checker import WITHOUT_WAKER
from tests.chaos.crew import ROOT, Points, TrialCrew
from tests.chaos.display import Display
from tests.chaos.faults import Faults, make_schedule
from tests.chaos.nursery import Nursery
from tests.chaos.servers import Servers

from coatcheck.store import migrate

PEERS = {"quick": 2, "slow": 1, "twice": 1, "failing": 1, "progress": 1, "silent": 1, "sink": 1}
LEASE_S = 8.0
MAX_PICKUPS = 6
LOOK_EVERY_S = 2.0
START_S = 90.0
STOP_S = 60.0


@dataclass(frozen=True)
class Options:
    """How large a trial is to be."""

    task_count: int = 2000
    minutes: float = 1.2
    seed: str = "1"
    worker_count: int = 3
    client_count: int = 2
    light_every_s: float = 2.5
    patience_s: float = 300.0
    """How long a trial may go on after its time to reach all points, and then again to settle."""
    point_count: int | None = None
    """At how many different points a process must have died; None: at all that there are on the broker."""
    needs_every_fault: bool = False
    """Go on until everything that can be broken was, each thing in turn."""


@dataclass
class Outcome:
    """What came of it, for the report."""

    options: Options
    began_at: float = field(default_factory=time.time)
    length_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    impossible: dict[str, str] = field(default_factory=dict)
    points: Points | None = None
    broker_kind: str = ""
    is_broken_enough: bool = False
    is_settled: bool = False
    verdict: str = ""
    exit_code: int = 1
    versions: dict[str, str] = field(default_factory=dict)


class Trial:
    """Everything that lives while a trial runs."""

    def __init__(self, options: Options, servers: Servers, directory: Path, display: Display) -> None:
        self._options = options
        self._servers = servers
        self._directory = directory
        self._display = display
        self._events = Book(directory / "events.jsonl")
        self._points = Points(servers.broker.points, random.Random(f"{options.seed}/points"))
        self._nursery = Nursery(ROOT)
        freeze_s = (LEASE_S * 1.1, LEASE_S * 1.6)
        self._crew = TrialCrew(self._nursery, directory, self._events, self._points, freeze_s=freeze_s, stop_s=STOP_S)
        self._faults = Faults(self._crew, servers, self._events, seed=options.seed)
        self._clients = [f"{number}" for number in range(options.client_count)]
        self._tails = [Tail(directory / f"client-{name}.jsonl") for name in self._clients]
        self._asked: set[str] = set()
        self._answered: set[str] = set()
        self._phase = "starting"

    # --- the course of a trial ---

    async def run(self) -> Outcome:
        outcome = Outcome(self._options, points=self._points, broker_kind=self._servers.broker.kind)
        began_s = time.monotonic()
        this_task = asyncio.current_task()
        assert this_task is not None
        for number in (signal.SIGINT, signal.SIGTERM):  # whoever interrupts us: the servers must go with us
            asyncio.get_running_loop().add_signal_handler(number, this_task.cancel)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._nursery)
            await stack.enter_async_context(self._crew)
            await self._set_up(stack)
            beside = [asyncio.create_task(it) for it in (self._crew.watch(), self._look(), self._show())]
            stack.callback(lambda: [task.cancel() for task in beside])
            await self._ask_and_break()
            outcome.is_broken_enough = self._is_broken_enough()
            outcome.is_settled = await self._settle()
            await self._stop()
            self._phase = "checking"
            outcome.versions = {"Postgres": self._servers.postgres.version, **await self._servers.broker.versions()}
            outcome.exit_code, outcome.verdict = await asyncio.to_thread(self._check)
        outcome.length_s = time.monotonic() - began_s
        outcome.counts, outcome.faults = self._crew.counts, self._faults.outages
        outcome.impossible = self._faults.impossible
        return outcome

    async def _set_up(self, stack: AsyncExitStack) -> None:
        service = self._servers.service
        own = [service, f"{service}.replies", f"{service}.control", f"{service}.dead", f"{service}.hints"]
        consumed = [f"{service}-{role}{suffix}" for role in PEERS for suffix in ("", ".control")]
        peers = [f"{service}-{role}{suffix}" for role in PEERS for suffix in self._servers.broker.peer_suffixes]
        clients = [f"{service}-client-{name}" for name in self._clients]
        self._queues = own + peers + clients
        facts = {"service": service, "dead": f"{service}.dead", "queues": self._queues, "lease_s": LEASE_S}
        facts |= {"max_pickups": MAX_PICKUPS}
        (self._directory / "facts.json").write_text(json.dumps(facts))
        await migrate(self._servers.postgres.url)
        await self._start_peers()
        await self._start_ours(stack)
        await self._until_consumed(service, *consumed)
        for name in self._clients:
            book = str(self._directory / f"client-{name}.jsonl")
            rate = self._options.task_count / (self._options.minutes * 60) / len(self._clients)
            options = {"--name": name, "--service": service, "--seed": self._options.seed, "--book": book}
            arguments = [word for pair in options.items() for word in pair]
            self._crew.add(
                f"client-{name}",
                "client",
                "tests.chaos.client",
                *arguments,
                "--rate",
                str(rate * 1.1),
                CHAOS_BROKER=self._servers.broker.url,
            )

    async def _start_peers(self) -> None:
        for role, count in PEERS.items():
            for number in range(count):
                name = f"peer-{role}-{number}"
                arguments = (role, f"{self._servers.service}-{role}", str(self._directory / f"{name}.jsonl"))
                self._crew.add(name, "peer", "tests.chaos.peer", *arguments, CHAOS_BROKER=self._servers.broker.url)

    async def _start_ours(self, stack: AsyncExitStack) -> None:
        """Workers and sweepers, each with a bad network of its own."""
        places = [(f"worker-{number}", "worker") for number in range(self._options.worker_count)]
        for name, role in [*places, ("sweeper-0", "sweeper"), ("sweeper-1", "sweeper")]:
            store = await stack.enter_async_context(Proxy(self._servers.postgres.url))
            broker = await stack.enter_async_context(Proxy(self._servers.broker.url))
            self._faults.store_proxies.append(store)
            self._faults.broker_proxies.append(broker)
            arguments = ("worker", "tests.chaos.app:app") if role == "worker" else ("sweeper",)
            environment = self._environment(store=store.url, broker=broker.url)
            self._crew.add(name, role, "tests.chaos.replica", *arguments, "--name", name, **environment)

    def _environment(self, *, store: str, broker: str) -> dict[str, str]:
        return {
            "COATCHECK_STORE": store,
            "COATCHECK_BROKER": broker,
            "COATCHECK_SWEEPER_QUEUE": f"{self._servers.service}.hints",
            "COATCHECK_LEASE": f"{LEASE_S}s",
            "COATCHECK_LONG_RUN_LIMIT": "2s",
            "COATCHECK_SWEEP_INTERVAL": "0.5s",
            "COATCHECK_GRACE": "10s",
            "COATCHECK_MAX_PICKUPS": str(MAX_PICKUPS),
            "COATCHECK_LOG_FORMAT": "json",
            "COATCHECK_LOG_LEVEL": "info",
            "CHAOS_SERVICE": self._servers.service,
            "CHAOS_LONG_S": "3",
            "CHAOS_EVIDENCE": str(self._directory),
            "PYTHONUNBUFFERED": "1",
        }

    async def _ask_and_break(self) -> None:
        """Until all is asked, the time is over, a process has died at every point, and all was broken that must be."""
        self._phase = "breaking"
        length_s = self._options.minutes * 60
        limit_s = time.monotonic() + length_s + self._options.patience_s
        schedule = make_schedule(
            self._options.seed,
            heavy=self._servers.broker.heavy_faults,
            length_s=length_s + self._options.patience_s,
            light_every_s=self._options.light_every_s,
            heavy_every_s=self._servers.broker.heavy_every_s,
            in_turn=self._options.needs_every_fault,
        )
        ends_s = time.monotonic() + length_s
        breaking = asyncio.create_task(self._faults.run(schedule))
        try:
            while time.monotonic() < limit_s:
                is_asked = len(self._asked) >= self._options.task_count
                if time.monotonic() >= ends_s and is_asked and self._is_broken_enough():
                    break
                if breaking.done():
                    breaking.result()
                await asyncio.sleep(0.2)
        finally:
            breaking.cancel()
            await asyncio.wait([breaking])
        (self._directory / "stop_asking").touch()

    def _is_broken_enough(self) -> bool:
        reached_count = len(self._points.names) - len(self._points.missing)
        wanted_count = self._options.point_count
        if wanted_count is None:
            wanted_count = len(self._points.names)
        has_every_fault = not (self._options.needs_every_fault and self._faults.missing)
        return reached_count >= wanted_count and has_every_fault

    async def _settle(self) -> bool:
        """Nothing is broken any more: wait until everything is answered, every row ended, every queue empty."""
        self._phase = "settling"
        for proxy in self._faults.store_proxies + self._faults.broker_proxies:
            proxy.restore()
            proxy.delay_s = 0.0
        await self._servers.postgres.is_up(60)
        await self._crew.disarm()
        quiet_since_s = time.monotonic()
        limit_s = time.monotonic() + self._options.patience_s
        while time.monotonic() < limit_s:
            if not await self._is_quiet():
                quiet_since_s = time.monotonic()
            elif time.monotonic() - quiet_since_s > 2.0:
                return True
            await asyncio.sleep(0.3)
        return False

    async def _is_quiet(self) -> bool:
        has_asked_all = all((self._directory / f"client-{name}.idle").exists() for name in self._clients)
        if not has_asked_all or self._asked - self._answered:
            return False
        return not await self._unfinished() and not any((await self._depths()).values())

    async def _stop(self) -> None:
        """Whoever might still say something goes first; clients listen to the end."""
        self._phase = "stopping"
        for role in ("worker", "sweeper", "peer"):
            await self._crew.stop(role)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while any(count for queue, count in (await self._depths()).items() if "-client-" in queue):
                    await asyncio.sleep(0.2)
        await asyncio.sleep(0.5)
        await self._crew.stop("client")

    def _check(self) -> tuple[int, str]:
        """The checker is a process of its own: it shares nothing with us but the files."""
        addresses = ["--store", self._servers.postgres.url, "--broker", self._servers.broker.url]
        checked = subprocess.run(
            [sys.executable, "-m", "tests.chaos.checker", self._directory, *addresses],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return checked.returncode, checked.stdout + checked.stderr

    # --- beside it ---

    async def _look(self) -> None:
        """Every unfinished task has a waker at every instant: look while it all goes on."""
        while True:
            with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):
                connection = await asyncpg.connect(self._servers.postgres.url, timeout=5, command_timeout=20)
                try:
                    found = [row["id"] for row in await connection.fetch(WITHOUT_WAKER)]
                finally:
                    connection.terminate()
                self._crew.counts["looks for tasks without a waker"] += 1
                if found:
                    self._events.write("without_waker", tasks=found)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _show(self) -> None:
        while True:
            for tail in self._tails:
                for line in tail.fresh():
                    if line["what"] == "send":
                        self._asked.add(line["id"])
                    elif line["what"] == "reply":
                        self._answered.add(line["correlation_id"])
            self._crew.pace.answered_count = len(self._answered)
            counts = self._crew.counts
            self._display.show(
                self._phase,
                asked=len(self._asked),
                answered=len(self._answered),
                kills=sum(count for name, count in counts.items() if name.startswith(("kill", "ended"))),
                stops=sum(count for name, count in counts.items() if name.startswith(("freezes", "stopped"))),
                restarts=counts["restarts"],
                outages=sum(self._faults.outages.values()),
                points=f"{len(self._points.names) - len(self._points.missing)}/{len(self._points.names)}",
            )
            await asyncio.sleep(0.25)

    # --- looking at the servers ---

    async def _unfinished(self) -> int:
        connection = await asyncpg.connect(self._servers.postgres.url, timeout=10)
        try:
            return await connection.fetchval(
                "SELECT (SELECT count(*) FROM coatcheck.task WHERE state NOT IN ('done', 'failed', 'cancelled'))"
                " + (SELECT count(*) FROM coatcheck.call WHERE state = 'open')"
            )
        finally:
            await connection.close()

    async def _depths(self) -> dict[str, int]:
        dead = f"{self._servers.service}.dead"
        return await self._servers.broker.depths(queue for queue in self._queues if queue != dead)

    async def _until_consumed(self, *queues: str) -> None:
        """Return when somebody consumes each of these queues."""
        async with asyncio.timeout(START_S):
            waiting = set(queues)
            while waiting := await self._servers.broker.find_unconsumed(waiting):
                await asyncio.sleep(0.2)
