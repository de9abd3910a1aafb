"""What was seen of a handler that was killed at each of its checkpoints, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coatcheck import points

__all__ = ["Crash", "CrashReport", "Difference"]


@dataclass(frozen=True, slots=True, order=True)
class Crash:
    """Where the replica died: the point, and the how-manieth time it came there."""

    point: str
    number: int

    def __str__(self) -> str:
        return f"{self.point}:{self.number} ({points.POINTS[self.point]})"


@dataclass(frozen=True, slots=True)
class Difference:
    """A play that came to something else than the first one."""

    crash: Crash | None
    """None: nobody died, and the handler came to something else all the same."""
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        where = "without any crash, the second time" if self.crash is None else f"killed at {self.crash}"
        return "\n".join(
            [
                f"{where}: {self.what}",
                "  the first time, without a crash:",
                *_indented(self.expected),
                "  this time:",
                *_indented(self.found),
            ]
        )


@dataclass(frozen=True, slots=True)
class CrashReport:
    """What was seen of a handler that was killed at each of its checkpoints."""

    handler: str
    result: Any
    """The result without a crash; None if the task did not end well."""
    checkpoints: int
    """How many commits the task needs without a crash."""
    crashes: tuple[Crash, ...]
    steps: Mapping[str, int]
    """How often each step ran without a crash, by key."""
    repeated: Mapping[str, int]
    """Steps that ran more often in a play with a crash, and how often at most: their effects must bear it."""
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.handler}: {self.checkpoints} checkpoints, killed {len(self.crashes)} times, "
            + (f"{len(self.differences)} differences" if self.differences else "the same end every time")
        ]
        if self.repeated:
            told = ", ".join(f"{key} ({count} times)" for key, count in self.repeated.items())
            lines.append(f"steps that ran again, cut off before they were recorded: {told}")
        for difference in self.differences:
            lines += ["", str(difference)]
        if self.differences:
            lines += ["", _ADVICE]
        return "\n".join(lines)


_ADVICE = (
    "A handler runs again from the top at every resume. Whatever is not the same each time belongs in `ctx.step`, or "
    "is asked of `ctx.now()`, `ctx.random()`, `ctx.uuid(name)`."
)


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines() or [""]]
