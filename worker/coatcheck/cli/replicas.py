"""One replica under `--processes`: a process, and its successor when it has died.

start ──► started ──► ends by itself ──► a pause that grows ──► start
  └─────► ends before it has started ──► the same, unless the supervisor gives up
stop: SIGTERM, it drains; SIGKILL if it takes too long
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from coatcheck.cli.deaths import LONGEST_PAUSE_S, Deaths
from coatcheck.cli.link import SupervisorEnd
from coatcheck.cli.meters import Meter
from coatcheck.cli.relay import relay
from coatcheck.log import get_logger
from coatcheck.worker.log_streams import line_stream

log = get_logger(__name__)

ANSWER_S = 2.0
"""How long a replica may take to say how it is, before it counts as one that does not answer."""
LOOK_AGAIN_S = 0.1
STDOUT, STDERR = 1, 2
LAST_WORDS_S = 5.0
"""What is in the pipe when a process has ended is there at once; a grandchild that keeps it open is not waited for."""

ADDRESSES = "_COATCHECK_ADDRESSES"
"""The variable in which a replica gets the options of its command line that other users must not see."""


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended by itself."""

    code: int
    has_started: bool
    is_hopeless: bool
    """It was one of several in a row that ended before they had started."""

    def describe(self) -> dict[str, object]:
        if self.code >= 0:
            return {"exit_code": self.code}
        known = {it.value: it.name for it in signal.Signals}
        return {"signal": known.get(-self.code, str(-self.code))}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every replica gets from its supervisor, and whom it tells of its end."""

    environ: Mapping[str, str]
    lifeline: int
    patience_s: float
    on_end: Callable[[Replica, End], None]
    on_report: Callable[[list[Meter]], None]
    """Takes what a process had counted when it was last heard of."""


@dataclass(slots=True)
class Life:
    """A process, from its start to its end."""

    process: Process
    link: SupervisorEnd
    is_answering: bool = True
    has_started: bool = False
    began_s: float = field(default_factory=time.monotonic)


class Replica:
    """A replica by its name. `keep` runs its processes; the other methods tell it what to do."""

    def __init__(self, name: str, arguments: tuple[str, ...], surroundings: Surroundings) -> None:
        self.name = name
        self.started = asyncio.Event()
        """Set while a process runs that has started."""
        self.is_clean = True
        """Whether what was told to stop has done so by itself, in good order."""
        self._arguments = arguments
        self._surroundings = surroundings
        self._life: Life | None = None
        self._stopping = asyncio.Event()

    async def keep(self) -> None:
        """Keep a process running until `stop`; none is left when this returns."""
        deaths = Deaths()
        while not self._stopping.is_set():
            life = await self._spawn()
            code = await self._see_through(life)
            if self._stopping.is_set():
                # It handles the signal for as long as it works: one that dies of it had not begun, or was done.
                self.is_clean = code in (0, -signal.SIGTERM)
                break
            pause_s = deaths.add(has_started=life.has_started, lived_s=time.monotonic() - life.began_s)
            end = End(code, life.has_started, is_hopeless=pause_s is None)
            await self._pause(end, LONGEST_PAUSE_S if pause_s is None else pause_s)

    def stop(self) -> None:
        """Let the process drain, and start no other; `keep` returns when it has ended. Safe to repeat."""
        self._stopping.set()

    def kill(self) -> None:
        """End the process on the spot."""
        self._stopping.set()
        if self._life is not None:
            _signal(self._life, signal.SIGKILL)

    # --- how it is ---

    async def refresh(self) -> None:
        """Ask how it is. What the properties below tell is up to date afterwards."""
        life = self._life
        if life is not None and life.link.latest is not None:
            life.is_answering = await life.link.ask(ANSWER_S)

    @property
    def live(self) -> dict[str, bool]:
        """One that is being started, for the first time or again, is looked after: no reason to restart us all."""
        life = self._present()
        return {} if life is None else {"answers": life.is_answering}

    @property
    def ready(self) -> dict[str, bool]:
        life = self._present()
        if life is None or life.link.latest is None:
            return {"started": False}
        return {"answers": life.is_answering} | life.link.latest.ready

    @property
    def meters(self) -> list[Meter]:
        life = self._life
        return [] if life is None or life.link.latest is None else life.link.latest.meters

    def _present(self) -> Life | None:
        """The process that we have heard of and that has not ended."""
        life = self._life
        return None if life is None or life.link.latest is None or life.link.is_over else life

    # --- a process ---

    async def _spawn(self) -> Life:
        link = SupervisorEnd()
        lifeline, theirs = self._surroundings.lifeline, link.theirs.fileno()
        with link.theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "coatcheck.cli.supervised"),
                *(str(os.getpid()), str(lifeline), str(theirs)),
                *self._arguments,
                env=self._surroundings.environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(lifeline, theirs),
                start_new_session=True,  # Ctrl-C is for the supervisor alone, which passes it on once
            )
        return Life(process, link)

    async def _see_through(self, life: Life) -> int:
        """Wait for the end of a process, and pass on what it says until then. Told to stop, end it."""
        assert life.process.stdout is not None
        assert life.process.stderr is not None
        self._life = life
        starting = asyncio.ensure_future(self._await_start(life))
        talking = [
            asyncio.ensure_future(life.link.listen()),
            asyncio.ensure_future(relay(life.process.stdout, line_stream(STDOUT))),
            asyncio.ensure_future(relay(life.process.stderr, line_stream(STDERR))),
        ]
        try:
            code = await self._await_end(life)
            await asyncio.wait(talking, timeout=LAST_WORDS_S)
        finally:
            for task in (starting, *talking):
                task.cancel()
            _signal(life, signal.SIGKILL)  # only where we were cut off: otherwise it has ended
            self._surroundings.on_report(self.meters)
            self.started.clear()
            self._life = None
        return code

    async def _await_end(self, life: Life) -> int:
        ending = asyncio.ensure_future(life.process.wait())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([ending, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                _signal(life, signal.SIGTERM)
                await asyncio.wait([ending], timeout=self._surroundings.patience_s)
            if not ending.done():
                log.error("replica_killed", replica=self.name, waited_s=self._surroundings.patience_s)
                _signal(life, signal.SIGKILL)
            return await ending
        finally:
            ending.cancel()
            stopping.cancel()

    async def _await_start(self, life: Life) -> None:
        while life.link.latest is None or not life.link.latest.ready.get("started"):
            await asyncio.sleep(LOOK_AGAIN_S)
            await life.link.ask(ANSWER_S)
        life.has_started = True
        self.started.set()
        log.info("replica_started", replica=self.name, pid=life.process.pid)

    async def _pause(self, end: End, pause_s: float) -> None:
        log.warning("replica_ended", replica=self.name, **end.describe(), has_started=end.has_started, pause_s=pause_s)
        self._surroundings.on_end(self, end)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()


def _signal(life: Life, number: signal.Signals) -> None:
    if life.process.returncode is None:
        with suppress(ProcessLookupError):
            life.process.send_signal(number)
