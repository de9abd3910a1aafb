"""`coatcheck dev`: everything a service needs, on this machine, with the code as it is now."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import click
from rich.text import Text

from coatcheck.broker import connect
from coatcheck.cli.dev_screen import STARTED, Screen, make_banner, read_line
from coatcheck.cli.dev_sources import Broken, Offer, find_root, look, no_watcher, probe, watch
from coatcheck.cli.options import CONNECT_BUDGET, connections, load_settings
from coatcheck.cli.processes.crew import Crew, Ending, Life, Member, Watcher, describe_end
from coatcheck.embedded import find_directory, is_running, join
from coatcheck.errors import StoreUnavailable
from coatcheck.store.front import Store
from coatcheck.store.migrate import migrate
from coatcheck.store.rows import TaskState
from coatcheck.worker.log_streams import flush
from coatcheck.worker.servers import HOME, settle
from coatcheck.worker.settings import EMBEDDED_STORE, Checkpointing, LogLevel, Settings, is_embedded
from coatcheck.worker.worker import check_schema

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KILLED = 130
GRACE = timedelta(seconds=3)
"""A developer waits for every reload: what has not ended by then is cut short, and runs again."""
MOST_COUNTED = 1_000
SWEEPER = "sweeper"
ALONE = ("--processes", "1")
"""The replicas are ours to look after, also if the environment or an App asks for processes."""
KILL_SLACK_S = 4.0
"""What a process may need beyond its grace time to write its last acks and leave."""


@dataclass(frozen=True, slots=True)
class DevPlan:
    """What was asked for on the command line."""

    references: tuple[str, ...]
    replica_count: int
    reloads: bool
    watched: tuple[Path, ...]
    migrates: bool


@click.command(short_help="Run services while you write them.")
@click.argument("references", nargs=-1, required=True, metavar="MODULE:APP…")
@click.option(
    "--replicas", type=click.IntRange(1, 100), default=2, show_default=True, metavar="N", help="Workers of each App."
)
@click.option("--no-reload", is_flag=True, help="Do not restart the workers when the code changes.")
@click.option(
    "--watch",
    "watched",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Reload when a .py file changes there, too; may be repeated.",
)
@click.option(
    "--log-level",
    type=click.Choice([str(each) for each in LogLevel]),
    help="Lowest level that is shown; debug shows every fact of every line.  [env: COATCHECK_LOG_LEVEL, default: info]",
)
@click.option("--migrate", "migrates", is_flag=True, help="Bring the schema of a Postgres that you named up to date.")
@connections
def dev(
    *,
    references: tuple[str, ...],
    replicas: int,
    no_reload: bool,
    watched: tuple[Path, ...],
    log_level: str | None,
    migrates: bool,
    broker: str | None,
    store: str | None,
) -> None:
    """Run services while you write them: workers, a sweeper, and a Postgres in .coatcheck/ unless you name your own.

    When a .py file changes the workers are replaced, one after the other; tasks that wait go on with the new code. If
    it cannot be imported, the traceback is shown and the old workers stay. A worker that dies is started again. In
    another terminal `coatcheck submit`, `ps` and the others find what runs here. Ctrl-C stops everything, a second one
    at once.

    \b
    Example:
      coatcheck dev shop.service:app shop.prices:app --replicas 3
    """
    settings = load_settings(broker=broker, store=store, log_level=log_level)
    if not os.environ.get("COATCHECK_GRACE"):
        settings = replace(settings, grace=GRACE)
    plan = DevPlan(references, replicas, not no_reload, watched, migrates)
    screen = Screen.on_stdout(level=settings.log_level)
    environ = make_environ(settings, broker=broker, store=store)
    asyncio.run(Loop(plan, settings, screen, environ=environ).run())


def make_environ(settings: Settings, *, broker: str | None, store: str | None) -> dict[str, str]:
    """What the workers run with: the caller's environment, and logs that can be read here."""
    ours = {
        "COATCHECK_LOG_FORMAT": "json",
        # `info` at least: it tells us when they have started. What is shown is decided here.
        "COATCHECK_LOG_LEVEL": "debug" if settings.log_level is LogLevel.DEBUG else "info",
        "COATCHECK_GRACE": f"{settings.grace.total_seconds():g}",
        "COATCHECK_LOG_TRACEBACKS": os.environ.get("COATCHECK_LOG_TRACEBACKS") or "true",
        "PYTHONUNBUFFERED": "1",
    }
    if settings.health_port is not None:
        ours["COATCHECK_HEALTH_PORT"] = "0"  # several cannot have the same
    named = {"COATCHECK_BROKER": broker, "COATCHECK_STORE": store}
    return {**os.environ, **ours, **{name: value for name, value in named.items() if value}}


