"""`coatcheck worker --processes N`: a small process that keeps N replicas of a service running.

    python -P -m coatcheck.cli.processes.supervisor PLAN module:app

PLAN is a pipe to read what it should do from; the rest is for people who list the processes. The command has loaded the
App and found its settings good; then it becomes this one by `exec`, so that the user's code, its memory and its threads
are in the replicas only. The first replica goes ahead: what keeps it from starting is said once, by it, and ends us
with its exit code, as if it ran alone. The others follow together.

SIGTERM, SIGINT: all drain, 0 if all did so in good order. A second one: all are killed, 128 + its number.
A replica dies: it is started again, after a pause that grows to ten seconds.
None is left, and one does not start three times in a row: that is an error, and our own supervisor has to act.
We die, however: the replicas end with us.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click
import msgspec
import structlog
from prometheus_client import CollectorRegistry

from coatcheck.cli.processes.child import ADDRESSES
from coatcheck.cli.processes.crew import LONGEST_PAUSE_S, Crew, Ending, Life, Member, Watcher
from coatcheck.cli.processes.reports import Merged, Meter, SupervisorEnd, merge, read_meters, without_gauges
from coatcheck.errors import InvalidSettings
from coatcheck.log import get_logger
from coatcheck.worker.health import HealthServer
from coatcheck.worker.log_streams import LineStream, flush, line_stream
from coatcheck.worker.logs import configure
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.redaction import clean, redacted
from coatcheck.worker.settings import LogFormat, LogLevel

log = get_logger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
ANSWER_S = 2.0
"""How long a replica may take to say how it is, before it counts as one that does not answer."""
LOOK_AGAIN_S = 0.1
LAST_WORDS_S = 5.0
"""Longer than in a crew whose output is taken at once: our own reader may be slow."""
ROOM_PATIENCE_S = 1.0
ROOM_LOOK_S = 0.01
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """What was asked for: the service, what its replicas are run with, and what they are told by us."""

    service: str
    reference: str
    arguments: tuple[str, ...]
    migrates: bool
    process_count: int
    name: str | None
    patience_s: float
    health_host: str
    health_port: int | None
    log_format: LogFormat
    log_level: LogLevel
    addresses: tuple[str, ...] = ()
    """Options that may have passwords in them. They do not become arguments, which all users can list."""


def become_supervisor(plan: ReplicaPlan) -> NoReturn:
    """Replace this process by one that has loaded nothing of the user's. What it should do travels through a pipe."""
    reading, writing = os.pipe()
    os.write(writing, msgspec.json.encode(plan))  # far less than a pipe holds
    os.close(writing)
    os.set_inheritable(reading, True)
    sys.stdout.flush()
    sys.stderr.flush()
    flush()  # the thread that writes log lines ends with this program
    command = [sys.executable, "-P", "-m", "coatcheck.cli.processes.supervisor", str(reading), plan.reference]
    os.execv(sys.executable, command)  # noqa: S606 -- no shell is wanted


