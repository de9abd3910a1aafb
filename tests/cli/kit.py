"""Running the command line the ways it is run: in this process, and as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from click.testing import CliRunner, Result
from tests.services import run_sync

from coatcheck.broker import Broker, connect
from coatcheck.cli import main
from coatcheck.store import Store

T = TypeVar("T")
COATCHECK = [sys.executable, "-c", "from coatcheck.cli import main; main(prog_name='coatcheck')"]
NOWHERE_BROKER = "amqp://guest:guest@127.0.0.1:1/"
NOWHERE_STORE = "postgresql://nobody@127.0.0.1:1/nothing"
WAIT_S = 60.0


@dataclass
class Cli:
    """The command line against the servers of a test."""

    environ: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str, **options: Any) -> Result:
        """Run a command in this process."""
        result = CliRunner().invoke(main, list(arguments), env=dict(self.environ), prog_name="coatcheck", **options)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def json(self, *arguments: str, exit_code: int = 0) -> Any:
        result = self(*arguments, "--json")
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    def run(self, *arguments: str, cwd: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as a process, to its end."""
        return subprocess.run(
            [*COATCHECK, *arguments],
            cwd=cwd,
            env=self.process_environ(),
            text=True,
            capture_output=True,
            timeout=100,
            check=False,
            **options,
        )

    def start(self, *arguments: str, cwd: Path | None = None) -> Process:
        """Start a command as a process; its log can be waited on."""
        return Process([*COATCHECK, *arguments], cwd=cwd, environ=self.process_environ())

    def process_environ(self) -> dict[str, str]:
        here = {name: value for name, value in os.environ.items() if not name.startswith("COATCHECK_")}
        return here | dict(self.environ) | {"PYTHONUNBUFFERED": "1"}


class Process:
    """A worker or sweeper in a process of its own, killed at the end whatever happens. Its log is JSON lines."""

    def __init__(self, command: Sequence[str], *, cwd: Path | None, environ: Mapping[str, str]) -> None:
        self._command = command
        self._cwd = cwd
        self._environ = environ
        self._lines: list[str] = []

    def __enter__(self) -> Process:
        self.popen = subprocess.Popen(
            self._command,
            cwd=self._cwd,
            env=dict(self._environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.popen.kill()
        rest = self.popen.communicate(timeout=WAIT_S)[1]
        if kind is not None:
            print("".join(self._lines) + rest)

    def wait_for(self, event: str) -> dict[str, Any]:
        """Read the log until this event; a process that ends or says nothing fails the test by its timeout."""
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self._lines.append(line)
            if line.startswith("{") and (found := json.loads(line)).get("event") == event:
                return found
        raise AssertionError(f"the process ended without {event}:\n{''.join(self._lines)}")

    def wait_for_line(self, text: str) -> str:
        """Read what it says to a person until a line has this text."""
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self._lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"the process ended without {text!r}:\n{''.join(self._lines)}")

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: exit code, stdout, and all it said on stderr."""
        assert self.popen.stderr is not None
        # Not left to `communicate`: it does not see what `wait_for` has read ahead.
        self._lines += self.popen.stderr
        out, _ = self.popen.communicate(timeout=WAIT_S)
        return self.popen.returncode, out, "".join(self._lines)


def with_store(url: str, work: Callable[[Store], Awaitable[T]], *, replica: str = "") -> T:
    """Do something with the store of a replica, on a loop of its own."""

    async def run() -> T:
        store = Store(url, replica=replica)
        try:
            return await work(store)
        finally:
            await store.close()

    return run_sync(run())


def with_broker(url: str, work: Callable[[Broker], Awaitable[T]]) -> T:
    """Do something with the broker, on a loop of its own."""

    async def run() -> T:
        async with connect(url) as broker:
            return await work(broker)

    return run_sync(run())


def until(check: Callable[[], bool], *, seconds: float = WAIT_S) -> None:
    """Wait for something another process does."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)
