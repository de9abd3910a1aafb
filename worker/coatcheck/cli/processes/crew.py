"""Processes that should be running: started, watched, started again when they die, replaced, stopped.

start ──► started ──► ends by itself ──► a pause that grows ──► start
  └─────► ends before it has started, three times ──► the watcher decides: go on trying, or leave it alone
replace: start another; once it has started, SIGTERM for the old one, it drains; SIGKILL if it takes too long
         the other does not start: it is ended, and the old one stays
stop:    SIGTERM, it drains; SIGKILL if it takes too long
we die, however: the children end with us (`child.py`)

A crew knows processes and nothing of what they do. Its watcher takes in what they say and decides about their ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from coatcheck.cli.processes.child import CLI, NO_LINK
from coatcheck.cli.processes.reports import SupervisorEnd

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
SETTLED_S = 10.0
"""A process that has run for so long is not part of a series of deaths."""
MOST_FALSE_STARTS = 3
START_PATIENCE_S = 20.0
"""How long a replacement may take to start before it is given up."""
LAST_WORDS_S = 0.5
"""What is in the pipe when a process has ended is there at once; a grandchild that keeps it open is not waited for."""
LONGEST_LINE = 1024 * 1024
CHUNK = 64 * 1024
OUT, ERR = 1, 2


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended by itself, and when its successor may start."""

    pid: int
    code: int
    has_started: bool
    false_start_count: int
    """How many in a row, with this one, ended before they had started."""
    pause_s: float | None
    """None: too many in a row ended before they had started."""


@dataclass(slots=True)
class Deaths:
    """How often in a row a process has ended by itself."""

    count: int = 0
    false_start_count: int = 0

    def add(self, *, has_started: bool, lived_s: float) -> float | None:
        """Count one more, and return the pause before the next start; None: there is no point in one."""
        self.count = 1 if lived_s >= SETTLED_S else self.count + 1
        self.false_start_count = 0 if has_started else self.false_start_count + 1
        if self.false_start_count >= MOST_FALSE_STARTS:
            return None
        return min(FIRST_PAUSE_S * 2.0 ** (self.count - 1), LONGEST_PAUSE_S)


