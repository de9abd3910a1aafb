"""The processes of the demo: each with a log of its own, none of them left behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from pathlib import Path

from coatcheck.worker.settings import redacted

STOP_TIMEOUT_S = 10.0
LAST_WORDS = 15
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SET_PARENT_DEATH_SIGNAL = 1


class DemoFailed(Exception):
    """The demo cannot go on; the text says why and what to do."""


class Crew:
    """Starts processes by name and stops them all at the end. `async with Crew(…) as crew: …`"""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self.logs = logs
        # What somebody set for services of their own must not change ours: a health port, a mode, a limit.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("COATCHECK_")}
        self._environment = {**inherited, **environment}
        self._members: dict[str, Process] = {}

    async def __aenter__(self) -> Crew:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ask all to stop, wait a while, then insist."""
        for process in self._alive():
            process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.gather(*(process.wait() for process in self._alive()))
        finally:
            for process in self._alive():
                process.kill()
                await process.wait()

    async def start(self, name: str, *arguments: str, **environment: str) -> int:
        """Start `python -m …`, leave it running and give its process id."""
        with (self.logs / f"{name}.log").open("wb") as output:
            self._members[name] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # not where the user is: a `coatcheck/` there would be imported instead of this one
                "-m",
                *arguments,
                cwd=self.logs,
                env=self._environment | environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then stops the others in order
                preexec_fn=_die_with_parent,
            )
        return self._members[name].pid

    async def kill(self, name: str) -> None:
        """kill -9: no goodbye, no draining."""
        process = self._members.pop(name)
        process.send_signal(signal.SIGKILL)
        await process.wait()

    def check(self) -> None:
        """Raise DemoFailed if a process has ended that should be running."""
        for name, process in self._members.items():
            if process.returncode is not None:
                raise DemoFailed(self._explain(name))

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._members.items()}

    def _alive(self) -> list[Process]:
        return [process for process in self._members.values() if process.returncode is None]

    def _explain(self, name: str) -> str:
        lines = (self.logs / f"{name}.log").read_text(errors="replace").splitlines()
        words = [redacted(line) for line in lines[-LAST_WORDS:]] or ["(nothing)"]
        return "\n  ".join([f"{name} ended before its time. Its last words:", *words])


def _die_with_parent() -> None:
    """Ask Linux to end this process when the demo is gone, however it went. Elsewhere the caretaker does that."""
    if _LIBC is not None:
        _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
