"""`coatcheck demo`: see it work, on this machine, in half a minute.

Set the stage, ask, kill one replica in the middle, wait for the rest. Who does what is seen from the logs alone;
whether all went well is read from the asker's books alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from coatcheck.broker import Broker, connect
from coatcheck.cli.options import json_option, load_settings
from coatcheck.cli.output import emit_json
from coatcheck.cli.processes.crew import Crew, Ending, Life, Member, Watcher
from coatcheck.demo.books import Asker, AskerBooks, DemoVerdict, judge
from coatcheck.demo.peer import SOURCES
from coatcheck.demo.scene import Chronicle, DemoScene, LogEvent, ReplicaState, read_events
from coatcheck.demo.stage import CONNECT_TIMEOUT_S, Caretaker, DemoFailed, DemoServers, announce, no_broker, servers_of
from coatcheck.demo.survey import FEWEST_TASKS, DemoPlan
from coatcheck.demo.view import Display, describe_verdict, make_console, make_display, show_next, show_verdict
from coatcheck.errors import BrokerUnavailable
from coatcheck.store import migrate
from coatcheck.worker.settings import QUEUES_IN_STORE, Settings, redacted

T = TypeVar("T")

FEWEST_REPLICAS = 2
MOST_REPLICAS = 20
MOST_TASKS = 10_000
MOST_SEEDS = 10_000
TICK_S = 0.1
RSS_EVERY_S = 0.5
PS_TIMEOUT_S = 2.0
START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 90.0
STRAGGLERS_S = 1.0
"""After the last answer: time for one too many to show up."""
STOP_TIMEOUT_S = 10.0
LAST_WORDS = 15


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """What a run left: the verdict, the last thing to see, the logs if they were kept, what could not be removed."""

    verdict: DemoVerdict
    scene: DemoScene
    logs: Path | None
    leftovers: str


@click.command(short_help="See it work: replicas, peers, a kill -9, nothing lost.")
@click.option(
    "--tasks",
    "task_count",
    type=click.IntRange(FEWEST_TASKS, MOST_TASKS),
    default=300,
    show_default=True,
    help="How many to ask for.",
)
@click.option(
    "--replicas",
    "replica_count",
    type=click.IntRange(FEWEST_REPLICAS, MOST_REPLICAS),
    default=3,
    show_default=True,
    help="Workers to start with; one of them is killed and another one joins.",
)
@click.option("--seed", type=int, help="Ask the same questions, with the same delays, as the run that had this seed.")
@click.option(
    "--ledger",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep the asker's books there; the file must not exist yet.",
)
@click.option("--keep", "keeps", is_flag=True, help="Keep the logs of all processes, and say where they are.")
@click.option("--plain", "is_plain", is_flag=True, help="Print a line per event instead of a live view.")
@json_option
def demo(
    *,
    task_count: int,
    replica_count: int,
    seed: int | None,
    ledger: Path | None,
    keeps: bool,
    is_plain: bool,
    as_json: bool,
) -> None:
    """See it work: replicas, slow peers, a kill -9 in the middle, and nothing lost.

    Starts workers, a sweeper and peers as processes, asks for a few hundred surveys and kills one worker on the way. At
    the end the asker's own books say what was asked, answered, lost and answered twice; the exit code is 0 only if they
    say what was promised.

    It needs no server: it runs one of its own, which is gone afterwards. With COATCHECK_STORE and COATCHECK_BROKER it
    uses those, under names of its own, and removes what it made.

    \b
    Example:
      coatcheck demo --tasks 1000 --replicas 5
    """
    settings = load_settings(broker=None, store=None)  # it uses those of the environment, from many processes
    plan = DemoPlan(task_count, replica_count, random.randrange(MOST_SEEDS) if seed is None else seed)
    if ledger is not None:
        _make_file(ledger)
    # With --json stdout is the document's, and the view goes where remarks go.
    console = make_console(sys.stderr if as_json else sys.stdout, is_plain=is_plain)
    try:
        outcome = run(plan, settings, console=console, books=ledger, keeps=keeps)
    except DemoFailed as error:
        raise click.ClickException(str(error)) from error
    except BrokenPipeError:
        raise
    except OSError as error:  # a disk that is full, no temporary directory: of this machine, not of ours
        raise click.ClickException(f"{error.filename or 'writing'}: {error.strerror}") from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("Stopped and cleared up.", err=True)
        raise click.Abort from None
    _tell(outcome, console, as_json=as_json)
    if outcome.verdict.complaints:
        raise click.exceptions.Exit(1)


def _make_file(path: Path) -> None:
    """Make the file now, while a mistake costs nothing. Raises click.BadParameter."""
    try:
        path.touch(exist_ok=False)
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", param_hint="'--ledger'") from error


def _tell(outcome: DemoOutcome, console: Console, *, as_json: bool) -> None:
    """The figures, where the logs are if they were kept, what could not be removed, and what to try next."""
    verdict = outcome.verdict
    if as_json:
        emit_json(describe_verdict(verdict, scene=outcome.scene))
    else:
        show_verdict(console, verdict, scene=outcome.scene)
    if outcome.logs is not None:
        click.echo(f"Logs are in {outcome.logs}", err=as_json)
    if outcome.leftovers:
        click.echo(f"Warning: {outcome.leftovers}", err=True)
    if not (verdict.complaints or as_json):
        show_next(console)


def run(plan: DemoPlan, settings: Settings, *, console: Console, books: Path | None, keeps: bool) -> DemoOutcome:
    """Play, judge, clear up. Raises DemoFailed and CoatcheckError, and what an interrupt raises, after clearing up."""
    caretaker = Caretaker()
    try:
        logs = Path(tempfile.mkdtemp(prefix="coatcheck-demo-logs-"))
        caretaker.will("directory", path=str(logs))
        kept_books = AskerBooks(books or logs / "ledger.jsonl")
        try:
            with make_display(console) as display:
                performance = Performance(plan, display, caretaker=caretaker, logs=logs, books=kept_books)
                asyncio.run(performance.run(settings))
        except DemoFailed as error:
            if not any(logs.glob("*.log")):
                raise
            caretaker.will("keep", path=str(logs))
            raise DemoFailed(f"{error}\nAll logs are in {logs}") from None
        finally:
            kept_books.close()
        verdict = judge(kept_books.path)
        is_kept = keeps or bool(verdict.complaints)
        if is_kept:
            caretaker.will("keep", path=str(logs))
    finally:
        leftovers = caretaker.finish()
    return DemoOutcome(verdict, performance.scene, logs if is_kept else None, leftovers)


class Performance(Watcher):
    """One run of the demo, from the first process to the last answer."""

    def __init__(
        self, plan: DemoPlan, display: Display, *, caretaker: Caretaker, logs: Path, books: AskerBooks
    ) -> None:
        self.prefix = f"demo-{secrets.token_hex(4)}"
        self.scene = DemoScene(plan, Chronicle(f"{self.prefix}-"), began_at_s=time.time())
        for replica in plan.replicas:
            self.scene.add_replica(replica)
        self._plan = plan
        self._display = display
        self._caretaker = caretaker
        self._logs = logs
        self._books = books
        self._news: list[LogEvent] = []
        self._failure: Exception | None = None
        self._weighed_s = 0.0

    async def run(self, settings: Settings) -> None:
        """Play it once. SIGTERM ends it like Ctrl-C. Raises DemoFailed, CoatcheckError."""
        this_task = asyncio.current_task()
        assert this_task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)
        async with AsyncExitStack() as stage:
            await self._set_stage(stage, settings)
            await self._play()

    # --- the stage ---

    async def _set_stage(self, stage: AsyncExitStack, settings: Settings) -> None:
        """Servers, then all processes that take part; they all leave with the stage."""
        self._say(announce(settings, self.prefix))
        entering = servers_of(settings, self._caretaker, database=f"coatcheck_{self.prefix.replace('-', '_')}")
        servers = await self._begin("Postgres", stage.enter_async_context(entering))
        self.scene.servers = servers.words
        broker = await self._begin("queues", stage.enter_async_context(_connected(servers.broker)))
        if settings.broker != QUEUES_IN_STORE:
            services = [f"{self.prefix}-{name}" for name in ("survey", *(source.name for source in SOURCES))]
            self._caretaker.will("queues", url=servers.broker, services=services, queues=[f"{self.prefix}-sweepers"])
        self._crew = await stage.enter_async_context(
            Crew(self, environ=self._environ(servers), patience_s=STOP_TIMEOUT_S, cwd=self._logs)
        )
        await self._start_all(servers.store)
        self._asker = await Asker.start(broker, self._books, service=f"{self.prefix}-survey")

    def _environ(self, servers: DemoServers) -> dict[str, str]:
        # What the user set for services of their own must not change ours: a health port, a mode, a limit.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("COATCHECK_")}
        return inherited | {
            "COATCHECK_BROKER": servers.broker,
            "COATCHECK_STORE": servers.store,
            "COATCHECK_LEASE": "5s",
            "COATCHECK_GRACE": "2s",
            # A queue of our own: another database's sweeper on this broker must not take our hints.
            "COATCHECK_SWEEPER_QUEUE": f"{self.prefix}-sweepers",
            "COATCHECK_LOG_FORMAT": "json",
            "COATCHECK_LOG_LEVEL": "debug",  # who claimed which reply
            "DEMO_PREFIX": self.prefix,
        }

    async def _start_all(self, store: str) -> None:
        """Peers first, for they need no tables; then the schema, the sweeper and the replicas."""
        plan, scene, crew = self._plan, self.scene, self._crew
        self._say(f"starting {plan.replica_count} replicas, a sweeper and {len(SOURCES)} peers")
        scene.begin("peers", *(source.name for source in SOURCES))
        for source in SOURCES:
            arguments = (source.name, f"{self.prefix}-{source.name}", str(plan.seed))
            crew.start(crew.add(source.name, *arguments, module="coatcheck.demo.peer"))
        await self._begin("tables", migrate(store))
        scene.begin("sweeper")
        crew.start(crew.add("sweeper", "sweeper", "--name", "sweeper"))
        scene.begin("replicas", *plan.replicas)
        for replica in plan.replicas:
            self._start_replica(replica)
        wanted = {name for names in scene.starts.values() for name in names}
        if not await self._look_until(lambda: wanted <= scene.ready.keys(), limit_s=START_LIMIT_S):
            late = ", ".join(sorted(wanted - scene.ready.keys()))
            raise DemoFailed(f"not all processes were ready after {START_LIMIT_S:.0f} seconds: {late}")

    async def _begin(self, word: str, work: Coroutine[Any, Any, T]) -> T:
        """Do something that is shown as being started until it is done."""
        self.scene.begin(word)
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._look()
                await asyncio.wait([task], timeout=TICK_S)
        finally:
            await _cancelled(task)
        done = task.result()
        self.scene.ready[word] = time.time()
        return done

    def _start_replica(self, name: str) -> None:
        arguments = ("worker", "coatcheck.demo.survey:app", "--name", name)
        self._crew.start(self._crew.add(name, *arguments, DEMO_REPLICA=name))

    # --- the play ---

    async def _play(self) -> None:
        """Ask, kill one replica when an eighth is answered, start another, wait for the rest."""
        plan, books = self._plan, self._books
        self._say(f"asking for {plan.task_count} surveys (seed {plan.seed})")
        asking = asyncio.ensure_future(self._ask_all())
        try:
            await self._look_until(self._is_time_to_kill, limit_s=ANSWER_LIMIT_S, failing=asking)
            await self._replace_victim()
            is_over = await self._look_until(self._is_over, limit_s=ANSWER_LIMIT_S, failing=asking)
        finally:
            await _cancelled(asking)
        self._say(f"{books.answered} of {plan.task_count} are answered" + ("" if is_over else "; gave up waiting"))
        await self._look_until(lambda: False, limit_s=STRAGGLERS_S)

    async def _ask_all(self) -> None:
        began_s = time.monotonic()
        for number, question in enumerate(self._plan.questions()):
            await asyncio.sleep(began_s + number / self._plan.ask_per_s - time.monotonic())
            if not await self._asker.ask(question):
                raise DemoFailed(f"the queue {self.prefix}-survey is gone: it was deleted while the demo ran")

    def _is_time_to_kill(self) -> bool:
        """An eighth is answered, and the victim has begun something that is not finished."""
        answered, total = self._books.answered, self._plan.task_count
        has_survivor = self.scene.chronicle.find_survivor(self._plan.victim) is not None
        return answered >= total // 8 and (has_survivor or answered >= total // 2)

    async def _replace_victim(self) -> None:
        plan, chronicle = self._plan, self.scene.chronicle
        victim = self._crew.members[plan.victim]
        victim.kill()
        await victim.stop()
        killed_at_s = time.time()
        self._books.note_killed(plan.victim)
        self.scene.replicas[plan.victim].change(ReplicaState.KILLED, killed_at_s)
        self._look()  # its last words
        survivor = chronicle.find_survivor(plan.victim)
        if survivor is not None:
            chronicle.begin(survivor, victim=plan.victim, killed_at_s=killed_at_s)
        self._say(f"{plan.victim} was killed with -9; {plan.successor} starts")
        self.scene.add_replica(plan.successor, is_late=True)
        self._start_replica(plan.successor)

    def _is_over(self) -> bool:
        """All are answered, and the replica that was to join has joined."""
        return self._books.answered >= self._plan.task_count and self._plan.successor in self.scene.ready

    # --- looking ---

    async def on_output(self, life: Life, lines: bytes, *, descriptor: int) -> None:
        try:
            with (self._logs / f"{life.name}.log").open("ab") as file:
                file.write(lines)
        except OSError as error:
            self._failure = error
        self._news += read_events(life.name, lines)

    def on_end(self, member: Member, ending: Ending) -> None:
        """No process of the demo ends by itself: the next look raises DemoFailed."""
        log = self._logs / f"{member.name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        words = [redacted(line) for line in lines[-LAST_WORDS:]] or ["(nothing)"]
        text = "\n  ".join([f"{member.name} ended before its time. Its last words:", *words])
        self._failure = self._failure or DemoFailed(text)

    def _say(self, text: str) -> None:
        self.scene.now_s = time.time()
        self._display.say(self.scene, text)

    def _look(self) -> None:
        """Take in what happened and show it. Raises DemoFailed if a process is gone that should be there."""
        if self._failure is not None:
            raise self._failure
        scene, books = self.scene, self._books
        events, self._news = sorted(self._news, key=lambda event: event.at_s), []
        for event in events:
            scene.note(event)
        scene.asked, scene.answered, scene.now_s = books.asked, books.answered, time.time()
        self._weigh()
        self._display.show(scene)
        if any(event.name == "worker_started" and event.who == self._plan.successor for event in events):
            self._say(f"{self._plan.successor} joined")

    def _weigh(self) -> None:
        if time.monotonic() - self._weighed_s < RSS_EVERY_S or not self.scene.starts.get("replicas"):
            return
        self._weighed_s = time.monotonic()
        pids = {name: self._crew.members[name].pid for name in self.scene.replicas if name in self._crew.members}
        found = find_rss({name: pid for name, pid in pids.items() if pid is not None})
        for name, replica in self.scene.replicas.items():
            replica.rss = found.get(name)

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


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end; what it raised was seen, or is not wanted any more."""
    task.cancel()
    await asyncio.wait([task])


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Broker]:
    """The asker's connection. Raises DemoFailed with the fix if no broker answers there."""
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


def find_rss(pids: Mapping[str, int]) -> dict[str, int]:
    """Bytes in RAM of each process that is there: from /proc where there is one, from `ps` elsewhere."""
    found: dict[str, int] = {}
    if Path("/proc/self/statm").exists():
        for name, pid in pids.items():
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, IndexError):  # it has ended, a moment ago or while we looked
                continue
            found[name] = pages * os.sysconf("SC_PAGE_SIZE")
        return found
    command = ["ps", "-o", "pid=,rss=", "-p", ",".join(map(str, pids.values()))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PS_TIMEOUT_S, check=False)  # noqa: S603 - our own pids
    except (OSError, subprocess.TimeoutExpired):  # no `ps` either: the column stays empty
        return {}
    kibibytes = {int(pid): int(rss) for pid, rss in (line.split() for line in done.stdout.splitlines())}
    return {name: kibibytes[pid] * 1024 for name, pid in pids.items() if pid in kibibytes}
