"""The measured figures, beside their targets."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Line:
    """One figure. `target` is its upper limit (a lower limit with `least`); None: the figure is for information."""

    name: str
    value: float
    unit: str = ""
    target: float | None = None
    least: bool = False
    note: str = ""

    @property
    def holds(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.least else self.value <= self.target


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of all values does not exceed. NaN for none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ratio(one: float, other: float) -> float:
    return one / other if other else math.nan


def indexes_of(plan: str) -> set[str]:
    """The indexes that a plan, as EXPLAIN prints it, reads."""
    words = plan.replace("\n", " ").split()
    scanned = {after for word, after in itertools.pairwise(words) if word in ("using", "on")}
    return {name.removeprefix("coatcheck.") for name in scanned if "_" in name}


def reads_whole_tables(plan: str) -> bool:
    return "Seq Scan on" in plan


def show(lines: Iterable[Line]) -> None:
    table = Table("", "measured", "target", "", "")
    for line in lines:
        sign = "≥" if line.least else "≤"
        target = "" if line.target is None else f"{sign} {_number(line.target)} {line.unit}".strip()
        verdict = {True: "[green]holds", False: "[red]missed", None: ""}[line.holds]
        table.add_row(line.name, f"{_number(line.value)} {line.unit}".strip(), target, verdict, line.note)
    Console(width=160).print(table)


def write(lines: Sequence[Line], path: Path, **about: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figures = [asdict(line) | {"holds": line.holds} for line in lines]
    path.write_text(json.dumps({"about": about, "figures": figures}, indent=2) + "\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "none"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
