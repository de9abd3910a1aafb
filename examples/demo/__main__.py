"""Three replicas, slow peers, one peer that never answers, and a kill -9 in the middle. Nothing is lost.

    python -m examples.demo [--tasks 200] [--ledger FILE]

Everything is real: RabbitMQ, Postgres, and one process each for the replicas, the sweeper and the peers. The demo uses
a database and queue names of its own and removes them. It exits with 0 only if its own books say what it promises.
"""

import argparse
import asyncio
import logging
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aio_pika
from rich.console import Console

from examples.demo.asker import Asker, delete_leftovers, wait_for_consumers
from examples.demo.display import Display, show_verdict
from examples.demo.ledger import Ledger, Verdict, judge
from examples.demo.processes import Crew, DemoFailed
from examples.demo.servers import find_broker, temporary_database

SOURCES = {"library": 0.6, "archive": 1.2}  # seconds an answer takes, about
SILENT = "oracle"
SILENT_EVERY = 10  # each tenth task asks the silent source too
PATIENCE_S = 4.0  # twice what the slowest source needs, so that a busy machine times nobody else out
REPLICAS = ("replica-1", "replica-2", "replica-3")
KILLED, SUCCESSOR = "replica-2", "replica-4"
ASK_PER_S = 60.0
START_LIMIT_S = 30.0
ANSWER_LIMIT_S = 45.0
STRAGGLERS_S = 1.0  # after the last answer, time for one too many to show up


@dataclass(frozen=True, slots=True)
class Options:
    task_count: int
    ledger: Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--tasks", type=int, default=200, help="how many to ask for, at least 10 (default: %(default)s)"
    )
    parser.add_argument("--ledger", type=Path, help="keep the requester's books in this file, which must not exist yet")
    arguments = parser.parse_args()
    if arguments.tasks < SILENT_EVERY:
        parser.error(f"--tasks {arguments.tasks}: must be at least {SILENT_EVERY}")
    if arguments.ledger is not None and arguments.ledger.exists():
        parser.error(f"--ledger {arguments.ledger}: exists already")
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # what it would say about a silent broker, we say
    console = Console()
    files = Path(tempfile.mkdtemp(prefix="coatcheck-demo-"))
    options = Options(arguments.tasks, arguments.ledger or files / "ledger.jsonl")
    try:
        verdict = asyncio.run(run(console, options, logs=files))
    except DemoFailed as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        shutil.rmtree(files)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("Stopped and cleaned up.")
        shutil.rmtree(files)
        return 130
    show_verdict(console, verdict, killed=KILLED)
    if verdict.complaints:
        console.print(f"Logs and books are in {files}", highlight=False, soft_wrap=True)
        return 1
    shutil.rmtree(files)
    return 0


async def run(console: Console, options: Options, *, logs: Path) -> Verdict:
    """Set the stage, play, clear the stage; then read the books."""
    this_task = asyncio.current_task()
    assert this_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)
    broker = await find_broker()
    token = secrets.token_hex(5)
    prefix = f"demo-{token}"
    async with AsyncExitStack() as stage:
        display = stage.enter_context(Display(console, options.task_count))
        store = await stage.enter_async_context(temporary_database(f"coatcheck_demo_{token}"))
        connection = await stage.enter_async_context(await aio_pika.connect(broker))
        stage.push_async_callback(
            delete_leftovers, connection, queues=queues_of(prefix), exchange=f"{prefix}-survey.broadcast"
        )
        ledger = Ledger(options.ledger)
        stage.callback(ledger.close)
        crew = await stage.enter_async_context(Crew(logs, environment_of(prefix, broker=broker, store=store)))
        await start_everyone(crew, display, connection=connection, prefix=prefix)
        asker = await Asker.start(connection, ledger)
        await play(crew, display, asker=asker, ledger=ledger, service=f"{prefix}-survey", task_count=options.task_count)
    return judge(options.ledger, silent=SILENT)


