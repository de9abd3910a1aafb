"""What a person has read a moment ago: a server that goes away is one event, and a hundred warnings."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

QUIET = timedelta(seconds=10)


class Repeats:
    """Decides which warnings to show. The first of each event is; those of the next ten seconds are counted."""

    def __init__(self) -> None:
        self._quiet_until: dict[str, datetime] = {}
        self._swallowed: Counter[str] = Counter()

    def is_news(self, event: str, at: datetime) -> bool:
        """Whether a warning is worth a line; if not, it is counted."""
        if at < self._quiet_until.get(event, at):
            self._swallowed[event] += 1
            return False
        self._quiet_until[event] = at + QUIET
        return True

    def take_summary(self) -> str | None:
        """Say once what was counted: `and 57 more: consumer_lost 36, broker_connect_failed 21`."""
        if not self._swallowed:
            return None
        counts = ", ".join(f"{event} {count}" for event, count in self._swallowed.most_common())
        total = self._swallowed.total()
        self._swallowed.clear()
        return f"and {total} more: {counts}"
