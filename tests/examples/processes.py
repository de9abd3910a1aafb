"""Examples as the processes they are for a user: a command of the README, with what it prints kept in a file."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "examples/README.md").read_text()
TIMEOUT_S = 30.0
PLAY_LIMIT_S = 100.0
# What a developer may have set must not decide where the tests run.
OURS = re.compile(r"COATCHECK_(?!TEST_|PG_BIN)\w+")


def command_of(heading: str) -> list[str]:
    """The first command in a section of the README, as words after `python`."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", README, flags=re.MULTILINE | re.DOTALL)
    (command, *_) = re.findall(r"^    (\S.*)$", section, flags=re.MULTILINE)
    python, *words = shlex.split(command)
    assert python == "python"
    return words


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    code: int
    printed: str

    @property
    def lines(self) -> list[str]:
        return self.printed.splitlines()


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
        inherited = {name: value for name, value in os.environ.items() if not OURS.fullmatch(name)}
        self._environment = inherited | dict(environment)
        self._running: list[Running] = []

    def start(self, *arguments: str, **environment: str) -> Running:
        """Start `python -m …` in the repository's root."""
        return self.command(["-m", *arguments], environment)

    def command(self, words: list[str], environment: Mapping[str, str], *, cwd: Path = ROOT) -> Running:
        """Start `python …`."""
        output = self._directory / f"{len(self._running)}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=cwd,
                env={**self._environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._running.append(Running(process, output))
        return self._running[-1]

    def play(self, words: list[str], *, cwd: Path = ROOT, **environment: str) -> Ended:
        """Run `python …` to its end."""
        running = self.command(words, environment, cwd=cwd)
        return Ended(running.process.wait(PLAY_LIMIT_S), running.printed)

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
