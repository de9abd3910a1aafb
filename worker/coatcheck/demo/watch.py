"""Reads what the processes of the demo log, line by line, as it is written. Nothing that is shown is made up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a log: who wrote it, when (seconds since the epoch), and what."""

    who: str
    at_s: float
    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def task_id(self) -> str | None:
        return self.facts.get("task_id")


class Watch:
    """The logs of a directory, one file per process."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._read: dict[Path, int] = {}

    def look(self) -> list[Event]:
        """What has been written since the last look, in the order it happened."""
        found = [event for path in sorted(self._logs.glob("*.log")) for event in self._read_on(path)]
        return sorted(found, key=lambda event: event.at_s)

    def _read_on(self, path: Path) -> list[Event]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            # A line that is not finished yet is read at the next look; one whose writer was killed never is.
            text = file.read().rpartition(b"\n")[0]
        if not text:
            return []
        self._read[path] = self._read.get(path, 0) + len(text) + 1
        return [event for line in text.splitlines() if (event := _parse(path.stem, line)) is not None]


def _parse(who: str, line: bytes) -> Event | None:
    try:
        facts = json.loads(line)
        return Event(who, datetime.fromisoformat(facts["timestamp"]).timestamp(), facts["event"], facts)
    except (ValueError, KeyError, TypeError):  # a traceback, a warning of Python's: for people
        return None