def environment_of(prefix: str, *, broker: str, store: str) -> dict[str, str]:
    return {
        "COATCHECK_BROKER": broker,
        "COATCHECK_STORE": store,
        "COATCHECK_LEASE": "5s",
        # A queue of our own: another database's sweeper on this broker must not take our hints.
        "COATCHECK_SWEEPER_QUEUE": f"{prefix}-sweepers",
        "DEMO_PREFIX": prefix,
        "DEMO_PATIENCE": str(PATIENCE_S),
    }


def queues_of(prefix: str) -> list[str]:
    service = f"{prefix}-survey"
    own = [service, f"{service}.replies", f"{service}.control", f"{service}.dead"]
    return [*own, f"{prefix}-sweepers"] + [f"{prefix}-{source}" for source in (*SOURCES, SILENT)]


async def start_everyone(
    crew: Crew, display: Display, *, connection: aio_pika.abc.AbstractConnection, prefix: str
) -> None:
    """Peers first, for they need no tables; then the schema, the sweeper and three replicas."""
    display.say(
        f"starting {len(REPLICAS)} replicas, a sweeper and {len(SOURCES) + 1} peers, one of which never answers"
    )
    for source, delay_s in SOURCES.items():
        await crew.start(source, "examples.search_peer", f"{prefix}-{source}", "--delay", str(delay_s))
    await crew.start(SILENT, "examples.search_peer", f"{prefix}-{SILENT}", "--silent")
    await crew.run("migrate", "coatcheck.cli", "migrate")
    await crew.start("sweeper", "coatcheck.cli", "sweeper")
    for replica in REPLICAS:
        await start_replica(crew, replica)
    waits = [wait_for_consumers(connection, f"{prefix}-{source}", count=1) for source in (*SOURCES, SILENT)]
    waits.append(wait_for_consumers(connection, f"{prefix}-survey", count=len(REPLICAS)))
    await all_or_explain(crew, *waits)


async def start_replica(crew: Crew, name: str) -> None:
    await crew.start(name, "coatcheck.cli", "worker", "examples.demo.service:app", DEMO_REPLICA=name)


async def all_or_explain(crew: Crew, *waits: Coroutine[Any, Any, None]) -> None:
    """Wait for all, but give up as soon as a process has ended."""
    waiting = asyncio.gather(*waits)
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not waiting.done():
                crew.check()
                await asyncio.wait([waiting], timeout=0.2)
            await waiting
    except TimeoutError:
        raise DemoFailed(f"not everybody was ready after {START_LIMIT_S:.0f} seconds") from None
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting


async def play(crew: Crew, display: Display, *, asker: Asker, ledger: Ledger, service: str, task_count: int) -> None:
    """Ask, kill one replica when a quarter is answered, start another, wait for the rest."""
    display.say(f"asking {service} for {task_count} surveys")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(ask_all(asker, service, task_count))
        killing = group.create_task(kill_in_the_middle(crew, display, ledger=ledger, task_count=task_count))
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                while ledger.answered < task_count:
                    display.show(asked=ledger.asked, answered=ledger.answered, replicas=crew.count("replica-"))
                    await asyncio.sleep(0.1)
        except TimeoutError:
            display.say(f"gave up waiting after {ANSWER_LIMIT_S:.0f} seconds")
            asking.cancel()
            killing.cancel()
    display.say(f"{ledger.answered} of {task_count} are answered")
    await asyncio.sleep(STRAGGLERS_S)


async def ask_all(asker: Asker, service: str, task_count: int) -> None:
    for number in range(task_count):
        sources = [*SOURCES, SILENT] if number % SILENT_EVERY == 0 else [*SOURCES]
        await asker.ask(service, {"topic": f"topic {number}", "sources": sources})
        await asyncio.sleep(1 / ASK_PER_S)


async def kill_in_the_middle(crew: Crew, display: Display, *, ledger: Ledger, task_count: int) -> None:
    await ledger.wait_for_answers(task_count // 4)
    await crew.kill(KILLED)
    ledger.note_killed(KILLED)
    display.say(f"{KILLED} was killed with -9; {SUCCESSOR} starts")
    await start_replica(crew, SUCCESSOR)


if __name__ == "__main__":
    sys.exit(main())
