"""`coatcheck worker` and `coatcheck sweeper`: a process that runs until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import click
import structlog

from coatcheck.cli.apps import load_app
from coatcheck.cli.options import connections, load_settings
from coatcheck.points import arm_from_environment
from coatcheck.store import migrate
from coatcheck.worker.logs import configure
from coatcheck.worker.settings import Checkpointing, Settings
from coatcheck.worker.sweeper import Sweeper
from coatcheck.worker.worker import Worker

log = structlog.get_logger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
DRAIN_SLACK_S = 10.0
"""What a draining worker may need beyond its grace time to write the last acks and close its connections."""
SWEEPER_PATIENCE_S = 5.0
"""A sweeper has little to drain: the round it is in."""

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
def worker(
    *,
    app_reference: str,
    concurrency: int | None,
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
    30 s), and exits with 0. A second signal exits at once; nothing is lost either way.

    \b
    Example:
      coatcheck worker research:app --concurrency 50 --migrate
    """
    app = load_app(app_reference)
    settings = _prepare(
        app.load_settings,
        broker=broker,
        store=store,
        concurrency=concurrency,
        health_port=health_port,
        checkpointing=checkpointing,
    )
    replica = Worker(app, settings, name=name)

    async def work() -> None:
        if migrates and settings.checkpointing is not Checkpointing.OFF:
            log.info("schema_migrated", version=await migrate(settings.store))
        patience_s = settings.grace.total_seconds() + DRAIN_SLACK_S
        await run_until_signalled(replica, patience_s=patience_s, has_work=lambda: replica.is_ready)

    _run(work())


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
    _run(run_until_signalled(part, patience_s=SWEEPER_PATIENCE_S, has_work=lambda: part.is_ready))


class Part(Protocol):
    """What can be run and told to stop."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...


async def run_until_signalled(part: Part, *, patience_s: float, has_work: Callable[[], bool]) -> None:
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
        signalled.append(number)
        if len(signalled) > 1:
            log.warning("exited_at_once", signal=number.name)
            os._exit(128 + number)
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


def _prepare(loader: Callable[..., Settings] = Settings.load, **options: Any) -> Settings:
    """Load the settings, then let logs flow as they say."""
    ignored: list[str] = []
    settings = load_settings(loader, warn=ignored.append, **options)
    configure(settings.log_format, settings.log_level)
    arm_from_environment()
    for text in ignored:
        log.warning("setting_ignored", detail=text)
    return settings


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where it is installed (`pip install coatcheck[fast]`), else on asyncio's own loop."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ImportError:
        pass
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(work)
