"""What to make of a process that has ended by itself: how it ended, and when to start it again."""

from __future__ import annotations

import signal
from dataclasses import dataclass

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
SETTLED_S = 10.0
"""One that has run for so long is not part of a series of deaths."""
MOST_FALSE_STARTS = 3


@dataclass(slots=True)
class Deaths:
    """How often in a row a process has ended by itself."""

    count: int = 0
    false_start_count: int = 0

    def add(self, *, has_started: bool, lived_s: float) -> float | None:
        """Count one more, and return the pause before the next start; None: there is no point in one."""
        self.count = 1 if lived_s >= SETTLED_S else self.count + 1
        self.false_start_count = 0 if has_started else self.false_start_count + 1
        if self.false_start_count >= MOST_FALSE_STARTS:
            return None
        return min(FIRST_PAUSE_S * 2.0 ** (self.count - 1), LONGEST_PAUSE_S)


def describe_end(code: int) -> str:
    """How a process ended, from its exit code: `ended with code 1`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
