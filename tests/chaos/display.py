"""What a trial shows while it runs: one line, drawn over on a terminal, said every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

SAY_EVERY_S = 10.0


class Display:
    def __init__(self, output: TextIO | None = None) -> None:
        self._output = output or sys.stderr
        self._began_s = time.monotonic()
        self._said_s = -SAY_EVERY_S
        self._phase = ""

    def show(self, phase: str, **figures: Any) -> None:
        elapsed_s = time.monotonic() - self._began_s
        text = ", ".join(f"{name} {figure}" for name, figure in figures.items())
        line = f"{elapsed_s:6.1f}s  {phase:<9} {text}"
        if self._output.isatty():
            print(f"\r{line:<110}", end="", file=self._output, flush=True)
        elif time.monotonic() - self._said_s >= SAY_EVERY_S or phase != self._phase:
            self._said_s = time.monotonic()
            self._phase = phase
            print(line, file=self._output, flush=True)

    def end(self) -> None:
        if self._output.isatty():
            print(file=self._output)