class Loop:
    """The development loop, from the first import to the end of the last process."""

    def __init__(self, plan: DevPlan, settings: Settings, screen: Screen, *, environ: Mapping[str, str]) -> None:
        self._plan = plan
        self._settings = self._settled = settings
        self._screen = screen
        self._environ = environ
        self._crew: DevCrew | None = None
        self._signal_count = 0

    async def run(self) -> None:
        """Run until a signal. Raises CoatcheckError or click.ClickException if it cannot start or go on."""
        working = asyncio.ensure_future(self._work())
        loop = asyncio.get_running_loop()
        self._screen.on_deaf = partial(loop.call_soon_threadsafe, working.cancel)
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, working)
        try:
            await working
        except asyncio.CancelledError:
            if not self._signal_count and not self._screen.is_deaf:
                raise
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
        if self._screen.is_deaf:
            raise BrokenPipeError

    def _on_signal(self, working: asyncio.Future[None]) -> None:
        self._signal_count += 1
        if self._signal_count > 1:
            self._screen.say("killed; nothing is lost")
            if self._crew is not None:
                self._crew.kill()
            flush()
            os._exit(KILLED)
        self._screen.say("stopping; Ctrl-C again kills")
        working.cancel()

    async def _work(self) -> None:
        roots = self._find_roots()
        async with AsyncExitStack() as stack:
            changes = watch(roots, since=await asyncio.to_thread(look, roots))
            await stack.enter_async_context(aclosing(changes))
            offers = await self._first_offers(changes)
            is_first = await asyncio.to_thread(self._is_first)
            store = await self._open_store(stack)
            present = await self._declare(offers)
            await self._introduce(offers, roots)
            if present and not is_first:
                self._screen.say(describe_present(present), style="bold yellow")
            self._crew = await stack.enter_async_context(
                DevCrew(
                    offers,
                    self._settings,
                    replica_count=self._plan.replica_count,
                    environ=self._environ,
                    screen=self._screen,
                )
            )
            if not self._plan.reloads:
                await self._crew.lost()
                raise click.ClickException("no worker is left; what they said is above")
            async for changed in changes:
                await self._reload(self._crew, store, changed)

    def _find_roots(self) -> list[Path]:
        """The directories to watch; none with --no-reload."""
        if not self._plan.reloads:
            return []
        if importlib.util.find_spec("watchfiles") is None:
            raise no_watcher()
        found = [find_root(reference, Path.cwd()) for reference in self._plan.references]
        return sorted({root for root in found if root is not None} | {each.resolve() for each in self._plan.watched})

    # --- the code ---

    async def _first_offers(self, changes: AsyncIterator[list[Path]]) -> list[Offer]:
        """What the Apps offer; code that raises is waited for until its author mends it."""
        while True:
            offers, broken = await self._probe()
            if not broken:
                _check_services(offers)
                return offers
            is_wrong_usage = any(each.is_wrong_usage for each in broken)
            if is_wrong_usage or not self._plan.reloads:
                click.echo("\n".join(_texts(broken)), err=True)
                raise click.exceptions.Exit(2 if is_wrong_usage else 1)
            self._show(broken)
            self._screen.say("nothing runs yet; it starts when the code is mended")
            await anext(changes)

    async def _probe(self) -> tuple[list[Offer], list[Broken]]:
        found = await asyncio.gather(*(probe(each, environ=self._environ) for each in self._plan.references))
        return [it for it in found if isinstance(it, Offer)], [it for it in found if isinstance(it, Broken)]

    def _show(self, broken: Sequence[Broken]) -> None:
        for text in _texts(broken):
            self._screen.say(text, style="red")

    async def _reload(self, crew: DevCrew, store: Store | None, changed: Sequence[Path]) -> None:
        began_s = time.monotonic()
        offers, broken = await self._probe()
        what = describe_changes(changed)
        if broken:
            self._show(broken)
            self._screen.say(f"{what} changed, but cannot be imported; the old code goes on", style="bold yellow")
            return
        count = await _count_waiting(store, offers)
        self._screen.say(f"{what} changed" + describe_waiting(count))
        if await crew.renew():
            self._screen.say(f"the new code runs, {time.monotonic() - began_s:.1f} s later")
        else:
            self._screen.say("the new code does not start; what is left of the old goes on", style="bold yellow")

    # --- the servers ---

    async def _open_store(self, stack: AsyncExitStack) -> Store | None:
        """Bring up the server we run ourselves, or see that the one that was named is fit for use."""
        if self._settings.store == EMBEDDED_STORE and find_directory() is None:
            self._screen.print(Text(f"making {HOME}/ …", style="dim"))
        self._settled = await settle(self._settings, makes=True)
        if self._settings.checkpointing is Checkpointing.OFF:
            return None
        if self._plan.migrates:
            await migrate(self._settled.store)
        store = Store(self._settled.store, pool_size=1)
        stack.push_async_callback(store.close)
        check_schema(await store.ping(), store.place)
        return store

    def _is_first(self) -> bool:
        """Whether the server is one of our own that does not run yet: then no other worker can be there."""
        directory = _find_embedded(self._settings.store) if is_embedded(self._settings.store) else None
        return directory is not None and not is_running(directory)

    async def _declare(self, offers: Sequence[Offer]) -> dict[str, int]:
        """Make all queues before any worker runs: one that is ready first may call another at once. Return how many
        workers the services have already.
        """
        async with connect(self._settled.broker, connect_budget=CONNECT_BUDGET) as broker:
            if self._settled.declare:
                for offer in offers:
                    await broker.declare_service(offer.service)
            counts = {offer.service: await broker.consumer_count(offer.service) or 0 for offer in offers}
        return {service: count for service, count in counts.items() if count}

    async def _introduce(self, offers: Sequence[Offer], roots: Sequence[Path]) -> None:
        embedded = None
        if is_embedded(self._settings.store) and not is_embedded(self._settled.store):
            embedded = await asyncio.to_thread(_look_at_embedded, self._settings.store)
        banner = make_banner(
            offers, self._settled, replica_count=self._plan.replica_count, roots=roots, embedded=embedded
        )
        self._screen.print(*banner)