class ReplicaSupervisor(Watcher):
    """Runs the replicas of a plan, and tells how they are."""

    def __init__(self, plan: ReplicaPlan) -> None:
        self._plan = plan
        self._exit_code = 0
        self._has_begun = asyncio.Event()
        """The first replica has started: from here on it is a service, not an attempt."""
        self._is_signalled = False
        self._stopping = asyncio.Event()
        self._own = Metrics()
        self._departed: list[Meter] = []
        """What replicas had counted that are no more."""
        self._links: dict[str, SupervisorEnd] = {}
        """Of the replicas that run, once they have reported."""
        self._crew = Crew(
            self,
            environ=make_environ(plan),
            patience_s=plan.patience_s,
            last_words_s=LAST_WORDS_S,
            has_links=True,
            merges_output=False,
        )
        name = plan.name or f"{socket.gethostname()}-{os.getpid()}"
        self.replicas = [
            self._crew.add(f"{name}-{number}", *make_arguments(plan, f"{name}-{number}", is_first=number == 1))
            for number in range(1, plan.process_count + 1)
        ]

    async def run(self) -> int:
        """Run until a signal, or until there is no hope; return the exit code. Raises InvalidSettings."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        async with AsyncExitStack() as stack:
            if self._plan.health_port is not None:
                await stack.enter_async_context(self._make_health_server(self._plan.health_port))
            log.info("supervisor_started", process_count=len(self.replicas), pid=os.getpid())
            await self._keep_all()
        if not self._exit_code and not all(replica.is_clean for replica in self.replicas):
            self._exit_code = 1
        log.info("supervisor_stopped", exit_code=self._exit_code)
        return self._exit_code

    async def _keep_all(self) -> None:
        first, *others = self.replicas
        async with self._crew:
            self._crew.start(first)
            await _either(self._has_begun, self._stopping)
            if not self._stopping.is_set():
                self._crew.start(*others)
            await self._stopping.wait()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._is_signalled:
            log.warning("exited_at_once", signal=number.name)
            self._crew.kill()
            flush()
            os._exit(128 + number)
        log.info("stop_requested", signal=number.name)
        self._is_signalled = True
        self._stopping.set()

    # --- what the replicas do ---

    async def on_output(self, life: Life, lines: bytes, *, descriptor: int) -> None:
        await put_lines(line_stream(descriptor), lines)

    async def follow(self, life: Life) -> None:
        """Take in a replica's reports; keep what it had counted when it was last heard of."""
        assert life.link is not None
        starting = asyncio.ensure_future(self._await_start(life, life.link))
        try:
            await life.link.listen()
        finally:
            starting.cancel()
            self._links.pop(life.name, None)
            if life.link.latest is not None:
                self._departed = merge([*self._departed, *without_gauges(life.link.latest.meters)])

    async def _await_start(self, life: Life, link: SupervisorEnd) -> None:
        while link.latest is None or not link.latest.ready.get("started"):
            await asyncio.sleep(LOOK_AGAIN_S)
            await link.ask(ANSWER_S)
            if link.latest is not None:
                self._links[life.name] = link
        life.note_started()
        self._has_begun.set()
        log.info("replica_started", replica=life.name, pid=life.process.pid)

    def on_killed(self, member: Member, waited_s: float) -> None:
        log.error("replica_killed", replica=member.name, waited_s=waited_s)

    def on_end(self, member: Member, ending: Ending) -> float:
        """Give up, or let it start again."""
        pause_s = LONGEST_PAUSE_S if ending.pause_s is None else ending.pause_s
        how = describe(ending.code)
        log.warning("replica_ended", replica=member.name, **how, has_started=ending.has_started, pause_s=pause_s)
        if not self._has_begun.is_set() and ending.code > 0 and not ending.has_started:
            self._give_up(f"{member.name} could not start and has said why", exit_code=ending.code)
        elif ending.pause_s is None and not any(each.has_started for each in self.replicas):
            self._give_up(f"no replica runs, and {member.name} does not start", exit_code=1)
        else:
            self._own.restarts.inc()
        return pause_s

    def _give_up(self, why: str, *, exit_code: int) -> None:
        log.error("supervisor_gave_up", why=why)
        self._exit_code = exit_code
        self._stopping.set()

    # --- how they are ---

    def _make_health_server(self, port: int) -> HealthServer:
        registry = CollectorRegistry()
        registry.register(Merged(self._meters))
        return HealthServer(
            *(port, self._plan.health_host),
            live=lambda: {"supervisor": True} | self._live(),
            ready=self._ready,
            registry=registry,
            refresh=self._refresh,
        )

    async def _refresh(self) -> None:
        await asyncio.gather(*(link.ask(ANSWER_S) for link in self._links.values()))

    def _live(self) -> dict[str, bool]:
        """A replica that is being started, for the first time or again, is no reason to restart us all."""
        return {f"{name}.answers": self._links[name].is_answering for name in self._names() if name in self._links}

    def _ready(self) -> dict[str, bool]:
        """The checks of all replicas: `shop-1.broker`, `shop-2.broker`."""
        return {f"{name}.{check}": is_so for name in self._names() for check, is_so in self._checks(name).items()}

    def _checks(self, name: str) -> dict[str, bool]:
        link = self._links.get(name)
        if link is None or link.latest is None:
            return {"started": False}
        return {"answers": link.is_answering} | link.latest.ready

    def _names(self) -> list[str]:
        return [replica.name for replica in self.replicas]

    def _meters(self) -> Iterator[Meter]:
        yield from read_meters(self._own.registry)
        yield from self._departed
        for link in self._links.values():
            yield from link.latest.meters if link.latest is not None else ()


def describe(code: int) -> dict[str, object]:
    """How a replica ended, for its log line."""
    if code >= 0:
        return {"exit_code": code}
    known = {it.value: it.name for it in signal.Signals}
    return {"signal": known.get(-code, str(-code))}


def make_arguments(plan: ReplicaPlan, name: str, *, is_first: bool) -> tuple[str, ...]:
    """The command line of a replica. The schema is migrated by the first, before the others start."""
    migrates = ("--migrate",) if plan.migrates and is_first else ()
    return ("worker", plan.reference, *plan.arguments, *migrates, "--name", name)


def make_environ(plan: ReplicaPlan) -> dict[str, str]:
    """Ours, and what a pipe hides from replicas: whether their output ends on a terminal."""
    unbuffered = {"PYTHONUNBUFFERED": "1"} if sys.stdout.isatty() else {}
    addresses = {ADDRESSES: msgspec.json.encode(plan.addresses).decode()} if plan.addresses else {}
    return {**os.environ, **unbuffered, **addresses, "COATCHECK_LOG_FORMAT": plan.log_format}


async def put_lines(stream: LineStream, lines: bytes) -> None:
    """Pass on what a replica printed, so that lines of different replicas do not mix.

    A slow reader slows the replicas down a little. One that has left or does not read is no reason to stop working:
    what it does not take in time is lost and counted (`log_streams.py`).
    """
    deadline_s = time.monotonic() + ROOM_PATIENCE_S
    while stream.is_filling and time.monotonic() < deadline_s:  # noqa: ASYNC110 - a thread makes the room
        await asyncio.sleep(ROOM_LOOK_S)
    stream.put(lines)


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


# --- how many replicas a machine can run ---


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """The cores we may use, at least 1: those we are bound to, or fewer if a container's limit is lower."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _find_limit(cgroups)
    return max(1, bound if limit is None else min(bound, math.ceil(limit)))


def _find_limit(cgroups: Path) -> float | None:
    """CPU time per time, as a container sees it: cgroup version 2, then 1."""
    second = _read(cgroups / "cpu.max")
    first = _read(cgroups / "cpu/cpu.cfs_quota_us") + _read(cgroups / "cpu/cpu.cfs_period_us")
    for found in (second, first):
        match [int(word) for word in found if word.isdecimal()]:  # no limit is `max`, or -1
            case [quota, period] if period:
                return quota / period
            case _:
                continue
    return None


def _read(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []


def _run(plan: ReplicaPlan) -> int:
    configure(plan.log_format, plan.log_level)
    try:
        with structlog.contextvars.bound_contextvars(service=plan.service):
            return asyncio.run(ReplicaSupervisor(plan).run())
    except InvalidSettings as error:
        click.echo(f"Error: {clean(redacted(str(error)))}", err=True)
        return 1


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "rb") as asked:
        plan = msgspec.json.decode(asked.read(), type=ReplicaPlan)
    sys.exit(_run(plan))
