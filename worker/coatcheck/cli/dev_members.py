"""One process of `coatcheck dev` that should be running: started, started again when it dies, replaced, stopped.

start ──► started ──► ends by itself ──► a pause that grows ──► start
  └─────► ends before it has started, three times ──► left alone until the code changes
replace: start another; once it has started, SIGTERM for the old one, it drains; SIGKILL if it takes too long
         the other does not start: it is ended, and the old one stays
stop:    SIGTERM, SIGKILL if it takes too long
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from coatcheck.cli.deaths import Deaths, describe_end
from coatcheck.cli.dev_screen import STARTED, Screen, read_line

START_PATIENCE_S = 20.0
"""How long a reload waits for a replica to start before it goes on with the next."""
LAST_WORDS_S = 0.5
"""Output may come a moment after the end; a grandchild that keeps the pipe open is not waited for."""
LONGEST_LINE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Bond:
    """What every process gets from `dev`: its surroundings, its lifeline, and how long it may take to drain."""

    environ: Mapping[str, str]
    lifeline: int
    patience_s: float


class Life:
    """A process, from its start to its end."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.has_started = False
        self.settled = asyncio.Event()
        """It has said that it is ready, or it has ended."""
        self.ended = asyncio.ensure_future(process.wait())
        self.ended.add_done_callback(lambda _: self.settled.set())
        self.reading: asyncio.Future[None] | None = None

    def signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def wait_started(self) -> bool:
        """Wait until it is ready or has ended, for so long and no longer; tell whether it is ready."""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_PATIENCE_S):
                await self.settled.wait()
        return self.has_started

    def close(self) -> None:
        """Leave nothing behind, where we are cut off: otherwise it has ended."""
        self.signal(signal.SIGKILL)
        if self.reading is not None:
            self.reading.cancel()


class Member:
    """A process and its successors. `keep` runs them; the other methods tell it what to do."""

    def __init__(self, name: str, arguments: tuple[str, ...], *, bond: Bond, screen: Screen) -> None:
        self.name = name
        self.given_up = asyncio.Event()
        self._arguments = arguments
        self._bond = bond
        self._screen = screen
        self._life: Life | None = None
        self._successor: Life | None = None
        """A process that is ready to take the place of the present one, which is about to end."""
        self._is_ended_by_us = False
        self._is_stopping = False
        self._nudged = asyncio.Event()
        self._is_begun = asyncio.Event()
        """The newest process runs, or there will be none by itself."""

    async def keep(self) -> None:
        """Keep a process running until `stop`; none is left when this returns."""
        deaths = Deaths()
        try:
            while not self._is_stopping:
                began_s = time.monotonic()
                life, code = await self._run_once()
                if self._is_ended_by_us:
                    self._is_ended_by_us, deaths = False, Deaths()
                    continue
                pause_s = deaths.add(has_started=life.has_started, lived_s=time.monotonic() - began_s)
                self._tell_end(life, code, pause_s, false_start_count=deaths.false_start_count)
                await self._pause(pause_s)
                if pause_s is None:
                    deaths = Deaths()
        finally:
            if self._successor is not None:
                self._successor.close()

    async def replace(self) -> bool:
        """Put a new process in the place of the old one; tell whether it has started. If not, the old one stays."""
        if self._life is None or not self._life.has_started:
            return await self._begin_again()
        life = await self._spawn()
        try:
            if await life.wait_started() and not self._is_stopping:
                await self._hand_over(life)
                return True
            await self._end(life)
            return False
        finally:
            if self._successor is not life and self._life is not life:
                life.close()

    async def _hand_over(self, life: Life) -> None:
        self._successor = life
        self._is_ended_by_us = self._life is not None
        self._nudged.set()
        if self._life is not None:
            await self._end(self._life)

    async def _begin_again(self) -> bool:
        """Start what does not run, or has not started yet, with the code as it is now."""
        self._is_begun.clear()
        self._is_ended_by_us = self._life is not None
        self._nudged.set()
        if self._life is not None:
            await self._end(self._life)
        await self._is_begun.wait()
        return self._life is not None and await self._life.wait_started()

    async def stop(self) -> None:
        """End the process, gently first. Safe to repeat."""
        self._is_stopping = self._is_ended_by_us = True
        self._nudged.set()
        if self._life is not None:
            await self._end(self._life)

    def kill(self) -> None:
        """End the process on the spot."""
        self._is_stopping = self._is_ended_by_us = True
        for life in (self._life, self._successor):
            if life is not None:
                life.signal(signal.SIGKILL)

    async def _run_once(self) -> tuple[Life, int]:
        life, self._successor = self._successor or await self._spawn(), None
        self._life = life
        self._is_begun.set()
        if self._is_stopping:  # it was told to while there was nothing to stop yet
            life.signal(signal.SIGTERM)
        try:
            code = await asyncio.shield(life.ended)
            assert life.reading is not None
            await asyncio.wait([life.reading], timeout=LAST_WORDS_S)
        finally:
            life.close()
            self._life = None
        return life, code

    async def _spawn(self) -> Life:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coatcheck.cli.dev_child", str(os.getpid()), str(self._bond.lifeline)),
            *self._arguments,
            env=self._bond.environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(self._bond.lifeline,),
            start_new_session=True,  # Ctrl-C is for `dev` alone, which then stops the others in order
        )
        life = Life(process)
        life.reading = asyncio.ensure_future(self._read(life))
        return life

    async def _read(self, life: Life) -> None:
        async for line in _lines_of(life.process):
            said = read_line(line)
            if said.event in STARTED:
                life.has_started = True
                life.settled.set()
            self._screen.show(self.name, said)

    async def _end(self, life: Life) -> None:
        life.signal(signal.SIGTERM)
        await asyncio.wait([life.ended], timeout=self._bond.patience_s)
        if not life.ended.done():
            self._screen.say(f"{self.name} did not stop within {self._bond.patience_s:g} s and is killed")
            life.signal(signal.SIGKILL)
            await asyncio.wait([life.ended])

    async def _pause(self, pause_s: float | None) -> None:
        """Wait for so long, or until somebody has a reason to go on; None: only for that."""
        if pause_s is None:
            self.given_up.set()
            self._is_begun.set()
        self._nudged.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._nudged.wait()
        self.given_up.clear()

    def _tell_end(self, life: Life, code: int, pause_s: float | None, *, false_start_count: int) -> None:
        who, how = f"{self.name} (pid {life.process.pid})", describe_end(code)
        if pause_s is None:
            series = f"before it had started, {false_start_count} times in a row"
            text = f"{who} {how} {series}; it is left alone until the code changes"
        else:
            text = f"{who} {how}; it starts again in {pause_s:g} s"
        self._screen.say(text, style="bold red" if pause_s is None else "bold yellow")


async def _lines_of(process: Process) -> AsyncIterator[bytes]:
    """The lines of a process's output. One that never ends is cut."""
    assert process.stdout is not None
    rest = b""
    while chunk := await process.stdout.read(65_536):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > LONGEST_LINE:
            yield rest
            rest = b""
    if rest:
        yield rest
