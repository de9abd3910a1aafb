"""`coatcheck worker` and `coatcheck sweeper`: a process that runs until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from uuid import UUID

import click
import structlog

from coatcheck.cli.apps import load_app
from coatcheck.cli.options import connections, find_shown_passwords, load_settings
from coatcheck.cli.processes.reports import ReplicaEnd, Report, read_meters
from coatcheck.cli.processes.supervisor import ReplicaPlan, become_supervisor, usable_cores
from coatcheck.errors import InvalidSettings
from coatcheck.log import get_logger
from coatcheck.points import arm_from_environment
from coatcheck.store import migrate
from coatcheck.store.opening import is_in_memory
from coatcheck.store.rows import TaskId
from coatcheck.worker.log_streams import flush
from coatcheck.worker.logs import configure, default_format
from coatcheck.worker.loop_watchdog import LoopWatch
from coatcheck.worker.servers import settle
from coatcheck.worker.settings import Checkpointing, EventLoop, Settings, redacted
from coatcheck.worker.sweeper import Sweeper
from coatcheck.worker.worker import Worker

log = get_logger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
DRAIN_SLACK_S = 10.0
"""What a draining worker may need beyond its grace time to write the last acks and close its connections."""
SWEEPER_PATIENCE_S = 5.0
"""A sweeper has little to drain: the round it is in."""
KILL_SLACK_S = 5.0
"""What a supervisor gives a replica beyond the time after which it cuts itself off."""

health_port_option = click.option(
    "--health-port",
    type=click.IntRange(0, 65_535),
    metavar="PORT",
    help="Serve /livez, /readyz and /metrics there; 0 picks a free port.  [env: COATCHECK_HEALTH_PORT]",
)
name_option = click.option("--name", help="What logs call this process.  [default: host and process id]")


@click.command(short_help="Run one replica of a service.")
@click.argument("app_reference", metavar="MODULE:APP")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 65_535),
    metavar="N",
    help="Handlers that run at once; waiting tasks do not count.  [env: COATCHECK_CONCURRENCY, default: 100]",
)
@click.option(
    "--processes",
    metavar="N",
    help="Replicas to run, each a process, under one supervisor; auto: one per core.  "
    "[env: COATCHECK_PROCESSES, default: 1]",
)
@connections
@health_port_option
@click.option(
    "--checkpointing",
    type=click.Choice([str(each) for each in Checkpointing]),
    help="Waiting tasks need Postgres (required), fall back to RAM while it is away (preferred), or always "
    "stay in RAM (off).  [env: COATCHECK_CHECKPOINTING, default: required]",
)
@click.option("--migrate", "migrates", is_flag=True, help="Bring the database schema up to date first.")
@name_option
@click.pass_obj
def worker(
    link: ReplicaEnd | None,
    *,
    app_reference: str,
    concurrency: int | None,
    processes: str | None,
    broker: str | None,
    store: str | None,
    health_port: int | None,
    checkpointing: str | None,
    migrates: bool,
    name: str | None,
) -> None:
    """Run one replica of a service; start as many as you like.

    MODULE:APP names the App: `research:app` is the variable `app` in research.py, looked for in the current directory
    first. SIGTERM or Ctrl-C drains: it takes nothing new, finishes or puts down what it runs (at most COATCHECK_GRACE,
    30 s), and exits with 0. A second signal exits at once; nothing is lost either way. With --processes, N replicas run
    and stop together, and one that dies is started again.

    \b
    Example:
      coatcheck worker research:app --concurrency 50 --migrate
    """
    app = load_app(app_reference)
    given = {"broker": broker, "store": store, "concurrency": concurrency, "checkpointing": checkpointing}
    settings = _prepare(
        app.load_settings,
        is_supervised=link is not None,
        owns_memory=True,
        processes=processes,
        health_port=health_port,
        **given,
    )
    process_count = settings.processes or usable_cores()
    if link is None and process_count > 1:
        words = {option: (f"--{option}", str(it)) for option, it in given.items() if it is not None}
        addresses = [*words.pop("broker", ()), *words.pop("store", ())]
        become_supervisor(
            ReplicaPlan(
                service=app.service,
                reference=app_reference,
                arguments=tuple(word for pair in words.values() for word in pair),
                addresses=tuple(addresses),
                migrates=migrates,
                process_count=process_count,
                name=name,
                patience_s=settings.grace.total_seconds() + DRAIN_SLACK_S + KILL_SLACK_S,
                health_host=settings.health_host,
                health_port=settings.health_port,
                log_format=settings.log_format or default_format(),
                log_level=settings.log_level,
            )
        )
    _run(partial(_work, Worker(app, settings, name=name), migrates=migrates, link=link), settings.loop)


async def _work(replica: Worker, *, migrates: bool, link: ReplicaEnd | None) -> None:
    """Run a replica until a signal; under a supervisor, answer its questions meanwhile."""
    settings = replica.settings
    async with AsyncExitStack() as stack:
        if link is not None:
            await stack.enter_async_context(link.answering(partial(_report, replica)))
        if migrates and settings.checkpointing is not Checkpointing.OFF:
            store = (await settle(settings, makes=True)).store
            log.info("schema_migrated", version=await migrate(store))
        stack.enter_context(LoopWatch(partial(_handler_of, replica)))
        await run_until_signalled(
            _SweptWorker(replica) if _must_sweep(settings) else replica,
            patience_s=settings.grace.total_seconds() + DRAIN_SLACK_S,
            has_work=lambda: replica.is_ready,
            on_second=exit_at_once if link is None else leave_it_at_that,
        )


@click.command(short_help="Run the process that notices what is overdue.")
@connections
@health_port_option
@name_option
def sweeper(broker: str | None, store: str | None, health_port: int | None, name: str | None) -> None:
    """Run the process that notices what is overdue: timeouts, lost runs, replies that were never sent.

    One is needed, for all services that share a broker and a database; several may run. Without one nothing is lost,
    but silent peers never time out. SIGTERM or Ctrl-C stops it.

    \b
    Example:
      coatcheck sweeper --health-port 8081
    """
    settings = _prepare(broker=broker, store=store, health_port=health_port)
    part = Sweeper(settings, name=name)

    async def work() -> None:
        await run_until_signalled(part, patience_s=SWEEPER_PATIENCE_S, has_work=lambda: part.is_ready)

    _run(work, settings.loop)


def _handler_of(replica: Worker, task_id: UUID) -> str | None:
    live = None if replica.runtime is None else replica.runtime.lives.find(TaskId(task_id))
    return None if live is None else live.handler_name


def _report(replica: Worker) -> Report:
    return Report(replica.ready_checks(), read_meters(replica.metrics.registry))


class Service(Protocol):
    """What can be run and told to stop."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...