def describe_end(code: int) -> str:
    """How a process ended, from its exit code: `ended with code 1`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class Handle(Protocol):
    """A process as the crew needs it; `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


class Life:
    """A process, from its start to its end."""

    def __init__(self, name: str, process: Handle, *, link: SupervisorEnd | None = None) -> None:
        self.name = name
        self.process = process
        self.link = link
        self.began_s = time.monotonic()
        self.has_started = False
        """It does what it is for. The watcher finds that out and calls `note_started`."""
        self.is_dismissed = False
        """We have told it to end."""
        self.ended = asyncio.ensure_future(process.wait())
        self._settled = asyncio.Event()
        self.ended.add_done_callback(lambda _: self._settled.set())
        self._beside: list[asyncio.Future[None]] = []

    def note_started(self) -> None:
        self.has_started = True
        self._settled.set()

    def run_beside(self, *work: Coroutine[Any, Any, None]) -> None:
        """Run something for as long as the process does, and a moment longer."""
        self._beside += [asyncio.ensure_future(each) for each in work]

    def send(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def wait_started(self) -> bool:
        """Wait until it has started or ended, for so long and no longer; tell whether it has started."""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_PATIENCE_S):
                await self._settled.wait()
        return self.has_started

    async def wait_ended(self, last_words_s: float) -> int:
        """Wait for its end and for what it said last; return its exit code."""
        code = await asyncio.shield(self.ended)
        if self._beside:
            await asyncio.wait(self._beside, timeout=last_words_s)
        return code

    async def end(self, number: signal.Signals, *, within_s: float | None = None) -> bool:
        """Send a signal and wait for the end; tell whether it came in time."""
        self.send(number)
        await asyncio.wait([self.ended], timeout=within_s)
        return self.ended.done()

    def close(self) -> None:
        """Leave nothing behind, where we are cut off: otherwise it has ended."""
        self.send(signal.SIGKILL)
        for work in self._beside:
            work.cancel()


class Watcher:
    """Takes in what the processes of a crew do. Each command has its own."""

    async def on_output(self, life: Life, lines: bytes, *, descriptor: int) -> None:
        """Take whole lines of a process, from its stdout (1) or stderr (2); both are 1 in a crew that merges them."""

    async def follow(self, life: Life) -> None:
        """Runs beside each process; cancelled soon after its end."""

    def on_end(self, member: Member, ending: Ending) -> float | None:
        """Told when a process has ended by itself. Return the pause before the next; None: leave it alone."""
        return ending.pause_s

    def on_killed(self, member: Member, waited_s: float) -> None:
        """Told when a process did not stop in time and is killed."""


class Member:
    """A place in a crew, and the processes that fill it one after the other."""

    def __init__(self, crew: Crew, name: str, command: Sequence[str], *, environ: Mapping[str, str]) -> None:
        self.name = name
        self.command = tuple(command)
        self.environ = environ
        self.given_up = asyncio.Event()
        """Set while no process runs and none will start by itself."""
        self.is_clean = True
        """Whether the process that was told to stop last did so in good order."""
        self._crew = crew
        self._keeping: asyncio.Task[None] | None = None
        self._life: Life | None = None
        self._successor: Life | None = None
        """A process that is ready to take the place of the present one, which is about to end."""
        self._is_stopping = False
        self._nudged = asyncio.Event()
        self._is_begun = asyncio.Event()
        """The newest process runs, or there will be none by itself."""

    @property
    def pid(self) -> int | None:
        return None if self._life is None else self._life.process.pid

    @property
    def has_started(self) -> bool:
        return self._life is not None and self._life.has_started

    def start(self, group: asyncio.TaskGroup) -> None:
        """Keep a process running until `stop`."""
        self._keeping = group.create_task(self._keep())

    async def replace(self) -> bool:
        """Put a new process in the place of the old one; tell whether it has started. If not, the old one stays."""
        if not self.has_started:
            return await self._begin_again()
        life = await self._crew.spawn(self)
        try:
            if await life.wait_started() and not self._is_stopping:
                self._successor = life
                self._is_begun.clear()
                await self._end_present()
                await self._is_begun.wait()  # the new one has taken the place
                return True
            await self._dismiss(life)
            return False
        finally:
            if self._successor is not life and self._life is not life:
                life.close()

    async def stop(self) -> None:
        """End the process, gently first. When this returns it has ended, and what it said was taken in."""
        self._is_stopping = True
        await self._end_present()
        if self._keeping is not None:
            await asyncio.wait([self._keeping])

    def kill(self) -> None:
        """End the process on the spot, and start no other. `stop` waits for its end."""
        self._is_stopping = True
        for life in (self._life, self._successor):
            if life is not None:
                life.is_dismissed = True
                life.send(signal.SIGKILL)

    async def _keep(self) -> None:
        """Keep a process running until `stop`; none is left when this returns."""
        deaths = Deaths()
        try:
            while not self._is_stopping:
                life, code = await self._run_once()
                if life.is_dismissed:
                    # It handles SIGTERM for as long as it works: one that dies of it had not begun, or was done.
                    self.is_clean, deaths = code in (0, -signal.SIGTERM), Deaths()
                    continue
                pause_s = deaths.add(has_started=life.has_started, lived_s=time.monotonic() - life.began_s)
                ending = Ending(life.process.pid, code, life.has_started, deaths.false_start_count, pause_s)
                pause_s = self._crew.watcher.on_end(self, ending)
                await self._pause(pause_s)
                if pause_s is None:
                    deaths = Deaths()
        finally:
            self._is_begun.set()
            if self._successor is not None:
                self._successor.close()

    async def _run_once(self) -> tuple[Life, int]:
        life, self._successor = self._successor or await self._crew.spawn(self), None
        self._life = life
        self._is_begun.set()
        try:
            if self._is_stopping:  # it was told to while there was nothing to stop yet
                await self._dismiss(life)
            code = await life.wait_ended(self._crew.last_words_s)
        finally:
            life.close()
            self._life = None
        return life, code

    async def _begin_again(self) -> bool:
        """Start what does not run, or has not started yet, with the code as it is now."""
        self._is_begun.clear()
        await self._end_present()
        await self._is_begun.wait()
        return self._life is not None and await self._life.wait_started()

    async def _end_present(self) -> None:
        """End the process that runs, if one does. Without one, a pause ends here."""
        self._nudged.set()
        if self._life is not None:
            await self._dismiss(self._life)

    async def _dismiss(self, life: Life) -> None:
        """End a process, gently first."""
        life.is_dismissed = True
        if not await life.end(signal.SIGTERM, within_s=self._crew.patience_s):
            self._crew.watcher.on_killed(self, self._crew.patience_s)
            await life.end(signal.SIGKILL)

    async def _pause(self, pause_s: float | None) -> None:
        """Wait for so long, or until there is a reason to go on; None: only for that."""
        if pause_s is None:
            self.given_up.set()
            self._is_begun.set()
        self._nudged.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._nudged.wait()
        self.given_up.clear()


class Crew:
    """Members by name. `async with Crew(…) as crew: …`; leaving stops those that still run."""

    def __init__(
        self,
        watcher: Watcher,
        *,
        environ: Mapping[str, str],
        patience_s: float,
        last_words_s: float = LAST_WORDS_S,
        cwd: Path | None = None,
        has_links: bool = False,
        merges_output: bool = True,
    ) -> None:
        """`patience_s`: how long a process may drain. `has_links`: each has a socket to report on (`reports.py`)."""
        self.watcher = watcher
        self.patience_s = patience_s
        self.last_words_s = last_words_s
        self.members: dict[str, Member] = {}
        self._environ = environ
        self._cwd = cwd
        self._has_links = has_links
        self._merges_output = merges_output
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        self._lifeline, self._our_end = os.pipe()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.stop(*self.members.values())
        except BaseException as error:  # we are cut off: the members are cancelled, which kills their processes
            await self._group.__aexit__(type(error), error, error.__traceback__)
            raise
        else:
            # What the body raised goes on as it is. The group raises what a member did, which is a bug.
            await self._group.__aexit__(None, None, None)
        finally:
            os.close(self._our_end)
            os.close(self._lifeline)

    def add(self, name: str, *arguments: str, module: str = CLI, **environ: str) -> Member:
        """Make a place for `python -m module arguments…`; `start` fills it."""
        self.members[name] = Member(self, name, (module, *arguments), environ=environ)
        return self.members[name]

    def start(self, *members: Member) -> None:
        for member in members:
            member.start(self._group)

    async def stop(self, *members: Member) -> None:
        """Stop some, all at once. Safe to repeat."""
        await asyncio.gather(*(member.stop() for member in members))

    async def renew(self, *members: Member) -> bool:
        """Replace members one after the other, so that there is always one; tell whether all have started.

        If one does not start, the others are left as they are.
        """
        for member in members:
            if not await member.replace():
                return False
        return True

    def kill(self) -> None:
        """End all on the spot."""
        for member in self.members.values():
            member.kill()

    async def spawn(self, member: Member) -> Life:
        """Start a process for a member, and take in what it says."""
        link = SupervisorEnd() if self._has_links else None
        passed = [self._lifeline, *([link.theirs.fileno()] if link is not None else [])]
        with nullcontext() if link is None else link.theirs:  # the child has a copy of its end
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "coatcheck.cli.processes.child"),
                *(str(os.getpid()), str(passed[0]), str(passed[1]) if link is not None else NO_LINK),
                *member.command,
                cwd=self._cwd,
                env={**self._environ, **member.environ},
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT if self._merges_output else PIPE,
                pass_fds=passed,
                start_new_session=True,  # Ctrl-C reaches us alone; we stop the others in order
            )
        life = Life(member.name, process, link=link)
        for descriptor, reader in ((OUT, process.stdout), (ERR, process.stderr)):
            if reader is not None:
                life.run_beside(self._take_in(life, reader, descriptor))
        life.run_beside(self.watcher.follow(life))
        return life

    async def _take_in(self, life: Life, reader: asyncio.StreamReader, descriptor: int) -> None:
        async for lines in read_lines(reader):
            await self.watcher.on_output(life, lines, descriptor=descriptor)


async def read_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Whole lines, as many at a time as have come, each with its newline. A line that never ends is cut.

    Children could write to our own stdout and stderr, but a pipe takes no more than 4 KB in one piece: a traceback of
    one would be cut by the next line of another, and a log of JSON lines could not be read.
    """
    rest = b""
    while chunk := await reader.read(CHUNK):
        lines, newline, end = chunk.rpartition(b"\n")
        if newline:
            yield rest + lines + newline
            rest = end
        else:
            rest += chunk
        if len(rest) > LONGEST_LINE:
            yield rest + b"\n"
            rest = b""
    if rest:
        yield rest + b"\n"
