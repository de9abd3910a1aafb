"""`coatcheck worker --processes N`: a small process that keeps N replicas of a service running.

The command has loaded the App and found its settings good; then it becomes this one by `exec`, so that the user's code,
its memory and its threads are in the replicas only. The first replica goes ahead: whatever keeps it from starting is
said once, by it, and ends us with its exit code, as if it ran alone. The others follow together.

SIGTERM, SIGINT: all drain, 0 if all did so in good order. A second one: all are killed, 128 + its number.
A replica dies: it is started again, after a pause that grows to ten seconds.
None is left, and one does not start three times in a row: that is an error, for whoever started us to deal with.
We die, however: the replicas end with us.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal, NoReturn

import msgspec
from prometheus_client import CollectorRegistry

from coatcheck.cli.meters import Merged, Meter, merge, read_meters, without_gauges
from coatcheck.cli.replicas import ADDRESSES, End, Replica, Surroundings
from coatcheck.log import get_logger
from coatcheck.worker.health import HealthServer
from coatcheck.worker.log_streams import flush
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.settings import LogFormat, LogLevel

log = get_logger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
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


def become_supervisor(plan: Plan) -> NoReturn:
    """Replace this process by one that has loaded nothing of the user's. What it should do travels through a pipe."""
    reading, writing = os.pipe()
    os.write(writing, msgspec.json.encode(plan))  # far less than a pipe holds
    os.close(writing)
    os.set_inheritable(reading, True)
    sys.stdout.flush()
    sys.stderr.flush()
    flush()  # the thread that writes log lines ends with this program
    command = [sys.executable, "-P", "-m", "coatcheck.cli.supervising", str(reading), plan.reference]
    os.execv(sys.executable, command)  # noqa: S606 -- no shell is wanted


class Supervisor:
    """Runs the replicas of a plan, and tells how they are."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._exit_code = 0
        self._has_begun = False
        """The first replica has started: from here on it is a service, not an attempt."""
        self._is_signalled = False
        self._stopping = asyncio.Event()
        self._own = Metrics()
        self._departed: list[Meter] = []
        """What replicas had counted that are no more."""
        lifeline, self._our_end = os.pipe()
        surroundings = Surroundings(
            environ=make_environ(plan),
            lifeline=lifeline,
            patience_s=plan.patience_s,
            on_end=self._on_end,
            on_report=self._keep_counts,
        )
        name = plan.name or f"{socket.gethostname()}-{os.getpid()}"
        self._replicas = [
            Replica(f"{name}-{number}", make_arguments(plan, f"{name}-{number}", is_first=number == 1), surroundings)
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
            log.info("supervisor_started", process_count=len(self._replicas), pid=os.getpid())
            await self._keep_all()
        if not self._exit_code and not all(replica.is_clean for replica in self._replicas):
            self._exit_code = 1
        log.info("supervisor_stopped", exit_code=self._exit_code)
        return self._exit_code

    async def _keep_all(self) -> None:
        first, *others = self._replicas
        async with asyncio.TaskGroup() as group:
            group.create_task(first.keep())
            await _either(first.started, self._stopping)
            self._has_begun = first.started.is_set()
            if not self._stopping.is_set():
                for replica in others:
                    group.create_task(replica.keep())
            await self._stopping.wait()
            for replica in self._replicas:
                replica.stop()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._is_signalled:
            log.warning("exited_at_once", signal=number.name)
            for replica in self._replicas:
                replica.kill()
            flush()
            os._exit(128 + number)
        log.info("stop_requested", signal=number.name)
        self._is_signalled = True
        self._stopping.set()

    # --- replicas that end by themselves ---

    def _on_end(self, replica: Replica, end: End) -> None:
        """Give up, or let it start again."""
        if not self._has_begun and end.code > 0 and not end.has_started:
            self._give_up(f"{replica.name} could not start and has said why", exit_code=end.code)
        elif end.is_hopeless and not any(each.started.is_set() for each in self._replicas):
            self._give_up(f"no replica runs, and {replica.name} does not start", exit_code=1)
        else:
            self._own.restarts.inc()

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
            live=lambda: {"supervisor": True} | self._named("live"),
            ready=lambda: self._named("ready"),
            registry=registry,
            refresh=self._refresh,
        )

    async def _refresh(self) -> None:
        await asyncio.gather(*(replica.refresh() for replica in self._replicas))

    def _named(self, checks: Literal["live", "ready"]) -> dict[str, bool]:
        """The checks of all replicas: `shop-1.broker`, `shop-2.broker`."""
        return {
            f"{replica.name}.{name}": value
            for replica in self._replicas
            for name, value in (replica.live if checks == "live" else replica.ready).items()
        }

    def _meters(self) -> Iterator[Meter]:
        yield from read_meters(self._own.registry)
        yield from self._departed
        for replica in self._replicas:
            yield from replica.meters

    def _keep_counts(self, meters: list[Meter]) -> None:
        self._departed = merge([*self._departed, *without_gauges(meters)])


def make_arguments(plan: Plan, name: str, *, is_first: bool) -> tuple[str, ...]:
    """The command line of a replica. The schema is migrated by the first, before the others start."""
    migrates = ("--migrate",) if plan.migrates and is_first else ()
    return ("worker", plan.reference, *plan.arguments, *migrates, "--name", name)


def make_environ(plan: Plan) -> dict[str, str]:
    """Ours, and what a pipe hides from replicas: whether their output ends on a terminal."""
    unbuffered = {"PYTHONUNBUFFERED": "1"} if sys.stdout.isatty() else {}
    addresses = {ADDRESSES: msgspec.json.encode(plan.addresses).decode()} if plan.addresses else {}
    return {**os.environ, **unbuffered, **addresses, "COATCHECK_LOG_FORMAT": plan.log_format}


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()
