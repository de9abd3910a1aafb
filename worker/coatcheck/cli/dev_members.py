"""One process of `coatcheck dev` that should be running: started, started again when it dies, replaced, stopped.

start ──► started ──► ends by itself ──► a pause that grows ──► start
  └─────► ends before it has started, three times ──► left alone until the code changes
replace: SIGTERM, it drains; SIGKILL if it takes too long; start
stop:    the same, without the start
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
from coatcheck.cli.dev_lines import STARTED, Screen, read_line

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


class Member:
    """A process and its successors. `keep` runs them; the other methods tell it what to do."""

    def __init__(self, name: str, arguments: tuple[str, ...], *, bond: Bond, screen: Screen) -> None:
        self.name = name
        self.given_up = asyncio.Event()
        self._arguments = arguments
        self._bond = bond
        self._screen = screen
        self._process: Process | None = None
        self._has_started = False
        self._is_ended_by_us = False
        self._is_stopping = False
        self._nudged = asyncio.Event()
        self._settled = asyncio.Event()
        """The newest process has started, or there will be none by itself."""

    async def keep(self) -> None:
        """Keep a process running until `stop`; none is left when this returns."""
        deaths = Deaths()
        while not self._is_stopping:
            began_s = time.monotonic()
            code = await self._run_once()
            if self._is_ended_by_us:
                self._is_ended_by_us, deaths = False, Deaths()
                continue
            pause_s = deaths.add(has_started=self._has_started, lived_s=time.monotonic() - began_s)
            self._tell_end(code, pause_s, deaths.false_start_count)
            await self._pause(pause_s)
            if pause_s is None:
                deaths = Deaths()

    async def replace(self) -> bool:
        """Put a new process in the place of the old one; tell whether it has started."""
        self._settled.clear()
        self._is_ended_by_us = self._process is not None
        self._nudged.set()
        await self._end()
        with suppress(TimeoutError):
            async with asyncio.timeout(START_PATIENCE_S):
                await self._settled.wait()
        return self._has_started

    async def stop(self) -> None:
        """End the process, gently first. Safe to repeat."""
        self._is_stopping = self._is_ended_by_us = True
        self._nudged.set()
        await self._end()

    def kill(self) -> None:
        """End the process on the spot."""
        self._is_stopping = self._is_ended_by_us = True
        self._signal(signal.SIGKILL)

    async def _run_once(self) -> int:
        self._has_started = False
        process = self._process = await self._spawn()
        if self._is_stopping:  # it was told to while there was nothing to stop yet
            self._signal(signal.SIGTERM)
        reading = asyncio.ensure_future(self._read(process))
        try:
            code = await process.wait()
            await asyncio.wait([reading], timeout=LAST_WORDS_S)
        finally:
            reading.cancel()
            self._signal(signal.SIGKILL)  # only where we were cut off: otherwise it has ended
            self._process = None
        return code

    async def _spawn(self) -> Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coatcheck.cli.dev_child", str(os.getpid()), str(self._bond.lifeline)),
            *self._arguments,
            env=self._bond.environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(self._bond.lifeline,),
            start_new_session=True,  # Ctrl-C is for `dev` alone, which then stops the others in order
        )

    async def _read(self, process: Process) -> None:
        async for line in _lines_of(process):
            said = read_line(line)
            if said.event in STARTED:
                self._has_started = True
                self._settled.set()
            self._screen.show(self.name, said)

    async def _end(self) -> None:
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._bond.patience_s):
                await process.wait()
        except TimeoutError:
            self._screen.say(f"{self.name} did not stop within {self._bond.patience_s:g} s and is killed")
            self._signal(signal.SIGKILL)
            await process.wait()

    async def _pause(self, pause_s: float | None) -> None:
        """Wait for so long, or until somebody has a reason to go on; None: only for that."""
        if pause_s is None:
            self.given_up.set()
            self._settled.set()
        self._nudged.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._nudged.wait()
        self.given_up.clear()

    def _tell_end(self, code: int, pause_s: float | None, false_start_count: int) -> None:
        how = describe_end(code)
        if pause_s is None:
            series = f"before it had started, {false_start_count} times in a row"
            text = f"{self.name} {how} {series}; it is left alone until the code changes"
        else:
            text = f"{self.name} {how}; it starts again in {pause_s:g} s"
        self._screen.say(text, style="bold red" if pause_s is None else "bold yellow")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


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