def _must_sweep(settings: Settings) -> bool:
    """Whether this process must sweep for itself: no other one can reach queues that live in it."""
    return is_in_memory(settings.broker) and settings.checkpointing is not Checkpointing.OFF


class _SweptWorker:
    """A worker and a sweeper in one process."""

    def __init__(self, replica: Worker) -> None:
        self._replica = replica
        # The worker serves the port of both.
        self._sweeper = Sweeper(replace(replica.settings, health_port=None), name=f"{replica.name}-sweeper")

    async def run(self) -> None:
        log.info("sweeper_in_worker", sweeper=self._sweeper.name, broker=redacted(self._replica.settings.broker))
        async with asyncio.TaskGroup() as group:
            sweeping = group.create_task(self._sweeper.run())
            await self._replica.run()
            if self._sweeper.is_ready:
                self._sweeper.stop()
            else:
                sweeping.cancel()  # it waits for a store that is away

    def stop(self) -> None:
        self._replica.stop()


def exit_at_once(number: signal.Signals) -> None:
    log.warning("exited_at_once", signal=number.name)
    flush()
    os._exit(128 + number)


def leave_it_at_that(number: signal.Signals) -> None:
    """Under a supervisor a second signal means nothing: a service manager may signal all processes, and the supervisor
    passes its own on. It kills if it has to.
    """


async def run_until_signalled(
    part: Service,
    *,
    patience_s: float,
    has_work: Callable[[], bool],
    on_second: Callable[[signal.Signals], None] = exit_at_once,
) -> None:
    """Run a part; the first signal stops it gently, the second ends the process on the spot.

    A part that has no work yet is cut off instead, since it may be waiting for a server that is away. One that is not
    done within `patience_s` is cut off too, and that is an error.
    """
    running: asyncio.Future[None] = asyncio.ensure_future(part.run())
    loop = asyncio.get_running_loop()
    signalled: list[signal.Signals] = []
    is_late = False

    def cut_off() -> None:
        nonlocal is_late
        is_late = True
        running.cancel()

    def on_signal(number: signal.Signals) -> None:
        if signalled:
            on_second(number)
            return
        signalled.append(number)
        log.info("stop_requested", signal=number.name)
        part.stop()
        if has_work():
            loop.call_later(patience_s, cut_off)
        else:
            running.cancel()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await running
    except asyncio.CancelledError:
        if not signalled:
            raise
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
    if is_late:
        raise click.ClickException(f"it did not stop within {patience_s:g} s and was cut off; its tasks are safe")


def _prepare(
    loader: Callable[..., Settings] = Settings.load,
    *,
    is_supervised: bool = False,
    owns_memory: bool = False,
    **options: Any,
) -> Settings:
    """Load the settings, then let logs flow as they say. What the supervisor has said is not said again."""
    ignored: list[str] = []
    settings = load_settings(loader, warn=ignored.append, owns_memory=owns_memory, **options)
    configure(settings.log_format, settings.log_level)
    arm_from_environment()
    if not is_supervised:
        for text in ignored:
            log.warning("setting_ignored", detail=text)
        for text in find_shown_passwords(options):
            log.warning("password_shown", detail=text)
    # Several cannot serve one port: the supervisor does it for all.
    return replace(settings, health_port=None) if is_supervised else settings


def _run(work: Callable[[], Coroutine[Any, Any, None]], loop: EventLoop) -> None:
    settle_in()
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        runner.run(work())


def loop_factory(loop: EventLoop) -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes the loop that was asked for. Raises InvalidSettings if uvloop was, and is not installed."""
    if loop is EventLoop.ASYNCIO:
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError as error:
        if loop is EventLoop.AUTO:
            return asyncio.new_event_loop
        raise InvalidSettings("loop=uvloop: it is not installed; `pip install 'coatcheck[fast]'` brings it") from error
    return uvloop.new_event_loop


def settle_in() -> None:
    """Make a process that runs for long spend less on itself: collecting garbage took a sixth of a busy worker's CPU.

    What was imported stays, so the collector need not look at it. Most runs leave no knots behind; one that fails may,
    with all that its handler held: so it looks when as much has piled up as some hundred runs are made of. From here on
    the logs are not configured again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    structlog.configure(cache_logger_on_first_use=True)
