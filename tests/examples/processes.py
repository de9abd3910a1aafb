"""Examples as the processes they are for a user: `python -m …`, with what they print kept in a file."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 30.0


class Running:
    """One running process."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def printed(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Return when the process has printed `text`. Fails if it ends without, or takes too long."""
        wait_until(lambda: text in self.printed or self.process.poll() is not None, lambda: self.printed)
        assert text in self.printed, self.printed

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)


class Processes:
    """Starts processes and ends whatever is left of them."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = {**os.environ, **environment}
        self._running: list[Running] = []

    def start(self, *arguments: str, **environment: str) -> Running:
        """Start `python -m …` in the repository's root."""
        output = self._directory / f"{len(self._running)}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                env=self._environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._running.append(Running(process, output))
        return self._running[-1]

    def end(self) -> None:
        for running in self._running:
            if running.process.poll() is None:
                running.process.kill()
            running.process.wait()


def wait_until(is_so: Callable[[], bool], explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)
