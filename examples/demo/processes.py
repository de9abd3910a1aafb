"""The processes of the demo: each with a log of its own, none of them left behind."""

import asyncio
import ctypes
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
STOP_TIMEOUT_S = 10.0


class DemoFailed(Exception):
    """The demo cannot go on; the text says why and what to do."""


class Crew:
    """Starts processes by name and stops them all at the end. `async with Crew(…) as crew: …`"""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self.logs = logs
        self._environment = {**os.environ, **environment}
        paths = [str(ROOT), self._environment.get("PYTHONPATH", "")]
        self._environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        self._members: dict[str, Process] = {}

    async def __aenter__(self) -> "Crew":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ask all to stop, wait a while, then insist."""
        for process in self._alive():
            process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.gather(*(process.wait() for process in self._alive()))
        except TimeoutError:
            for process in self._alive():
                process.kill()
                await process.wait()

    async def run(self, name: str, *arguments: str) -> None:
        """Run `python -m …` to its end. Raises DemoFailed unless it succeeds."""
        await self.start(name, *arguments)
        if await self._members.pop(name).wait() != 0:
            raise DemoFailed(self._explain(name))

    async def start(self, name: str, *arguments: str, **environment: str) -> None:
        """Start `python -m …` and leave it running."""
        with (self.logs / f"{name}.log").open("wb") as output:
            self._members[name] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *arguments,
                env=self._environment | environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl+C reaches the demo alone, which then stops the others in order
                preexec_fn=_die_with_parent,
            )

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

    def count(self, prefix: str) -> int:
        return sum(name.startswith(prefix) and it.returncode is None for name, it in self._members.items())

    def _alive(self) -> list[Process]:
        return [process for process in self._members.values() if process.returncode is None]

    def _explain(self, name: str) -> str:
        lines = (self.logs / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n  ".join([f"{name} ended before its time. Its last words:", *lines[-15:]])


def _die_with_parent() -> None:
    """Ask Linux to stop this process when the demo is gone, however it went."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM))