class DevCrew(Watcher):
    """Replicas of each App and a sweeper, kept running, renewed when the code changes.

    `async with DevCrew(…) as crew: …`; leaving stops them: replicas first, then the sweeper.
    """

    def __init__(
        self,
        offers: Sequence[Offer],
        settings: Settings,
        *,
        replica_count: int,
        environ: Mapping[str, str],
        screen: Screen,
    ) -> None:
        self._screen = screen
        self._crew = Crew(self, environ=environ, patience_s=settings.grace.total_seconds() + KILL_SLACK_S)
        self._replicas = [
            [
                self._crew.add(name, "worker", offer.reference, *ALONE, "--name", name)
                for name in names_of(offer.service, replica_count, is_alone=len(offers) == 1)
            ]
            for offer in offers
        ]
        self._sweeper: Member | None = None
        if settings.checkpointing is not Checkpointing.OFF:
            self._sweeper = self._crew.add(SWEEPER, "sweeper", "--name", SWEEPER)
        screen.add(*self._crew.members)

    async def __aenter__(self) -> Self:
        self._leaving = AsyncExitStack()
        await self._leaving.enter_async_context(self._crew)
        self._leaving.push_async_callback(self._crew.stop, *chain(*self._replicas))
        self._crew.start(*self._crew.members.values())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leaving.__aexit__(kind, error, trace)

    async def lost(self) -> None:
        """Return when not one replica is left and none will start by itself."""
        await asyncio.gather(*(member.given_up.wait() for member in chain(*self._replicas)))

    async def renew(self) -> bool:
        """Replace the replicas of each App one after the other, so that there is always one; tell whether all have
        started. An App whose first one does not start keeps the others as they are. The sweeper runs no code of the
        user's, so it is only started if it was given up.
        """
        groups = [*self._replicas]
        if self._sweeper is not None and self._sweeper.given_up.is_set():
            groups.append([self._sweeper])
        return all(await asyncio.gather(*(self._crew.renew(*members) for members in groups)))

    def kill(self) -> None:
        self._crew.kill()

    async def on_output(self, life: Life, lines: bytes, *, descriptor: int) -> None:
        for line in lines.removesuffix(b"\n").split(b"\n"):
            said = read_line(line)
            if said.event in STARTED:
                life.note_started()
            self._screen.show(life.name, said)

    def on_end(self, member: Member, ending: Ending) -> float | None:
        what = f"{member.name} (pid {ending.pid}) {describe_end(ending.code)}"
        if ending.pause_s is None:
            series = f"before it had started, {ending.false_start_count} times in a row"
            self._screen.say(f"{what} {series}; it is left alone until the code changes", style="bold red")
        else:
            self._screen.say(f"{what}; it starts again in {ending.pause_s:g} s", style="bold yellow")
        return ending.pause_s

    def on_killed(self, member: Member, waited_s: float) -> None:
        self._screen.say(f"{member.name} did not stop within {waited_s:g} s and is killed")


