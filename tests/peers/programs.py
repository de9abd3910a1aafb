"""Programs of `examples/tutorial_six` as processes: started, watched by what they print, stopped."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

TUTORIAL = Path(__file__).parents[2] / "examples/tutorial_six"
START_TIMEOUT_S = 20.0
READY = "Awaiting RPC requests"


@dataclass(frozen=True, slots=True)
class Language:
    """How the tutorial's programs are run in one language."""

    name: str
    server: tuple[str, ...]
    client: tuple[str, ...]


def _programs(name: str, program: str, *, directory: Path, suffix: str) -> Language:
    return Language(name, (program, f"{directory}/rpc_server{suffix}"), (program, f"{directory}/rpc_client{suffix}"))


def node(directory: Path) -> Language:
    """The programs in a directory where `npm ci` has run."""
    return _programs("node", "node", directory=directory, suffix=".js")


PYTHON = _programs("python", sys.executable, directory=TUTORIAL, suffix=".py")


class Server:
    """A running RPC server that can be made to take its time."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def pause(self) -> None:
        """Freeze it as it is: its queue and connection stay, it answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Tutorial:
    """Tutorial six in one language, its server on a queue of its own."""

    language: Language
    queue: str
    broker_url: str

    @asynccontextmanager
    async def server(self) -> AsyncIterator[Server]:
        """The tutorial's server, ready to answer."""
        process = await _start(self.language.server, self.queue, broker_url=self.broker_url)
        reading: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await _wait_for_line(process, READY)
            reading = asyncio.create_task(_drop_output(process))  # a full pipe would stop it
            yield Server(process)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            if reading is not None:
                await reading

    async def ask(self, n: int, queue: str, *, timeout_s: float = 30.0) -> str:
        """Run the tutorial's client to its end and return what it printed."""
        process = await _start(self.language.client, str(n), queue, broker_url=self.broker_url)
        try:
            async with asyncio.timeout(timeout_s):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
        assert process.returncode == 0, output.decode()
        return output.decode()


async def _start(command: tuple[str, ...], *arguments: str, broker_url: str) -> Process:
    environment = {**os.environ, "COATCHECK_BROKER": broker_url}
    return await asyncio.create_subprocess_exec(
        *command, *arguments, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT
    )


async def _wait_for_line(process: Process, wanted: str) -> None:
    assert process.stdout is not None
    seen = b""
    while line := await process.stdout.readline():
        seen += line
        if wanted.encode() in line:
            return
    raise AssertionError(f"the server ended without saying {wanted!r}:\n{seen.decode()}")


async def _drop_output(process: Process) -> None:
    assert process.stdout is not None
    while await process.stdout.readline():
        pass
