"""Append-only books of what a process saw and did. They survive `kill -9`; synced ones survive a power cut too.

Whoever reads them needs nothing of ours: a line is a JSON object with `at` (seconds since 1970) and `what`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Book:
    """One file of one writer. A line is written at once, and is on disk when `write` returns unless told otherwise."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, *, is_synced: bool = True, **fields: Any) -> None:
        line = json.dumps({"at": time.time(), "what": what, **fields})
        os.write(self._file, f"{line}\n".encode())
        if is_synced:
            os.fdatasync(self._file)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a book; the last one may be torn, if its writer was killed in the middle of it."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


class Tail:
    """Follows a book that is still being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = ""

    def fresh(self) -> Iterator[dict[str, Any]]:
        """What was added since the last time."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            added = file.read()
        self._offset += len(added)
        *lines, self._rest = (self._rest + added.decode()).split("\n")
        for line in lines:
            if line:
                yield json.loads(line)
