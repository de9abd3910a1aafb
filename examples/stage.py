"""The stage for the other examples: starts their processes, waits until they are ready, leaves none behind.

    async with Stage() as stage:
        await stage.workers("examples.hello:app", "examples.hello:greeter")

Each process leads its own process group, and a guard knows all groups. The guard reads from a pipe that only the
command holds. When the command ends, even by kill -9, the pipe ends and the guard ends the groups.
"""

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

import aio_pika
import structlog

from coatcheck.store import migrate

READY_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
RABBITMQ = "amqp://guest:guest@localhost:5672/"

# Settings for a short run on one machine; your own settings take precedence.
MANNERS = {"COATCHECK_GRACE": "5s", "COATCHECK_SWEEP_INTERVAL": "1s"}

GUARD = """
import os, signal, sys, time
groups = set()
for line in sys.stdin:
    groups ^= {int(line)}
for number, pause_s in ((signal.SIGTERM, 2), (signal.SIGKILL, 0)) if groups else ():
    for group in groups:
        try:
            os.killpg(group, number)
        except OSError:
            pass
    time.sleep(pause_s)
"""


class CannotRun(Exception):
    """The example cannot go on; the text says why and what to do."""


def play(story: Coroutine[Any, Any, None]) -> int:
    """Run an example to its end and return its exit code. Only errors of its own client are shown."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # what it would log about a silent broker, we print
    try:
        asyncio.run(story)
    except CannotRun as reason:
        print(reason, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class Program:
    """A running process, and the last lines it printed."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._lines: deque[str] = deque(maxlen=200)
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def wait_for(self, text: str) -> None:
        """Return when it has printed `text`. Raises CannotRun if it ends without, or takes too long."""
        try:
            async with asyncio.timeout(READY_LIMIT_S):
                while not any(text in line for line in self._lines):
                    if self._reading.done():
                        raise CannotRun(self._explain("ended before its time"))
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise CannotRun(self._explain(f"did not say {text!r} within {READY_LIMIT_S:.0f} s")) from None

    async def kill(self) -> None:
        """Kill it with -9: no draining."""
        self._signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        """Ask it to stop, wait a while, then kill it."""
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._process.wait()
        await self.kill()
        await self._reading

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
            os.killpg(self.pid, number)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._lines.append(line.decode(errors="replace").rstrip())
            self._news.set()
        self._news.set()

    def _explain(self, what: str) -> str:
        return "\n  ".join([f"{self.name} {what}. Its last words:", *list(self._lines)[-15:]])


class Stage:
    """Starts programs and stops them all at the end."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = MANNERS | os.environ | dict(environment or {})
        self._programs: list[Program] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True
        )

    async def __aenter__(self) -> "Stage":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(program.stop() for program in self._programs))
        for program in self._programs:
            self._tell_guard(program)
        self._guard.communicate()

    async def workers(self, *apps: str) -> list[Program]:
        """Start a replica of each app, and a sweeper for all; return the replicas when all of them are ready.

        An app that is named twice gets two replicas.
        """
        store = self._environment.get("COATCHECK_STORE", "")
        if store.startswith("postgres"):  # the embedded server makes its tables itself
            await migrate(store)
        programs = [await self.start("coatcheck", "worker", app, name=app) for app in apps]
        sweeper = await self.start("coatcheck", "sweeper", name="the sweeper")
        for program in programs:
            await program.wait_for("worker_started")
        await sweeper.wait_for("sweeper_started")
        return programs

    async def start(self, *command: str, name: str = "") -> Program:
        """Start one program; `coatcheck` and `python` are those of this environment."""
        ours = {"python": [], "coatcheck": ["-m", "coatcheck.cli"]}
        head = [sys.executable, *ours[command[0]]] if command[0] in ours else [command[0]]
        process = await asyncio.create_subprocess_exec(
            *head,
            *command[1:],
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the command alone, which then stops the others in order
            limit=1 << 20,
        )
        program = Program(name or command[0], process)
        self._programs.append(program)
        self._tell_guard(program)
        return program

    def _tell_guard(self, program: Program) -> None:
        """Tell the guard of a group. The first time the guard learns of it, the second time it forgets it."""
        assert self._guard.stdin is not None
        self._guard.stdin.write(b"%d\n" % program.pid)
        self._guard.stdin.flush()


async def need(*, rabbitmq: bool = False, programs: Mapping[str, str] | None = None) -> str:
    """Check that the servers and programs of an example are there; return RabbitMQ's address.

    `programs` maps each program to the way to get it. Raises CannotRun with everything that is missing.
    """
    url = os.environ.get("COATCHECK_BROKER") or RABBITMQ
    missing = [f"{name}: {how}" for name, how in (programs or {}).items() if shutil.which(name) is None]
    if rabbitmq and (reason := await _why_no_rabbitmq(url)):
        missing.append(
            f"RabbitMQ: {reason}\n"
            "    start one:      docker run --detach --publish 5672:5672 rabbitmq:4-management-alpine\n"
            "    or name yours:  export COATCHECK_BROKER=amqp://user:password@host:5672/"
        )
    if missing:
        raise CannotRun("\n  ".join(["This example needs what is not here:", *missing]))
    return url


async def _why_no_rabbitmq(url: str) -> str | None:
    if not url.startswith(("amqp://", "amqps://")):
        return "COATCHECK_BROKER names another kind of broker, and only RabbitMQ speaks to foreign programs"
    try:
        connection = await aio_pika.connect(url, timeout=5)
    except (OSError, ValueError, TimeoutError, aio_pika.AMQPException) as error:
        return f"none answers at {url.rpartition('@')[2]} ({str(error) or type(error).__name__})"
    await connection.close()
    return None
