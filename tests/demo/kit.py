"""The demo as a user runs it: a process, its output in a pipe or on a terminal, and what it leaves behind."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

COATCHECK = [sys.executable, "-c", "from coatcheck.cli import main; main(prog_name='coatcheck')"]
PATIENCE_S = 100.0
_NOT_INHERITED = ("COATCHECK_", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")


class Demo:
    """Starts demos whose temporary files are in one directory: by that everything they leave can be told."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self.directory = directory
        here = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        self._environ = {**here, "TMPDIR": str(directory), "TERM": "xterm-256color", **environ}

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COATCHECK, "demo", *arguments],
            env=self._environ | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    @contextmanager
    def started(self, *arguments: str) -> Iterator[Running]:
        """A demo under way, in a session of its own, with a pipe for its output."""
        process = subprocess.Popen(
            [*COATCHECK, "demo", *arguments],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield Running(process)
        finally:
            process.kill()
            process.communicate()

    def run_on_terminal(
        self, *arguments: str, columns: int, lines: int, meanwhile: Callable[[str], None]
    ) -> tuple[int, Terminal]:
        """Run it on a pseudo-terminal of that size, to its end: exit code, and what was written there.

        `meanwhile` is called with each piece of that.
        """
        leader, follower = pty.openpty()
        termios.tcsetwinsize(follower, (lines, columns))
        process = subprocess.Popen(
            [*COATCHECK, "demo", *arguments],
            env=self._environ,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)
        watchdog = threading.Timer(PATIENCE_S, process.kill)
        watchdog.start()
        try:
            written = b""
            while piece := _read(leader):
                written += piece
                meanwhile(piece.decode(errors="replace"))
            return process.wait(), Terminal(written.decode())
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()
            os.close(leader)

    def left_behind(self) -> list[str]:
        """Processes and files of these demos that are still there. Processes are told by their environment."""
        mark = os.fsencode(self.directory)
        found = [f"file {path}" for path in self.directory.iterdir()]
        for process in Path("/proc").glob("[0-9]*"):
            try:
                texts = (process / "environ").read_bytes(), (process / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended, or is somebody else's
            if any(mark in text for text in texts):
                found.append(f"process {process.name}: {texts[1].decode(errors='replace')}")
        return found

    def wait_until_clean(self) -> None:
        wait_until(lambda: not self.left_behind(), lambda: "\n".join(self.left_behind()))


class Running:
    """A demo under way."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.printed = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read on until a line matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"it ended without {pattern}:\n{self.printed}")

    def end(self, number: signal.Signals | None = None) -> int:
        """Send a signal, if any, and wait for the end: the exit code."""
        if number is not None:
            self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=PATIENCE_S)
        self.printed += rest
        return self.process.returncode


class Terminal:
    """What somebody saw on a terminal, from what was written to it. It knows what the demo uses, and no more."""

    _TOKEN = re.compile(
        r"\x1b\[(?P<arguments>[?0-9;]*)(?P<command>[A-Za-z])|(?P<control>[\r\n])|(?P<text>[^\x1b\r\n]+)"
    )

    def __init__(self, written: str) -> None:
        self.written = written
        self.frames: list[str] = []
        """The screen, each time before it is wiped out to be drawn again."""
        self._is_drawn = False
        self._lines = [""]
        self._row = self._column = 0
        unknown = self._TOKEN.sub(self._take, written)
        assert unknown == "", f"sequences that this terminal does not know: {unknown!r}"
        self.frames.append(self.screen)

    @property
    def screen(self) -> str:
        return "\n".join(line.rstrip() for line in self._lines)

    def _take(self, token: re.Match[str]) -> str:
        match token["command"] or token["control"]:
            case None:
                self._write(token["text"])
            case "\r":
                self._column = 0
            case "\n":
                self._row, self._column = self._row + 1, 0
                self._lines += [""] * (self._row + 1 - len(self._lines))
            case "A":
                self._row -= int(token["arguments"] or 1)
                assert self._row >= 0
            case "K":
                if self._is_drawn:
                    self.frames.append(self.screen)
                self._is_drawn = False
                self._lines[self._row] = ""
            case "m" | "h" | "l":
                pass  # colours; the cursor hidden and shown
            case other:
                raise AssertionError(f"a command that this terminal does not know: {other}")
        return ""

    def _write(self, text: str) -> None:
        line = self._lines[self._row].ljust(self._column)
        self._lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
        self._column += len(text)
        self._is_drawn = True


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux says so when nobody is left at the other end
        return b""


def wait_until(is_so: Callable[[], bool], explain: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, explain()
        time.sleep(0.05)