def names_of(service: str, count: int, *, is_alone: bool) -> list[str]:
    """What the replicas are called: w1, w2…, or by their service where there are several."""
    return [f"w{number}" if is_alone else f"{service}-{number}" for number in range(1, count + 1)]


def describe_changes(changed: Sequence[Path]) -> str:
    """`service.py`, or `service.py and 2 more`."""
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{changed[0].name}{more}"


def describe_waiting(count: int) -> str:
    if not count:
        return ""
    number = f"{count} or more" if count >= MOST_COUNTED else str(count)
    return f"; {number} task waits and goes on with it" if count == 1 else f"; {number} tasks wait and go on with it"


def describe_present(present: Mapping[str, int]) -> str:
    """Say whose company we are in: `shop has 2 workers already; …`."""
    found = ", ".join(f"{service} has {count} worker{'s' if count > 1 else ''}" for service, count in present.items())
    return f"{found} already, of another `coatcheck dev` or elsewhere: they take tasks, too, and run the code they have"


def _texts(broken: Sequence[Broken]) -> list[str]:
    """What is wrong; Apps of one module have the same complaint."""
    return list(dict.fromkeys(each.text for each in broken))


def _check_services(offers: Sequence[Offer]) -> None:
    """Replicas of two Apps under one name would take each other's tasks. Raises click.UsageError."""
    seen: dict[str, str] = {}
    for offer in offers:
        if other := seen.get(offer.service):
            raise click.UsageError(f"{other} and {offer.reference} are both called {offer.service!r}; rename one")
        seen[offer.service] = offer.reference


async def _count_waiting(store: Store | None, offers: Sequence[Offer]) -> int:
    if store is None:
        return 0
    try:
        found = [
            await store.summarise_tasks(service=offer.service, states=[TaskState.PARKED], limit=MOST_COUNTED)
            for offer in offers
        ]
    except StoreUnavailable:
        return 0  # a pity for the sentence, no reason to stop
    return sum(map(len, found))


def _look_at_embedded(store: str) -> tuple[Path, str]:
    """Where the server that `settle` has started keeps its data, and its address for other programs."""
    with join(_find_embedded(store)) as server:
        return server.directory, server.tcp_url


def _find_embedded(store: str) -> Path:
    return Path(urlsplit(store).path or find_directory() or HOME)
