"""A figure and its spread: the median of some rounds, with the lowest and the highest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def ratio(cls, of: Sequence[float], to: Sequence[float]) -> Spread:
        """Divide round by round: two rows of one round ran under the same load, so their ratio varies less."""
        return cls.of([one / other if other else math.inf for one, other in zip(of, to, strict=True)])

    def written(self, digits: int = 2) -> str:
        """`1.52 (1.40 to 1.71)`; a single round has no spread."""
        if self.low == self.high:
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
