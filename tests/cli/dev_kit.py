"""`coatcheck dev` as a developer has it: a process with a screen, in a project of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from tests.cli.kit import COATCHECK, Cli, until

from coatcheck.embedded import is_running

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# A session with a terminal of its own, so that the byte of Ctrl-C becomes a signal to all in the foreground.
ON_TERMINAL = f"""
import fcntl, os, sys
os.setsid()
fcntl.ioctl(0, {termios.TIOCSCTTY}, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Dev:
    """A running `coatcheck dev`. What it prints can be waited for; it and all it started are gone at the end."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        environ: Mapping[str, str] | None = None,
        on_terminal: bool = False,
    ) -> None:
        self.cwd = cwd
        self.cli = Cli(dict(environ or {}))
        self.raw: list[str] = []
        self._arguments = arguments
        self._on_terminal = on_terminal
        self._seen = 0
        self._known_pids: set[int] = set()

    def __enter__(self) -> Dev:
        command = [*COATCHECK, "dev", *self._arguments]
        mine, theirs = pty.openpty() if self._on_terminal else os.pipe()
        if self._on_terminal:
            command = [sys.executable, "-c", ON_TERMINAL, *command]
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x32\x00\xc8\x00\x00\x00\x00\x00")  # 50 lines of 200
        self.popen = subprocess.Popen(
            command,
            cwd=self.cwd,
            env=self.cli.process_environ() | {"TERM": "xterm-256color"},
            stdin=theirs if self._on_terminal else subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self._keyboard = mine
        self._reader = threading.Thread(target=self._read, args=(mine,), daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.popen.poll() is None:
            self.pids()
        self.popen.kill()
        self.popen.wait(timeout=30)
        try:
            until(lambda: not alive(self._known_pids))
        finally:
            for pid in alive(self._known_pids):  # the test has failed, but nothing is to be left
                os.kill(pid, signal.SIGKILL)
            self._reader.join(timeout=30)
            os.close(self._keyboard)
            if kind is not None:
                print("".join(self.raw))

    def _read(self, mine: int) -> None:
        pending = b""
        while True:
            try:
                chunk = os.read(mine, 65_536)
            except OSError:  # how a terminal says that nobody is left on the other side
                return
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            self.raw += [f"{line.decode(errors='replace')}\n" for line in lines]

    @property
    def lines(self) -> list[str]:
        """What it has printed, without colours."""
        return [COLOUR.sub("", line).rstrip() for line in list(self.raw)]

    def wait_for(self, pattern: str) -> str:
        """Wait for a line that fits, printed after the one waited for before. A `dev` that ends fails the test."""
        while True:
            is_over = self.popen.poll() is not None and not self._reader.is_alive()
            for number, line in enumerate(self.lines[self._seen :], start=self._seen):
                if re.search(pattern, line):
                    self._seen = number + 1
                    return line
            assert not is_over, f"it ended without {pattern!r}:\n{''.join(self.raw)}"
            self._reader.join(timeout=0.05)

    def wait_for_all(self, *patterns: str) -> None:
        """Wait for several lines, in any order, all after the one waited for before."""
        begin = self._seen
        furthest = begin
        for pattern in patterns:
            self._seen = begin
            self.wait_for(pattern)
            furthest = max(furthest, self._seen)
        self._seen = furthest

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run another command, as in a second terminal, and return what it printed. It has to succeed."""
        done = self.cli.run(*arguments, cwd=cwd or self.cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def json(self, *arguments: str, cwd: Path | None = None) -> Any:
        return msgspec.json.decode(self.run(*arguments, "--json", cwd=cwd))

    def type(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def end(self) -> int:
        """Wait for its end and return the exit code."""
        return self.popen.wait(timeout=60)

    def pids(self) -> list[int]:
        """All processes it has started and that run, itself left out."""
        found = sorted(descendants(self.popen.pid))
        self._known_pids.update(found)
        return found

    def pid_of(self, name: str) -> int:
        """The process of one replica."""
        (found,) = [pid for pid in self.pids() if command_of(pid).endswith(f"--name {name}")]
        return found


def server_pids(project: Path) -> list[int]:
    """The supervisor of the project's embedded server, and Postgres with all its processes."""
    (supervisor,) = [
        pid
        for pid, (_, _, command) in process_table().items()
        if "coatcheck.embedded.supervisor" in command and str(project / ".coatcheck") in command
    ]
    return [supervisor, *descendants(supervisor)]


def alive(pids: Iterable[int]) -> list[int]:
    """Those that still run; one that waits to be reaped does not."""
    table = process_table()
    return [pid for pid in pids if pid in table and not table[pid][1].startswith("Z")]


def is_served(project: Path) -> bool:
    return is_running(project / ".coatcheck")


def descendants(pid: int) -> set[int]:
    table = process_table()
    found, new = set[int](), {pid}
    while new:
        new = {child for child, (parent, *_) in table.items() if parent in new} - found
        found |= new
    return found


def command_of(pid: int) -> str:
    return process_table().get(pid, (0, "", ""))[2]


def process_table() -> dict[int, tuple[int, str, str]]:
    """Parent, state and command line of every process."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    found = {}
    for line in listed.splitlines():
        pid, parent, state, *command = line.split(None, 3)
        found[int(pid)] = (int(parent), state, command[0] if command else "")
    return found
